"""Grouped-query attention over full or sliding context."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attend(query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Causal attention. query: [B, heads, T, D]; keys, values: [B, kv_heads, S, D] with S >= T.

    The queries are the last T of the S positions. `window` counts the positions that a query sees,
    itself included; None means all of them. Returns [B, T, heads * D].
    """
    batch, heads, length, dim = query.shape
    span = keys.shape[2]
    repeats = heads // keys.shape[1]
    if repeats > 1:
        keys = keys.repeat_interleave(repeats, dim=1)
        values = values.repeat_interleave(repeats, dim=1)
    mask = None
    causal = length == span
    if (not causal and length > 1) or (window is not None and span > window):
        mask = visible(length, span, window)
        causal = False
    mixed = functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal and length > 1
    )
    return mixed.transpose(1, 2).reshape(batch, length, heads * dim)


def visible(length: int, span: int, window: int | None) -> Tensor:
    """[length, span] bool: which positions each of the last `length` queries may see."""
    rows = torch.arange(span - length, span).unsqueeze(1)
    columns = torch.arange(span).unsqueeze(0)
    mask = columns <= rows
    if window is not None:
        mask &= columns > rows - window
    return mask
