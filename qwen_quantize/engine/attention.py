"""Grouped-query attention over full or sliding context."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_quantize.engine.context_attention import attend_context
from qwen_quantize.engine.kv_cache import AttentionCache, Context
from qwen_quantize.engine.layer import Layer, rms_norm
from qwen_quantize.engine.rotary import LayerRotary, rotate
from qwen_quantize.models.blueprint import Blueprint, Stream
from qwen_quantize.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Projected:
    """What grouped attention mixes: query [B, heads, T, D], key and value [B, kv_heads, T, D].

    The query is rotated, the key unless it was to stay as it is.

    gate: [B, T, heads, D], what the mixture is gated with, where a model has that.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate: Tensor | None


def mix_grouped(
    normed: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    rotary: LayerRotary,
    cache: AttentionCache | None,
) -> Tensor:
    """normed: [B, T, hidden_size] -> what the output projection reads, [B, T, heads * head_dim]."""
    start, config = 0 if cache is None else cache.length, blueprint.config
    turned = cache is None or not cache.keeps_unrotated
    own = project_grouped(normed, layer, index, blueprint, rotary, start, rotate_keys=turned)
    context = Context.whole(own.key, own.value) if cache is None else cache.append(index, own.key, own.value)
    if not turned:
        context = _rotated(context, rotary.slice(index, 0, start + normed.shape[1]), config)
    mixed = attend_context(own.query, context, config.window(index), config.softmax_scale, config.score_cap)
    return mixed if own.gate is None else mixed * own.gate.flatten(2).sigmoid()


def project_grouped(
    normed: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    rotary: LayerRotary,
    start: int = 0,
    *,
    rotate_keys: bool = True,
) -> Projected:
    """Queries, keys and values of normed [B, T, hidden_size], whose first token is at position `start`."""
    config, family = blueprint.config, blueprint.family
    batch, length, _ = normed.shape
    outputs = layer.groups[Stream.ATTENTION_INPUT](normed)
    if len(outputs) == 1:  # one matrix for all three
        keys = config.num_kv_heads * config.head_dim
        outputs = torch.split(outputs[0], [config.num_heads * config.head_dim, keys, keys], dim=-1)
    query, key, value = outputs
    query = query.view(batch, length, config.num_heads, -1)
    gate = None
    if config.output_gate:
        query, gate = query.chunk(2, dim=-1)  # of each head
    key = key.view(batch, length, config.num_kv_heads, config.head_dim)
    value = value.view(batch, length, config.num_kv_heads, config.head_dim).transpose(1, 2)
    if family.query_norm is not None:
        query = rms_norm(query, layer.tensors[family.query_norm], config.rms_norm_eps)
    if family.key_norm is not None:
        key = rms_norm(key, layer.tensors[family.key_norm], config.rms_norm_eps)
    cos, sin = rotary.slice(index, start, length)
    query = rotate(query.transpose(1, 2), cos, sin, config.rope.interleaved)
    key = key.transpose(1, 2)
    if rotate_keys:
        key = rotate(key, cos, sin, config.rope.interleaved)
    return Projected(query, key, value, gate)


def _rotated(context: Context, turns: tuple[Tensor, Tensor], config: ModelConfig) -> Context:
    """Keys that were kept as they are before rotation, at their places. turns: cos and sin of all positions."""

    def read(block: int) -> tuple[Tensor, Tensor]:
        keys, values = context.read(block)
        chosen = slice(*context.spans[block])
        places = chosen if context.columns is None else context.columns.positions[chosen]
        cos, sin = (turn[places] for turn in turns)
        return rotate(keys, cos, sin, config.rope.interleaved), values

    return replace(context, read=read)
