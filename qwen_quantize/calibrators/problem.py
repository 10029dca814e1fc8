"""What a solver is given and what it gives back: one linear at a time, tensors and records only."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.schemes import Scheme


@dataclass(frozen=True, slots=True)
class HessianFactor:
    """A damped Hessian H of K features and the upper U with (P H P^T)^-1 = U^T U, both [K, K] float32.

    order: [K] int64, the order P in which the features are rounded: falling diagonal of H. damping: what
    was added to each diagonal entry, relative to the entry.
    """

    hessian: Tensor
    upper: Tensor
    order: Tensor
    damping: float


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """weight: [out, in] float32. `statistics` and `factors` describe the input; None and () mean no data.

    `factors` may be shared by all linears of one stream: they are computed once. There is one for all
    features, or one for each of several ranges of features, which are then compensated separately (what a
    memory ceiling may ask for). gain: [in] float32, what each column is worth more because the chip's cast
    shrinks (or widens) the input it meets; None for 1.
    """

    name: str
    weight: Tensor
    scheme: Scheme
    weight_cast: CastRule
    statistics: InputStatistics | None = None
    factors: tuple[HessianFactor, ...] = ()
    gain: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerSolution:
    """codes: [out, in] uint8; exponents: int32 grid of E8M0 scales, 2^e multiplies a block.

    error: relative error on the solver's objective (output error with data, weight error without);
    baseline_error: the same for round-to-nearest with the rceil rule; weight_sqnr_db: of the weights alone.
    """

    codes: Tensor
    exponents: Tensor
    error: float
    baseline_error: float
    weight_sqnr_db: float
    searched_blocks: int  # blocks whose exponent differs from the rceil rule's
    zero_blocks: int
    partial_blocks: int
    notes: tuple[str, ...] = ()
