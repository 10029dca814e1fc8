"""Operands of a matrix unit: rounded and flushed as it reads them, and packed for the kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import CastRule, Overflow, Subnormals
from qwen_quantize.formats.codec import check_float32
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat, IntFormat

NOTHING = -8192  # the exponent of zero, as in dot.c
STRIP = 32  # columns of one strip, as in dot.c
_NO_EXPONENTS = (0, 0)


def inputs_of(x: Tensor, fmt: FloatFormat | IntFormat, unit: DotUnit, name: str) -> Tensor:
    """float32 x [rows, K] as the unit reads it: rounded, flushed, contiguous; x itself where nothing is done.

    ValueError unless x is a float32 matrix, and one of values of `fmt` where the unit does not round.
    """
    check_float32(x, name)
    if x.dim() != 2:
        raise ValueError(f"{name} must be a matrix, not of shape {tuple(x.shape)}")
    x = x.contiguous()
    if isinstance(fmt, IntFormat):
        if not bool(((x >= fmt.minimum) & (x <= fmt.maximum) & (x == x.round())).all()):
            raise ValueError(f"{name} has values that are not {fmt.name}: cast it first")
        return x
    if unit.input_rounding is not None:
        x = quantize_values(x, fmt, CastRule(unit.input_rounding, Overflow.NONSATURATE, Subnormals.KEEP))
    elif fmt.mantissa_bits < 23:
        below = x.view(torch.int32) & ((1 << (23 - fmt.mantissa_bits)) - 1)
        if bool(below.any()) and bool(below[x.isfinite()].any()):
            raise ValueError(f"{name} has values with more mantissa bits than {fmt.name}: cast it first")
    if unit.flush_inputs:
        x = torch.where(x.abs() < fmt.min_normal, 0.0, x)
    return x


def exponents_of(x: Tensor, fmt: FloatFormat | IntFormat) -> Tensor:
    """int16 of x's shape: the exponents of values of fmt, with subnormals at the smallest; zero: NOTHING."""
    lowest = fmt.min_exponent if isinstance(fmt, FloatFormat) else 0
    fields = ((x.contiguous().view(torch.int32) >> 23) & 0xFF).to(torch.int16) - 127
    return torch.where(x == 0, NOTHING, fields.clamp(min=lowest)).to(torch.int16)


@dataclass(frozen=True, slots=True)
class Exponents:
    """The exponents of a matrix [rows, K], and the smallest and largest of what is not zero."""

    values: Tensor
    smallest: int
    largest: int


def find_exponents(x: Tensor, fmt: FloatFormat | IntFormat) -> Exponents:
    """The exponents of finite x [rows, K]; smallest and largest are 0 where x has nothing but zeros."""
    values = exponents_of(x, fmt)
    if values.numel() == 0:
        return Exponents(values, *_NO_EXPONENTS)
    largest = int(values.max())
    if largest == NOTHING:
        return Exponents(values, *_NO_EXPONENTS)
    smallest = int(torch.where(values == NOTHING, 127, values).min())
    return Exponents(values, smallest, largest)


def in_strips(x: Tensor) -> Tensor:
    """x [N, K] as [ceil(N / STRIP), K, STRIP], padded with zeros (exponents: of zero)."""
    rows, k = x.shape
    strips = -(-rows // STRIP)
    padded = torch.full((strips * STRIP, k), NOTHING if x.dtype == torch.int16 else 0, dtype=x.dtype)
    padded[:rows] = x
    return padded.view(strips, STRIP, k).transpose(1, 2).contiguous()


@dataclass(frozen=True, slots=True)
class RightOperand:
    """The right matrix b [N, K] of a unit, prepared once for many products.

    `strips` and `exponents` are for the kernel and None where it is not used; `bad_rows` [N] marks rows that
    hold infinities or NaN, None when there are none.
    """

    unit: DotUnit
    values: Tensor
    strips: Tensor | None
    exponents: Exponents | None
    bad_rows: Tensor | None


def without_bad_rows(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with its infinities and NaN replaced by zeros, and which rows had some; None if none had."""
    finite = x.isfinite()
    if bool(finite.all()):
        return x, None
    return torch.where(finite, x, 0.0), ~finite.all(1)
