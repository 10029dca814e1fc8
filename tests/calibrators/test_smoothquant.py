"""The search for smoothing: measured on tokens or predicted, never worse than none, and better with outliers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qwen_quantize.calibrators.awq import balanced
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics, TokenSample
from qwen_quantize.calibrators.smoothquant import STRENGTHS, activation_noise, search_smoothing
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import SCHEMES, TensorSpec

W8A8 = SCHEMES["w8a8"].activation
FP8 = SCHEMES["fp8"].activation
assert W8A8 is not None
assert FP8 is not None


def by_row(x: Tensor) -> Tensor:
    """INT8 with a scale for each row."""
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def rounded(weight: Tensor, _: Tensor) -> Tensor:
    return by_row(weight)


def observed(x: Tensor) -> InputStatistics:
    observer = InputObserver(x.shape[1], None, (x.shape[1],))
    observer.observe(x)
    return observer.statistics()


def layer(seed: int, outliers: float = 60.0) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 80, generator=generator)
    x[:, [3, 41]] *= outliers
    return x, [torch.randn(n, 80, generator=generator) * 0.2 for n in (32, 24)]


def exact_loss(x: Tensor, weights: list[Tensor], scale: Tensor) -> float:
    lost = size = 0.0
    for weight in weights:
        exact = x.double() @ weight.double().T
        found = by_row(x / scale).double() @ by_row(weight * scale).double().T
        lost += float((found - exact).square().sum())
        size += float(exact.square().sum())
    return lost / size


def all_losses(x: Tensor, weights: list[Tensor]) -> dict[float, float]:
    loud = x.abs().amax(dim=0)
    heavy = torch.cat(weights).abs().amax(dim=0)
    return {a: exact_loss(x, weights, balanced(loud**a / heavy ** (1 - a))) for a in STRENGTHS}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_measured_choice_is_the_best_on_the_tokens(seed: int) -> None:
    x, weights = layer(seed)
    sample = TokenSample(x, torch.ones(256))
    choice = search_smoothing(weights, observed(x), W8A8, rounded, by_row, sample)
    losses = all_losses(x, weights)
    best = min(losses, key=lambda strength: losses[strength])
    assert choice.exponent == best
    assert choice.loss == pytest.approx(losses[best], rel=1e-3)
    assert choice.identity_loss == pytest.approx(exact_loss(x, weights, torch.ones(80)), rel=1e-3)
    assert choice.loss < 0.3 * choice.identity_loss  # the outliers cost every other feature its precision


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_predicted_choice_is_nearly_as_good(seed: int) -> None:
    x, weights = layer(seed)
    choice = search_smoothing(weights, observed(x), W8A8, rounded)
    losses = all_losses(x, weights)
    assert exact_loss(x, weights, choice.scale) <= 1.25 * min(losses.values())
    assert exact_loss(x, weights, choice.scale) < 0.4 * exact_loss(x, weights, torch.ones(80))


def test_nothing_to_smooth_is_left_alone() -> None:
    x, weights = layer(4, outliers=1.0)
    flat = torch.where(torch.rand(256, 80, generator=torch.Generator().manual_seed(0)) < 0.5, -1.0, 1.0)
    even = [torch.sign(weight) for weight in weights]
    choice = search_smoothing(even, observed(flat), W8A8, rounded, by_row, TokenSample(flat, torch.ones(256)))
    assert choice.is_identity
    assert choice.loss == choice.identity_loss
    choice = search_smoothing(weights, observed(x), W8A8, rounded, by_row, TokenSample(x, torch.ones(256)))
    assert choice.loss <= choice.identity_loss


def test_tokens_count_by_their_weight() -> None:
    x, weights = layer(5)
    quiet = torch.cat([x, 1e3 * torch.randn(8, 80, generator=torch.Generator().manual_seed(1))])
    statistics = observed(x)
    plain = search_smoothing(weights, statistics, W8A8, rounded, by_row, TokenSample(x, torch.ones(256)))
    weight = torch.cat([torch.ones(256), torch.zeros(8)])
    weighed = search_smoothing(weights, statistics, W8A8, rounded, by_row, TokenSample(quiet, weight))
    assert weighed.exponent == plain.exponent
    assert weighed.loss == pytest.approx(plain.loss, rel=1e-5)


def test_tied_columns_get_one_factor() -> None:
    x, weights = layer(6)
    tie = torch.arange(40).repeat(2)
    choice = search_smoothing(
        weights, observed(x), W8A8, rounded, by_row, TokenSample(x, torch.ones(256)), tie
    )
    assert choice.scale.shape == (40,)
    assert choice.loss == pytest.approx(exact_loss(x, weights, choice.scale[tie]), rel=1e-3)
    assert choice.loss < choice.identity_loss


def test_integer_noise_under_one_scale() -> None:
    """Uniform numbers under one scale: the mean square that rounding adds is the prediction."""
    x = torch.rand(20000, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    static = replace(W8A8, granularity=Granularity.tensor())
    noise = activation_noise(observed(x), static)
    step = float(x.abs().max()) / 127
    found = ((x / step).round() * step - x).square().mean(dim=0)
    torch.testing.assert_close(noise, found, rtol=0.03, atol=0)


def test_integer_noise_under_scales_for_each_token() -> None:
    x = torch.randn(20000, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 64)
    noise = activation_noise(observed(x), W8A8)
    found = (by_row(x) - x).square().mean()
    assert float(noise[0]) == pytest.approx(float(found), rel=0.25)
    assert torch.equal(noise, noise[:1].expand(64))
    grouped = activation_noise(observed(x), replace(W8A8, granularity=Granularity.group(32)))
    found = (by_row(x.view(-1, 2, 32)).view(-1, 64) - x).square().view(-1, 2, 32).mean(dim=(0, 2))
    torch.testing.assert_close(grouped.view(2, 32)[:, 0], found, rtol=0.25, atol=0)


def test_float_noise_is_a_share_of_each_feature() -> None:
    x = torch.randn(20000, 6, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 6)
    noise = activation_noise(observed(x), FP8)
    found = (x.to(torch.float8_e4m3fn).float() - x).square().mean(dim=0)
    ratio = noise / found
    assert 0.6 < float(ratio.min()) <= float(ratio.max()) < 1.6


def test_silent_input() -> None:
    _, weights = layer(7)
    spec: TensorSpec = W8A8
    choice = search_smoothing(weights, observed(torch.zeros(32, 80)), spec, rounded)
    assert bool((choice.scale > 0).all())
    assert bool(choice.scale.isfinite().all())
