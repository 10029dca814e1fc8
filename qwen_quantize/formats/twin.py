"""The casts in torch integer operations: the same bits as the C kernels, for machines without a compiler.

Works on any device. Inputs are handled in pieces, because the 64-bit intermediates of a piece take about a
hundred bytes for each element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.grid import Grid
from qwen_quantize.formats.spec import IntFormat

_PIECE = 1 << 19
_INFINITY = 0x7F800000
_WORD = 0xFFFFFFFF
Seed = tuple[int, int]


def random_words(seed: Seed, start: int, count: int, device: torch.device) -> Tensor:
    """int64 [count]: 32 random bits for each of the elements from `start` on: a hash of seed and position.

    Position-based, so that the result does not depend on how many threads share the work.
    """
    index = torch.arange(start, start + count, dtype=torch.int64, device=device)
    x = _mix((index & _WORD) ^ seed[0])
    x = (x + (((index >> 32) * 0x9E3779B9 & _WORD) ^ seed[1])) & _WORD
    return _mix(x)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash with low bias (multipliers from C. Wellons' search)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _WORD
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


def cast_to_codes(x: Tensor, grid: Grid, exponents: Tensor | None, seed: Seed) -> Tensor:
    """Codes of x * 2^-exponents, int64 of x's shape; `exponents`: int32 of x's shape, or None for zeros."""
    out = torch.empty(x.shape, dtype=torch.int64, device=x.device)
    flat = out.view(-1)
    for start, piece, shifts in _pieces(x, exponents):
        rank, negative, nan = _ranks(piece, grid, shifts, seed, start)
        flat[start : start + piece.numel()] = _codes(rank, negative, nan, grid)
    return out


def cast_to_values(x: Tensor, grid: Grid, exponents: Tensor | None, seed: Seed) -> Tensor:
    """float32 values of the codes of x * 2^-exponents (not scaled back), x's shape."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    flat = out.view(-1)
    for start, piece, shifts in _pieces(x, exponents):
        rank, negative, nan = _ranks(piece, grid, shifts, seed, start)
        flat[start : start + piece.numel()] = _values(rank, negative, nan, grid)
    return out


def _pieces(x: Tensor, exponents: Tensor | None) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    flat = x.reshape(-1)
    flat_exponents = None if exponents is None else exponents.reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        stop = start + _PIECE
        yield start, flat[start:stop], None if flat_exponents is None else flat_exponents[start:stop]


def _ranks(
    x: Tensor, grid: Grid, exponents: Tensor | None, seed: Seed, start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rank (int64), sign (int64, 0 or 1) and NaN flag of each element of x [n]."""
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    negative = (bits >> 31) & 1
    magnitude = bits & 0x7FFFFFFF
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | ((field != 0).to(torch.int64) << 23)
    field = field.clamp(min=1)
    if exponents is not None:
        # Scaling up can make a float32 subnormal normal, so give each its leading one first; zero, which has
        # none, gets an exponent far below all others.
        subnormal = magnitude < 0x800000
        normalized = magnitude.to(torch.float32).view(torch.int32).to(torch.int64)
        field = torch.where(subnormal, (normalized >> 23) - 149, field)
        leading_one = (magnitude != 0).to(torch.int64) << 23
        significand = torch.where(subnormal, (normalized & 0x7FFFFF) | leading_one, significand)
        field = field - exponents.to(torch.int64)
    below_normal = (grid.min_exponent + 127 - field).clamp(min=0)
    if grid.tapered is None:
        shift = 23 - grid.mantissa_bits + below_normal
        base = (field - grid.min_exponent - 127).clamp(min=0) << grid.mantissa_bits
    else:
        mantissa_bits = torch.zeros_like(field)
        first_field = torch.full_like(field, grid.min_exponent + 127)
        base = torch.zeros_like(field)
        for piece in grid.tapered.pieces:
            inside = field >= piece.exponent + 127
            mantissa_bits = torch.where(inside, piece.mantissa_bits, mantissa_bits)
            first_field = torch.where(inside, piece.exponent + 127, first_field)
            base = torch.where(inside, piece.base, base)
        shift = 23 - mantissa_bits + below_normal
        base = base + ((field - first_field).clamp(min=0) << mantissa_bits)
    if grid.rounding is Rounding.STOCHASTIC:
        rank = round_randomly(significand, shift, base, random_words(seed, start, x.numel(), x.device))
    else:
        rank = round_significand(significand, shift, base, negative, grid.rounding)
    limit = torch.where(negative == 1, grid.limit_negative, grid.limit_positive)
    of_infinity = torch.where(negative == 1, grid.infinity_negative, grid.infinity_positive)
    rank = torch.where(magnitude == _INFINITY, of_infinity, torch.minimum(rank, limit))
    return torch.where(rank < grid.flush_below, 0, rank), negative, magnitude > _INFINITY


def round_randomly(significand: Tensor, shift: Tensor, base: Tensor, words: Tensor) -> Tensor:
    """base + significand / 2^shift, rounded up where fraction + word / 2^32 >= 1. All int64, shift >= 1."""
    left = significand << (32 - shift).clamp(0, 32)
    right = significand >> (shift - 32).clamp(0, 63)
    fraction = torch.where(shift <= 32, left, right) & _WORD
    return base + (significand >> shift.clamp(max=31)) + ((fraction + words) >> 32)


def round_significand(
    significand: Tensor, shift: Tensor, base: Tensor, negative: Tensor, rounding: Rounding
) -> Tensor:
    """base + significand / 2^shift, rounded by a deterministic rule. All int64, shift >= 1."""
    deep = shift > 24
    shift = shift.clamp(max=31)  # significand < 2^24: every larger shift rounds alike
    truncated = base + (significand >> shift)
    half = torch.ones_like(shift) << (shift - 1)
    rest = (half << 1) - 1
    match rounding:
        case Rounding.RNE:
            added = half - 1 + (truncated & 1)
        case Rounding.RNA:
            added = half
        case Rounding.RTZ:
            return truncated
        case Rounding.FLOOR:
            added = rest * negative
        case Rounding.CEIL:
            added = rest * (1 - negative)
        case Rounding.ODD:
            return truncated | ((significand & rest) != 0).to(torch.int64)
        case Rounding.HYBRID:
            # Ascend: ties away where three mantissa bits are kept; elsewhere up if the 14 bits below the kept
            # ones are not less than the low 14 bits of the very same float32, read literally: equal is up.
            below_kept = (significand >> (shift - 14)) & 0x3FFF
            seeded = truncated + (below_kept >= (significand & 0x3FFF)).to(torch.int64)
            seeded = torch.where(deep, 0, seeded)  # less than half the smallest value
            return torch.where(shift == 20, base + ((significand + half) >> shift), seeded)
        case Rounding.STOCHASTIC:
            raise ValueError("stochastic rounding needs random words")
    return base + ((significand + added) >> shift)


def _codes(rank: Tensor, negative: Tensor, nan: Tensor, grid: Grid) -> Tensor:
    if isinstance(grid.format, IntFormat):
        return torch.where(nan, 0, torch.where(negative == 1, -rank, rank))
    code = rank
    if grid.tapered is not None:
        code = torch.tensor(grid.tapered.codes, dtype=torch.int64, device=rank.device)[rank]
    sign = negative << (grid.format.bits - 1)
    signed = code | sign
    if not grid.has_negative_zero:
        signed = torch.where(rank == 0, 0, signed)
    if grid.nan_code < 0:
        return torch.where(nan, 0, signed)
    return torch.where(nan, grid.nan_code | sign if grid.nan_keeps_sign else grid.nan_code, signed)


def _values(rank: Tensor, negative: Tensor, nan: Tensor, grid: Grid) -> Tensor:
    if grid.tapered is not None:
        value = torch.tensor(grid.tapered.values, device=rank.device)[rank]
    else:
        # Ranks are exponent and mantissa fields in one: move them to float32's place. A rank below the first
        # normal one is a multiple of the smallest value; for bfloat16 that product would be subnormal, and
        # its fields are float32's own.
        bits = (rank << (23 - grid.mantissa_bits)) + ((grid.min_exponent + 126) << 23)
        value = bits.to(torch.int32).view(torch.float32)
        if grid.min_exponent > -126:
            step = math.ldexp(1.0, grid.min_exponent - grid.mantissa_bits)
            value = torch.where(rank < 1 << grid.mantissa_bits, rank.to(torch.float32) * step, value)
    value = torch.where(negative == 1, -value, value)
    if not grid.has_negative_zero:
        value = torch.where(rank == 0, 0.0, value)
    quiet = torch.full_like(value, math.nan)
    if grid.nan_keeps_sign:
        quiet = torch.where(negative == 1, torch.full_like(value, -math.nan), quiet)
    beyond = rank > grid.max_rank
    infinity = torch.where(negative == 1, -math.inf, math.inf)
    value = torch.where(beyond, quiet if grid.overflow_is_nan else infinity, value)
    return torch.where(nan, quiet if grid.nan_code >= 0 else torch.zeros_like(value), value)
