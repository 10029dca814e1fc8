"""Rounding in place of coding: the float32 value that a cast would leave, without the code in between."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats import kernel_calls
from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.codec import check_float32, decode, encode, single_under_rule
from qwen_quantize.formats.grid import grid_for
from qwen_quantize.formats.seeds import draw_seed
from qwen_quantize.formats.spec import FloatFormat, Format
from qwen_quantize.formats.twin import cast_to_values


def quantize_values(
    x: Tensor,
    fmt: Format,
    rule: CastRule,
    *,
    generator: torch.Generator | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """float32 values of x rounded to `fmt`, x's shape: decode(encode(x)) but for NaN payloads of 16-bit ones.

    `out`: contiguous float32 of x's shape, may be x itself; it is returned. ValueError as for `encode`.
    """
    check_float32(x, "x")
    out = checked_out(x, out)
    if isinstance(fmt, FloatFormat) and not fmt.has_zero:
        return out.copy_(decode(encode(x, fmt, rule, generator=generator), fmt))
    if isinstance(fmt, FloatFormat) and fmt.bits == 32:
        return out.copy_(single_under_rule(x, rule))
    grid, seed = grid_for(fmt, rule), draw_seed(rule, generator)
    library = kernel_calls.native_library() if x.device.type == "cpu" else None
    if library is None:
        return out.copy_(cast_to_values(x, grid, None, seed))
    kernel_calls.quantize(library, x.contiguous(), out, grid, seed)
    return out


def checked_out(x: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a new contiguous tensor like x; ValueError if `out` does not fit."""
    if out is None:
        return torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if (
        out.shape != x.shape
        or out.dtype != torch.float32
        or not out.is_contiguous()
        or out.device != x.device
    ):
        raise ValueError(
            f"out must be contiguous float32 of shape {tuple(x.shape)} on {x.device}, "
            f"got {out.dtype} {tuple(out.shape)} on {out.device}"
        )
    return out
