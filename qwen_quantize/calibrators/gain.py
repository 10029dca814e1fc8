"""What a chip's cast takes from its input on average, given back in the weights: per feature, then across them."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.formats.cast_rule import CastRule, Rounding

# What other features tell is worth this many tokens' ridge: a smaller one takes more off after a cast that rounds down,
# and does harm after one that truncates (`benchmarks/constants.py`).
RIDGE_TOKENS = 16384.0
_PRIOR_TOKENS = 256.0  # a feature's own gain counts as much as its input's common one after so many tokens


def is_biased(rule: CastRule) -> bool:
    """Whether the cast is off to one side, so that full cross moments have something to tell."""
    return rule.rounding in (Rounding.RTZ, Rounding.FLOOR, Rounding.CEIL)


def column_gain(statistics: InputStatistics) -> Tensor | None:
    """[K] float32: g that minimises E w (x - g Q(x))^2, for each input feature; None without second moments.

    A truncating cast shrinks every value, by about four per cent in E4M3, and W diag(g) makes up for it: the
    least squares of W x on Q(x), restricted to a diagonal. The full solution, W E[x Q^T] E[Q Q^T]^-1, has K
    times as many parameters and overfits on a few thousand tokens. Each feature's gain is drawn toward the
    common one of all features as if that had been seen on 256 tokens. A cast to nearest gives gains within a
    thousandth of 1 in E4M3; steps wider than a feature, as integers and narrow floats have them, make Q(x) larger than
    x on average, and g less than 1. A feature that never fired gets 1.
    """
    if not statistics.second_moments or statistics.tokens == 0:
        return None
    diagonal = [moment.diagonal() for moment in statistics.second_moments]
    squares = torch.cat(diagonal)
    total = float(squares.sum())
    if total <= 0:
        return None
    common = float(statistics.cross.sum()) / total
    own = statistics.tokens / (statistics.tokens + _PRIOR_TOKENS)
    gain = own * statistics.cross / squares + (1 - own) * common
    return torch.where(squares > 0, gain, 1.0).float()


def input_maps(
    statistics: InputStatistics, gain: Tensor | None, ridge_tokens: float = RIDGE_TOKENS
) -> tuple[Tensor, ...]:
    """[k, k] float32 for each range of features: A that brings A Q(x) nearest to x; () without full cross moments.

    The least squares of x on Q(x) with a ridge toward the gain g alone: with H = E w Q Q^T, D its diagonal and
    G = diag(g), A = G + E[w (x - G Q) Q^T] (H + r D)^-1. A cast that rounds down shifts every feature by an amount
    that others tell: where a feature's mean or its size is known from them, A takes that back, W becomes W A, and
    no bias is needed. The ridge r = ridge_tokens / tokens is the noise of so few tokens: after a cast that truncates,
    whose loss the gain explains, r much smaller does harm on unseen text.
    """
    if not statistics.cross_moments or gain is None:
        return ()
    ridge = ridge_tokens / max(statistics.tokens, 1)
    gains = torch.split(gain, [moment.shape[0] for moment in statistics.second_moments])
    maps = []
    for moment, cross, own in zip(statistics.second_moments, statistics.cross_moments, gains, strict=True):
        # Scaled to a unit diagonal the eigenvalues lie between the ridge and k + ridge: float32 is enough.
        scale = moment.diagonal().sqrt()
        scale = torch.where(scale > 0, 1 / scale, 0.0)
        unit = (moment * scale.unsqueeze(1) * scale).float()
        rest = ((cross - own.double().unsqueeze(1) * moment) * scale).float()
        unit.diagonal().add_(ridge)
        lower = torch.linalg.cholesky(unit)
        solved = torch.cholesky_solve(rest.T, lower).T
        found = solved * scale.float()
        found.diagonal().add_(own)
        maps.append(found)
    return tuple(maps)
