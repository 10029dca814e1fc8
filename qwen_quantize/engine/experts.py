"""Mixtures of experts: which experts a token visits, and what they make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.layer import Experts, Layer, activate
from qwen_quantize.engine.linear import LinearGroup
from qwen_quantize.models.blueprint import Blueprint, Stream
from qwen_quantize.models.moe import MoeConfig, Router

_TOKENS_AT_ONCE = 4096  # of one expert; bounds its intermediate activations

_SMALLEST_SUM = 1e-20  # what DeepSeek-V3 adds to a sum of scores before it divides by it


@dataclass(frozen=True, slots=True)
class Routing:
    """Where tokens go. indices: [N, k] int64 experts, best first; weights: [N, k] float32 beside them."""

    indices: Tensor
    weights: Tensor


def route(
    x: Tensor, layer: Layer, index: int, blueprint: Blueprint, indices: Tensor | None = None
) -> Routing:
    """x: [N, hidden_size], the normed input of a sparse layer's MLP. Router logits are float32.

    indices: [N, k] int64, experts that are visited whatever the router prefers; it still weighs them.
    """
    family, moe = blueprint.family, blueprint.sparse(index)
    assert moe is not None
    logits = functional.linear(x, layer.tensors[family.router])
    scores = logits.softmax(dim=-1) if moe.router is Router.SOFTMAX else logits.sigmoid()
    if indices is None:
        worth = scores  # what experts are chosen by; they are weighed by their scores
        if family.correction_bias is not None:
            worth = scores + layer.tensors[family.correction_bias]
        if moe.groups > 1:
            worth = _within_best_groups(worth, moe)
        indices = worth.topk(moe.experts_per_token, dim=-1).indices
    weights = scores.gather(1, indices)
    if moe.normalise:
        total = weights.sum(dim=-1, keepdim=True)
        weights = weights / (total + _SMALLEST_SUM if moe.router is Router.SIGMOID else total)
    return Routing(indices, weights * moe.scale if moe.scale != 1 else weights)


def _within_best_groups(worth: Tensor, moe: MoeConfig) -> Tensor:
    """worth [N, experts], minus infinity outside each token's best groups."""
    grouped = worth.view(-1, moe.groups, moe.num_experts // moe.groups)
    judged_by = 1 if moe.router is Router.SOFTMAX else 2
    group_worth = grouped.topk(judged_by, dim=-1).values.sum(dim=-1)
    best = group_worth.topk(moe.groups_per_token, dim=-1).indices
    outside = torch.ones_like(group_worth, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside.unsqueeze(-1), float("-inf")).view_as(worth)


def run_expert(x: Tensor, groups: Mapping[Stream, LinearGroup], activation: str) -> Tensor:
    """x: [n, hidden_size] -> [n, hidden_size], through one routed expert."""
    gate, up = groups[Stream.EXPERT_INPUT](x)
    (down,) = groups[Stream.EXPERT_HIDDEN](activate(gate, activation) * up)
    return down


def run_experts(
    x: Tensor,
    routing: Routing,
    experts: Experts,
    activation: str,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """x: [N, hidden_size] -> the weighted sum of each token's experts, [N, hidden_size].

    Every expert that has tokens is asked for once, in the order of their numbers. prepare: applied to the rows
    of x that an expert reads (a norm, so that no normed copy of x has to be held); row by row or not at all.
    """
    mixed = torch.zeros_like(x)
    chosen = routing.indices.shape[1]
    # A stable sort by expert keeps each expert's tokens in order, so that batches cannot change a sum's order.
    numbers, order = routing.indices.flatten().sort(stable=True)
    weights = routing.weights.flatten()
    visits = torch.bincount(numbers).tolist()
    for expert, slots in enumerate(torch.split(order, visits)):
        if not visits[expert]:
            continue
        groups = experts(expert)
        for part in torch.split(slots, _TOKENS_AT_ONCE):
            tokens = part // chosen
            rows = x[tokens] if prepare is None else prepare(x[tokens])
            mixed.index_add_(0, tokens, run_expert(rows, groups, activation) * weights[part].unsqueeze(1))
        del groups  # freed before the next one is read
    return mixed


def shared_expert(x: Tensor, layer: Layer, blueprint: Blueprint) -> Tensor:
    """x: [..., hidden_size] -> what the expert that every token visits adds, gated where the family does so.

    Only for layers whose groups hold SHARED_INPUT.
    """
    gate, up = layer.groups[Stream.SHARED_INPUT](x)
    (down,) = layer.groups[Stream.SHARED_HIDDEN](activate(gate, blueprint.config.activation) * up)
    if blueprint.family.shared_gate is None:
        return down
    return functional.linear(x, layer.tensors[blueprint.family.shared_gate]).sigmoid() * down
