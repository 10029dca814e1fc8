"""The slow and obvious twin: one value at a time, in exact fractions, by listing what the format holds.

The tests hold every fast cast to these functions, and these to ml_dtypes and en_dtypes. Nothing here is
shared with the fast casts but the format records.
"""

from __future__ import annotations

import functools
import math
import struct
from bisect import bisect_right
from fractions import Fraction

from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat, TableFormat


def decode_scalar(code: int, fmt: Format) -> float:
    """The value of `code`; integer codes are signed, all others unsigned. Single precision as in struct."""
    match fmt:
        case IntFormat():
            return float(code)
        case TableFormat():
            return fmt.values[code]
        case FloatFormat(exponent_bits=8, mantissa_bits=23):
            return float(struct.unpack("<f", struct.pack("<I", code))[0])
    magnitude = code & (fmt.sign_mask - 1) if fmt.signed else code
    sign = -1.0 if code & fmt.sign_mask else 1.0
    if fmt.is_nan(code):
        return math.nan
    if fmt.infinity_code is not None and magnitude == fmt.infinity_code:
        return sign * math.inf
    field, fraction = divmod(magnitude, 1 << fmt.mantissa_bits)
    if field == 0 and fmt.has_zero:
        return sign * float(Fraction(fraction, 1 << fmt.mantissa_bits) * Fraction(2) ** (1 - fmt.bias))
    significand = 1 + Fraction(fraction, 1 << fmt.mantissa_bits)
    return sign * float(significand * Fraction(2) ** (field - fmt.bias))


def encode_scalar(x: float | Fraction, fmt: Format, rule: CastRule, *, random_word: int | None = None) -> int:
    """The code of x, a float or an exact fraction, for formats up to 16 bits; special inputs as in codec.py.

    STOCHASTIC rounds away from zero where fraction + random_word / 2^32 >= 1, `fraction` being the distance
    from the neighbour below in units of the gap. HYBRID reads x as the float32 it must be.
    """
    if rule.rounding is Rounding.HYBRID and not isinstance(fmt, TableFormat):
        raise ValueError(f"rounding hybrid exists for hif8 only, not for {fmt.name}")
    if fmt.bits > 16:
        raise ValueError(f"the reference lists all values and cannot list {fmt.name}'s")
    negative = math.copysign(1.0, x) < 0 if isinstance(x, float) else x < 0
    if isinstance(x, float) and math.isnan(x):
        return _nan(fmt, rule, negative)
    without_zero = isinstance(fmt, FloatFormat) and not fmt.has_zero
    if without_zero and x < 0:
        return _nan(fmt, rule, negative)
    if without_zero and x == 0:
        return 0 if rule.overflow is Overflow.SATURATE else _nan(fmt, rule, negative)
    if isinstance(x, float) and math.isinf(x):
        return _overflow(fmt, rule, negative)
    magnitude = abs(Fraction(x))
    values, codes = _ladder(fmt, negative)
    index = bisect_right(values, magnitude) - 1
    beyond = Fraction(fmt.beyond_max) + (1 if isinstance(fmt, IntFormat) and negative else 0)
    if index < 0:  # E8M0: below its smallest value
        return codes[0]
    above_max = magnitude > values[-1]
    if above_max and rule.rounding in _toward_zero(negative):
        return _signed(codes[-1], fmt, negative)
    if magnitude >= beyond:
        return _overflow(fmt, rule, negative)
    if magnitude != values[index] or rule.rounding is Rounding.HYBRID:
        upper = beyond if above_max or index + 1 == len(values) else values[index + 1]
        fraction = (magnitude - values[index]) / (upper - values[index])
        index += _steps_away(fraction, codes[index], magnitude, rule, negative, random_word, fmt)
    if index == len(values):
        return _overflow(fmt, rule, negative)
    min_normal = 0.0 if isinstance(fmt, IntFormat) else fmt.min_normal
    if rule.subnormals is Subnormals.FLUSH and values[index] < min_normal:
        index = 0
    return _signed(codes[index], fmt, negative)


def _steps_away(
    fraction: Fraction, code: int, magnitude: Fraction, rule: CastRule, negative: bool,
    random_word: int | None, fmt: Format,
) -> int:  # fmt: skip
    """1 if a magnitude `fraction` of the way from `code` to the next goes up, else 0."""
    half = Fraction(1, 2)
    odd = code & 1
    match rule.rounding:
        case Rounding.RNE:
            if isinstance(fmt, FloatFormat) and not fmt.has_zero:
                return int(fraction >= half)  # no mantissa bit: ties go up
            return int(fraction > half or (fraction == half and odd == 1))
        case Rounding.RNA:
            return int(fraction >= half)
        case Rounding.RTZ:
            return 0
        case Rounding.FLOOR:
            return int(negative)
        case Rounding.CEIL:
            return int(not negative)
        case Rounding.ODD:
            return 1 - odd
        case Rounding.STOCHASTIC:
            if random_word is None:
                raise ValueError("stochastic rounding needs a random word")
            return int(fraction + Fraction(random_word, 1 << 32) >= 1)
        case Rounding.HYBRID:
            return _hybrid(magnitude, fraction)


def _hybrid(magnitude: Fraction, fraction: Fraction) -> int:
    """Ascend's HYBRID from float32, after the pseudo-code of its register Cast: equality rounds up."""
    if magnitude == 0:
        return 0
    exponent = _floor_log2(magnitude)
    if -3 <= exponent <= 3:
        return int(fraction >= Fraction(1, 2))
    if exponent < -23:
        return 0
    mantissa = int((magnitude / Fraction(2) ** exponent - 1) * (1 << 23))
    threshold = mantissa & 0x3FFF
    if exponent == -23:
        return int((1 << 13 | mantissa >> 10) >= threshold)
    kept = 2 if 4 <= abs(exponent) <= 7 else 1 if 8 <= abs(exponent) <= 15 else 0
    return int(((mantissa >> (23 - kept - 14)) & 0x3FFF) >= threshold)


def _floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def _toward_zero(negative: bool) -> tuple[Rounding, ...]:
    """The roundings that never turn a finite value of this sign into an overflow (IEEE 754-2019, 7.4)."""
    return (Rounding.RTZ, Rounding.ODD, Rounding.CEIL if negative else Rounding.FLOOR)


@functools.cache
def _ladder(fmt: Format, negative: bool) -> tuple[list[Fraction], list[int]]:
    """The finite magnitudes of one sign in ascending order and their codes (without sign)."""
    if isinstance(fmt, IntFormat):
        last = -fmt.minimum if negative else fmt.maximum
        return [Fraction(i) for i in range(last + 1)], list(range(last + 1))
    half = 1 << (fmt.bits - 1)
    codes = range(half if isinstance(fmt, TableFormat) or fmt.signed else 2 * half)
    pairs = [(decode_scalar(code, fmt), code) for code in codes]
    finite = sorted((value, code) for value, code in pairs if math.isfinite(value))
    return [Fraction(value) for value, _ in finite], [code for _, code in finite]


def _signed(code: int, fmt: Format, negative: bool) -> int:
    if not negative:
        return code
    if isinstance(fmt, IntFormat):
        return -code
    if isinstance(fmt, TableFormat):
        return code | 0x80 if code else 0
    if code == 0 and not fmt.has_negative_zero:
        return 0
    return code | fmt.sign_mask


def _overflow(fmt: Format, rule: CastRule, negative: bool) -> int:
    if rule.overflow is Overflow.NONSATURATE and not isinstance(fmt, IntFormat):
        if fmt.infinity_code is not None:
            return _signed(fmt.infinity_code, fmt, negative)
        if fmt.nan_code is not None:
            return fmt.nan_code | (fmt.sign_mask if negative and isinstance(fmt, FloatFormat) else 0)
    return _signed(_ladder(fmt, negative)[1][-1], fmt, negative)


def _nan(fmt: Format, rule: CastRule, negative: bool) -> int:
    without_zero = isinstance(fmt, FloatFormat) and not fmt.has_zero
    if rule.nan is NanResult.ZERO and not (without_zero and rule.overflow is Overflow.NONSATURATE):
        return 0
    if isinstance(fmt, IntFormat) or fmt.nan_code is None:
        return 0
    keeps_sign = isinstance(fmt, FloatFormat) and fmt.nan_keeps_sign
    return fmt.nan_code | (fmt.sign_mask if negative and keeps_sign and isinstance(fmt, FloatFormat) else 0)
