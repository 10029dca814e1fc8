"""Streaming statistics of a linear's input: one pass, bounded memory, mergeable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.native import column_sums

_BLOCK = 192  # columns of a second moment that one matrix product makes


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """Some tokens of a stream. inputs: [n, K] float32 as the chip's cast leaves them; weight: [n] float32."""

    inputs: Tensor
    weight: Tensor

    def every_other(self, first: int) -> TokenSample:
        """The tokens first, first + 2, ..."""
        return TokenSample(self.inputs[first::2], self.weight[first::2])


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """What calibration saw at one stream of K features.

    tokens: rows seen. amax, total, squares: [K] per feature (float32, float64, float64) of the input as it
    arrives. histogram: [256, 8] int64 over float32 exponent field and top three mantissa bits.
    second_moments: [k, k] float64 sums of w Q(x) Q(x)^T over consecutive ranges of features, commonly one of
    all K; Q is the chip's cast (the identity without one) and w the token's weight. () when only the cheap
    statistics were asked for. cross: [K] float64 sum of w x Q(x), each feature with itself, gathered with the
    second moments or alone; cross_moments: [k, k] float64 sums of w x Q(x)^T over the same ranges, if asked for.
    weight_total: the sum of the weights. sample: tokens spread over all that were seen, if asked for.
    """

    tokens: int
    amax: Tensor
    total: Tensor
    squares: Tensor
    histogram: Tensor
    second_moments: tuple[Tensor, ...]
    cross: Tensor
    weight_total: float
    sample: TokenSample | None = None
    cross_moments: tuple[Tensor, ...] = ()

    def mean_square(self) -> Tensor:
        """[K] float64 E[x^2] of each feature."""
        return self.squares / max(self.tokens, 1)

    def weighed_mean_square(self) -> Tensor:
        """[K] float64 E[x^2] of each feature with tokens weighed, as far as that was gathered."""
        if self.second_moments:
            diagonal = torch.cat([moment.diagonal() for moment in self.second_moments])
        elif self.weight_total > 0 and bool(self.cross.any()):
            diagonal = self.cross
        else:
            return self.mean_square()
        return diagonal / (self.weight_total or 1.0)

    def outlier_ratio(self) -> float:
        """The largest amax over rms of a feature: how far the loudest outlier stands out of its own feature."""
        rms = self.mean_square().sqrt()
        ratio = torch.where(rms > 0, self.amax.double() / rms, torch.zeros_like(rms))
        return float(ratio.max())


class InputObserver:
    """Accumulates `InputStatistics` over calls with [tokens, K] float32 inputs.

    cast: the chip's cast of this input, or None. moment_ranges: sizes of the ranges of features whose second
    moments are gathered, summing to K; () for the cheap statistics alone. sample_tokens: how many tokens to keep
    at most. crossed: gather the full cross moments too. weighed: gather `cross` without second moments too.
    """

    def __init__(
        self,
        features: int,
        cast: Callable[[Tensor], Tensor] | None,
        moment_ranges: Sequence[int],
        sample_tokens: int = 0,
        *,
        crossed: bool = False,
        weighed: bool = False,
    ) -> None:
        if moment_ranges and sum(moment_ranges) != features:
            raise ValueError(f"ranges {list(moment_ranges)} do not make {features} features")
        self.cast = cast
        self.tokens = 0
        self.amax = torch.zeros(features)
        self.total = torch.zeros(features, dtype=torch.float64)
        self.squares = torch.zeros(features, dtype=torch.float64)
        self.histogram = torch.zeros(256, 8, dtype=torch.int64)
        self.second_moments = tuple(torch.zeros(k, k, dtype=torch.float64) for k in moment_ranges)
        self.cross = torch.zeros(features, dtype=torch.float64)
        self.cross_moments = tuple(torch.zeros_like(moment) for moment in self.second_moments if crossed)
        self.weight_total = 0.0
        self._weighed = weighed or bool(moment_ranges)
        self.sample = None if sample_tokens == 0 else _Sampler(features, sample_tokens)

    def observe(self, x: Tensor, weight: Tensor | None = None) -> None:
        """x: [tokens, K] float32, as the linear receives it before the chip's cast; weight: [tokens] or None."""
        if x.shape[0] == 0:
            return
        self.tokens += x.shape[0]
        wanted = self._weighed or self.sample is not None
        seen = x if self.cast is None or not wanted else self.cast(x)
        sums = column_sums(x, seen, weight)
        torch.maximum(self.amax, sums.amax, out=self.amax)
        self.total += sums.total
        self.squares += sums.squares
        self.histogram += sums.histogram
        self.weight_total += x.shape[0] if weight is None else float(weight.sum(dtype=torch.float64))
        if self.sample is not None:
            self.sample.add(seen, weight)
        if not self._weighed:
            return
        self.cross += sums.cross
        if not self.second_moments:
            return
        weighted = seen if weight is None else seen * weight.unsqueeze(1)
        begin = 0
        for moment in self.second_moments:
            end = begin + moment.shape[0]
            for first in range(begin, end, _BLOCK):  # the upper half; `statistics` mirrors it
                last = min(first + _BLOCK, end)
                product = weighted[:, first:last].T @ seen[:, first:end]
                moment[first - begin : last - begin, first - begin :] += product
            begin = end
        begin = 0
        for moment in self.cross_moments:
            end = begin + moment.shape[0]
            for first in range(begin, end, _BLOCK):
                last = min(first + _BLOCK, end)
                moment[first - begin : last - begin] += x[:, first:last].T @ weighted[:, begin:end]
            begin = end

    def statistics(self) -> InputStatistics:
        for moment in self.second_moments:
            _mirror(moment)
        return InputStatistics(
            self.tokens,
            self.amax,
            self.total,
            self.squares,
            self.histogram,
            self.second_moments,
            self.cross,
            self.weight_total,
            None if self.sample is None else self.sample.kept(),
            self.cross_moments,
        )


class _Sampler:
    """Every stride-th token of a stream of unknown length; the stride doubles whenever too many are kept."""

    def __init__(self, features: int, most: int) -> None:
        self._most = most
        self._stride = 1
        self._seen = 0
        self._inputs = torch.empty(0, features)
        self._weight = torch.empty(0)

    def add(self, x: Tensor, weight: Tensor | None) -> None:
        """x: [tokens, K]; weight: [tokens] or None."""
        while True:
            first = -self._seen % self._stride
            count = len(range(first, x.shape[0], self._stride))
            if self._inputs.shape[0] + count <= self._most:
                break
            self._stride *= 2
            self._inputs, self._weight = self._inputs[::2], self._weight[::2]
        self._seen += x.shape[0]
        chosen = slice(first, None, self._stride)
        self._inputs = torch.cat([self._inputs, x[chosen]])
        kept = torch.ones(count) if weight is None else weight[chosen]
        self._weight = torch.cat([self._weight, kept])

    def kept(self) -> TokenSample:
        return TokenSample(self._inputs, self._weight)


def _mirror(moment: Tensor) -> None:
    """Copy the upper half of [K, K] to the lower one in place, a strip at a time."""
    for first in range(0, moment.shape[0], _BLOCK):
        last = first + _BLOCK
        moment[last:, first:last] = moment[first:last, last:].T
        corner = moment[first:last, first:last]
        corner.copy_(corner.triu() + corner.triu(1).T)


def residual_weight(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """[tokens] float32: 1 / (mean square of the residual + that of what a linear adds to it).

    Whatever reads the residual normalises it first, so an error in it counts relative to its size. Without
    this weight the few tokens with massive activations (thousands of times the median) fill the second
    moments, and error compensation serves them alone. residual: [tokens, hidden]; x: [tokens, K], the
    input of the linear `weight` [hidden, K], whose output is estimated as a sum of uncorrelated terms,
    which is exact for the single feature that makes a massive activation.
    """
    added = (x.square() @ weight.square().sum(dim=0)) / weight.shape[0]
    size = residual.square().mean(dim=1) + added
    return 1 / size.clamp(min=torch.finfo(torch.float32).tiny)


def merge_statistics(a: InputStatistics, b: InputStatistics) -> InputStatistics:
    """The statistics of both inputs together; integer counts exactly, sums within float64 rounding."""
    moments = zip(a.second_moments, b.second_moments, strict=True)
    samples = [part.sample for part in (a, b) if part.sample is not None]
    sample = (
        TokenSample(torch.cat([s.inputs for s in samples]), torch.cat([s.weight for s in samples]))
        if samples
        else None
    )
    return InputStatistics(
        tokens=a.tokens + b.tokens,
        amax=torch.maximum(a.amax, b.amax),
        total=a.total + b.total,
        squares=a.squares + b.squares,
        histogram=a.histogram + b.histogram,
        second_moments=tuple(mine + theirs for mine, theirs in moments),
        cross=a.cross + b.cross,
        weight_total=a.weight_total + b.weight_total,
        sample=sample,
        cross_moments=tuple(
            mine + theirs for mine, theirs in zip(a.cross_moments, b.cross_moments, strict=True)
        ),
    )
