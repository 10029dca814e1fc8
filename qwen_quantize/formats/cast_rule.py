"""How a value becomes a code: rounding, overflow, subnormals and NaN, each named and none implied."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Rounding(StrEnum):
    """Which neighbour a value between two representable ones goes to."""

    RNE = "rne"  # nearest, ties to the even code (IEEE 754 roundTiesToEven)
    RNA = "rna"  # nearest, ties away from zero ("ROUND" in Ascend C, `_rna` of its HiF8 casts)
    RTZ = "rtz"  # toward zero ("TRUNC"): what a unit does that drops the low bits
    FLOOR = "floor"  # toward minus infinity
    CEIL = "ceil"  # toward plus infinity
    ODD = "odd"  # inexact results go to the neighbour with an odd code (von Neumann)
    STOCHASTIC = "stochastic"  # up with the probability of the distance; needs a torch.Generator
    HYBRID = "hybrid"  # HiF8 only: ties-away for small exponents, value-seeded thresholds for large ones


class Overflow(StrEnum):
    """What becomes of a value that rounds beyond the largest finite one, and of an infinity."""

    SATURATE = "saturate"  # the largest finite value, for infinities too
    NONSATURATE = "nonsaturate"  # infinity where the format has one, else NaN, else it saturates all the same


class Subnormals(StrEnum):
    """Whether results below the smallest normal value exist."""

    KEEP = "keep"
    FLUSH = "flush"  # a result below the smallest normal becomes zero, after rounding


class NanResult(StrEnum):
    """What a NaN becomes."""

    PROPAGATE = "propagate"  # the format's NaN; zero in a format that has none
    ZERO = "zero"  # saturating casts of Ascend units


@dataclass(frozen=True, slots=True)
class CastRule:
    """One cast, completely stated."""

    rounding: Rounding
    overflow: Overflow
    subnormals: Subnormals
    nan: NanResult = NanResult.PROPAGATE


RNE_SATURATE = CastRule(Rounding.RNE, Overflow.SATURATE, Subnormals.KEEP)
