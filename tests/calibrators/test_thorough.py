"""High effort: the search over regions against a dense float64 reference, and never worse than what it began with."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qwen_quantize.calibrators.error_feedback import output_error
from qwen_quantize.calibrators.grid_weights import compensate, compensated_weight, solve_compensated
from qwen_quantize.calibrators.hessian import factorize
from qwen_quantize.calibrators.problem import Effort, HessianFactor
from qwen_quantize.calibrators.range_search import Grid, grid_codes, grid_values, search_grid
from qwen_quantize.calibrators.thorough import improve, neighbours, search_regions
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.schemes import SCHEMES, Scheme, TensorSpec
from qwen_quantize.formats.spec import IntFormat
from tests.calibrators.test_grid_weights import SCHEME, column_by_column, hessian, problem
from tests.calibrators.test_range_search import weights

every_scheme = pytest.mark.parametrize("scheme", SCHEME.values(), ids=list(SCHEME))


def rounded(weight: torch.Tensor, spec: TensorSpec) -> tuple[torch.Tensor, Grid]:
    grid = search_grid(weight, spec, RNE_SATURATE, None).grid
    return grid_values(grid_codes(weight, spec, RNE_SATURATE, grid), spec, grid), grid


def row_losses(weight: torch.Tensor, values: torch.Tensor, factor: HessianFactor) -> torch.Tensor:
    difference = weight.double() - values.double()
    losses: torch.Tensor = torch.linalg.vecdot(difference @ factor.hessian.double(), difference)
    return losses


def descended(
    wanted: torch.Tensor, codes: torch.Tensor, grid: Grid, spec: TensorSpec, factor: HessianFactor
) -> torch.Tensor:
    """One sweep of coordinate descent in float64, column by column; values [N, k]."""
    assert isinstance(spec.format, IntFormat)
    scale, zero = (
        torch.zeros_like(codes) if part is None else part.double()
        for part in grid.expanded(spec.granularity, tuple(codes.shape))
    )
    hessian, codes = factor.hessian.double(), codes.clone()
    for k in factor.order.tolist():
        values = (codes - zero) * scale
        gradient = (wanted - values) @ hessian[:, k]
        best = ((values[:, k] + gradient / hessian[k, k]) / scale[:, k]).round() + zero[:, k]
        codes[:, k] = best.clamp(spec.format.minimum, spec.format.maximum)
    return (codes - zero) * scale


def by_regions(
    weight: torch.Tensor,
    values: torch.Tensor,
    grid: Grid,
    spec: TensorSpec,
    factor: HessianFactor,
    group: int,
) -> torch.Tensor:
    """What `search_regions` does to a weight in groups, with an inverse of each region's Hessian in float64."""
    full, values = factor.hessian.double(), values.double()
    for region in range(weight.shape[1] // group):
        part = slice(region * group, (region + 1) * group)
        inner = factorize(full[part, part].clone(), damping=0.0)
        free = ((weight.double() - values) @ full)[:, part] @ torch.linalg.inv(full[part, part])
        wanted = values[:, part] + free
        column = slice(region, region + 1)
        start = Grid(grid.scale[:, column], None if grid.zero_point is None else grid.zero_point[:, column])
        best = values[:, part].clone()
        least = torch.linalg.vecdot((wanted - best) @ full[part, part], wanted - best)
        for candidate in neighbours(start, spec):
            codes = column_by_column(wanted.float(), candidate, spec, inner)
            found = descended(wanted, codes, candidate, spec, inner)
            loss = torch.linalg.vecdot((wanted - found) @ full[part, part], wanted - found)
            best = torch.where((loss < least).unsqueeze(1), found, best)
            least = torch.minimum(loss, least)
        values[:, part] = best
    return values


@pytest.mark.parametrize("symmetric", [True, False])
def test_regions_equal_a_dense_reference(symmetric: bool) -> None:
    scheme = SCHEMES["w4a16"].with_group(32)
    spec = (scheme if symmetric else scheme.with_zero_point()).weight
    weight, factor = weights(12, 96), factorize(hessian(96), 0.05)
    start, grid = rounded(weight, spec)
    found, _ = search_regions(weight, start, grid, spec, [factor])
    expected = by_regions(weight, start, grid, spec, factor, 32)
    # A tie that float32 breaks otherwise changes what comes after it in its row.
    same = torch.isclose(found.double(), expected, rtol=1e-4, atol=1e-6).double().mean()
    assert float(same) > 0.9
    losses = [row_losses(weight, values, factor) for values in (start, found, expected)]
    assert bool((losses[1] <= losses[0] * (1 + 1e-5)).all())
    assert float(losses[1].sum()) == pytest.approx(float(losses[2].sum()), rel=0.02)
    assert float(losses[1].sum()) < 0.75 * float(losses[0].sum())


@every_scheme
def test_values_lie_on_the_grid_that_comes_with_them(scheme: Scheme) -> None:
    weight, factor = weights(32, 192), factorize(hessian(192), 0.05)
    start, grid = rounded(weight, scheme.weight)
    values, found = search_regions(weight, start, grid, scheme.weight, [factor])
    codes = grid_codes(values, scheme.weight, RNE_SATURATE, found)
    torch.testing.assert_close(grid_values(codes, scheme.weight, found), values, rtol=1e-5, atol=1e-9)


@every_scheme
def test_high_effort_is_never_worse_and_repeats_itself(scheme: Scheme) -> None:
    given = problem(scheme)
    normal = solve_compensated(given)
    high = solve_compensated(replace(given, effort=Effort.HIGH))
    assert high.error <= normal.error
    again = solve_compensated(replace(given, effort=Effort.HIGH))
    assert torch.equal(high.quantized.codes, again.quantized.codes)
    assert torch.equal(high.quantized.scale, again.quantized.scale)


@every_scheme
def test_every_row_that_has_its_own_scales_loses_no_more_than_before(scheme: Scheme) -> None:
    spec = scheme.weight
    weight, factor = weights(32, 192), factorize(hessian(192), 0.05)
    grid = search_grid(weight, spec, RNE_SATURATE, compensated_weight([factor])).grid
    codes, grid = compensate(weight, grid, spec, [factor])
    better, on = improve(weight, codes, grid, spec, [factor])
    rows = spec.granularity.block_shape((32, 192))[0]
    before, after = (
        row_losses(weight, grid_values(c, spec, g), factor).view(-1, min(rows, 32)).sum(dim=1)
        for c, g in ((codes, grid), (better, on))
    )
    assert bool((after <= before * (1 + 1e-4)).all())


@pytest.mark.parametrize("symmetric", [True, False])
def test_high_effort_gains_on_groups(symmetric: bool) -> None:
    scheme = SCHEMES["w4a16"].with_group(64)
    given = problem(scheme if symmetric else scheme.with_zero_point())
    normal = solve_compensated(given)
    high = solve_compensated(replace(given, effort=Effort.HIGH))
    assert high.error < 0.99 * normal.error


@every_scheme
def test_native_equals_torch(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    given = replace(problem(scheme, rows=32, columns=128), effort=Effort.HIGH)
    first = solve_compensated(given)
    monkeypatch.setattr("qwen_quantize.calibrators.native._library", lambda *_: None)
    second = solve_compensated(given)
    assert torch.equal(first.quantized.codes, second.quantized.codes)
    assert torch.equal(first.quantized.scale, second.quantized.scale)


def test_regions_that_cross_a_split_of_the_features_stay() -> None:
    spec = SCHEMES["w4a16"].with_group(64).weight
    weight = weights(8, 192)
    factors = [factorize(hessian(96, seed), 0.05) for seed in (0, 1)]
    start, grid = rounded(weight, spec)
    values, found = search_regions(weight, start, grid, spec, factors)
    assert torch.equal(values[:, 64:128], start[:, 64:128])
    assert torch.equal(found.scale[:, 1], grid.scale[:, 1])
    assert output_error(weight - values, factors) < output_error(weight - start, factors)
