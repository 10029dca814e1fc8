"""Grouped-query attention over full or sliding context."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.kv_cache import AttentionCache, Context
from qwen_quantize.engine.layer import Layer, rms_norm
from qwen_quantize.engine.rotary import LayerRotary, rotate
from qwen_quantize.engine.soft_cap import attend_capped
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
    start = 0 if cache is None else cache.length
    turned = cache is None or not cache.keeps_unrotated
    own = project_grouped(normed, layer, index, blueprint, rotary, start, rotate_keys=turned)
    context = Context(own.key, own.value) if cache is None else cache.append(index, own.key, own.value)
    if not turned:
        context = _rotated(context, rotary.slice(index, 0, start + normed.shape[1]), blueprint.config)
    mixed = _attend_context(own.query, context, index, blueprint.config)
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
    cos, sin = turns
    if context.columns is not None:
        cos, sin = cos[context.columns.positions], sin[context.columns.positions]
    return replace(context, keys=rotate(context.keys, cos, sin, config.rope.interleaved))


def _attend_context(query: Tensor, context: Context, index: int, config: ModelConfig) -> Tensor:
    """`attend` to what a cache gave, with the layer's window and cap."""
    key, value, window = context.keys, context.values, config.window(index)
    seen = None if context.columns is None else context.columns.visible(window)
    if context.columns is not None:
        window = None  # is in `seen`
    if config.score_cap is None:
        return attend(query, key, value, window, config.softmax_scale, None if seen is None else seen[None])
    if seen is None:
        ordered = context.columns is None
        seen = (
            visible(query.shape[2], key.shape[2], window) if ordered else torch.ones(1, 1, dtype=torch.bool)
        )
    scale = config.head_dim**-0.5 if config.softmax_scale is None else config.softmax_scale
    mixed = attend_capped(query, key, value, seen, scale, config.score_cap)
    return mixed.transpose(1, 2).flatten(2)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    window: int | None,
    scale: float | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Causal attention. query: [B, heads, T, D]; keys: [B, kv_heads, S, D]; values: [B, kv_heads, S, V].

    S >= T, and the queries are the last T of the S positions. `window` counts the positions that a query
    sees, itself included; None means all of them. scale: of the scores, 1 / sqrt(D) if None. chosen: bool
    [B, T, S], the positions that each query sees, in place of all earlier ones. Returns [B, T, heads * V].
    """
    batch, heads, length, _ = query.shape
    span, value_dim = values.shape[2:]
    repeats = heads // keys.shape[1]
    if repeats > 1:
        keys = keys.repeat_interleave(repeats, dim=1)
        values = values.repeat_interleave(repeats, dim=1)
    mask = None if chosen is None else chosen.unsqueeze(1)
    causal = length == span and chosen is None
    if chosen is None and ((not causal and length > 1) or (window is not None and span > window)):
        mask = visible(length, span, window)
        causal = False
    mixed = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal and length > 1, scale=scale
    )
    return mixed.transpose(1, 2).reshape(batch, length, heads * value_dim)


def visible(length: int, span: int, window: int | None) -> Tensor:
    """[length, span] bool: which positions each of the last `length` queries may see."""
    rows = torch.arange(span - length, span).unsqueeze(1)
    columns = torch.arange(span).unsqueeze(0)
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    return mask
