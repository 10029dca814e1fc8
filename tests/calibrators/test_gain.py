"""What is given back in the weights of what a biased cast takes: per feature, and told by other features."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qwen_quantize.calibrators.gain import column_gain, input_maps, is_biased
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics, merge_statistics
from qwen_quantize.calibrators.problem import LayerProblem
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.tables import E4M3FN

K = 64


def tokens(count: int, seed: int) -> Tensor:
    """Features with means of their own, one of them nearly constant: what a norm leaves in a language model."""
    generator = torch.Generator().manual_seed(seed)
    mean = torch.randn(K, generator=torch.Generator().manual_seed(99))
    x = torch.randn(count, K, generator=generator) + mean
    x[:, 0] = 4 + 0.1 * x[:, 0]
    return x


def casting(rounding: Rounding) -> CastRule:
    return CastRule(rounding, Overflow.SATURATE, Subnormals.KEEP)


def cast(x: Tensor, rounding: Rounding) -> Tensor:
    return fake_quantize_groups(x, E4M3FN, casting(rounding), ScaleRule.RCEIL, K)


def seen(
    x: Tensor, rounding: Rounding, ranges: tuple[int, ...] = (K,), *, crossed: bool = True
) -> InputStatistics:
    observer = InputObserver(K, lambda part: cast(part, rounding), ranges, crossed=crossed)
    observer.observe(x)
    return observer.statistics()


def missed(maps: tuple[Tensor, ...], rounding: Rounding) -> Tensor:
    """[tokens, K]: what the maps leave of the cast's error, on tokens that no statistics have seen."""
    fresh = tokens(2048, 5)
    parts = torch.split(cast(fresh, rounding), [by.shape[0] for by in maps], dim=1)
    return torch.cat([part @ by.T for part, by in zip(parts, maps, strict=True)], dim=1) - fresh


@pytest.mark.parametrize("ranges", [(K,), (48, 16)])
def test_a_cast_that_rounds_down_is_undone_by_other_features(ranges: tuple[int, ...]) -> None:
    statistics = seen(tokens(8192, 1), Rounding.FLOOR, ranges)
    gain = column_gain(statistics)
    assert gain is not None
    alone = missed((torch.diag(gain),), Rounding.FLOOR)
    mapped = missed(input_maps(statistics, gain), Rounding.FLOOR)
    assert float(mapped.square().mean()) < 0.9 * float(alone.square().mean())
    if ranges == (K,):  # the nearly constant feature tells the shift of all
        assert float(mapped.mean(dim=0).square().mean()) < 0.1 * float(alone.mean(dim=0).square().mean())


def test_truncation_is_explained_by_the_gain_and_nothing_is_lost_beside_it() -> None:
    statistics = seen(tokens(8192, 1), Rounding.RTZ)
    gain = column_gain(statistics)
    assert gain is not None
    alone = float(missed((torch.diag(gain),), Rounding.RTZ).square().mean())
    assert float(missed(input_maps(statistics, gain), Rounding.RTZ).square().mean()) < 1.01 * alone


def test_the_map_solves_its_normal_equations() -> None:
    statistics = seen(tokens(8192, 1), Rounding.FLOOR)
    gain = column_gain(statistics)
    assert gain is not None
    (found,) = input_maps(statistics, gain)
    moment, cross = statistics.second_moments[0], statistics.cross_moments[0]
    ridge = 16384 / 8192 * torch.diag(moment.diagonal())
    start = torch.diag(gain.double())
    expected = start + (cross - start @ moment) @ torch.linalg.inv(moment + ridge)
    assert torch.allclose(found.double(), expected, atol=1e-4)


def test_silent_features_map_to_themselves() -> None:
    x = tokens(1024, 1)
    x[:, 3] = 0
    statistics = seen(x, Rounding.FLOOR)
    (found,) = input_maps(statistics, column_gain(statistics))
    assert bool(found.isfinite().all())
    assert found[3].tolist() == [1.0 if column == 3 else 0.0 for column in range(K)]


def test_without_cross_moments_there_is_no_map() -> None:
    statistics = seen(tokens(64, 1), Rounding.FLOOR, crossed=False)
    assert statistics.cross_moments == ()
    assert input_maps(statistics, column_gain(statistics)) == ()


def test_cross_moments_merge() -> None:
    x = tokens(512, 1)
    whole = seen(x, Rounding.FLOOR)
    parts = merge_statistics(seen(x[:100], Rounding.FLOOR), seen(x[100:], Rounding.FLOOR))
    assert torch.allclose(whole.cross_moments[0], parts.cross_moments[0], rtol=1e-4, atol=1e-2)
    expected = x.double().T @ cast(x, Rounding.FLOOR).double()
    assert torch.allclose(whole.cross_moments[0], expected, rtol=1e-4, atol=1e-2)


def test_which_casts_are_biased() -> None:
    biased = {rounding for rounding in Rounding if is_biased(casting(rounding))}
    assert biased == {Rounding.RTZ, Rounding.FLOOR, Rounding.CEIL}


def test_a_problem_aims_at_the_mapped_weight() -> None:
    generator = torch.Generator().manual_seed(3)
    weight, gain = torch.randn(5, K, generator=generator), torch.rand(K, generator=generator)
    first, second = torch.randn(48, 48, generator=generator), torch.randn(16, 16, generator=generator)
    plain = LayerProblem("linear", weight, SCHEMES["ue8m0"], RNE_SATURATE)
    assert torch.equal(plain.towards(weight[:2]), weight[:2])
    assert torch.equal(replace(plain, gain=gain).towards(weight), weight * gain)
    mapped = replace(plain, gain=gain, maps=(first, second)).towards(weight)
    torch.testing.assert_close(mapped, weight @ torch.block_diag(first, second))
