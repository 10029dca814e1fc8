"""Perplexity, and the paired error of a change in it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LARGEST_EXPONENT = 709.0  # exp of more overflows a float64


def token_nll(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """[rows, vocab] and [rows] int64 -> [rows] float64 negative log-likelihood, in nats."""
    return -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1).double()


def perplexity(nll: Tensor) -> float:
    """exp of the mean of token losses; infinite where that is beyond a float64, or where a loss is no number."""
    mean = float(nll.mean())
    return math.exp(mean) if mean < _LARGEST_EXPONENT else math.inf


def paired_rise(reference_nll: Tensor, nll: Tensor, window_tokens: int) -> tuple[float, float]:
    """(relative rise of perplexity, its standard error), from losses of the same tokens.

    Pairing removes the spread that both runs share; tokens of one window are correlated, so the error is
    taken over window means (NaN with fewer than two windows). Losses come in windows of `window_tokens`.
    """
    difference = nll - reference_nll
    mean = float(difference.mean())
    rise = math.expm1(mean) if mean < _LARGEST_EXPONENT else math.inf
    means = difference.view(-1, window_tokens).mean(dim=1)
    if means.numel() < 2:
        return rise, math.nan
    error = float(means.std(unbiased=True)) / math.sqrt(means.numel())
    return rise, (1 + rise) * error


def rows_to_score(hidden: Tensor) -> Tensor:
    """[n, T, hidden] -> [n * (T - 1), hidden]: the positions whose next token is in the window."""
    return hidden[:, :-1].reshape(-1, hidden.shape[-1])


def targets_of(windows: Tensor) -> Tensor:
    """[n, T] int64 -> [n * (T - 1)]: each scored position's next token."""
    return windows[:, 1:].reshape(-1)


def concatenated(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)
