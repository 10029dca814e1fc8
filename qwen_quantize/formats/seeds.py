"""Where the random bits of stochastic rounding come from: a seed drawn from the caller's generator."""

from __future__ import annotations

import torch

from qwen_quantize.formats.cast_rule import CastRule, Rounding
from qwen_quantize.formats.twin import Seed


def draw_seed(rule: CastRule, generator: torch.Generator | None) -> Seed:
    """Two 32-bit words for one cast: one draw from `generator` under STOCHASTIC, zeros otherwise.

    ValueError if STOCHASTIC has no generator. Element i then uses a hash of the seed and i.
    """
    if rule.rounding is not Rounding.STOCHASTIC:
        return 0, 0
    if generator is None:
        raise ValueError("rounding stochastic needs generator=torch.Generator: results must be repeatable")
    words = torch.randint(0, 1 << 32, (2,), generator=generator, dtype=torch.int64, device=generator.device)
    return int(words[0]), int(words[1])
