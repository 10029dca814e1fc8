"""The solvers of integer and float grids against dense references, baselines and each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.calibrators.error_feedback import (
    compensated_rounding,
    output_error,
    quadratic,
    refined_rounding,
)
from qwen_quantize.calibrators.grid_weights import compensate, solve_compensated, solve_rounding
from qwen_quantize.calibrators.hessian import factorize
from qwen_quantize.calibrators.observers import InputObserver
from qwen_quantize.calibrators.problem import HessianFactor, LayerProblem
from qwen_quantize.calibrators.range_search import (
    Grid,
    grid_codes,
    grid_values,
    min_max_grid,
    region_sums,
    search_grid,
)
from qwen_quantize.calibrators.scale_refit import refitted_scales, unbiased_scales
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import SCHEMES, Scheme, TensorSpec
from qwen_quantize.formats.spec import IntFormat
from qwen_quantize.formats.tables import FP32
from tests.calibrators.test_hessian import correlated
from tests.calibrators.test_range_search import SPECS, weights

SCHEME = {name: replace(SCHEMES["w4a16"], weight=spec) for name, spec in SPECS.items()}
every_scheme = pytest.mark.parametrize("scheme", SCHEME.values(), ids=list(SCHEME))


def hessian(columns: int, seed: int = 0) -> torch.Tensor:
    x = correlated(4 * columns, columns, seed).double()
    return x.T @ x / x.shape[0]


def problem(scheme: Scheme, rows: int = 32, columns: int = 192, damping: float = 0.05) -> LayerProblem:
    factor = factorize(hessian(columns), damping)
    return LayerProblem("w", weights(rows, columns), scheme, RNE_SATURATE, factors=(factor,))


def column_by_column(
    weight: torch.Tensor, grid: Grid, spec: TensorSpec, factor: HessianFactor
) -> torch.Tensor:
    """The codes of optimal brain quantization with a zero point in float64: the inverse Hessian of the columns
    that remain is formed anew for each column."""
    format = spec.format
    assert isinstance(format, IntFormat)
    scale, zero = (
        torch.zeros(weight.shape) if part is None else part
        for part in grid.expanded(spec.granularity, tuple(weight.shape))
    )
    order = factor.order
    work, scale, zero = (part.double()[:, order] for part in (weight, scale, zero))
    damped = factor.hessian.double()[order][:, order]
    codes = torch.zeros_like(work)
    for column in range(work.shape[1]):
        inverse = torch.linalg.inv(damped[column:, column:])
        code = (work[:, column] / scale[:, column]).round() + zero[:, column]
        codes[:, column] = code.clamp(format.minimum, format.maximum)
        value = (codes[:, column] - zero[:, column]) * scale[:, column]
        error = (work[:, column] - value) / inverse[0, 0]
        work[:, column:] -= error.unsqueeze(1) * inverse[0].unsqueeze(0)
    return codes[:, order.argsort()]


@pytest.mark.parametrize("symmetric", [True, False])
def test_compensation_equals_dense_reference(symmetric: bool) -> None:
    scheme = SCHEMES["w4a16"].with_group(64)
    spec = (scheme if symmetric else scheme.with_zero_point()).weight
    weight, factor = weights(16, 160), factorize(hessian(160), 0.05)
    grid = search_grid(weight, spec, RNE_SATURATE, None).grid
    scale, zero = grid.expanded(spec.granularity, (16, 160))
    values, loss = compensated_rounding(weight, scale, [factor], spec.format, zero)
    expected = column_by_column(weight, grid, spec, factor)
    found = values / scale + (0 if zero is None else zero)
    assert float((found.round().double() != expected).double().mean()) < 0.02
    assert loss == pytest.approx(quadratic(weight - values, factor.hessian), rel=1e-3)


@every_scheme
def test_native_equals_torch(scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    first = solve_compensated(problem(scheme))
    monkeypatch.setattr("qwen_quantize.calibrators.native._library", lambda *_: None)
    second = solve_compensated(problem(scheme))
    assert torch.equal(first.quantized.codes, second.quantized.codes)
    assert torch.equal(first.quantized.scale, second.quantized.scale)
    assert first.error == second.error


def test_descent_ends_where_no_single_code_can_improve() -> None:
    spec = SCHEMES["w4a16"].with_group(32).with_zero_point().weight
    weight, factor = weights(6, 64), factorize(hessian(64), 0.05)
    grid = search_grid(weight, spec, RNE_SATURATE, None).grid
    scale, zero = grid.expanded(spec.granularity, (6, 64))
    start = grid_values(grid_codes(weight, spec, RNE_SATURATE, grid), spec, grid)
    done = refined_rounding(weight, start, scale, [factor], spec.format, zero, sweeps=50)
    h = factor.hessian.double()
    difference = weight.double() - done.double()
    least = torch.linalg.vecdot(difference @ h, difference)
    assert zero is not None
    codes = (done / scale).round() + zero
    for column in range(64):
        for step in (-1, 1):
            moved = codes.clone()
            moved[:, column] = (moved[:, column] + step).clamp(-8, 7)
            other = weight.double() - ((moved - zero) * scale).double()
            assert bool((torch.linalg.vecdot(other @ h, other) >= least * (1 - 1e-5)).all())


@every_scheme
def test_each_step_lowers_the_objective(scheme: Scheme) -> None:
    given = problem(scheme)
    rounded, compensated = solve_rounding(given), solve_compensated(given)
    assert rounded.error <= rounded.baseline_error
    assert compensated.error < 0.97 * rounded.error
    assert not compensated.notes
    difference = given.weight - compensated.quantized.dequantize()
    signal = output_error(given.weight, given.factors)
    assert output_error(difference, given.factors) / signal == pytest.approx(compensated.error, rel=1e-5)
    plain_spec = scheme.weight
    plain = min_max_grid(given.weight, plain_spec)
    values = grid_values(grid_codes(given.weight, plain_spec, RNE_SATURATE, plain), plain_spec, plain)
    baseline = output_error(given.weight - values, given.factors) / signal
    assert baseline == pytest.approx(compensated.baseline_error, rel=1e-5)


def test_refitted_scales_are_least_squares() -> None:
    """One region for each row: the closed form w H c / c H c."""
    spec = TensorSpec(SCHEMES["w4a16"].weight.format, Granularity.channel(), FP32)
    weight, factor = weights(8, 96), factorize(hessian(96), 0.05)
    grid = search_grid(weight, spec, RNE_SATURATE, None).grid
    codes = grid_codes(weight, spec, RNE_SATURATE, grid).float()
    h = factor.hessian.double()
    expected = torch.linalg.vecdot(weight.double() @ h, codes.double()) / torch.linalg.vecdot(
        codes.double() @ h, codes.double()
    )
    found = refitted_scales(weight, codes, grid, spec.granularity, FP32, [factor])
    torch.testing.assert_close(found.scale[:, 0].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["int4", "int4 partial group", "int4 zero point", "fp8 block, float scales"])
def test_refitted_scales_never_worsen(name: str) -> None:
    spec = SPECS[name]
    weight, parts = (
        weights(20, 192),
        [factorize(hessian(192)[a:b, a:b], 0.05) for a, b in ((0, 72), (72, 192))],
    )
    grid = search_grid(weight, spec, RNE_SATURATE, None).grid
    codes = grid_codes(weight, spec, RNE_SATURATE, grid)
    steps = grid_values(codes, spec, Grid(torch.ones_like(grid.scale), grid.zero_point))
    before = output_error(weight - grid_values(codes, spec, grid), parts)
    after = refitted_scales(weight, steps, grid, spec.granularity, spec.scale_format, parts)
    assert output_error(weight - grid_values(codes, spec, after), parts) < before


def test_ranges_and_strips_and_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = SCHEMES["w4a16"].with_group(64)
    whole = problem(scheme, rows=48)
    h = hessian(192)
    parts = tuple(factorize(h[a:b, a:b], 0.05) for a, b in ((0, 128), (128, 192)))
    split = solve_compensated(replace(whole, factors=parts))
    assert split.error < split.baseline_error
    assert "2 separate ranges" in split.notes[0]
    expected = solve_compensated(whole)
    monkeypatch.setattr("qwen_quantize.calibrators.grid_weights.STRIP_VALUES", 192 * 16)
    found = solve_compensated(whole)
    assert float((found.quantized.codes != expected.quantized.codes).double().mean()) < 0.01
    assert found.error == pytest.approx(expected.error, rel=0.01)
    gain = torch.linspace(1.0, 1.1, 192)
    gained = solve_compensated(replace(whole, gain=gain))
    difference = whole.weight * gain - gained.quantized.dequantize()
    assert output_error(difference, whole.factors) / output_error(
        whole.weight * gain, whole.factors
    ) == pytest.approx(gained.error, rel=1e-5)
    assert gained.baseline_error > 2 * gained.error  # the baseline knows nothing of the gain


def test_what_the_chip_takes_is_given_back_through_maps() -> None:
    whole = problem(SCHEMES["w4a16"].with_group(64))
    mixing = torch.eye(192) + 0.02 * torch.randn(192, 192, generator=torch.Generator().manual_seed(1))
    mapped = solve_compensated(replace(whole, maps=(mixing,), gain=torch.full((192,), 9.0)))
    difference = whole.weight @ mixing - mapped.quantized.dequantize()
    signal = output_error(whole.weight @ mixing, whole.factors)
    assert output_error(difference, whole.factors) / signal == pytest.approx(mapped.error, rel=1e-5)
    assert mapped.error < 0.5 * mapped.baseline_error


def test_a_tensor_scale_that_linears_share() -> None:
    given = replace(problem(SCHEMES["nvfp4"]), tensor_scale=0.02)
    for solution in (solve_rounding(given), solve_compensated(given)):
        assert solution.quantized.tensor_scale == 0.02
        assert solution.error < solution.baseline_error


def test_raised_damping_is_reported() -> None:
    columns = 96
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0)).double()
    singular = x.T @ x
    singular[5, 5] = -1.0  # no share of the diagonal below 1 mends it
    singular[:5, 5] = singular[5, :5] = singular[6:, 5] = singular[5, 6:] = 0
    factor = factorize(singular, 0.2)
    assert factor.damping > 0.2
    given = replace(problem(SCHEMES["w4a16"].with_group(32), columns=columns), factors=(factor,))
    assert any(note.startswith("Hessian damped by") for note in solve_compensated(given).notes)


def test_without_factors() -> None:
    scheme = SCHEMES["w4a16"].with_group(64)
    weight = weights(16, 192)
    bare = LayerProblem("w", weight, scheme, RNE_SATURATE)
    assert torch.equal(solve_compensated(bare).quantized.codes, solve_rounding(bare).quantized.codes)
    observer = InputObserver(192, None, ())
    observer.observe(correlated(256, 192, 3))
    seen = replace(bare, statistics=observer.statistics())
    solution = solve_rounding(seen)
    assert solution.error < solution.baseline_error
    assert not torch.equal(solution.quantized.scale, solve_rounding(bare).quantized.scale)


@pytest.mark.parametrize("name", ["int4", "int4 partial group", "int4 zero point", "int4 channel"])
def test_without_data_weights_are_right_on_average(name: str) -> None:
    """The error that is least is that of weights which are all a little too small."""
    spec, weight = SPECS[name], weights(32, 192)
    squares = region_sums(weight.square(), spec.granularity)

    def gain(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
        return region_sums(weight * grid_values(codes, spec, grid), spec.granularity) / squares

    searched = search_grid(weight, spec, RNE_SATURATE, None, cubed=True).grid
    codes = grid_codes(weight, spec, RNE_SATURATE, searched)
    assert float(gain(codes, searched).mean()) < 0.998
    solution = solve_rounding(LayerProblem("w", weight, SCHEME[name], RNE_SATURATE))
    assert torch.equal(solution.quantized.codes, codes)
    found = Grid(solution.quantized.scale, solution.quantized.zero_point)
    torch.testing.assert_close(gain(codes, found), torch.ones_like(squares), rtol=0, atol=2**-11)
    assert solution.error < solution.baseline_error


def test_unbiased_scales_where_little_is_left() -> None:
    spec = replace(SCHEMES["w4a16"].with_group(32).weight, scale_format=FP32)
    weight = torch.full((3, 32), 0.4)
    weight[:, 0] = 1.0
    codes = torch.zeros(3, 32, dtype=torch.int8)
    codes[0, 0] = 1
    codes[2] = -1
    found = unbiased_scales(weight, codes, spec, Grid(torch.tensor([[1.0], [-3.0], [-0.41]]), None)).scale
    # 31 zeros would want 5.96 of what is left; all zeros want nothing.
    assert found[:2].flatten().tolist() == [1.0, -3.0]
    assert float(found[2]) == pytest.approx(-(1 + 31 * 0.16) / (1 + 31 * 0.4))


def test_a_few_loud_columns_do_not_undo_the_search() -> None:
    """Where small weights become zero, those that are left are not blown up to make up for them."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    weight[:, ::128] *= 20
    solution = solve_rounding(LayerProblem("w", weight, SCHEMES["w4a16"].with_group(None), RNE_SATURATE))
    assert solution.error < 0.95 * solution.baseline_error
    assert solution.searched_blocks == 64
    largest = weight.abs().amax()
    assert float(solution.quantized.dequantize().abs().amax()) < 1.05 * float(largest)


def test_tokens_count_as_their_weight_says() -> None:
    """A massive token that hardly counts: the scales are those of the other tokens alone."""
    x = correlated(257, 192, 3)
    x[0] *= torch.linspace(1e4, 0, 192)
    token_weight = torch.ones(257)
    token_weight[0] = 0
    with_token, without = InputObserver(192, None, (192,)), InputObserver(192, None, (192,))
    with_token.observe(x, token_weight)
    without.observe(x[1:])
    scheme = SCHEMES["w4a16"].with_group(64)
    found, expected = (
        solve_rounding(
            LayerProblem("w", weights(16, 192), scheme, RNE_SATURATE, statistics=observer.statistics())
        )
        for observer in (with_token, without)
    )
    assert float((found.quantized.scale != expected.quantized.scale).double().mean()) < 0.05


def test_zero_and_exact_weights() -> None:
    scheme = SCHEMES["w4a16"].with_group(32).with_zero_point()
    given = replace(problem(scheme, 8, 96), weight=torch.zeros(8, 96))
    solution = solve_compensated(given)
    assert bool((solution.quantized.dequantize() == 0).all())
    assert solution.zero_blocks == 24
    assert solution.error == 0.0
    exact = torch.randint(-8, 8, (8, 96), generator=torch.Generator().manual_seed(2)).float() / 4
    exact[:, ::32], exact[:, 1::32] = -2.0, 1.75
    solution = solve_compensated(replace(given, weight=exact))
    assert torch.equal(solution.quantized.dequantize(), exact)
    assert solution.error == 0.0


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(2, 70), st.sampled_from(sorted(SCHEME)), st.integers(0, 50))
def test_codes_are_on_the_grid_and_no_worse(rows: int, columns: int, name: str, seed: int) -> None:
    scheme = SCHEME[name]
    given = LayerProblem(
        "w",
        weights(rows, columns, seed),
        scheme,
        RNE_SATURATE,
        factors=(factorize(hessian(columns, seed), 0.05),),
    )
    solution = solve_compensated(given)
    quantized = solution.quantized
    grid = Grid(quantized.scale, quantized.zero_point, quantized.tensor_scale)
    assert torch.equal(quantized.dequantize(), grid_values(quantized.codes, scheme.weight, grid))
    assert bool(quantized.dequantize().isfinite().all())
    assert solution.error <= solution.baseline_error
    if scheme.weight.format.bits == 4 and isinstance(scheme.weight.format, IntFormat):
        assert int(quantized.codes.min()) >= -8
        assert int(quantized.codes.max()) <= 7


def test_compensate_is_at_least_as_good_as_its_first_step() -> None:
    spec = SCHEMES["w4a16"].with_group(64).weight
    weight, factor = weights(64, 192), factorize(hessian(192), 0.05)
    grid = search_grid(weight, spec, RNE_SATURATE, factor.hessian.diagonal()).grid
    scale, _ = grid.expanded(spec.granularity, (64, 192))
    _, loss = compensated_rounding(weight, scale, [factor], spec.format)
    codes, after = compensate(weight, grid, spec, [factor])
    assert quadratic(weight - grid_values(codes, spec, after), factor.hessian) < 0.98 * loss
