"""Activation-aware scales (AWQ, arXiv 2306.00978): larger columns for loud features, which rounding then spares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics, TokenSample
from qwen_quantize.calibrators.pair_scaling import expand_tied

# (scaled weight [n, K] float32, mean square [K] float32 of what its columns will meet) -> the rounded weight,
# decoded, [n, K]. A rounding that does not weigh its errors has no use for the second.
RoundWeight = Callable[[Tensor, Tensor], Tensor]

# Of the same arguments, what that rounding leaves: the sum over the weight of the mean square times the squared error.
RoundingError = Callable[[Tensor, Tensor], float]

# Weights of all readers together that losses are measured on: 192 rows of 576. Of the constants here and in the other
# modules of solvers, `benchmarks/constants.py` shows what each is worth beside its alternatives.
SAMPLED_WEIGHTS = 192 * 576
# What a candidate must win over the identity on the sample, above what chance makes of so few rows.
LEAST_GAIN = 0.03
_COARSE = (0, 4, 8, 12, 16)  # twentieths
_FINE = (2, 1)  # around the best so far
# Features that calibration hardly saw count as this share of a typical one: on other text they may speak up.
_QUIETEST = 1 / 32


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """Factors of a pair. scale: [features] float32, positive; ones for the identity.

    exponent: of the activations' size; weight_exponent: of the weights' size, which it is divided by. loss,
    identity_loss: relative output error over the rows that were looked at, with these factors and without.
    """

    scale: Tensor
    exponent: float
    weight_exponent: float
    loss: float
    identity_loss: float

    @property
    def is_identity(self) -> bool:
        return self.exponent == 0 and self.weight_exponent == 0


def search_awq(
    weights: Sequence[Tensor],
    statistics: InputStatistics,
    round_weight: RoundWeight,
    tie: Tensor | None = None,
    *,
    sampled_weights: int | None = SAMPLED_WEIGHTS,
    least_gain: float = LEAST_GAIN,
    floor: float = 0.0,
    rows_together: int = 1,
    diagonal: bool = True,
    remaining: Tensor | None = None,
    rounding_error: RoundingError | None = None,
) -> ScaleChoice:
    """The factors with the least output error of the linears `weights` [n_i, K] float32 that read one stream.

    Candidates are size^r and size^r / weight^(1 - r), r = 0, 0.05 .. 0.95, and the identity, which stays unless one
    gains `least_gain`; size is the root mean square of a feature (as the second moments weigh tokens, where there are
    any), weight that of its column over all readers. Steps of 0.2 are tried first, then smaller ones around the best.
    The error is that of Q(W s) / s against W under the input's second moments. `round_weight` should be the
    rounding that follows, with its search for scales (`clipped_rounding` stands in for it): what is best for plain
    rounding can be worse than nothing for one that clips. tie: [K] int64, the factor that each column takes, or
    None for its own. sampled_weights: how many of all readers the error is measured on, None for all; rows are taken
    `rows_together` at a time (the height of the region that shares a scale) and evenly spread. diagonal: leave
    out what errors of two features do together, which from few rows is mostly noise; every feature's square then
    grows by `floor` of the median one, as under the Hessian, which spares what other text may use. remaining: [K]
    float32, what a squared error in each column counts once those after it make up for it, where the rounding that
    follows compensates; a feature's square is then the geometric mean of this and its own. rounding_error: of
    `round_weight`, where that is quicker to have than the rounded weight and no region with a scale spans two rows;
    for `diagonal`.
    """
    sampled = sample_rows(weights, sampled_weights, rows_together)
    size = feature_size(statistics)
    if remaining is not None:
        size = _floored((size * remaining.sqrt()).sqrt())
    elif diagonal and floor > 0:
        size = (size.square() + floor * size.square().median()).sqrt()
    moments = (size.square(),) if diagonal else second_moments(statistics)
    weight_size = torch.stack([weight.square().mean(dim=0) for weight in weights]).mean(dim=0).sqrt()
    if tie is not None:
        size, weight_size = _tied(size, tie), _tied(weight_size, tie)
    weight_size = _floored(weight_size)
    quick = rounding_error if diagonal else None
    loss = _Loss(sampled if quick is None else (torch.cat(sampled),), moments, round_weight, quick, tie)
    identity_loss = loss(torch.ones_like(size))

    def choice(steps: int, duo: bool) -> ScaleChoice:
        exponent = steps / 20
        weight_exponent = 1 - exponent if duo else 0.0
        scale = balanced(size.pow(exponent) / weight_size.pow(weight_exponent))
        return ScaleChoice(scale, exponent, weight_exponent, loss(scale), identity_loss)

    found = {(steps, duo): choice(steps, duo) for steps in _COARSE for duo in (False, True) if steps or duo}
    for step in _FINE:
        steps, duo = min(found, key=lambda key: found[key].loss)
        for near in (steps - step, steps + step):
            if (near, duo) not in found and 0 <= near < 20 and (near or duo):
                found[near, duo] = choice(near, duo)
    best = min(found.values(), key=lambda one: one.loss)
    if best.loss <= (1 - least_gain) * identity_loss:
        return best
    return ScaleChoice(torch.ones_like(size), 0.0, 0.0, identity_loss, identity_loss)


def balanced(scale: Tensor) -> Tensor:
    """The same proportions with sqrt(largest * smallest) = 1, so that no format's range is left."""
    return scale / (scale.max() * scale.min()).sqrt()


def feature_size(statistics: InputStatistics) -> Tensor:
    """[K] float32: the root mean square of each feature, those that are next to silent raised to a floor."""
    return _floored(statistics.weighed_mean_square().sqrt().float())


def second_moments(statistics: InputStatistics) -> tuple[Tensor, ...]:
    """Float32 second moments of each range of features, [k, k], or one [K] of only squares without them.

    Silent features have the floor's square on the diagonal: an error there is not free.
    """
    floor = feature_size(statistics).square()
    if not statistics.second_moments:
        return (floor,)
    moments, begin = [], 0
    for moment in statistics.second_moments:
        mean = (moment / (statistics.weight_total or 1.0)).float()
        mean.diagonal().copy_(floor[begin : begin + mean.shape[0]])
        moments.append(mean)
        begin += mean.shape[0]
    return tuple(moments)


def scaled_statistics(statistics: InputStatistics, scale: Tensor) -> InputStatistics:
    """The statistics of x / scale, of those of x; scale: [K], positive, a factor for each column.

    Exact but for the histogram, which mixes all features and stays that of x, and where a cast was observed: Q(x)
    is divided here, and Q(x / scale) is something else unless the factors are powers of two.
    """
    inverse = 1 / scale.double()
    moments, begin = [], 0
    for moment in statistics.second_moments:
        part = inverse[begin : begin + moment.shape[0]]
        moments.append(moment * part.unsqueeze(1) * part)
        begin += moment.shape[0]
    sample = statistics.sample
    if sample is not None:
        sample = TokenSample(sample.inputs / scale.float(), sample.weight)
    return replace(
        statistics,
        amax=(statistics.amax.double() * inverse).float(),
        total=statistics.total * inverse,
        squares=statistics.squares * inverse.square(),
        second_moments=tuple(moments),
        cross=statistics.cross * inverse.square(),
        sample=sample,
    )


def sample_rows(
    weights: Sequence[Tensor], sampled_weights: int | None, together: int = 1
) -> tuple[Tensor, ...]:
    """Rows with about `sampled_weights` of all weights [n_i, K], the same share of each, evenly spread.

    Rows come in runs of `together` that begin at a multiple of it; None stands for all rows.
    """
    total = sum(weight.numel() for weight in weights)
    if sampled_weights is None or total <= sampled_weights:
        return tuple(weights)
    sampled = []
    for weight in weights:
        runs = -(-weight.shape[0] // together)
        kept = max(1, min(runs, round(runs * sampled_weights / total)))
        starts = [(2 * i + 1) * runs // (2 * kept) * together for i in range(kept)]
        sampled.append(torch.cat([weight[start : start + together] for start in starts]))
    return tuple(sampled)


class _Loss:
    """Relative output error of rounding under a scale; what does not depend on the scale is made once."""

    def __init__(
        self,
        weights: Sequence[Tensor],
        moments: tuple[Tensor, ...],
        round_weight: RoundWeight,
        rounding_error: RoundingError | None,
        tie: Tensor | None,
    ) -> None:
        self._weights = weights
        self._moments = moments
        self._round = round_weight
        self._error = rounding_error
        self._tie = tie
        self._squares = torch.cat([m if m.dim() == 1 else m.diagonal() for m in moments])
        size = sum(quadratic_error(weight, moments) for weight in weights)
        self._size = max(size, torch.finfo(torch.float64).tiny)

    def __call__(self, scale: Tensor) -> float:
        columns = expand_tied(scale, self._tie)
        squares = self._squares / columns.square()
        lost = 0.0
        for weight in self._weights:
            if self._error is not None:
                lost += self._error(weight * columns, squares)
                continue
            rounded = self._round(weight * columns, squares)
            lost += quadratic_error((rounded / columns).sub_(weight), self._moments)
        return lost / self._size


def quadratic_error(difference: Tensor, moments: tuple[Tensor, ...]) -> float:
    """The sum over rows of d H d^T for difference [n, K]; a moment of one dimension is H's diagonal."""
    ends = list(accumulate(moment.shape[0] for moment in moments))
    total = 0.0
    for begin, end, moment in zip([0, *ends], ends, moments, strict=False):
        part = difference[:, begin:end]
        if moment.dim() == 1:
            total += float((part.square().sum(dim=0, dtype=torch.float64) * moment).sum())
        else:
            total += float(torch.linalg.vecdot(part @ moment, part).sum(dtype=torch.float64))
    return total


def _tied(size: Tensor, tie: Tensor) -> Tensor:
    """[features]: the root mean square over the columns that share a factor; size: [K]."""
    features = int(tie.max()) + 1
    squares = torch.zeros(features).index_add_(0, tie, size.square())
    return (squares / torch.bincount(tie, minlength=features)).sqrt()


def _floored(size: Tensor) -> Tensor:
    positive = size[size > 0]
    if not positive.numel():
        return torch.ones_like(size)
    return size.clamp(min=float(positive.median()) * _QUIETEST)
