"""Attention over what a cache gives: in one piece while that is short, else block by block.

Each block has a softmax of its own; its mixture and the logarithm of its sum are merged into those of the blocks
before it (arXiv 1805.02867; as flash attention merges). Blocks are those of the context, so that sums run in the same
order wherever a block comes from, and memory holds the keys and values of one block at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.kv_cache import Context
from qwen_quantize.engine.soft_cap import attend_capped, soft_cap


def attend_context(
    query: Tensor,
    context: Context,
    window: int | None,
    scale: float | None,
    cap: float | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """Causal attention of query [B, heads, T, key_dim]; returns [B, T, heads * value_dim].

    window: positions that a query sees, itself included, None for all; scale: of the scores, 1 / sqrt(key_dim) if
    None; cap: of the scaled scores; chosen: bool [B, T, tokens], what an indexer lets each query see.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if len(context.spans) == 1:
        return _attend_whole(query, context, window, scale, cap, chosen)
    merged: _Merged | None = None
    for block, span in enumerate(context.spans):
        if _is_behind(context, span, window, query.shape[2]):
            continue
        keys, values = context.read(block)
        seen = _seen(context, span, window, chosen, query.shape[2])
        part, log_sum = _attend_block(query, keys, values, seen, scale, cap)
        merged = _Merged(part, log_sum) if merged is None else merged.with_block(part, log_sum)
    assert merged is not None
    return merged.mixed.transpose(1, 2).flatten(2)


class _Merged:
    """The mixture [B, heads, T, V] of the blocks so far, and the logarithm of their softmax's sum [B, heads, T]."""

    def __init__(self, mixed: Tensor, log_sum: Tensor) -> None:
        self.mixed, self._log_sum = mixed, log_sum

    def with_block(self, mixed: Tensor, log_sum: Tensor) -> _Merged:
        total = torch.logaddexp(self._log_sum, log_sum)
        # Where no block had anything to see yet, both weights are zero instead of inf - inf.
        base = total.clamp(min=torch.finfo(torch.float32).min)
        old, new = (self._log_sum - base).exp_(), (log_sum - base).exp_()
        self.mixed.mul_(old.unsqueeze(-1)).addcmul_(mixed, new.unsqueeze(-1))
        self._log_sum = total
        return self


def _is_behind(context: Context, span: tuple[int, int], window: int | None, length: int) -> bool:
    """Whether all of a block has left the window of all queries: it is not read then."""
    if window is None:
        return False
    if context.columns is None:
        return span[1] - 1 <= context.spans[-1][1] - length - window
    columns = context.columns
    return int(columns.positions[span[0] : span[1]].max()) <= columns.start - window


def _seen(
    context: Context, span: tuple[int, int], window: int | None, chosen: Tensor | None, length: int
) -> Tensor | None:
    """bool [B or 1, T, n], what each query sees of a block; None for all of it."""
    begin, end = span
    if context.columns is not None:
        columns = context.columns.part(begin, end)
        seen = columns.visible(window)
        if chosen is None:
            return None if seen is None else seen[None]
        picked = chosen[..., columns.positions]
        return picked if seen is None else picked & seen
    if chosen is not None:
        return chosen[..., begin:end]
    start = context.spans[-1][1] - length
    if end <= start + 1 and (window is None or begin > start + length - 1 - window):
        return None
    rows, positions = torch.arange(start, start + length).unsqueeze(1), torch.arange(begin, end)
    mask = positions <= rows
    if window is not None:
        mask &= positions > rows - window
    return mask[None]


def _attend_block(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, scale: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """(mixture [B, heads, T, V], log of the sum of exponentials [B, heads, T]); -inf where nothing is seen."""
    repeats = query.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
    value_dim = values.shape[-1]
    if cap is None and query.device.type == "cpu":
        query, keys, values = _of_one_width(query, keys, values)
        mask = None
        if seen is not None:
            mask = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf")).unsqueeze(1)
        # What scaled_dot_product_attention calls on the CPU; it alone gives the sums as well.
        mixed, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, attn_mask=mask, scale=scale
        )
        if seen is not None:  # it says zero for a row without anything to see
            log_sum = log_sum.masked_fill(~seen.any(-1).unsqueeze(1), float("-inf"))
        return mixed[..., :value_dim], log_sum
    scores = (query @ keys.transpose(-1, -2)).mul_(scale)
    if cap is not None:
        scores = soft_cap(scores, cap)
    if seen is not None:
        scores.masked_fill_(~seen.unsqueeze(1), float("-inf"))
    log_sum = scores.logsumexp(-1)
    base = log_sum.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1)
    return scores.sub_(base).exp_() @ values, log_sum


def _attend_whole(
    query: Tensor,
    context: Context,
    window: int | None,
    scale: float,
    cap: float | None,
    chosen: Tensor | None,
) -> Tensor:
    (span,) = context.spans
    keys, values = context.read(0)
    value_dim, length = values.shape[-1], query.shape[2]
    if context.columns is not None:
        chosen = _seen(context, span, window, chosen, length)
        window = None  # is in `chosen`
    if cap is not None:
        seen = torch.ones(1, 1, dtype=torch.bool) if context.columns is not None else None
        seen = chosen[0] if chosen is not None else seen
        seen = visible(length, keys.shape[2], window) if seen is None else seen
        return attend_capped(query, keys, values, seen, scale, cap).transpose(1, 2).flatten(2)
    query, keys, values = _of_one_width(query, keys, values)
    mixed = attend(query, keys, values, window, scale, chosen)
    if values.shape[-1] == value_dim:
        return mixed
    return mixed.view(*mixed.shape[:2], query.shape[1], -1)[..., :value_dim].flatten(2)


def _of_one_width(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with values as long as keys.

    torch's attention on the CPU takes only heads of one size in blocks; otherwise it holds the scores of all
    heads at once, which are gigabytes at 128 heads. Zeros behind the values (or keys) change no result.
    """
    missing = keys.shape[-1] - values.shape[-1]
    if missing > 0:
        return query, keys, functional.pad(values, (0, missing))
    if missing < 0:
        return functional.pad(query, (0, -missing)), functional.pad(keys, (0, -missing)), values
    return query, keys, values


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
