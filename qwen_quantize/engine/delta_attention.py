"""A gated delta-net layer in the place of attention, as Qwen3-Next and Qwen3.5 have it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.delta_net import (
    causal_convolution,
    chunked,
    gated_rms_norm,
    recurrent,
    unit_vectors,
)
from qwen_quantize.engine.kv_cache import TokenCache
from qwen_quantize.engine.layer import Layer, activate
from qwen_quantize.models.blueprint import Blueprint, Stream
from qwen_quantize.models.delta import DeltaConfig


def mix_delta(
    normed: Tensor,
    layer: Layer,
    index: int,
    blueprint: Blueprint,
    cache: TokenCache | None,
) -> Tensor:
    """normed: [B, T, hidden_size] -> what the output projection reads, [B, T, value heads * value_dim]."""
    names, delta = blueprint.family.delta, blueprint.config.delta
    assert names is not None
    assert delta is not None
    outputs = layer.groups[Stream.ATTENTION_INPUT](normed)
    gates = [functional.linear(normed, layer.tensors[name]) for name in names.gates]
    if len(outputs) == 1:
        mixed, gate, rate, step = _by_key_head(outputs[0], gates[0], delta)
    else:
        (mixed, gate), (rate, step) = outputs, gates
    batch, length, _ = normed.shape
    if cache is None:
        before = normed.new_zeros(batch, delta.taps - 1, delta.mixed_size)
        memory = normed.new_zeros(batch, delta.value_heads, delta.key_dim, delta.value_dim)
    else:
        before, memory = cache.delta_state(index)
    mixed, before = causal_convolution(mixed, layer.tensors[names.convolution], before)
    mixed = activate(mixed, blueprint.config.activation)
    query, key, value = torch.split(mixed, [delta.key_size, delta.key_size, delta.value_size], dim=-1)
    query = unit_vectors(_heads(query, delta.key_heads, delta.value_heads)) * delta.key_dim**-0.5
    key = unit_vectors(_heads(key, delta.key_heads, delta.value_heads))
    value = _heads(value, delta.value_heads, delta.value_heads)
    speed = layer.tensors[names.decay].exp()
    decay = -speed * functional.softplus(step + layer.tensors[names.step_bias])
    run = recurrent if length == 1 else chunked
    read, memory = run(query, key, value, decay.transpose(1, 2), rate.sigmoid().transpose(1, 2), memory)
    if cache is not None:
        cache.store_delta(index, before, memory)
    read = read.transpose(1, 2)  # [B, T, heads, value_dim]
    norm = layer.tensors[names.norm]
    read = gated_rms_norm(read, gate.reshape(read.shape), norm, blueprint.config.rms_norm_eps)
    return read.reshape(batch, length, delta.value_size)


def _heads(x: Tensor, heads: int, wanted: int) -> Tensor:
    """[B, T, heads * D] -> [B, wanted, T, D], each head as often as it takes, copies side by side."""
    x = x.view(*x.shape[:2], heads, -1).transpose(1, 2)
    return x if heads == wanted else x.repeat_interleave(wanted // heads, dim=1)


def _by_key_head(
    projected: Tensor, gates: Tensor, delta: DeltaConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take apart what Qwen3-Next stores key head by key head: (q | k | v | gate) and (rate | step) of each.

    Returns (all queries, all keys, all values [B, T, mixed_size], gates [B, T, value_size], rates, steps).
    """
    batch, length, _ = projected.shape
    shared = delta.value_heads // delta.key_heads
    values = shared * delta.value_dim
    by_head = projected.view(batch, length, delta.key_heads, -1)
    query, key, value, gate = torch.split(by_head, [delta.key_dim, delta.key_dim, values, values], dim=-1)
    mixed = torch.cat([part.flatten(2) for part in (query, key, value)], dim=-1)
    rate, step = torch.split(gates.view(batch, length, delta.key_heads, -1), shared, dim=-1)
    return mixed, gate.flatten(2), rate.flatten(2), step.flatten(2)
