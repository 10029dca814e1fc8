"""From a chip's arithmetic to the matrix unit that the engine emulates, bit by bit.

Operands with power-of-two scales. A unit sees codes; their scales are applied in one of two places. A unit with
block scales (Ascend 950, Blackwell) adds the scales' exponents to those of the products before it aligns them,
and its register runs through the whole sum. Any other unit adds codes of one group only: the kernel multiplies
that sum by both scales while it adds it to a float32 register (DeepGEMM's promotion). In both cases the bits are
those of the unit on values that are already multiplied by their scales: in the first because exponents add, in the
second because a power of two that all terms of a group share moves the alignment, the cut and the rounding with
it. So that is what is emulated, with operands of the format's mantissa and a float32's exponents, and a promotion
interval that never spans two groups.

It differs from codes in three corners. A code below the format's smallest normal value enters with its own
exponent, not with the format's lowest (it matters where no product of the step is larger). Sums below 2^-126 round as
float32 subnormals. And an fp16 register keeps its 11 significant bits but float32's range: whether it overflows
depends on how a kernel scales its codes, which no profile says.
"""

from __future__ import annotations

import math
from fractions import Fraction

from qwen_quantize.chip_profiles.arithmetic import FLOAT32_BITS, Arithmetic, usual_step
from qwen_quantize.errors import UserError
from qwen_quantize.formats.dot_record import DOT_ROUNDINGS, DotUnit, Order
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat, TableFormat

_HALF_BITS = 10  # fraction bits of an fp16 register


def dot_unit_of(
    arithmetic: Arithmetic,
    weight: Format,
    activation: Format,
    group_size: int | None = None,
    *,
    bit_true: bool = False,
) -> DotUnit | None:
    """The unit that multiplies activations (a) with weights (b); None where float32 sums in any order will do.

    That is so for integer sums, for a width nobody states, and for one of float32's 23 bits or more, whose loss
    is no larger than that of the order; `bit_true` gives a unit for the last one too. group_size: of the
    power-of-two scales that both operands have been multiplied with, None for bare codes. UserError for a
    rounding that a sum cannot have.
    """
    accumulator = arithmetic.accumulator
    if isinstance(weight, IntFormat) or isinstance(activation, IntFormat) or accumulator.format == "int32":
        return None
    if not accumulator.narrow and (not bit_true or accumulator.fraction_bits is None):
        return None
    for rounding in (accumulator.alignment_rounding, accumulator.final_rounding):
        if rounding not in DOT_ROUNDINGS:
            raise UserError(
                f"{arithmetic.chip}: sums that round {rounding} are not emulated; set accumulator.final_rounding and "
                f"accumulator.alignment_rounding with --assume to one of {', '.join(DOT_ROUNDINGS)}"
            )
    interval, width = accumulator.promotion_interval, activation.bits
    name = weight.name
    weight, activation = (_operand(fmt, scaled=group_size is not None) for fmt in (weight, activation))
    if group_size is not None:
        interval = None if interval is None else math.gcd(interval, group_size)
    kept = FLOAT32_BITS if accumulator.output_mantissa_bits is None else accumulator.output_mantissa_bits
    return DotUnit(
        f"{arithmetic.chip} {name}",
        activation,
        weight,
        Order.ALIGNED,
        products=accumulator.products_per_step or usual_step(width),
        fraction_bits=accumulator.fraction_bits,
        alignment_rounding=accumulator.alignment_rounding,
        mantissa_bits=min(kept, _HALF_BITS) if accumulator.format == "fp16" else kept,
        final_rounding=accumulator.final_rounding,
        promotion_interval=interval,
    )


def _operand(fmt: FloatFormat | TableFormat, *, scaled: bool) -> FloatFormat:
    """The operand of a unit. A table's values (HiF8) are floats of its widest mantissa and of any exponent."""
    if isinstance(fmt, FloatFormat):
        return with_any_exponent(fmt) if scaled else fmt
    # A value in 1/2 .. 1 with n significant bits is an odd number over 2^n.
    parts = (Fraction(math.frexp(value)[0]) for value in fmt.values if math.isfinite(value) and value)
    widest = max(part.denominator.bit_length() - 1 for part in parts)
    return _float_of_width(f"{fmt.name}-scaled", widest - 1)


def with_any_exponent(fmt: FloatFormat) -> FloatFormat:
    """Values of `fmt` times any power of two in float32's range, as a format; one of 8 exponent bits as it is."""
    if fmt.exponent_bits == 8:
        return fmt
    return _float_of_width(f"{fmt.name}-scaled", fmt.mantissa_bits)


def with_scales_of(fmt: FloatFormat, scale: FloatFormat) -> FloatFormat:
    """Products of values of `fmt` and of scales with a mantissa, exactly: what a unit that applies both adds."""
    bits = fmt.mantissa_bits + scale.mantissa_bits + 1
    return _float_of_width(f"{fmt.name}-{scale.name}", bits)


def _float_of_width(name: str, bits: int) -> FloatFormat:
    nan = (0xFF << bits) | (1 << bits >> 1)
    return FloatFormat(name, 8, bits, bias=127, has_infinity=True, nan_codes=(nan,))
