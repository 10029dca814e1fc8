"""One decoder for every family: plain functions over a blueprint and groups of linears."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_quantize.engine.attention import mix_grouped
from qwen_quantize.engine.cache_pages import IN_MEMORY, CacheLayout, CacheOptions, CachePlan
from qwen_quantize.engine.decode_step import DecodeStep
from qwen_quantize.engine.delta_attention import mix_delta
from qwen_quantize.engine.experts import route, run_experts, shared_expert
from qwen_quantize.engine.kv_cache import AttentionCache, KVCache, TokenCache, plan_float_cache
from qwen_quantize.engine.latent_attention import mix_latent
from qwen_quantize.engine.layer import Layer, ResidentExperts, activate, rms_norm
from qwen_quantize.engine.linear import LinearGroup, PlainGroup
from qwen_quantize.engine.packed_cache import PackedKVCache, plan_packed_cache
from qwen_quantize.engine.rotary import LayerRotary
from qwen_quantize.engine.soft_cap import CappedGroup
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.models.blueprint import Blueprint, Stream

_PREFILL_CHUNK = 512  # tokens whose scores and hidden states are held together


def run_layer(
    hidden: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    rotary: LayerRotary,
    cache: AttentionCache | None = None,
) -> Tensor:
    """One decoder layer. hidden: [B, T, hidden_size] float32 -> the same shape (a new tensor).

    With a cache the T tokens follow those it holds; its caller advances it after the last layer.
    """
    return run_mlp(run_attention(hidden, layer, index, blueprint, rotary, cache), layer, index, blueprint)


def run_attention(
    hidden: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    rotary: LayerRotary,
    cache: AttentionCache | None = None,
) -> Tensor:
    """The first half of a layer: hidden + attention, [B, T, hidden_size] (a new tensor)."""
    config = blueprint.config
    normed = attention_input(hidden, layer, blueprint)
    if config.is_delta(index):
        mixed = mix_delta(normed, layer, index, blueprint, cache if isinstance(cache, TokenCache) else None)
    else:
        mix = mix_grouped if config.latent is None else mix_latent
        mixed = mix(normed, layer, index, blueprint, rotary, cache)
    return hidden + attention_output(mixed, layer, blueprint)


def attention_input(hidden: Tensor, layer: Layer, blueprint: Blueprint) -> Tensor:
    """The norm in front of attention: what its first linears read. [..., hidden_size]."""
    return rms_norm(hidden, layer.tensors[blueprint.family.input_norm], blueprint.config.rms_norm_eps)


def attention_output(mixed: Tensor, layer: Layer, blueprint: Blueprint) -> Tensor:
    """What attention adds to the residual, of what its last linear reads."""
    (attention,) = layer.groups[Stream.ATTENTION_OUTPUT](mixed)
    return _normed(attention, blueprint.family.attention_output_norm, layer, blueprint)


def mlp_input(hidden: Tensor, layer: Layer, blueprint: Blueprint) -> Tensor:
    """The norm in front of the MLP: what it, its router and its experts read. [..., hidden_size]."""
    return rms_norm(hidden, layer.tensors[blueprint.family.mlp_norm], blueprint.config.rms_norm_eps)


def run_mlp(hidden: Tensor, layer: Layer, index: int, blueprint: Blueprint) -> Tensor:
    """The second half of a layer: hidden + its dense MLP or its experts, [B, T, hidden_size] (a new tensor)."""
    normed = mlp_input(hidden, layer, blueprint)
    if blueprint.sparse(index) is None:
        return hidden + dense_mlp(normed, layer, blueprint)
    assert layer.experts is not None
    rows = normed.flatten(0, -2)
    routing = route(rows, layer, index, blueprint)
    mixed = run_experts(rows, routing, layer.experts, blueprint.config.activation).view_as(hidden)
    if Stream.SHARED_INPUT in layer.groups:
        mixed += shared_expert(normed, layer, blueprint)
    return mixed.add_(hidden)


def dense_mlp(x: Tensor, layer: Layer, blueprint: Blueprint) -> Tensor:
    """x: [..., hidden_size], normed -> what a dense MLP adds, of the same shape."""
    outputs = layer.groups[Stream.MLP_INPUT](x)
    gate, up = outputs[0].chunk(2, dim=-1) if len(outputs) == 1 else outputs
    return mlp_output(activate(gate, blueprint.config.activation) * up, layer, blueprint)


def mlp_output(inner: Tensor, layer: Layer, blueprint: Blueprint) -> Tensor:
    """What a dense MLP adds to the residual, of what its last linear reads."""
    (down,) = layer.groups[Stream.MLP_HIDDEN](inner)
    return _normed(down, blueprint.family.mlp_output_norm, layer, blueprint)


def _normed(x: Tensor, suffix: str | None, layer: Layer, blueprint: Blueprint) -> Tensor:
    return x if suffix is None else rms_norm(x, layer.tensors[suffix], blueprint.config.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model in memory, for generation and benchmarks; calibration and eval stream instead."""

    blueprint: Blueprint
    embedding: Tensor  # [vocab, hidden] float32
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: LinearGroup  # over the embedding itself when tied
    rotary: LayerRotary
    step: DecodeStep | None = (
        None  # what runs tokens one at a time, where the model has been loaded for speed
    )

    @property
    def nbytes(self) -> int:
        """Bytes of the linears and the embedding, each counted once, all experts included."""
        return self.step_bytes + (0 if self._head_is_embedding else self.embedding.nbytes)

    @property
    def step_bytes(self) -> int:
        """Bytes of all linears, the head and all experts included: what one token reads at most."""
        linears = sum(group.nbytes for layer in self.layers for group in layer.groups.values())
        experts = sum(
            layer.experts.nbytes for layer in self.layers if isinstance(layer.experts, ResidentExperts)
        )
        return linears + experts + self.head.nbytes

    @property
    def _head_is_embedding(self) -> bool:
        head = self.head.inner if isinstance(self.head, CappedGroup) else self.head
        return isinstance(head, PlainGroup) and head.weight.data_ptr() == self.embedding.data_ptr()

    def new_cache(
        self, batch: int, capacity: int, plan: KvPlan | None = None, options: CacheOptions = IN_MEMORY
    ) -> KVCache | PackedKVCache:
        """Room for `capacity` tokens, in float32 or as `plan` says; UserError for a ceiling without room."""
        if plan is None:
            return KVCache(self.blueprint.config, batch, capacity, self._with_layout(options))
        return PackedKVCache(self.blueprint.config, plan, batch, capacity, options)

    def plan_cache(
        self, batch: int, capacity: int, plan: KvPlan | None = None, options: CacheOptions = IN_MEMORY
    ) -> CachePlan:
        """What `new_cache` would take."""
        if plan is None:
            return plan_float_cache(self.blueprint.config, batch, capacity, self._with_layout(options))
        return plan_packed_cache(self.blueprint.config, plan, batch, capacity, options)

    @property
    def fastest_layout(self) -> CacheLayout:
        """Lines of 16 tokens suit the native step; without it keys are read head by head."""
        return CacheLayout.HEAD_MAJOR if self.step is None else CacheLayout.INTERLEAVED

    def _with_layout(self, options: CacheOptions) -> CacheOptions:
        return options if options.layout is not None else replace(options, layout=self.fastest_layout)

    def prefill(self, tokens: Tensor, cache: KVCache | PackedKVCache, chunk: int = _PREFILL_CHUNK) -> Tensor:
        """Run tokens [B, T] through in chunks, so that no step holds more; returns the last logits [B, 1, vocab]."""
        parts = torch.split(tokens, chunk, dim=1)
        for part in parts[:-1]:
            self.forward(part, cache, last_only=True)
        return self.forward(parts[-1], cache, last_only=True)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, cache: KVCache | PackedKVCache | None = None, last_only: bool = False
    ) -> Tensor:
        """tokens: [B, T] int64 -> logits [B, T, vocab] float32, or [B, 1, vocab] with `last_only`."""
        hidden = self.embedding[tokens]
        if self.blueprint.family.scaled_embedding:
            hidden = hidden * self.blueprint.embedding_scale
        if self.step is not None and isinstance(cache, KVCache) and self.step.takes(tokens, cache):
            logits = self.step(hidden, cache)
            cache.advance(1)
            return logits
        for index, layer in enumerate(self.layers):
            hidden = run_layer(hidden, layer, index, self.blueprint, self.rotary, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if last_only:
            hidden = hidden[:, -1:]
        normed = rms_norm(hidden, self.final_norm, self.blueprint.config.rms_norm_eps)
        (logits,) = self.head(normed)
        return logits
