"""Perplexity, divergence and their statistics against direct float64 computation."""

from __future__ import annotations

import math

import pytest
import torch

from qwen_quantize.eval.divergence import LayerError, agreement, log_histogram, quantiles, token_kl
from qwen_quantize.eval.perplexity import (
    paired_rise,
    perplexity,
    rows_to_score,
    targets_of,
    token_nll,
)


def log_probabilities(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)


def test_nll_and_perplexity() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]).log()
    nll = token_nll(scores, torch.tensor([1, 2]))
    assert nll.tolist() == pytest.approx([-math.log(0.25), -math.log(0.1)], rel=1e-6)
    assert perplexity(nll) == pytest.approx(math.sqrt(4 * 10), rel=1e-6)


def test_rows_and_targets_line_up() -> None:
    windows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    hidden = windows.unsqueeze(-1).float()
    assert rows_to_score(hidden).flatten().tolist() == [1, 2, 4, 5]
    assert targets_of(windows).tolist() == [2, 3, 5, 6]


def test_kl_against_float64() -> None:
    a, b = log_probabilities(64, 50, 0), log_probabilities(64, 50, 1)
    exact = (a.double().exp() * (a.double() - b.double())).sum(-1)
    torch.testing.assert_close(token_kl(a, b), exact, rtol=1e-4, atol=1e-5)
    assert token_kl(a, a).max() == 0
    assert bool((token_kl(a, b) >= 0).all())


def test_agreement() -> None:
    a = torch.tensor([[0.0, 1.0], [3.0, 1.0]])
    b = torch.tensor([[5.0, 6.0], [1.0, 3.0]])
    assert agreement(a, b).tolist() == [True, False]


def test_paired_rise_is_exact_and_its_error_shrinks_with_pairing() -> None:
    generator = torch.Generator().manual_seed(3)
    reference = torch.rand(40 * 10, generator=generator, dtype=torch.float64) * 5
    candidate = reference + 0.01 + 0.001 * torch.randn(400, generator=generator, dtype=torch.float64)
    rise, error = paired_rise(reference, candidate, 10)
    assert rise == pytest.approx(perplexity(candidate) / perplexity(reference) - 1, rel=1e-9)
    assert 0 < error < 1e-3  # unpaired it would be about 0.07
    assert math.isnan(paired_rise(reference[:10], candidate[:10], 10)[1])


def test_standard_error_covers() -> None:
    """The true rise lies within two standard errors about 95 times in 100."""
    generator = torch.Generator().manual_seed(11)
    inside = 0
    for _ in range(200):
        window_effect = 0.02 * torch.randn(30, 1, generator=generator, dtype=torch.float64)
        difference = (
            0.01 + window_effect + 0.1 * torch.randn(30, 20, generator=generator, dtype=torch.float64)
        )
        base = torch.zeros(600, dtype=torch.float64)
        rise, error = paired_rise(base, difference.flatten(), 20)
        inside += abs(rise - math.expm1(0.01)) < 2 * error
    assert 180 <= inside <= 199


def test_quantiles_are_members() -> None:
    values = torch.arange(101, dtype=torch.float64).flip(0)
    assert quantiles(values, (0.0, 0.5, 0.9, 0.99, 1.0)) == (0.0, 50.0, 90.0, 99.0, 100.0)
    assert quantiles(torch.tensor([7.0]), (0.5, 0.99)) == (7.0, 7.0)


def test_histogram_counts_every_value() -> None:
    values = torch.cat([torch.zeros(5), torch.logspace(-8, 1, 200)]).double()
    edges, counts = log_histogram(values)
    assert sum(counts) == 205
    assert len(edges) == len(counts) + 1
    assert edges == sorted(edges)
    assert edges[-1] == pytest.approx(10)
    assert counts[0] >= 5


def test_layer_error() -> None:
    error = LayerError()
    reference = torch.tensor([[[3.0, 4.0]], [[0.0, 2.0]]])
    error.add(reference[:1], reference[:1] * 0.9)
    error.add(reference[1:], reference[1:])
    assert error.signal == pytest.approx(29)
    assert error.noise == pytest.approx(0.25, rel=1e-5)
    assert error.cosine / error.tokens == pytest.approx(1)
