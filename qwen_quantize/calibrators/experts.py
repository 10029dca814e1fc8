"""Statistics of routed experts that calibration reached with few tokens, or with none."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import torch

from qwen_quantize.calibrators.observers import InputStatistics

MOST_NEEDED_TOKENS = 8192


class ExpertPolicy(StrEnum):
    """What an expert is calibrated on.

    SHRINK: its own tokens; where they are too few, as many pseudo-tokens of the all-token statistics as are
    missing. FORCED: the all-token statistics, as if every token had been routed to it. ROUND: its own tokens,
    and plain rounding where they are too few.
    """

    SHRINK = "shrink"
    FORCED = "forced"
    ROUND = "round"


def needed_tokens(features: int) -> int:
    """Tokens below which an expert counts as starved: four per input feature, at most 8192."""
    return min(4 * features, MOST_NEEDED_TOKENS)


def shrunk(own: InputStatistics, everyone: InputStatistics, needed: int) -> InputStatistics:
    """`own` with its missing tokens made up by the average token of `everyone`.

    The second moments become S_own + (needed - n) w S_all / W_all, with n the own tokens and w their mean
    weight (1 without any): the all-token Hessian exactly as far as the expert is starved. Counts, amax and
    histogram stay the expert's own where it has tokens. `own`'s matrices are changed in place.
    """
    missing = needed - own.tokens
    if missing <= 0 or everyone.tokens == 0:
        return own
    mean_weight = own.weight_total / own.tokens if own.tokens and own.weight_total > 0 else 1.0
    share = missing * mean_weight / everyone.weight_total
    for mine, theirs in zip(own.second_moments, everyone.second_moments, strict=True):
        mine.add_(theirs, alpha=share)
    for mine, theirs in zip(own.cross_moments, everyone.cross_moments, strict=True):
        mine.add_(theirs, alpha=share)
    tokens = missing / everyone.tokens
    return replace(
        own,
        amax=own.amax if own.tokens else everyone.amax,
        total=own.total + tokens * everyone.total,
        squares=own.squares + tokens * everyone.squares,
        cross=own.cross + share * everyone.cross,
        weight_total=own.weight_total + missing * mean_weight,
    )


def evenly_spread(count: int, wanted: int) -> torch.Tensor:
    """int64 [min(count, wanted)]: positions spread evenly over 0 .. count - 1, the same on every run."""
    if wanted >= count:
        return torch.arange(count)
    return (torch.arange(wanted) * count) // wanted
