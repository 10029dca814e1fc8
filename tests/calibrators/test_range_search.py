"""Searched grids against their baselines, against every candidate by brute force, and native against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.calibrators.ladder import ladder_of
from qwen_quantize.calibrators.range_search import (
    Grid,
    grid_codes,
    grid_values,
    min_max_grid,
    region_sums,
    search_grid,
    stored_scale,
)
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode_table
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.schemes import SCHEMES, TensorSpec
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import BF16, E2M1, E2M3, E4M3FN, E5M2, FP16, FP32, HIF8, INT4, INT8

TRUNCATE = CastRule(Rounding.RTZ, Overflow.SATURATE, Subnormals.FLUSH)


def w4(group: int, *, symmetric: bool = True) -> TensorSpec:
    scheme = SCHEMES["w4a16"].with_group(group)
    return (scheme if symmetric else scheme.with_zero_point()).weight


SPECS = {
    "int4": w4(64),
    "int4 partial group": w4(48),
    "int4 zero point": w4(64, symmetric=False),
    "int4 bf16 scale": replace(w4(64, symmetric=False), scale_format=BF16),
    "int4 channel": SCHEMES["w4a16"].with_group(None).weight,
    "int8 tensor": replace(SCHEMES["w8a8"].weight, granularity=Granularity.tensor()),
    "fp8 block, float scales": TensorSpec(E4M3FN, Granularity.block(16, 48), FP32),
    **{name: SCHEMES[name].weight for name in ("w8a8", "fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "hif8")},
    "ue8m0": SCHEMES["ue8m0"].with_block(32, 32).weight,
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


def weights(rows: int = 24, columns: int = 160, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    heavy = torch.randn(rows, columns, generator=generator) ** 3
    return heavy * torch.rand(columns, generator=generator)


def importance(columns: int = 160) -> torch.Tensor:
    return torch.rand(columns, generator=torch.Generator().manual_seed(9)) ** 4


def region_error(
    weight: torch.Tensor, values: torch.Tensor, spec: TensorSpec, column: torch.Tensor
) -> torch.Tensor:
    difference = weight.double() - values.double()
    return region_sums(difference.square() * column.double(), spec.granularity)


@every_spec
def test_errors_are_those_of_the_codes_and_never_above_the_baseline(spec: TensorSpec) -> None:
    weight, column = weights(), importance()
    choice = search_grid(weight, spec, RNE_SATURATE, column)
    for grid, errors in ((choice.grid, choice.errors), (choice.baseline, choice.baseline_errors)):
        values = grid_values(grid_codes(weight, spec, RNE_SATURATE, grid), spec, grid)
        torch.testing.assert_close(errors, region_error(weight, values, spec, column), rtol=1e-4, atol=1e-12)
    if spec.tensor_scale_format is None:
        assert bool((choice.errors <= choice.baseline_errors).all())
    assert float(choice.errors.sum()) <= float(choice.baseline_errors.sum())
    assert torch.equal(choice.baseline.scale, min_max_grid(weight, spec).scale)


@every_spec
@pytest.mark.parametrize("cubed", [False, True])
def test_native_equals_torch(spec: TensorSpec, cubed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, column = weights(rows=40, columns=200), importance(200)
    native = search_grid(weight, spec, RNE_SATURATE, column, cubed=cubed)
    monkeypatch.setattr("qwen_quantize.calibrators.native._library", lambda *_: None)
    twin = search_grid(weight, spec, RNE_SATURATE, column, cubed=cubed)
    assert torch.equal(native.errors, twin.errors)
    assert torch.equal(native.grid.scale, twin.grid.scale)
    assert native.grid.tensor_scale == twin.grid.tensor_scale
    if native.grid.zero_point is not None:
        assert twin.grid.zero_point is not None
        assert torch.equal(native.grid.zero_point, twin.grid.zero_point)


@pytest.mark.parametrize("name", ["int4", "int4 partial group", "int4 zero point"])
def test_cubes_clip_less(name: str) -> None:
    weight, spec = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)), SPECS[name]
    squared, cubed = (search_grid(weight, spec, RNE_SATURATE, None, cubed=c) for c in (False, True))

    def difference(grid: Grid) -> torch.Tensor:
        values = grid_values(grid_codes(weight, spec, RNE_SATURATE, grid), spec, grid)
        return (weight - values).abs()

    def worst(grid: Grid) -> float:
        return float(difference(grid).amax(dim=1).mean())

    assert worst(cubed.grid) < 0.85 * worst(squared.grid)
    cubes = region_sums(difference(cubed.grid) ** 3, spec.granularity)
    torch.testing.assert_close(cubed.errors.float(), cubes, rtol=1e-4, atol=1e-12)
    assert float(cubed.errors.sum()) < float(
        region_sums(difference(squared.grid) ** 3, spec.granularity).sum()
    )


@every_spec
def test_search_helps_with_importance(spec: TensorSpec) -> None:
    weight, column = weights(), importance()
    plain = search_grid(weight, spec, RNE_SATURATE, None)
    weighted = search_grid(weight, spec, RNE_SATURATE, column)

    def error(grid: Grid) -> float:
        values = grid_values(grid_codes(weight, spec, RNE_SATURATE, grid), spec, grid)
        return float(region_error(weight, values, spec, column).sum())

    assert error(weighted.grid) <= error(plain.grid) * 1.001


@pytest.mark.parametrize("format", [E4M3FN, E5M2, E2M1, E2M3, HIF8, INT4, INT8], ids=lambda f: f.name)
def test_ladder_gives_the_nearest_value(format: Format) -> None:
    ladder = ladder_of(format)
    table = decode_table(format)
    table = torch.tensor(sorted(set(table[table.isfinite()].tolist())), dtype=torch.float64)
    x = torch.cat([table.float(), torch.randn(4000, generator=torch.Generator().manual_seed(1)).mul(3).exp()])
    x = torch.cat([x, -x]).clamp(ladder.low, ladder.high)
    nearest = (table - x.double().unsqueeze(1)).abs().amin(dim=1)
    assert torch.equal((ladder.nearest(x).double() - x.double()).abs(), nearest)
    assert (ladder.low, ladder.high) == (float(table[0]), float(table[-1]))


def test_ladder_is_the_cast_to_nearest() -> None:
    x = weights(64, 300).mul(20).clamp(-400, 400)
    for format in (E4M3FN, E2M1, E2M3, HIF8, INT8):
        ladder = ladder_of(format)
        inside = x.clamp(ladder.low, ladder.high).contiguous()
        different = ladder.nearest(inside) != quantize_values(inside, format, RNE_SATURATE)
        assert float(different.double().mean()) < 1e-3  # ties, if any


def test_search_equals_brute_force_over_fine_scales() -> None:
    weight = weights(8, 64)
    spec = replace(w4(64), scale_format=FP32)
    found = float(search_grid(weight, spec, RNE_SATURATE, None).errors.sum())
    amax = weight.abs().amax(dim=1, keepdim=True)
    best = torch.full((8,), torch.inf, dtype=torch.float64)
    for share in torch.linspace(0.3, 1.2, 2000):
        scale = amax * share / 7.5
        error = (weight - (weight / scale).round().clamp(-8, 7) * scale).double().square().sum(dim=1)
        best = torch.minimum(best, error)
    assert found < 1.03 * float(best.sum())


def test_min_max_grids_by_hand() -> None:
    weight = torch.tensor([[-3.0, 1.0, 0.5, 15.0], [0.0, 0.0, 0.0, 0.0], [-8.0, -2.0, -1.0, -0.5]])
    plain = min_max_grid(weight, replace(w4(4), scale_format=FP32))
    assert plain.scale.flatten().tolist() == [2.0, 1.0, pytest.approx(8 / 7.5)]
    zeroed = min_max_grid(weight, replace(w4(4, symmetric=False), scale_format=FP32))
    assert zeroed.zero_point is not None
    assert zeroed.scale.flatten().tolist() == [pytest.approx(18 / 15), 1.0, pytest.approx(8 / 15)]
    # -8 - low / scale, to even where that is -5.5
    assert zeroed.zero_point.flatten().tolist() == [-6.0, 0.0, 7.0]
    nv = min_max_grid(weight[:, :].repeat(1, 4), SCHEMES["nvfp4"].weight)
    assert nv.tensor_scale == pytest.approx(15 / 2688)
    assert float(nv.scale[0, 0]) == 448.0


def test_four_over_six() -> None:
    """Values on quarters of the largest one: with a scale that maps it to 4 they are exact, with 6 they are not."""
    block = torch.tensor([4.0, 3.0, 2.0, 1.0] * 4) / 4
    weight = torch.stack([block, block * 0.25, torch.linspace(-1, 1, 16)])
    choice = search_grid(weight, SCHEMES["nvfp4"].weight, RNE_SATURATE, None)
    assert float(choice.errors[1].sum()) < 0.2 * float(choice.baseline_errors[1].sum())
    given = search_grid(weight, SCHEMES["nvfp4"].weight, RNE_SATURATE, None, tensor_scale=0.01)
    assert given.grid.tensor_scale == given.baseline.tensor_scale == 0.01


def test_other_casts_are_searched_under_their_own_rounding() -> None:
    weight, spec = weights(), SCHEMES["mxfp4"].weight
    truncated = search_grid(weight, spec, TRUNCATE, None)
    nearest = search_grid(weight, spec, RNE_SATURATE, None)
    values = grid_values(grid_codes(weight, spec, TRUNCATE, nearest.grid), spec, nearest.grid)
    ones = torch.ones(weight.shape[1])
    assert float(truncated.errors.sum()) < float(region_error(weight, values, spec, ones).sum())


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9),
    st.integers(1, 70),
    st.sampled_from(sorted(SPECS)),
    st.integers(0, 99),
    st.floats(-20, 12),
)
def test_any_shape_and_size(rows: int, columns: int, name: str, seed: int, size: float) -> None:
    spec = SPECS[name]
    weight = weights(rows, columns, seed) * 2.0**size
    weight[0] = 0
    choice = search_grid(weight, spec, RNE_SATURATE, None)
    codes = grid_codes(weight, spec, RNE_SATURATE, choice.grid)
    values = grid_values(codes, spec, choice.grid)
    assert bool(values.isfinite().all())
    assert bool((values[0] == 0).all())
    assert float(choice.errors.sum()) <= float(choice.baseline_errors.sum())
    assert torch.equal(stored_scale(choice.grid.scale, spec.scale_format), choice.grid.scale)
    zero = choice.grid.zero_point
    if zero is not None:
        assert torch.equal(zero, zero.round())
        assert bool(((zero >= -8) & (zero <= 7)).all())


def test_the_longer_side_of_the_codes_goes_where_it_is_needed() -> None:
    weight = torch.tensor([[8.0, 3.0, -2.0, 1.0], [-8.0, 3.0, -2.0, 1.0]]).repeat(1, 16)
    choice = search_grid(weight, replace(w4(64), scale_format=FP32), RNE_SATURATE, None)
    assert choice.errors.flatten().tolist() == [0.0, 0.0]
    assert choice.grid.scale.flatten().tolist() == [-1.0, 1.0]
    eight = search_grid(weight, SCHEMES["w8a8"].weight, RNE_SATURATE, None)
    assert bool((eight.grid.scale > 0).all())


def test_scales_that_a_format_cannot_hold() -> None:
    scales = torch.tensor([1e-12, 1.0, 1e9])
    assert stored_scale(scales, FP16).tolist() == [2.0**-24, 1.0, 65504.0]
    assert stored_scale(-scales, FP16).tolist() == [-(2.0**-24), -1.0, -65504.0]
    assert stored_scale(scales, FP32).tolist() == scales.tolist()
