"""What the manifest says of each quantized linear and of each input that calibration saw."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT_DB = 999.0  # stands for a weight without any error: JSON has no infinity


def binary_exponents(scale: Tensor) -> Tensor:
    """int32 floor(log2 |scale|), exactly, also of subnormals; 0 for a scale of zero."""
    return torch.where(scale == 0, 0, torch.frexp(scale).exponent - 1)


def exponent_counts(exponents: Tensor) -> dict[str, int]:
    """Scale exponent -> number of regions, for a grid of int32 exponents."""
    values, counts = torch.unique(exponents, return_counts=True)
    return {str(int(v)): int(c) for v, c in zip(values, counts, strict=True)}


def why_no_better(error: float, baseline_error: float) -> tuple[str, ...]:
    """A note for a linear that errs as much as plain rounding; none for one that errs less."""
    if error < baseline_error:
        return ()
    if error == 0:
        return ("no better than plain rounding, which is exact already",)
    return ("no better than plain rounding: none of the scales and codes tried errs less",)


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """What the report says of one quantized linear; errors are relative and squared."""

    name: str
    shape: tuple[int, int]
    error: float
    baseline_error: float
    weight_sqnr_db: float
    searched_blocks: int
    zero_blocks: int
    partial_blocks: int
    exponents: dict[str, int]  # binary exponent of the scale -> number of regions
    sha256: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What calibration saw at one input stream of a layer."""

    stream: str
    tokens: int
    amax: float
    rms: float
    outlier_ratio: float  # the largest amax / rms of a feature
    exponents: dict[str, int]  # float32 exponent -> count


@dataclass(frozen=True, slots=True)
class ExpertRecord:
    """How calibration reached one routed expert. needed: the tokens below which it counts as starved."""

    expert: int
    tokens: int
    needed: int
    policy: str  # what its linears were calibrated on: "own", "shrink", "forced" or "round"
