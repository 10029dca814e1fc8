"""The search for activation-aware scales: its loss against float64, what it finds, and exact statistics."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from qwen_quantize.calibrators.awq import (
    balanced,
    feature_size,
    quadratic_error,
    sample_rows,
    scaled_statistics,
    search_awq,
    second_moments,
)
from qwen_quantize.calibrators.clipped_rounding import clipped_error, clipped_rounding
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics
from qwen_quantize.formats.blocks import block_amax, expand_scale
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import SCHEMES

GROUP = Granularity.group(16)


def rounded(weight: Tensor, _: Tensor) -> Tensor:
    """Plain four-bit rounding in groups of 16."""
    scale = expand_scale(block_amax(weight, GROUP) / 7, GROUP, tuple(weight.shape))
    return (weight / scale.clamp(min=1e-30)).round().clamp(-8, 7) * scale


def observed(
    x: Tensor, weight: Tensor | None = None, ranges: tuple[int, ...] | None = None
) -> InputStatistics:
    observer = InputObserver(x.shape[1], None, (x.shape[1],) if ranges is None else ranges, 64)
    observer.observe(x, weight)
    return observer.statistics()


def loud(tokens: int, features: int, seed: int = 0) -> Tensor:
    """Correlated inputs of which a few features are thirty times as loud."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=generator)
    x = x @ (torch.eye(features) + 0.5 * torch.randn(features, features, generator=generator) / features**0.5)
    x[:, torch.randperm(features, generator=generator)[: features // 24 + 1]] *= 30
    return x


def layer(seed: int = 0, features: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed + 100)
    return (
        loud(400, features, seed),
        torch.randn(40, features, generator=generator),
        torch.randn(24, features, generator=generator) * 0.3,
    )


def exact_loss(weights: list[Tensor], scale: Tensor, x: Tensor) -> float:
    """Float64, from the tokens themselves."""
    lost = size = 0.0
    for weight in weights:
        q = rounded(weight * scale, scale).double() / scale.double()
        lost += float((x.double() @ (q - weight.double()).T).square().sum())
        size += float((x.double() @ weight.double().T).square().sum())
    return lost / size


def test_the_loss_is_the_output_error_on_the_tokens() -> None:
    x, *weights = layer()
    choice = search_awq(weights, observed(x), rounded, diagonal=False)
    assert choice.identity_loss == pytest.approx(exact_loss(weights, torch.ones(96), x), rel=1e-4)
    assert choice.loss == pytest.approx(exact_loss(weights, choice.scale, x), rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_choice_is_nearly_the_best_of_all_candidates(seed: int) -> None:
    x, *weights = layer(seed)
    choice = search_awq(weights, observed(x), rounded, diagonal=False)
    size = x.double().square().mean(dim=0).sqrt()
    by_weight = torch.stack([w.double().square().mean(dim=0) for w in weights]).mean(dim=0).sqrt()
    losses = {}
    for exponent in (step / 20 for step in range(20)):
        for other in (0.0, 1 - exponent):
            scale = (size**exponent / by_weight**other).float()
            losses[exponent, other] = exact_loss(weights, balanced(scale), x)
    key = min(losses, key=lambda key: abs(key[0] - choice.exponent) + abs(key[1] - choice.weight_exponent))
    assert choice.loss == pytest.approx(losses[key], rel=1e-3)  # the exponents that are named made the scale
    assert choice.loss <= 1.05 * min(losses.values())
    assert choice.loss < 0.7 * choice.identity_loss  # with such inputs there is much to win


def test_ranges_of_moments_are_summed_apart() -> None:
    x, *weights = layer(2)
    choice = search_awq(weights, observed(x, ranges=(40, 56)), rounded, diagonal=False)
    lost = size = 0.0
    for weight in weights:
        off = (rounded(weight * choice.scale, choice.scale) / choice.scale - weight).double()
        for part in (slice(0, 40), slice(40, 96)):
            lost += float((x[:, part].double() @ off[:, part].T).square().sum())
            size += float((x[:, part].double() @ weight[:, part].double().T).square().sum())
    assert choice.loss == pytest.approx(lost / size, rel=1e-4)


def test_never_worse_than_the_identity() -> None:
    """Inputs and weights without structure leave nothing to win, and then nothing is changed."""
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(48, 64, generator=generator)]
        choice = search_awq(
            weights, observed(torch.randn(300, 64, generator=generator)), rounded, diagonal=False
        )
        assert choice.loss <= choice.identity_loss
        assert choice.is_identity == (choice.loss == choice.identity_loss)
        assert choice.is_identity or choice.loss <= 0.97 * choice.identity_loss
    exact = search_awq(weights, observed(torch.randn(300, 64)), lambda weight, _: weight)
    assert exact.is_identity
    assert torch.equal(exact.scale, torch.ones(64))


def test_tied_columns_get_one_factor() -> None:
    x, weight, _ = layer(3)
    tie = torch.arange(48).view(2, 1, 24).expand(2, 2, 24).reshape(96)
    choice = search_awq([weight], observed(x), rounded, tie, diagonal=False)
    assert choice.scale.shape == (48,)
    assert choice.loss == pytest.approx(exact_loss([weight], choice.scale[tie], x), rel=1e-4)
    assert choice.loss <= choice.identity_loss
    size = x.square().mean(dim=0)
    pooled = torch.stack([size[tie == i].mean() for i in range(48)]).sqrt()
    by_weight = weight.square().mean(dim=0)
    pooled_weight = torch.stack([by_weight[tie == i].mean() for i in range(48)]).sqrt()
    expected = balanced(pooled**choice.exponent / pooled_weight**choice.weight_exponent)
    torch.testing.assert_close(choice.scale, expected)


def test_weights_of_tokens_count() -> None:
    """A token that weighs nothing does not decide which features are loud."""
    x, weight, _ = layer(4)
    shouted = torch.cat([x, torch.full((4, 96), 1e4)])
    importance = torch.cat([torch.ones(400), torch.zeros(4)])
    plain = search_awq([weight], observed(x), rounded, diagonal=False)
    weighed = search_awq([weight], observed(shouted, importance), rounded, diagonal=False)
    torch.testing.assert_close(weighed.scale, plain.scale)
    assert weighed.loss == pytest.approx(plain.loss)


def test_silent_features_keep_a_bounded_factor() -> None:
    """On other text they may speak up: their columns must not be rounded away."""
    x, weight, _ = layer(5)
    x[:, 7] = 0
    x[:, 8] *= 1e-6
    statistics = observed(x)
    size = feature_size(statistics)
    assert float(size.max() / size.min()) < 1e4
    assert float(size[7]) == pytest.approx(float(size.median()) / 32, rel=0.1)
    assert second_moments(statistics)[0][7, 7] == size[7] ** 2
    scale = search_awq([weight], statistics, rounded).scale
    assert float(scale[7] / scale.median()) > 1 / 64
    silent = search_awq([weight], observed(torch.zeros(50, 96)), rounded, diagonal=False)
    assert bool((silent.scale > 0).all())
    assert silent.loss <= silent.identity_loss


def test_few_rows_choose_nearly_as_well_as_all() -> None:
    x = loud(400, 96, 6)
    generator = torch.Generator().manual_seed(7)
    weights = [torch.randn(n, 96, generator=generator) for n in (900, 300)]
    full = search_awq(weights, observed(x), rounded, sampled_weights=None, diagonal=False)
    some = search_awq(weights, observed(x), rounded, sampled_weights=150 * 96, diagonal=False)
    assert exact_loss(weights, some.scale, x) <= 1.02 * full.loss
    assert full.loss < 0.7 * full.identity_loss


def test_the_diagonal_chooses_nearly_as_well() -> None:
    x, *weights = layer(8)
    full = search_awq(weights, observed(x), rounded, diagonal=False)
    quick = search_awq(weights, observed(x), rounded, diagonal=True, floor=0.0)
    assert exact_loss(weights, quick.scale, x) <= 1.1 * full.loss


def test_a_floor_spares_features_that_other_text_uses() -> None:
    """Half of the features are an eighth as loud in calibration as on the text that comes."""
    x, *weights = layer(11)
    other = x.clone()
    other[:, 48:] *= 8
    plain = search_awq(weights, observed(x), rounded, floor=0.0)
    floored = search_awq(weights, observed(x), rounded, floor=0.5)
    assert exact_loss(weights, floored.scale, other) < exact_loss(weights, plain.scale, other)


def test_rows_are_sampled_evenly() -> None:
    weight = torch.arange(100.0).unsqueeze(1)
    (few,) = sample_rows([weight], 10)
    assert few.flatten().tolist() == [5, 15, 25, 35, 45, 55, 65, 75, 85, 95]
    (runs,) = sample_rows([weight], 20, together=8)
    assert runs.flatten().tolist() == [*range(16, 24), *range(48, 56), *range(80, 88)]
    several = sample_rows([torch.zeros(300, 2), torch.zeros(100, 2)], 80)
    assert [part.shape[0] for part in several] == [30, 10]
    assert sample_rows([weight], None)[0] is weight


def test_scaled_statistics_are_those_of_scaled_inputs() -> None:
    x = loud(200, 48, 9)
    scale = torch.linspace(0.3, 4, 48)
    weight = torch.rand(200, generator=torch.Generator().manual_seed(2))
    for ranges in ((48,), (20, 28), ()):
        found = scaled_statistics(observed(x, weight, ranges), scale)
        expected = observed(x / scale, weight, ranges)
        torch.testing.assert_close(found.amax, expected.amax)
        for name in ("total", "squares", "cross"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-4)
        for mine, theirs in zip(found.second_moments, expected.second_moments, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
        assert found.sample is not None
        assert expected.sample is not None
        torch.testing.assert_close(found.sample.inputs, expected.sample.inputs)
        assert found.tokens == expected.tokens
        assert found.weight_total == expected.weight_total


@pytest.mark.parametrize("seed", range(3))
def test_a_kernel_that_knows_the_error_leads_to_the_same_choice(seed: int) -> None:
    x, *weights = layer(seed)
    spec = SCHEMES["w4a16"].with_group(16).weight

    def clipped(weight: Tensor, squares: Tensor) -> Tensor:
        return clipped_rounding(weight, squares, spec, RNE_SATURATE)

    slow = search_awq(weights, observed(x), clipped)
    quick = search_awq(weights, observed(x), clipped, rounding_error=partial(clipped_error, spec=spec))
    assert (quick.exponent, quick.weight_exponent) == (slow.exponent, slow.weight_exponent)
    assert torch.equal(quick.scale, slow.scale)
    assert quick.loss == pytest.approx(slow.loss, rel=1e-5)


def test_quadratic_error_equals_float64() -> None:
    x, weight, _ = layer(10)
    h = (x.T @ x / 400).double()
    expected = float((weight.double() @ h * weight.double()).sum())
    assert quadratic_error(weight, (h.float(),)) == pytest.approx(expected, rel=1e-5)
    expected = float((weight.double().square() * h.diagonal()).sum())
    assert quadratic_error(weight, (h.float().diagonal(),)) == pytest.approx(expected, rel=1e-5)
