"""What a scheme does to the output of one linear: error power under the statistics of its input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics

_STRIP = 512  # output rows that one product makes


@dataclass(frozen=True, slots=True)
class OutputPower:
    """Sums over the weighted tokens of a stream and all outputs of a linear: of its output, and of its error."""

    signal: float
    noise: float

    @property
    def relative(self) -> float:
        return self.noise / self.signal if self.signal > 0 else 0.0


def power_under(weight: Tensor, statistics: InputStatistics) -> float:
    """Sum over tokens of w |W x|^2 = tr(W M W^T), M the second moments (block diagonal where there are several).

    weight: [N, K] float32; float64 sums.
    """
    if not statistics.second_moments:
        raise ValueError("these statistics were gathered without second moments")
    total, begin = 0.0, 0
    for moment in statistics.second_moments:
        end = begin + moment.shape[0]
        for rows in torch.split(weight[:, begin:end], _STRIP):
            exact = rows.double()
            total += float(((exact @ moment) * exact).sum())
        begin = end
    return max(total, 0.0)


def output_power(
    weight: Tensor,
    quantized: Tensor,
    statistics: InputStatistics,
    cast: Callable[[Tensor], Tensor] | None = None,
) -> OutputPower:
    """What rounding the weights, and the chip's cast of inputs, do to a linear's output.

    weight, quantized: [N, K] float32. statistics: gathered without a cast, second moments and a sample of tokens; the
    error that the cast Q adds is that of the sample, sum w |W' (x - Q(x))|^2, scaled to all weights. Both errors are
    taken as uncorrelated.
    """
    noise = power_under(quantized - weight, statistics)
    sample = statistics.sample
    if cast is not None and sample is not None and sample.inputs.shape[0]:
        moved = (sample.inputs - cast(sample.inputs)) @ quantized.T
        total = float((moved.double().square().sum(dim=1) * sample.weight.double()).sum())
        seen = float(sample.weight.sum(dtype=torch.float64))
        noise += total * statistics.weight_total / seen if seen > 0 else 0.0
    return OutputPower(power_under(weight, statistics), noise)
