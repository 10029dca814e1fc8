"""Casts that go through other formats on the way, and the scales that a unit keeps in fewer bits.

A unit without a direct cast rounds more than once: float32 to int8 by way of fp16 turns 2.5001 into 2.5 and then
into 2, where one rounding gives 3. Each step has its own rule. All formats up to float32 hold their values exactly
in float32, so that a path is a chain of `quantize_values`, ending in a code.

Ascend's units multiply by static scales of 19 bits: float32 without its low 13 mantissa bits (CANN,
npu_trans_quant_param: cut off by default, rounded first with round_mode=1; Ascend C, Fixpipe: bits 31..13 of the
scale word; infinities, NaN and subnormals are not allowed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import check_float32, encode
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat, Format

# 1 sign, 8 exponent and 10 mantissa bits: the top 19 bits of a float32.
FP19 = FloatFormat("fp19", 8, 10, bias=127, has_infinity=True, nan_codes=(0x3FE00,))
_NINE_BITS = (-256, 255)


@dataclass(frozen=True, slots=True)
class CastStep:
    """One cast of a path: to which format, and by which rule."""

    format: Format
    rule: CastRule


def cast_along(x: Tensor, path: Sequence[CastStep], *, generator: torch.Generator | None = None) -> Tensor:
    """float32 values of x after all steps, x's shape; x itself for an empty path. ValueError as `encode`."""
    check_float32(x, "x")
    for step in path:
        x = quantize_values(x, step.format, step.rule, generator=generator)
    return x


def encode_along(x: Tensor, path: Sequence[CastStep], *, generator: torch.Generator | None = None) -> Tensor:
    """Codes of the last step's format, x's shape, dtype `code_dtype` of it. ValueError for an empty path."""
    if not path:
        raise ValueError("a path to codes needs a step: which format are they of?")
    before = cast_along(x, path[:-1], generator=generator)
    return encode(before, path[-1].format, path[-1].rule, generator=generator)


def static_scale(scale: Tensor, rounding: Rounding = Rounding.RTZ, fmt: FloatFormat = FP19) -> Tensor:
    """float32 values of `scale` as the unit keeps it, same shape; a scale that rounds up never overflows.

    ValueError where it is negative, infinite, NaN, or below the smallest normal value, before or after.
    """
    check_float32(scale, "scale")
    kept = quantize_values(scale, fmt, CastRule(rounding, Overflow.SATURATE, Subnormals.KEEP))
    usable = scale.isfinite() & (scale >= fmt.min_normal) & (kept >= fmt.min_normal)
    if not bool(usable.all()):
        value = scale[~usable].flatten()[0].item()
        raise ValueError(
            f"a static scale of type {fmt.name} is {value:g}: it must be finite and at least {fmt.min_normal:g}"
        )
    return kept


def requantize_to_int8(sums: Tensor, scale: Tensor, offset: int = 0) -> Tensor:
    """int8 of sums, as Ascend's Fixpipe writes them: float32 or int32 sums, scale broadcast against them.

    Converted to float32, multiplied by the FP19 scale in float32, rounded to nearest even, clipped to nine bits,
    moved by `offset`, and clipped to eight: the first clip comes before the offset (Ascend C samples, golden data
    of Fixpipe). NaN becomes 0. ValueError for an offset outside nine bits or an unusable scale.
    """
    low, high = _NINE_BITS
    if not low <= offset <= high:
        raise ValueError(f"offset {offset} does not fit nine bits: {low} .. {high}")
    scaled = (sums.to(torch.float32) * static_scale(scale)).nan_to_num(nan=0.0).round()
    moved = scaled.clamp(low, high) + offset
    return moved.clamp(-128, 127).to(torch.int8)
