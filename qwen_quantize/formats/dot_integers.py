"""Integer products with an int32 sum that wraps or saturates."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats.dot_record import DotUnit, SumOverflow

_EXACT_IN_FLOAT = 1 << 24
_LARGEST = (1 << 31) - 1


def integer_dot(a: Tensor, b: Tensor, unit: DotUnit, c: Tensor | None) -> Tensor:
    """int32 [M, N]: a [M, K] times b [N, K] transposed plus c, both float32 holding small integers.

    Wrapping does not depend on the order of the additions. Saturation does: it is applied after every
    `unit.products` products (c joins the first block), or once, to the whole sum, when they are not stated.
    """
    k = a.shape[1]
    largest = _largest(a) * _largest(b)
    start = torch.zeros(a.shape[0], b.shape[0], dtype=torch.int64, device=a.device)
    if c is not None:
        start += c.to(torch.int64)
    fits = largest * k + (0 if c is None else int(start.abs().max()) if start.numel() else 0) <= _LARGEST
    block = k if fits or unit.products is None else unit.products
    if fits or unit.overflow is SumOverflow.WRAP or block >= k:
        total = _exact(a, b, largest, start)
        if not fits and unit.overflow is SumOverflow.SATURATE:
            total = total.clamp(-_LARGEST - 1, _LARGEST)
        return _wrapped(total)
    for first in range(0, k, block):
        piece = slice(first, first + block)
        start = _exact(a[:, piece], b[:, piece], largest, start).clamp(-_LARGEST - 1, _LARGEST)
    return start.to(torch.int32)


def _exact(a: Tensor, b: Tensor, largest: int, start: Tensor) -> Tensor:
    """int64 start + a b^T by float32 products that are short enough to be exact."""
    step = max(_EXACT_IN_FLOAT // max(largest, 1), 1)
    total = start
    for first in range(0, a.shape[1], step):
        piece = slice(first, first + step)
        total = total + (a[:, piece] @ b[:, piece].T).to(torch.int64)
    return total


def _largest(x: Tensor) -> int:
    return int(x.abs().max()) if x.numel() else 0


def _wrapped(x: Tensor) -> Tensor:
    """int64 modulo 2^32, as int32."""
    return (((x + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)).to(torch.int32)
