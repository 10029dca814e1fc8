"""Streaming statistics against one-shot float64 ones; merging against observing everything."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from qwen_quantize.calibrators.native import ColumnSums, column_sums
from qwen_quantize.calibrators.observers import (
    InputObserver,
    InputStatistics,
    merge_statistics,
    residual_weight,
)


def observed(parts: list[torch.Tensor], second_moment: bool = True) -> InputStatistics:
    observer = InputObserver(parts[0].shape[1], None, (parts[0].shape[1],) if second_moment else ())
    for part in parts:
        observer.observe(part)
    return observer.statistics()


@pytest.fixture
def data() -> torch.Tensor:
    return torch.randn(300, 24, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 2, 24)


def test_statistics_equal_one_shot(data: torch.Tensor) -> None:
    found = observed([data[:100], data[100:101], data[101:]])
    exact = data.double()
    assert found.tokens == 300
    assert torch.equal(found.amax, data.abs().amax(dim=0))
    torch.testing.assert_close(found.total, exact.sum(dim=0), rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found.squares, exact.square().sum(dim=0), rtol=1e-5, atol=0.0)
    (moment,) = found.second_moments
    torch.testing.assert_close(moment, exact.T @ exact, rtol=1e-4, atol=1e-4)
    assert torch.equal(moment, moment.T)


def test_merge_of_halves_equals_the_whole(data: torch.Tensor) -> None:
    whole = observed([data[:128], data[128:]])
    merged = merge_statistics(observed([data[:128]]), observed([data[128:]]))
    assert merged.tokens == whole.tokens
    assert torch.equal(merged.amax, whole.amax)
    assert torch.equal(merged.histogram, whole.histogram)
    torch.testing.assert_close(merged.second_moments, whole.second_moments, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(merged.squares, whole.squares, rtol=1e-14, atol=0.0)


def test_second_moment_sees_the_cast_input() -> None:
    observer = InputObserver(3, lambda x: x.round(), (3,))
    x = torch.tensor([[0.4, 1.6, -2.4]])
    observer.observe(x)
    rounded = torch.tensor([[0.0, 2.0, -2.0]], dtype=torch.float64)
    assert torch.equal(observer.statistics().second_moments[0], rounded.T @ rounded)
    assert torch.equal(observer.statistics().amax, torch.tensor([0.4, 1.6, 2.4]))


def test_histogram_counts_exponents_and_mantissas() -> None:
    x = torch.tensor([[1.0, 1.125, -1.99, 2.0, 0.0, 3.0, float("inf")]])
    counts = column_sums(x, x, None).histogram
    assert counts.sum() == 7
    assert counts[127].tolist() == [1, 1, 0, 0, 0, 0, 0, 1]
    assert counts[128].tolist() == [1, 0, 0, 0, 1, 0, 0, 0]
    assert counts[0, 0] == 1
    assert counts[255, 0] == 1


@pytest.mark.parametrize("shape", [(1, 1), (63, 24), (64, 17), (200, 530)])
@pytest.mark.parametrize("weighed", [False, True])
def test_native_sums_equal_torch(
    shape: tuple[int, int], weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(shape, generator=generator).exp_() - 1
    seen = (x * 8).round() / 8
    weight = torch.rand(shape[0], generator=generator) if weighed else None
    native = column_sums(x, seen, weight)
    monkeypatch.setattr("qwen_quantize.calibrators.native._library", lambda _="": None)
    twin = column_sums(x, seen, weight)
    for field in fields(ColumnSums):
        assert torch.equal(getattr(native, field.name), getattr(twin, field.name)), field.name


def test_sums_by_column_equal_float64() -> None:
    x = torch.randn(500, 40, generator=torch.Generator().manual_seed(1)) * 3 + 1
    weight = torch.rand(500, generator=torch.Generator().manual_seed(2))
    sums = column_sums(x, x.round(), weight)
    exact = x.double()
    torch.testing.assert_close(sums.total, exact.sum(dim=0), rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(sums.squares, exact.square().sum(dim=0), rtol=1e-6, atol=0)
    crossed = (exact * x.round().double() * weight.double().unsqueeze(1)).sum(dim=0)
    torch.testing.assert_close(sums.cross, crossed, rtol=1e-6, atol=1e-4)
    assert torch.equal(sums.amax, x.abs().amax(dim=0))


def test_a_number_that_is_none_shows_in_the_largest() -> None:
    x = torch.ones(130, 3)
    x[5, 0], x[129, 2] = float("nan"), float("inf")
    amax = column_sums(x, x, None).amax
    assert amax.isnan().tolist() == [True, False, False]
    assert amax.isinf().tolist() == [False, False, True]


def test_token_weights_scale_second_moments_only(data: torch.Tensor) -> None:
    weight = torch.linspace(0.1, 2, 300)
    observer = InputObserver(24, None, (24,))
    observer.observe(data[:200], weight[:200])
    observer.observe(data[200:], weight[200:])
    found, plain = observer.statistics(), observed([data])
    exact = data.double()
    expected = (exact * weight.double().unsqueeze(1)).T @ exact
    torch.testing.assert_close(found.second_moments[0], expected, rtol=1e-4, atol=1e-4)
    assert found.weight_total == pytest.approx(float(weight.double().sum()))
    assert torch.equal(found.amax, plain.amax)
    torch.testing.assert_close(found.squares, plain.squares, rtol=1e-5, atol=0.0)
    merged = merge_statistics(found, plain)
    assert merged.weight_total == pytest.approx(found.weight_total + 300)


def test_residual_weight_is_relative_to_the_residual() -> None:
    residual = torch.tensor([[3.0, 4.0], [3000.0, 4000.0], [0.0, 0.0], [0.0, 0.0]])
    x = torch.tensor([[0.0, 0.0], [0.0, 0.0], [100.0, 0.0], [0.0, 0.0]])
    linear = torch.tensor([[3.0, 1.0], [4.0, 1.0]])
    weight = residual_weight(residual, x, linear)
    assert weight[0] == pytest.approx(1 / 12.5)
    assert weight[1] == pytest.approx(1 / 12.5e6)
    assert weight[2] == pytest.approx(1 / (linear @ x[2]).square().mean())
    assert bool(weight.isfinite().all())


def test_ranges_are_blocks_of_the_whole_moment() -> None:
    x = torch.randn(500, 450, generator=torch.Generator().manual_seed(6))
    observer = InputObserver(450, None, (250, 200))
    observer.observe(x)
    first, second = observer.statistics().second_moments
    exact = x.double().T @ x.double()
    torch.testing.assert_close(first, exact[:250, :250], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(second, exact[250:, 250:], rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="do not make 450 features"):
        InputObserver(450, None, (250, 100))


@pytest.mark.parametrize("batches", [[1000], [7, 493, 500], [100] * 10])
def test_a_sample_is_spread_over_all_tokens_whatever_the_batches(batches: list[int]) -> None:
    x = torch.arange(1000.0).unsqueeze(1).repeat(1, 3)
    observer = InputObserver(3, lambda part: -part, (), 300)
    for part in x.split(batches):
        observer.observe(part, part[:, 0] + 1)
    sample = observer.statistics().sample
    assert sample is not None
    assert torch.equal(sample.inputs, -x[::4])
    assert torch.equal(sample.weight, x[::4, 0] + 1)
    assert torch.equal(sample.every_other(1).inputs, -x[4::8])
    assert observed([x]).sample is None


def test_samples_merge() -> None:
    parts = []
    for first in (0.0, 10.0):
        observer = InputObserver(2, None, (), 8)
        observer.observe(torch.full((4, 2), first))
        parts.append(observer.statistics())
    merged = merge_statistics(*parts).sample
    assert merged is not None
    assert merged.inputs[:, 0].tolist() == [0.0] * 4 + [10.0] * 4
