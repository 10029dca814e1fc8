"""Whose fault a loss is: the model is scored with each part of its quantization switched on and off.

With the parts P and a measure f over the sets of parts that are on (f of none: the reference), the share of a set T
is what its members lose together beyond what every smaller set of them loses:

    share(T) = sum over S in T of (-1)^(|T| - |S|) f(S)

One part alone is its main effect, two and more are an interaction, and all shares add up to the whole. Rounding the
scales of activations means nothing without a cast of activations: what it adds to that cast is its main effect, and
its interactions are likewise those with the cast on. Two measures are taken of every token, both in nats: the rise of
its loss (the mean is the logarithm of the perplexity ratio), and the KL divergence from the reference's prediction.
Standard errors are paired: of the means over windows of one combination of the same tokens' losses.

Memory: the reference's hidden states and those of one setting, one open layer, two heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations

import torch
from torch import Tensor

from qwen_quantize.eval.compare import HEAD_BATCH_BYTES, Progress
from qwen_quantize.eval.divergence import token_kl
from qwen_quantize.eval.perplexity import perplexity, rows_to_score, targets_of, token_nll
from qwen_quantize.eval.scorer import LayeredScorer

_ROWS_PER_HEAD_BATCH = 256


class Part(StrEnum):
    """A part of a quantization that can be switched off."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"  # the cast, as if its scales were not rounded
    SCALES = "scale_rounding"  # what powers of two as scales of activations add
    SUMS = "accumulator"  # the arithmetic of the matrix unit


Setting = frozenset[Part]  # the parts that are on
Build = Callable[[Setting], LayeredScorer]


@dataclass(frozen=True, slots=True)
class Effect:
    """Means over tokens, in nats, each with its paired standard error (NaN where there is one window only)."""

    nats: float
    standard_error: float
    kl_mean: float
    kl_standard_error: float


@dataclass(frozen=True, slots=True)
class Share:
    """What one part, or several together, lose. `recovered`: what switching this part alone off wins back."""

    parts: tuple[Part, ...]
    effect: Effect
    recovered: Effect | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """`parts` and `interactions` add up to `total`. restored: with everything off, all bits were the reference's."""

    tokens: int
    windows: int
    reference_perplexity: float
    perplexity: float
    parts: tuple[Share, ...]
    interactions: tuple[Share, ...]
    total: Effect
    restored: bool


@dataclass(frozen=True, slots=True)
class _Scores:
    """Of every token, float64 [n]: its loss and the KL divergence from the reference."""

    nll: Tensor
    kl: Tensor


def settings_of(parts: Sequence[Part]) -> tuple[Setting, ...]:
    """All sets of parts that make a difference, smallest first."""
    found = [frozenset(chosen) for size in range(len(parts) + 1) for chosen in combinations(parts, size)]
    return tuple(dict.fromkeys(effective(setting) for setting in found))


def effective(setting: Setting) -> Setting:
    """The set that computes the same: scales count only where activations are cast."""
    return setting if Part.ACTIVATIONS in setting else setting - {Part.SCALES}


def _ignore(_what: str, _done: int, _total: int) -> None:
    pass


@torch.inference_mode()
def attribute(
    reference: Callable[[], LayeredScorer],
    build: Build,
    parts: Sequence[Part],
    windows: Tensor,
    progress: Progress = _ignore,
) -> Attribution:
    """windows: [n, T >= 2] int64. reference: the unquantized model anew; build: the model with some parts on."""
    if windows.dim() != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(f"windows must be [n >= 1, T >= 2], found {list(windows.shape)}")
    settings = settings_of(parts)
    steps = len(settings) + 1
    truth = _last_hidden(reference(), windows)
    progress("settings", 1, steps)
    scores: dict[Setting, _Scores] = {}
    restored = False
    for number, setting in enumerate(settings):
        model = build(setting)
        hidden = _last_hidden(model, windows)
        scored, reference_nll = _score(model, hidden, reference(), truth, windows)
        scores[setting] = scored
        if not setting:
            restored = (
                _same_bits(hidden, truth)
                and _same_bits(scored.nll, reference_nll)
                and not bool(scored.kl.count_nonzero())
            )
        progress("settings", number + 2, steps)
    everything = frozenset(parts)
    shares = [
        Share(_named(chosen), _effect(scores, _signs(chosen), windows))
        for size in range(1, len(parts) + 1)
        for chosen in map(frozenset, combinations(parts, size))
        if effective(chosen) == chosen
    ]
    return Attribution(
        tokens=reference_nll.numel(),
        windows=windows.shape[0],
        reference_perplexity=perplexity(reference_nll),
        perplexity=perplexity(scores[everything].nll),
        parts=tuple(
            Share(
                share.parts,
                share.effect,
                _effect(scores, {everything: 1, effective(everything - set(share.parts)): -1}, windows),
            )
            for share in sorted(shares, key=lambda share: tuple(Part).index(share.parts[0]))
            if len(share.parts) == 1
        ),
        interactions=tuple(share for share in shares if len(share.parts) > 1),
        total=_effect(scores, {everything: 1, frozenset(): -1}, windows),
        restored=restored,
    )


def _named(chosen: Setting) -> tuple[Part, ...]:
    """The parts of a share: the cast that scales need is not named beside them."""
    left = chosen - {Part.ACTIVATIONS} if Part.SCALES in chosen else chosen
    return tuple(part for part in Part if part in left)


def _signs(chosen: Setting) -> dict[Setting, int]:
    """The share of a set as a combination of settings; without the cast, scales on and off cancel."""
    signs: dict[Setting, int] = {}
    for size in range(len(chosen) + 1):
        for subset in map(frozenset, combinations(chosen, size)):
            setting = effective(subset)
            signs[setting] = signs.get(setting, 0) + (-1) ** (len(chosen) - size)
    return {setting: sign for setting, sign in signs.items() if sign}


def _effect(scores: Mapping[Setting, _Scores], signs: Mapping[Setting, int], windows: Tensor) -> Effect:
    first = next(iter(scores.values()))
    nll, kl = torch.zeros_like(first.nll), torch.zeros_like(first.kl)
    # In a fixed order: sets have none, and float sums depend on it.
    for setting in sorted(signs, key=sorted):
        nll += signs[setting] * scores[setting].nll
        kl += signs[setting] * scores[setting].kl
    length = windows.shape[1] - 1
    return Effect(
        float(nll.mean()), _standard_error(nll, length), float(kl.mean()), _standard_error(kl, length)
    )


def _standard_error(values: Tensor, length: int) -> float:
    means = values.view(-1, length).mean(dim=1)
    return float(means.std(unbiased=True)) / math.sqrt(means.numel()) if means.numel() > 1 else math.nan


def _last_hidden(model: LayeredScorer, windows: Tensor) -> Tensor:
    hidden = model.embed(windows)
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
    return hidden


def _score(
    model: LayeredScorer, hidden: Tensor, reference: LayeredScorer, truth: Tensor, windows: Tensor
) -> tuple[_Scores, Tensor]:
    """The model's scores and the reference's losses."""
    model.open_head()
    reference.open_head()
    targets = targets_of(windows)
    ours, theirs = rows_to_score(hidden), rows_to_score(truth)
    rows = max(1, min(_ROWS_PER_HEAD_BATCH, HEAD_BATCH_BYTES // (4 * model.vocab_size)))
    nll, kl, reference_nll = (torch.empty(targets.numel(), dtype=torch.float64) for _ in range(3))
    for begin in range(0, targets.numel(), rows):
        part = slice(begin, begin + rows)
        found, expected = model.log_probabilities(ours[part]), reference.log_probabilities(theirs[part])
        nll[part] = token_nll(found, targets[part])
        reference_nll[part] = token_nll(expected, targets[part])
        kl[part] = token_kl(expected, found)
    return _Scores(nll, kl), reference_nll


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
