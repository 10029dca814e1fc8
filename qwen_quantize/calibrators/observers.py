"""Streaming statistics of a linear's input: one pass, bounded memory, mergeable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.native import exponent_mantissa_histogram


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """What calibration saw at one stream of K features.

    tokens: rows seen. amax, total, squares: [K] per feature (float32, float64, float64) of the input as it
    arrives. histogram: [256, 8] int64 over float32 exponent field and top three mantissa bits.
    second_moment: [K, K] float64 sum of Q(x) Q(x)^T, where Q is the chip's cast (the identity without one);
    None when only the cheap statistics were asked for.
    """

    tokens: int
    amax: Tensor
    total: Tensor
    squares: Tensor
    histogram: Tensor
    second_moment: Tensor | None

    def mean_square(self) -> Tensor:
        """[K] float64 E[x^2] of each feature."""
        return self.squares / max(self.tokens, 1)

    def kurtosis_hint(self) -> float:
        """amax over rms, largest feature: how far the loudest outlier stands out of its own feature."""
        rms = self.mean_square().sqrt()
        ratio = torch.where(rms > 0, self.amax.double() / rms, torch.zeros_like(rms))
        return float(ratio.max())


class InputObserver:
    """Accumulates `InputStatistics` over calls with [tokens, K] float32 inputs."""

    def __init__(self, features: int, cast: Callable[[Tensor], Tensor] | None, second_moment: bool) -> None:
        self.cast = cast
        self.tokens = 0
        self.amax = torch.zeros(features)
        self.total = torch.zeros(features, dtype=torch.float64)
        self.squares = torch.zeros(features, dtype=torch.float64)
        self.histogram = torch.zeros(256, 8, dtype=torch.int64)
        self.second_moment = torch.zeros(features, features, dtype=torch.float64) if second_moment else None

    def observe(self, x: Tensor) -> None:
        """x: [tokens, K] float32, as the linear receives it before the chip's cast."""
        self.tokens += x.shape[0]
        torch.maximum(self.amax, x.abs().amax(dim=0), out=self.amax)
        self.total += x.sum(dim=0, dtype=torch.float64)
        self.histogram += exponent_mantissa_histogram(x)
        seen = x if self.cast is None else self.cast(x)
        self.squares += x.square().sum(dim=0, dtype=torch.float64)
        if self.second_moment is not None:
            # The product of one batch is float32; batches add up in float64.
            self.second_moment += seen.T @ seen

    def statistics(self) -> InputStatistics:
        return InputStatistics(
            self.tokens, self.amax, self.total, self.squares, self.histogram, self.second_moment
        )


def merge_statistics(a: InputStatistics, b: InputStatistics) -> InputStatistics:
    """The statistics of both inputs together; integer counts exactly, sums within float64 rounding."""
    both = a.second_moment is not None and b.second_moment is not None
    return InputStatistics(
        tokens=a.tokens + b.tokens,
        amax=torch.maximum(a.amax, b.amax),
        total=a.total + b.total,
        squares=a.squares + b.squares,
        histogram=a.histogram + b.histogram,
        second_moment=a.second_moment + b.second_moment  # type: ignore[operator]
        if both
        else None,
    )
