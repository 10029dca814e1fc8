"""Matrix units in torch operations: the same bits as dot.c, on any device, and for every input.

Unlike the kernel it also takes infinities and NaN, and sums that overflow on the way. All but the plain float32
orders is float64 arithmetic without rounding errors: products and aligned terms are exact doubles, and where a
sum might not fit one it is rounded to odd, which makes rounding it again to the register correct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot_operands import NOTHING, exponents_of
from qwen_quantize.formats.dot_record import DotUnit, Joining, Order, SumOverflow, TwoStage

_LOWEST = -600  # exponents of sums are cut there, as in dot.c: below the exponents of all products
_PIECE = 1 << 20  # products handled at once
_DOUBLE_BITS = 53


def matmul_by_twin(a: Tensor, b: Tensor, c: Tensor | None, unit: DotUnit) -> Tensor:
    """float32 [M, N] of a [M, K], b [N, K] and c [M, N], all prepared by `dot_operands.inputs_of`."""
    rows, columns = a.shape[0], b.shape[0]
    out = torch.empty(rows, columns, dtype=torch.float32, device=a.device)
    step = max(_PIECE // max(columns * _widest(unit, a.shape[1]), 1), 1)
    for first in range(0, rows, step):
        piece = slice(first, first + step)
        start = torch.zeros_like(out[piece]) if c is None else c[piece]
        out[piece] = _dots(a[piece, None, :], b[None, :, :], start, unit)
    return out


def dots_by_twin(a: Tensor, b: Tensor, c: Tensor, unit: DotUnit) -> Tensor:
    """float32 [P]: the dot products of the rows of a [P, K] and b [P, K], each with its c [P]."""
    out = torch.empty(a.shape[0], dtype=torch.float32, device=a.device)
    step = max(_PIECE // max(a.shape[1], 1), 1)
    for first in range(0, a.shape[0], step):
        piece = slice(first, first + step)
        out[piece] = _dots(a[piece], b[piece], c[piece], unit)
    return out


def _widest(unit: DotUnit, k: int) -> int:
    return min(k, unit.products or (1 if unit.order is Order.FMA else k))


def _dots(a: Tensor, b: Tensor, c: Tensor, unit: DotUnit) -> Tensor:
    """a [..., K] and b [..., K], broadcast against each other, and c [...] -> float32 [...]."""
    k = a.shape[-1]
    segment = unit.promotion_interval or k
    block = unit.products or (1 if unit.order is Order.FMA else max(k, 1))
    total = c.to(torch.float32)
    register = torch.zeros_like(total) if unit.promotion_interval else total
    register = register.double() if unit.order is Order.ALIGNED else register
    for start in range(0, k, max(segment, 1)):
        end = min(start + segment, k)
        for first in range(start, end, block):
            piece = slice(first, min(first + block, end))
            left, right = a[..., piece], b[..., piece]
            match unit.order:
                case Order.ALIGNED:
                    register = _aligned_step(left, right, register, unit)
                case Order.FMA:
                    register = _fused(left[..., 0], right[..., 0], register, unit)
                case _:
                    products = _flushed(left * right, unit)
                    padded = torch.nn.functional.pad(products, (0, block - products.shape[-1]))
                    register = _flushed(register + _tree(padded, unit), unit)
        if unit.promotion_interval:
            total = total + register.to(torch.float32)
            register = torch.zeros_like(register)
    return total if unit.promotion_interval else register.to(torch.float32)


def _fused(a: Tensor, b: Tensor, c: Tensor, unit: DotUnit) -> Tensor:
    total, rest = _two_sum(a.double() * b.double(), c.double())
    odd = _to_odd(total, torch.where(total.isfinite(), rest, 0.0))
    return _flushed(odd.to(torch.float32), unit)


def _tree(products: Tensor, unit: DotUnit) -> Tensor:
    n = products.shape[-1]
    if n == 1:
        return products[..., 0]
    left, right = _tree(products[..., : n // 2], unit), _tree(products[..., n // 2 :], unit)
    return _flushed(left + right, unit)


def _flushed(x: Tensor, unit: DotUnit) -> Tensor:
    if not unit.flush_outputs:
        return x
    tiny = x.abs() < 2.0**unit.min_exponent
    return torch.where(tiny, torch.copysign(torch.zeros_like(x), x), x)


# ---- one aligned step ----


def _aligned_step(a: Tensor, b: Tensor, c: Tensor, unit: DotUnit) -> Tensor:
    """c [...] plus the products of a [..., n] and b [..., n]; float64 values of the register."""
    products = a.double() * b.double()
    if unit.products_overflow:
        beyond = products.abs() >= 2.0**128
        products = torch.where(
            beyond, torch.copysign(torch.full_like(products, math.inf), products), products
        )
    finite = products.isfinite()
    special = torch.where(finite, 0.0, products).sum(-1) + torch.where(c.isfinite(), 0.0, c)
    products = torch.where(finite, products, 0.0)
    known = torch.where(c.isfinite(), c, 0.0)
    exponents = _product_exponents(a, b, products, unit)
    match unit.joining, unit.two_stage:
        case Joining.WITH_PRODUCTS, _:
            top = torch.maximum(exponents.amax(-1), _exponents(known, unit.min_exponent))
            if unit.min_alignment_exponent is not None:
                top = top.clamp(min=unit.min_alignment_exponent)
            terms = [*products.unbind(-1), known]
            result = _rounded(_aligned_sum(terms, top, unit), unit)
        case Joining.TWO_STAGE, TwoStage() as stage:
            result = _rounded(_two_stage(products, exponents, known, unit, stage), unit)
        case _:
            of_products = _rounded(_aligned_sum(products.unbind(-1), exponents.amax(-1), unit), unit)
            result = _rounded(_to_odd(*_two_sum(of_products, known)) + 0.0, unit)
            result = torch.where(of_products.isfinite(), result, of_products)
    return torch.where(special == 0, result, special)


def _product_exponents(a: Tensor, b: Tensor, products: Tensor, unit: DotUnit) -> Tensor:
    """int64, of the shape of products; `_LOWEST` for a zero."""
    if unit.products_normalised:
        return _exponents(products, _LOWEST + 1)
    sums = exponents_of(a, unit.a_format).long() + exponents_of(b, unit.b_format).long()
    return torch.where(products == 0, _LOWEST, sums.clamp(min=2 * NOTHING))


def _exponents(x: Tensor, lowest: int) -> Tensor:
    fields = ((x.view(torch.int64) >> 52) & 0x7FF) - 1023
    return torch.where(x == 0, _LOWEST, fields.clamp(min=lowest))


def _powers(exponents: Tensor) -> Tensor:
    """2^exponents, -1022 .. 1023; torch's own powers are not exact on every device."""
    return ((exponents + 1023) << 52).view(torch.float64)


def _aligned_sum(terms: Sequence[Tensor], top: Tensor, unit: DotUnit) -> Tensor:
    """The sum of terms cut below 2^(top - F)."""
    if unit.fraction_bits is None:
        return _exact_sum(list(terms))
    scale = _powers(unit.fraction_bits - top)
    cut = [_to_integers(term * scale, unit.alignment_rounding) for term in terms]
    fits = unit.fraction_bits + 2 + len(cut).bit_length() <= _DOUBLE_BITS
    total = torch.stack(cut).sum(0) + 0.0 if fits else _exact_sum(cut)
    return total * _powers(top - unit.fraction_bits)


def _two_stage(products: Tensor, exponents: Tensor, c: Tensor, unit: DotUnit, stage: TwoStage) -> Tensor:
    fraction_bits = unit.fraction_bits or 0
    lanes = [
        (products[..., lane :: unit.lanes], exponents[..., lane :: unit.lanes]) for lane in range(unit.lanes)
    ]
    tops = [e.amax(-1) if e.shape[-1] else torch.full_like(c, _LOWEST).long() for _, e in lanes]
    top = torch.stack(tops).amax(0)
    total = torch.zeros_like(c)  # in units of 2^(top - fraction_bits)
    for (lane, _), lane_top in zip(lanes, tops, strict=True):
        lane_sum = torch.zeros_like(c)
        for term in lane.unbind(-1):
            lane_sum = lane_sum + _to_integers(
                term * _powers(fraction_bits - lane_top), unit.alignment_rounding
            )
        total = total + _to_integers(lane_sum * _powers(lane_top - top), stage.rounding)
    of_c = _exponents(c, unit.min_exponent)
    common = torch.maximum(top, of_c)
    if unit.min_alignment_exponent is not None:
        common = common.clamp(min=unit.min_alignment_exponent)
    total = total * _powers(top - fraction_bits + stage.sum_fraction_bits - common)
    kept = _to_integers(c * _powers(stage.register_fraction_bits - common), stage.rounding)
    if stage.dropped_below is not None:
        kept = torch.where(of_c < common - stage.dropped_below, 0.0, kept)
    total = _to_integers(total, stage.rounding) * _powers(common - stage.sum_fraction_bits)
    return total + kept * _powers(common - stage.register_fraction_bits) + 0.0


def _rounded(x: Tensor, unit: DotUnit) -> Tensor:
    """float64 values of the register; infinities where it overflows and does not saturate."""
    quantum = ((x.view(torch.int64) >> 52) & 0x7FF) - 1023
    quantum = quantum.clamp(min=unit.min_exponent) - unit.mantissa_bits
    x = _to_integers(x * _powers(-quantum), unit.final_rounding) * _powers(quantum)
    limit = unit.max_value if unit.overflow is SumOverflow.SATURATE else math.inf
    return _flushed(torch.where(x.abs() > unit.max_value, x.sign() * limit, x), unit)


# ---- exact arithmetic on doubles ----


def _to_integers(x: Tensor, rounding: Rounding) -> Tensor:
    match rounding:
        case Rounding.RNE:
            return x.round()
        case Rounding.RTZ:
            return x.trunc()
        case Rounding.FLOOR:
            return x.floor()
        case Rounding.CEIL:
            return x.ceil()
        case _:  # nearest, ties away from zero; adding one half would round
            whole = x.trunc()
            return torch.copysign(whole.abs() + ((x - whole).abs() >= 0.5), x)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and what it lacks (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _to_odd(x: Tensor, rest: Tensor) -> Tensor:
    """x + rest rounded to odd; rest is smaller than the last place of x."""
    bits = x.view(torch.int64)
    away = torch.where((rest < 0) == (x < 0), 1, -1)
    return torch.where((rest != 0) & ((bits & 1) == 0), bits + away, bits).view(torch.float64)


def _exact_sum(terms: list[Tensor]) -> Tensor:
    """The sum of terms rounded to odd, +0 if it is zero (Shewchuk 1997, GROW-EXPANSION)."""
    expansion: list[Tensor] = []
    for term in terms:
        rest = term
        for index, part in enumerate(expansion):
            rest, expansion[index] = _two_sum(rest, part)
        expansion.append(rest)
    total = expansion.pop()
    lost = torch.zeros_like(total)
    for part in reversed(expansion):  # once something is lost, smaller parts cannot change its sign
        grown, rest = _two_sum(total, part)
        total, lost = torch.where(lost != 0, total, grown), torch.where(lost != 0, lost, rest)
    return _to_odd(total, lost) + 0.0
