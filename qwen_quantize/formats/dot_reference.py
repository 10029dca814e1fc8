"""The slow and obvious matrix unit: one dot product at a time, in integers of any size.

Every finite number is an integer multiple of 2^-320, finer than any product of two float32 numbers, so that sums
are exact and rounding is integer division. Nothing here is shared with the fast code but the record.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot_record import DotUnit, Joining, Order, Register, SumOverflow
from qwen_quantize.formats.spec import FloatFormat, IntFormat

_POINT = 320  # bits behind the point
Term = tuple[int | None, int]  # exponent and number; zero has no exponent


def dot_reference(a: Sequence[float], b: Sequence[float], unit: DotUnit, c: float = 0.0) -> float:
    """a . b + c as `unit` computes it; a, b already rounded by `input_rounding` if it has one.

    An int32 sum comes back as the float of the integer. ValueError for a unit that is plain: it decides no bits.
    """
    if unit.register is Register.INT32:
        return float(_integers(a, b, unit, int(c)))
    if unit.is_plain:
        raise ValueError(f"dot unit {unit.name} does not say how it adds")
    if unit.flush_inputs:
        a, b = _without_subnormals(a, unit.a_format), _without_subnormals(b, unit.b_format)
        c = 0.0 if abs(c) < 2.0**unit.min_exponent else c
    steps = {Order.ALIGNED: _aligned_step, Order.FMA: _fma_step, Order.PAIRWISE: _pairwise_step}
    size = 1 if unit.order is Order.FMA else unit.products or len(a)
    register = 0.0 if unit.promotion_interval else c
    total = c
    segment = unit.promotion_interval or len(a)
    for start in range(0, len(a), segment or 1):
        end = min(start + segment, len(a))
        for first in range(start, end, size):
            last = min(first + size, end)
            register = steps[unit.order](a[first:last], b[first:last], register, unit, size)
        if unit.promotion_interval:
            total = _float32_sum(total, register)
            register = 0.0
    return total if unit.promotion_interval else register


def _without_subnormals(values: Sequence[float], fmt: FloatFormat | IntFormat) -> list[float]:
    smallest = fmt.min_normal if isinstance(fmt, FloatFormat) else 0.0
    return [0.0 if abs(x) < smallest else x for x in values]


# ---- numbers as integers ----


@functools.lru_cache(1 << 16)
def _fixed(x: float) -> int:
    numerator, denominator = x.as_integer_ratio()
    return numerator << (_POINT + 1 - denominator.bit_length())  # denominators are powers of two


def _exponent(n: int) -> int:
    """floor(log2) of the number that n != 0 stands for."""
    return abs(n).bit_length() - 1 - _POINT


def _to_multiple(n: int, exponent: int, rounding: Rounding) -> int:
    """n rounded to a multiple of 2^exponent."""
    shift = exponent + _POINT
    if shift <= 0:
        return n
    below = n >> shift  # toward minus infinity
    rest = n - (below << shift)
    half = 1 << (shift - 1)
    match rounding:
        case Rounding.FLOOR:
            up = False
        case Rounding.CEIL:
            up = rest > 0
        case Rounding.RTZ:
            up = n < 0 and rest > 0
        case Rounding.RNE:
            up = rest > half or (rest == half and below % 2 == 1)
        case Rounding.RNA:
            up = rest > half or (rest == half and n > 0)
        case _:
            raise ValueError(f"a matrix unit does not round {rounding}")
    return (below + int(up)) << shift


def _to_register(n: int, unit: DotUnit) -> float:
    """The register's value for the exact sum n."""
    if n == 0:
        return 0.0
    quantum = max(_exponent(n), unit.min_exponent) - unit.mantissa_bits
    rounded = _to_multiple(n, quantum, unit.final_rounding)
    sign = -1.0 if n < 0 else 1.0
    if abs(rounded) > _fixed(unit.max_value):
        return sign * (unit.max_value if unit.overflow is SumOverflow.SATURATE else math.inf)
    magnitude = math.ldexp(abs(rounded) >> (quantum + _POINT), quantum)
    return sign * (0.0 if unit.flush_outputs and magnitude < 2.0**unit.min_exponent else magnitude)


# ---- a step of aligned sums ----


def _aligned_step(a: Sequence[float], b: Sequence[float], c: float, unit: DotUnit, size: int) -> float:
    del size  # absent products add nothing
    special = _special([_product(x, y, unit) for x, y in zip(a, b, strict=True)], c)
    if special is not None:
        return special
    terms: list[Term] = []
    for x, y in zip(a, b, strict=True):
        product = _fixed(x) * _fixed(y) >> _POINT
        if product:
            exponent = _own_exponent(x, unit.a_format) + _own_exponent(y, unit.b_format)
            terms.append((_exponent(product) if unit.products_normalised else exponent, product))
        else:
            terms.append((None, 0))
    of_c = (max(_exponent(_fixed(c)), unit.min_exponent), _fixed(c)) if c else (None, 0)
    if unit.joining is Joining.WITH_PRODUCTS:
        return _to_register(_sum_of([*terms, of_c], unit, unit.min_alignment_exponent)[1], unit)
    if unit.joining is Joining.SEPARATE:
        of_products = _to_register(_sum_of(terms, unit, None)[1], unit)
        if math.isinf(of_products):
            return of_products
        return _to_register(_fixed(of_products) + _fixed(c), unit)
    return _to_register(_two_stage_sum(terms, of_c, unit), unit)


def _product(x: float, y: float, unit: DotUnit) -> float:
    product = x * y  # a double, without overflow
    if unit.products_overflow and math.isfinite(product) and abs(product) >= 2.0**128:
        return math.copysign(math.inf, product)
    return product


def _special(products: list[float], c: float) -> float | None:
    """What infinities and NaN make of a sum; None if there are none."""
    found = [x for x in [*products, c] if not math.isfinite(x)]
    if not found:
        return None
    return found[0] if all(x == found[0] for x in found) else math.nan


@functools.lru_cache(1 << 16)
def _own_exponent(x: float, fmt: FloatFormat | IntFormat) -> int:
    lowest = fmt.min_exponent if isinstance(fmt, FloatFormat) else 0
    return max(math.frexp(x)[1] - 1, lowest)


def _sum_of(terms: Sequence[Term], unit: DotUnit, lowest: int | None) -> Term:
    """The largest exponent and the sum of the terms, each cut to a multiple of 2^(E - F)."""
    exponents = [exponent for exponent, _ in terms if exponent is not None]
    if not exponents:
        return None, 0
    top = max(exponents) if lowest is None else max(*exponents, lowest)
    if unit.fraction_bits is None:
        return top, sum(number for _, number in terms)
    quantum = top - unit.fraction_bits
    return top, sum(_to_multiple(number, quantum, unit.alignment_rounding) for _, number in terms)


def _two_stage_sum(terms: Sequence[Term], c: Term, unit: DotUnit) -> int:
    stage, fraction_bits = unit.two_stage, unit.fraction_bits
    if stage is None or fraction_bits is None:
        raise ValueError(f"dot unit {unit.name} has no second stage")
    lanes = [_sum_of(terms[lane :: unit.lanes], unit, None) for lane in range(unit.lanes)]
    known = [exponent for exponent, _ in lanes if exponent is not None]
    total = 0
    if known:
        quantum = max(known) - fraction_bits
        total = sum(_to_multiple(number, quantum, stage.rounding) for _, number in lanes)
    if c[0] is not None:
        known.append(c[0])
    if not known:
        return 0
    top = max(known) if unit.min_alignment_exponent is None else max(*known, unit.min_alignment_exponent)
    total = _to_multiple(total, top - stage.sum_fraction_bits, stage.rounding)
    if c[0] is None or (stage.dropped_below is not None and c[0] < top - stage.dropped_below):
        return total
    return total + _to_multiple(c[1], top - stage.register_fraction_bits, stage.rounding)


# ---- float32 operations ----


def _float32(n: int, zero: float) -> float:
    """The float32 nearest to n, ties to even; `zero` if n is 0."""
    if n == 0:
        return zero
    quantum = max(_exponent(n), -126) - 23
    rounded = _to_multiple(n, quantum, Rounding.RNE)
    magnitude = abs(rounded) >> (quantum + _POINT)
    beyond = abs(rounded) >= 1 << (128 + _POINT)
    return math.copysign(math.inf if beyond else math.ldexp(magnitude, quantum), n)


def _float32_sum(x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return x + y
    return _float32(_fixed(x) + _fixed(y), x + y)  # the double x + y has the sign that a zero sum gets


def _flushed(x: float, unit: DotUnit) -> float:
    return math.copysign(0.0, x) if unit.flush_outputs and abs(x) < 2.0**unit.min_exponent else x


def _fma_step(a: Sequence[float], b: Sequence[float], c: float, unit: DotUnit, size: int) -> float:
    del size
    (x,), (y,) = a, b
    if not all(map(math.isfinite, (x, y, c))):
        return x * y + c
    exact = (_fixed(x) * _fixed(y) >> _POINT) + _fixed(c)
    return _flushed(_float32(exact, x * y + c), unit)


def _pairwise_step(a: Sequence[float], b: Sequence[float], c: float, unit: DotUnit, size: int) -> float:
    products = []
    for x, y in zip(a, b, strict=True):
        product = x * y
        if math.isfinite(product):
            product = _float32(_fixed(x) * _fixed(y) >> _POINT, product)
        products.append(_flushed(product, unit))
    products += [0.0] * (size - len(products))
    return _flushed(_float32_sum(c, _halves(products, unit)), unit)


def _halves(values: list[float], unit: DotUnit) -> float:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return _flushed(_float32_sum(_halves(values[:half], unit), _halves(values[half:], unit)), unit)


# ---- integers ----


def _integers(a: Sequence[float], b: Sequence[float], unit: DotUnit, c: int) -> int:
    total = c
    size = unit.products or max(len(a), 1)
    for first in range(0, len(a), size):
        pairs = zip(a[first : first + size], b[first : first + size], strict=True)
        total += sum(int(x) * int(y) for x, y in pairs)
        if unit.overflow is SumOverflow.SATURATE:
            total = max(-(1 << 31), min(total, (1 << 31) - 1))
    return total if unit.overflow is SumOverflow.SATURATE else (total + (1 << 31)) % (1 << 32) - (1 << 31)
