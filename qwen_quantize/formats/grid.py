"""A format and a cast rule, reduced to the integers that a cast needs.

Both fast casts, the C kernels and their torch twin, work on the bits of a float32. The magnitudes of a format
in ascending order are numbered by *rank*: zero is 0, the smallest subnormal 1. With `significand` the 24-bit
integer of an input whose exponent is e (hidden one included),

    rank = base(e) + round(significand / 2^shift(e))

and a significand that rounds up to the next power of two carries into the next binade by itself. For float
formats shift and base follow from two numbers, mantissa bits and smallest normal exponent; an integer format
is a float format all of whose values are subnormal; a table (HiF8) has shift and base listed for each
exponent. A rank beyond the largest finite one is overflow; what happens then is in the limits.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat, TableFormat

MAX_PIECES = 8  # as in kernels.c


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive binades with the same mantissa width, from 2^exponent on; the last piece never ends."""

    exponent: int
    mantissa_bits: int
    base: int  # what the first binade's integer significands are short of their ranks


@dataclass(frozen=True, slots=True)
class Tapered:
    """A table's binades in ascending order, and what each rank means."""

    pieces: tuple[Piece, ...]
    codes: tuple[int, ...]  # rank -> code, overflow result last
    values: tuple[float, ...]  # rank -> value, overflow result last


@dataclass(frozen=True, slots=True)
class Grid:
    """One cast of float32 into one format, as integers; see the module."""

    format: Format
    rounding: Rounding
    mantissa_bits: int
    min_exponent: int  # smallest normal exponent, unbiased
    max_rank: int  # largest finite rank; one more is the overflow result (infinity or NaN)
    limit_positive: int  # ranks of finite inputs are cut to these ...
    limit_negative: int
    infinity_positive: int  # ... and infinite inputs get these
    infinity_negative: int
    flush_below: int  # ranks below become zero
    nan_code: int  # -1: NaN becomes zero
    nan_keeps_sign: bool
    overflow_is_nan: bool
    has_negative_zero: bool
    tapered: Tapered | None


@functools.cache
def grid_for(fmt: Format, rule: CastRule) -> Grid:
    """The integers of casting float32 to `fmt` under `rule`.

    ValueError for HYBRID outside HiF8, for E8M0 (see powers.py) and for float32, which needs no rounding.
    """
    if rule.rounding is Rounding.HYBRID and not isinstance(fmt, TableFormat):
        raise ValueError(f"rounding hybrid exists for hif8 only, not for {fmt.name}")
    if isinstance(fmt, FloatFormat) and not fmt.has_zero:
        raise ValueError(
            f"format {fmt.name} has no zero: it holds scales and takes no scaled or grouped values"
        )
    if isinstance(fmt, FloatFormat) and fmt.mantissa_bits > 21:
        raise ValueError(f"format {fmt.name} is as wide as the float32 inputs: there is nothing to round")
    match fmt:
        case IntFormat():
            mantissa_bits = min_exponent = fmt.bits - 1  # below 2^(bits-1) the spacing is 1: all subnormal
            max_rank, max_negative, min_normal, tapered = fmt.maximum, -fmt.minimum, 0, None
        case FloatFormat():
            mantissa_bits, min_exponent, tapered = fmt.mantissa_bits, fmt.min_exponent, None
            max_rank = max_negative = fmt.max_code
            min_normal = 1 << fmt.mantissa_bits
        case TableFormat():
            tapered = _taper(fmt)
            mantissa_bits, min_exponent = 0, _exponent(fmt.min_subnormal)
            max_rank = max_negative = len(tapered.codes) - 2
            min_normal = tapered.values.index(fmt.min_normal)
    nan_code = None if isinstance(fmt, IntFormat) else fmt.nan_code
    has_infinity = not isinstance(fmt, IntFormat) and fmt.has_infinity
    overflows = rule.overflow is Overflow.NONSATURATE and (has_infinity or nan_code is not None)
    # IEEE 754: a finite value rounded toward zero, or to odd, never becomes an infinity.
    stays_positive = rule.rounding in (Rounding.RTZ, Rounding.ODD, Rounding.FLOOR)
    stays_negative = rule.rounding in (Rounding.RTZ, Rounding.ODD, Rounding.CEIL)
    return Grid(
        format=fmt,
        rounding=rule.rounding,
        mantissa_bits=mantissa_bits,
        min_exponent=min_exponent,
        max_rank=max(max_rank, max_negative),
        limit_positive=max_rank + int(overflows and not stays_positive),
        limit_negative=max_negative + int(overflows and not stays_negative),
        infinity_positive=max_rank + int(overflows),
        infinity_negative=max_negative + int(overflows),
        flush_below=min_normal if rule.subnormals is Subnormals.FLUSH else 0,
        nan_code=-1 if nan_code is None or rule.nan is NanResult.ZERO else nan_code,
        nan_keeps_sign=isinstance(fmt, FloatFormat) and fmt.nan_keeps_sign,
        overflow_is_nan=not has_infinity,
        has_negative_zero=isinstance(fmt, FloatFormat) and fmt.has_negative_zero,
        tapered=tapered,
    )


@functools.cache
def byte_values(fmt: Format) -> Tensor:
    """float32 [256]: the value of each byte that `encode` can write for a format of at most 8 bits.

    Integers are two's complement bytes. A byte that is no code of the format is NaN, so that a damaged file
    shows. Do not modify the result: it is shared.
    """
    if fmt.bits > 8:
        raise ValueError(
            f"format {fmt.name} has {fmt.bits} bits: only formats of at most 8 bits have a table"
        )
    values = torch.full((256,), math.nan)
    for byte in range(256):
        match fmt:
            case TableFormat():
                values[byte] = fmt.values[byte]
            case IntFormat():
                signed = byte - 256 if byte >= 128 else byte
                if fmt.minimum <= signed <= fmt.maximum:
                    values[byte] = float(signed)
            case FloatFormat():
                if byte < 1 << fmt.bits:
                    values[byte] = _float_value(fmt, byte)
    return values


def _float_value(fmt: FloatFormat, code: int) -> float:
    """The value of any code of a narrow float format; NaN has the code's sign where the format keeps it."""
    magnitude = code & ~fmt.sign_mask
    sign = -1.0 if code & fmt.sign_mask else 1.0
    if fmt.is_nan(code):
        return math.copysign(math.nan, sign if fmt.nan_keeps_sign else 1.0)
    if magnitude == fmt.infinity_code:
        return sign * math.inf
    field, fraction = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    if field == 0 and fmt.has_zero:
        return sign * math.ldexp(fraction, fmt.min_exponent - fmt.mantissa_bits)
    return sign * math.ldexp((1 << fmt.mantissa_bits) + fraction, field - fmt.bias - fmt.mantissa_bits)


def _exponent(value: float) -> int:
    return math.frexp(value)[1] - 1


def _taper(fmt: TableFormat) -> Tapered:
    """Ranks of a table: its non-negative finite values in ascending order, then the overflow result."""
    codes = sorted(
        (c for c in range(256) if 0 <= fmt.values[c] < math.inf), key=lambda code: fmt.values[code]
    )
    values = [fmt.values[code] for code in codes]
    ladder = [*values[1:], fmt.beyond_max]  # ladder[i] has rank i + 1
    pieces: list[Piece] = []
    first = 0
    while first < len(ladder):
        exponent = _exponent(ladder[first])
        count = sum(_exponent(value) == exponent for value in ladder)
        mantissa_bits = count.bit_length() - 1
        expected = [math.ldexp((1 << mantissa_bits) + i, exponent - mantissa_bits) for i in range(count)]
        if ladder[first : first + count] != expected:
            raise ValueError(f"format {fmt.name}: its values from 2^{exponent} on are not equally spaced")
        if first and exponent != _exponent(ladder[first - 1]) + 1:
            raise ValueError(f"format {fmt.name}: it has no value in the binade below 2^{exponent}")
        if not pieces or pieces[-1].mantissa_bits != mantissa_bits:
            pieces.append(Piece(exponent, mantissa_bits, first + 1 - (1 << mantissa_bits)))
        first += count
    if len(pieces) > MAX_PIECES or pieces[0].mantissa_bits != 0:
        raise ValueError(
            f"format {fmt.name}: more than {MAX_PIECES} precisions, or no powers of two at the bottom"
        )
    infinity, nan = fmt.infinity_code, fmt.nan_code
    beyond = infinity if infinity is not None else nan
    if beyond is None:
        raise ValueError(f"format {fmt.name}: a table needs an infinity or a NaN")
    return Tapered(tuple(pieces), (*codes, beyond), (*values, fmt.values[beyond]))
