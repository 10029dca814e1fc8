"""Smoothing of loud features into the weights (SmoothQuant, arXiv 2211.10438), its strength found by search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qwen_quantize.calibrators.awq import (
    SAMPLED_WEIGHTS,
    RoundWeight,
    ScaleChoice,
    balanced,
    feature_size,
    quadratic_error,
    sample_rows,
    second_moments,
)
from qwen_quantize.calibrators.observers import InputStatistics, TokenSample
from qwen_quantize.calibrators.pair_scaling import expand_tied
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.schemes import TensorSpec
from qwen_quantize.formats.spec import FloatFormat, IntFormat

# [tokens, K] float32 -> the same shape: what the matrix unit sees, times its scales.
CastInput = Callable[[Tensor], Tensor]

STRENGTHS = tuple(step / 20 for step in range(21))


def search_smoothing(
    weights: Sequence[Tensor],
    statistics: InputStatistics,
    activation: TensorSpec,
    round_weight: RoundWeight,
    cast_input: CastInput | None = None,
    sample: TokenSample | None = None,
    tie: Tensor | None = None,
    *,
    sampled_weights: int | None = SAMPLED_WEIGHTS,
    rows_together: int = 1,
) -> ScaleChoice:
    """The factors amax_x^a / amax_w^(1 - a), a = 0, 0.05 .. 1, under which both roundings together lose least.

    weights: [n_i, K] float32, the linears that read the stream. The identity is a candidate and wins ties. With
    `sample` (tokens before any cast) and `cast_input` the error is that of Qa(x / s) Q(W s)^T against x W^T on
    those tokens. Without them it is predicted: the weights' error under the second moments, plus for every output
    what `activation_noise` says of the input, the two taken as independent. tie, sampled_weights, rows_together: as in
    `search_awq`. exponent and weight_exponent of the choice: a and 1 - a.
    """
    sampled = sample_rows(weights, sampled_weights, rows_together)
    loud = _floor(statistics.amax)
    heavy = torch.stack([weight.abs().amax(dim=0) for weight in weights]).amax(dim=0)
    if tie is not None:
        loud, heavy = _largest(loud, tie), _largest(heavy, tie)
    heavy = _floor(heavy)
    if sample is not None and cast_input is not None and sample.inputs.shape[0]:
        lost: Callable[[Tensor], float] = _Measured(sampled, statistics, round_weight, cast_input, sample)
    else:
        lost = _Predicted(sampled, statistics, round_weight, activation)
    identity = torch.ones_like(loud)
    identity_loss = lost(expand_tied(identity, tie))
    best = ScaleChoice(identity, 0.0, 0.0, identity_loss, identity_loss)
    for strength in STRENGTHS:
        scale = balanced(loud.pow(strength) / heavy.pow(1 - strength))
        found = lost(expand_tied(scale, tie))
        if found < best.loss:
            best = ScaleChoice(scale, strength, 1 - strength, found, identity_loss)
    return best


def activation_noise(statistics: InputStatistics, activation: TensorSpec) -> Tensor:
    """[K] float32: the mean square of what rounding the input in `activation`'s format adds to each feature.

    An integer step is the same for all features that share a scale: step^2 / 12 with the step the largest number
    over the largest code. The largest is the amax of calibration where one scale serves all tokens; where each
    token has its own it is the median of the largest of independent normal numbers as large as the features. A
    float format's error is a share of each number, which no factor changes: E[x^2] 2^(-2 m) / 36 for m
    mantissa bits, with numbers anywhere in their binade.
    """
    format = activation.format
    squares = statistics.mean_square().float()
    if not isinstance(format, IntFormat):
        bits = format.mantissa_bits if isinstance(format, FloatFormat) else 2  # HiF8 has one to three
        return squares * 2.0 ** (-2 * bits) / 36
    if activation.granularity.kind is GranularityKind.TENSOR:
        largest = [statistics.amax.max()]
        sizes = [squares.numel()]
    else:
        parts = torch.split(squares.sqrt(), activation.granularity.cols or squares.numel())
        largest = [_typical_largest(part) for part in parts]
        sizes = [part.numel() for part in parts]
    return torch.cat(
        [
            (top / format.maximum).square().div(12).expand(size)
            for top, size in zip(largest, sizes, strict=True)
        ]
    )


def _typical_largest(rms: Tensor) -> Tensor:
    """The median of max |x_j| for independent normal x_j of these root mean squares [n], by bisection."""
    spread = rms[rms > 0].double()
    if not spread.numel():
        return torch.zeros(())
    low, high = (
        torch.zeros((), dtype=torch.float64),
        spread.max() * 40,
    )  # no normal number is 40 times its size
    for _ in range(50):
        middle = (low + high) / 2
        below = torch.special.erf(middle / spread * math.sqrt(0.5)).log().sum() < math.log(0.5)
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return high.float()


class _Predicted:
    """Relative output error from statistics alone."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        statistics: InputStatistics,
        round_weight: RoundWeight,
        activation: TensorSpec,
    ) -> None:
        self._weights = weights
        self._statistics = statistics
        self._round = round_weight
        self._activation = activation
        self._moments = second_moments(statistics)
        self._squares = feature_size(statistics).square()
        size = sum(quadratic_error(weight, self._moments) for weight in weights)
        self._size = max(size, torch.finfo(torch.float64).tiny)

    def __call__(self, columns: Tensor) -> float:
        squares = self._squares / columns.square()
        smoothed = InputStatistics(
            self._statistics.tokens,
            self._statistics.amax / columns,
            self._statistics.total,
            self._statistics.squares / columns.double().square(),
            self._statistics.histogram,
            (),
            self._statistics.cross,
            self._statistics.weight_total,
        )
        noise = activation_noise(smoothed, self._activation)
        lost = 0.0
        for weight in self._weights:
            rounded = self._round(weight * columns, squares)
            lost += quadratic_error((rounded / columns).sub_(weight), self._moments)
            lost += quadratic_error(rounded, (noise,))
        return lost / self._size


class _Measured:
    """Relative output error on a sample of tokens, each with its weight."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        statistics: InputStatistics,
        round_weight: RoundWeight,
        cast_input: CastInput,
        sample: TokenSample,
    ) -> None:
        self._weights = weights
        self._round = round_weight
        self._cast = cast_input
        self._inputs = sample.inputs
        self._importance = sample.weight.sqrt().unsqueeze(1)
        self._squares = feature_size(statistics).square()
        self._exact = [sample.inputs @ weight.T for weight in weights]
        size = sum(self._weighted_square(exact) for exact in self._exact)
        self._size = max(size, torch.finfo(torch.float64).tiny)

    def _weighted_square(self, outputs: Tensor) -> float:
        return float((outputs * self._importance).square().sum(dtype=torch.float64))

    def __call__(self, columns: Tensor) -> float:
        squares = self._squares / columns.square()
        seen = self._cast(self._inputs / columns)
        lost = 0.0
        for weight, exact in zip(self._weights, self._exact, strict=True):
            lost += self._weighted_square(seen @ self._round(weight * columns, squares).T - exact)
        return lost / self._size


def _largest(size: Tensor, tie: Tensor) -> Tensor:
    """[features]: the largest of the columns that share a factor; size: [K]."""
    found = torch.zeros(int(tie.max()) + 1)
    return found.scatter_reduce_(0, tie, size, "amax")


def _floor(size: Tensor) -> Tensor:
    """Features and columns next to silent take part like quiet ones."""
    positive = size[size > 0]
    return torch.ones_like(size) if not positive.numel() else size.clamp(min=float(positive.median()) / 32)
