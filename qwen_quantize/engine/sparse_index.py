"""The lightning indexer of DeepSeek-V3.2: a small scorer that says which earlier tokens a query attends to.

score(t, s) = sum over heads h of weight[t, h] * relu(q[t, h] . k[s] / sqrt(D)) / sqrt(heads)

and attention sees the `top_k` best of the earlier tokens (DeepSeek-V3.2-Exp report, section 2.1). The
release rotates q and k by a Hadamard matrix before it casts them to FP8; without that cast the rotation
changes no product and is left out.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Heads scored at a time: [B, heads, T, S] of all 64 heads would outweigh everything else of a layer.
_HEADS_AT_ONCE = 4


def index_scores(query: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """[B, T, S] float32. query: [B, T, heads, D]; keys: [B, S, D]; weights: [B, T, heads]."""
    heads, dim = query.shape[2:]
    scale = dim**-0.5
    weights = weights * heads**-0.5
    turned = keys.transpose(1, 2).unsqueeze(1)  # [B, 1, D, S]
    scores = query.new_zeros(query.shape[0], query.shape[1], keys.shape[1])
    for first in range(0, heads, _HEADS_AT_ONCE):
        part = slice(first, first + _HEADS_AT_ONCE)
        products = (query[:, :, part].transpose(1, 2) @ turned).mul_(scale).relu_()  # [B, h, T, S]
        scores += torch.einsum("bth,bhts->bts", weights[:, :, part], products)
    return scores


def select_tokens(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """[B, T, S] bool: the `top_k` best visible tokens of each query, or all where there are no more.

    visible: [T, S] bool. Equal scores are ordered as `torch.topk` orders them.
    """
    masked = scores.masked_fill(~visible, float("-inf"))
    best = masked.topk(min(top_k, scores.shape[-1]), dim=-1).indices
    chosen = torch.zeros_like(masked, dtype=torch.bool).scatter_(-1, best, True)
    return chosen & visible
