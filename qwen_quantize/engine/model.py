"""One decoder for every family: plain functions over a blueprint and groups of linears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.attention import attend
from qwen_quantize.engine.kv_cache import KVCache
from qwen_quantize.engine.linear import LinearGroup, PlainGroup
from qwen_quantize.engine.rotary import RotaryTable, rotate
from qwen_quantize.models.blueprint import Blueprint, Stream


@dataclass(frozen=True, slots=True)
class Layer:
    """What one decoder layer computes with: its linears by stream, its other tensors by suffix (float32)."""

    groups: Mapping[Stream, LinearGroup]
    norms: Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, in float32."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _activation(x: Tensor, name: str) -> Tensor:
    match name:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu_pytorch_tanh":
            return functional.gelu(x, approximate="tanh")
    raise ValueError(f"activation {name!r} is not one that a config may name")


def run_layer(
    hidden: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    rotary: RotaryTable,
    cache: KVCache | None = None,
) -> Tensor:
    """One decoder layer. hidden: [B, T, hidden_size] float32 -> the same shape (a new tensor).

    With a cache the T tokens follow those it holds; its caller advances it after the last layer.
    """
    config, family = blueprint.config, blueprint.family
    batch, length, _ = hidden.shape
    normed = rms_norm(hidden, layer.norms[family.input_norm], config.rms_norm_eps)
    query, key, value = layer.groups[Stream.ATTENTION_INPUT](normed)
    query = query.view(batch, length, config.num_heads, config.head_dim)
    key = key.view(batch, length, config.num_kv_heads, config.head_dim)
    value = value.view(batch, length, config.num_kv_heads, config.head_dim).transpose(1, 2)
    if family.query_norm is not None:
        query = rms_norm(query, layer.norms[family.query_norm], config.rms_norm_eps)
    if family.key_norm is not None:
        key = rms_norm(key, layer.norms[family.key_norm], config.rms_norm_eps)
    start = 0 if cache is None else cache.length
    cos, sin = rotary.slice(start, length)
    query = rotate(query.transpose(1, 2), cos, sin)
    key = rotate(key.transpose(1, 2), cos, sin)
    if cache is not None:
        key, value = cache.append(index, key, value)
    window = config.sliding_window if config.sliding_layers and config.sliding_layers[index] else None
    mixed = attend(query, key, value, window)
    (attention,) = layer.groups[Stream.ATTENTION_OUTPUT](mixed)
    hidden = hidden + attention
    normed = rms_norm(hidden, layer.norms[family.mlp_norm], config.rms_norm_eps)
    gate, up = layer.groups[Stream.MLP_INPUT](normed)
    (down,) = layer.groups[Stream.MLP_HIDDEN](_activation(gate, config.activation) * up)
    return hidden + down


@dataclass(frozen=True, slots=True)
class Model:
    """A whole model in memory, for generation and benchmarks; calibration and eval stream instead."""

    blueprint: Blueprint
    embedding: Tensor  # [vocab, hidden] float32
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: LinearGroup  # over the embedding itself when tied
    rotary: RotaryTable

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that take part, each counted once."""
        tied = isinstance(self.head, PlainGroup) and self.head.weight.data_ptr() == self.embedding.data_ptr()
        linears = sum(group.nbytes for layer in self.layers for group in layer.groups.values())
        return linears + self.head.nbytes + (0 if tied else self.embedding.nbytes)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        config = self.blueprint.config
        return KVCache(config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, cache: KVCache | None = None, last_only: bool = False) -> Tensor:
        """tokens: [B, T] int64 -> logits [B, T, vocab] float32, or [B, 1, vocab] with `last_only`."""
        hidden = self.embedding[tokens]
        for index, layer in enumerate(self.layers):
            hidden = run_layer(hidden, layer, index, self.blueprint, self.rotary, cache)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if last_only:
            hidden = hidden[:, -1:]
        normed = rms_norm(hidden, self.final_norm, self.blueprint.config.rms_norm_eps)
        (logits,) = self.head(normed)
        return logits
