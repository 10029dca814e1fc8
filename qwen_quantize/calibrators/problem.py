"""What a solver is given and what it gives back: one linear at a time, tensors and records only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.formats.blocks import QuantizedTensor
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


class Effort(StrEnum):
    """How long a solver goes on. HIGH: scales, zero points and codes are found together (`thorough.improve`)."""

    NORMAL = "normal"
    HIGH = "high"


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """weight: [out, in] float32. `statistics` and `factors` describe the input; None and () mean no data.

    `factors` may be shared by all linears of one stream: they are computed once. There is one for all
    features, or one for each of several ranges of features, which are then compensated separately (what a
    memory ceiling may ask for). gain: [in] float32, what each column is worth more because the chip's cast
    shrinks (or widens) the input it meets; None for 1. maps: [k, k] float32 for each range of features, what
    the weights are multiplied with instead, gain included, where other features' values tell what the cast
    took as well; () for the gain alone. tensor_scale: the second scale of schemes that have one, where several
    linears must share it; None for the weight's own.
    """

    name: str
    weight: Tensor
    scheme: Scheme
    weight_cast: CastRule
    statistics: InputStatistics | None = None
    factors: tuple[HessianFactor, ...] = ()
    gain: Tensor | None = None
    tensor_scale: float | None = None
    maps: tuple[Tensor, ...] = ()
    effort: Effort = Effort.NORMAL

    def towards(self, weight: Tensor) -> Tensor:
        """What some rows [n, in] of the weight are to become before they are rounded."""
        if self.maps:
            parts = torch.split(weight, [part.shape[0] for part in self.maps], dim=1)
            return torch.cat([part @ by for part, by in zip(parts, self.maps, strict=True)], dim=1)
        return weight if self.gain is None else weight * self.gain


@dataclass(frozen=True, slots=True)
class LayerSolution:
    """A solved linear, [out, in].

    error: relative error on the solver's objective (output error with data, weight error without);
    baseline_error: the same for plain rounding, whose scales come from each region's largest magnitude;
    weight_sqnr_db: of the weights alone. searched_blocks: regions whose scale is not the baseline's.
    """

    quantized: QuantizedTensor
    error: float
    baseline_error: float
    weight_sqnr_db: float
    searched_blocks: int
    zero_blocks: int
    partial_blocks: int
    notes: tuple[str, ...] = ()
