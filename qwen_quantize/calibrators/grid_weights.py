"""Solvers of every scheme with integer or float weights: rounding on a searched grid, and with compensation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.error_feedback import (
    compensated_rounding,
    output_error,
    refined_rounding,
    squared_norm,
)
from qwen_quantize.calibrators.hessian import DAMPING
from qwen_quantize.calibrators.problem import Effort, HessianFactor, LayerProblem, LayerSolution
from qwen_quantize.calibrators.range_search import (
    Grid,
    grid_codes,
    grid_values,
    min_max_grid,
    search_grid,
    value_codes,
)
from qwen_quantize.calibrators.scale_refit import refitted_scales, unbiased_scales
from qwen_quantize.calibrators.thorough import improve
from qwen_quantize.formats.blocks import QuantizedTensor, block_amax
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.schemes import TensorSpec
from qwen_quantize.formats.spec import IntFormat
from qwen_quantize.formats.tables import E4M3FN, E8M0

STRIP_VALUES = 1 << 24  # of a weight that are compensated together; about six copies of them live at a time
SWEEPS = 2
REFITS = 1


def solve_rounding(problem: LayerProblem) -> LayerSolution:
    """Round to nearest on the grid found by search, weighted with the inputs' mean squares where there are any.

    Without data, integers of up to four bits have the ranges of the least cubed error: by squares so much is clipped
    off the few largest weights that perplexity rises above plain rounding's. Their scales are then brought to where
    the weights are right on average (`unbiased_scales`). What is returned is never worse than plain rounding
    (`min_max_grid`) on the objective: the output error under the second moments, the weighted error with cheaper
    statistics, the weight error without data.
    """
    return _solve(problem, ())


def solve_compensated(problem: LayerProblem) -> LayerSolution:
    """As `solve_rounding`, then with error compensation, coordinate descent on the codes, and refitted scales.

    Without factors it is `solve_rounding`. With high effort `improve` goes on from there.
    """
    return _solve(problem, problem.factors)


def compensate(
    target: Tensor,
    grid: Grid,
    spec: TensorSpec,
    factors: Sequence[HessianFactor],
    *,
    sweeps: int = SWEEPS,
    refits: int = REFITS,
) -> tuple[Tensor, Grid]:
    """(codes, grid) of a weight [N, K] float32 with a small output error, from a grid to start with."""
    shape = tuple(target.shape)
    scale, zero = grid.expanded(spec.granularity, shape)
    values, _ = compensated_rounding(target, scale, factors, spec.format, zero)
    values = refined_rounding(target, values, scale, factors, spec.format, zero, sweeps)
    codes = value_codes(values, spec, grid)
    for _ in range(refits if spec.scale_format not in (E8M0, E4M3FN) else 0):
        unit = Grid(torch.ones_like(grid.scale), grid.zero_point)
        steps = grid_values(codes, spec, unit)
        grid = refitted_scales(target, steps, grid, spec.granularity, spec.scale_format, factors)
        scale, zero = grid.expanded(spec.granularity, shape)
        values = refined_rounding(
            target, grid_values(codes, spec, grid), scale, factors, spec.format, zero, 1
        )
        codes = value_codes(values, spec, grid)
    return codes, grid


def _keeps_size(spec: TensorSpec, column_weight: Tensor | None) -> bool:
    """Whether largest weights and average size count (`solve_rounding`): without data, where squares would clip much.

    With eight bits they do not, and nothing was gained there.
    """
    return column_weight is None and isinstance(spec.format, IntFormat) and spec.format.bits <= 4


@dataclass(frozen=True, slots=True)
class _Solved:
    """Some rows of the result; sums of squares over them."""

    codes: Tensor
    grid: Grid
    error: float
    baseline_error: float
    signal: float
    noise: float
    weight_square: float
    refused: bool


def _solve(problem: LayerProblem, factors: Sequence[HessianFactor]) -> LayerSolution:
    spec = problem.scheme.weight
    weight = problem.weight.contiguous()
    target = problem.towards(weight)
    column_weight = _column_weight(problem)
    importance = compensated_weight(factors) if factors else column_weight
    tensor_scale = problem.tensor_scale
    choice = search_grid(
        target,
        spec,
        problem.weight_cast,
        importance,
        tensor_scale=tensor_scale,
        cubed=_keeps_size(spec, column_weight),
    )
    plain = choice.baseline
    if target is not weight:  # the baseline knows nothing of the chip
        plain = min_max_grid(weight, spec, tensor_scale=tensor_scale)
    total, columns = weight.shape
    step = total
    if spec.granularity.kind is not GranularityKind.TENSOR:
        rows = spec.granularity.block_shape((total, columns))[0]
        step = max(rows, STRIP_VALUES // columns // rows * rows)
    strips = []
    for first in range(0, total, step):
        last = min(first + step, total)
        strips.append(
            _solve_strip(
                problem,
                factors,
                weight[first:last],
                target[first:last],
                column_weight,
                _rows(choice.grid, spec, first, last, (total, columns)),
                _rows(plain, spec, first, last, (total, columns)),
            )
        )
    return _solution(problem, strips, plain, bool(factors))


def _rows(grid: Grid, spec: TensorSpec, first: int, last: int, shape: tuple[int, int]) -> Grid:
    rows = spec.granularity.block_shape(shape)[0]
    part = slice(first // rows, -(-last // rows))
    zero = None if grid.zero_point is None else grid.zero_point[part]
    return Grid(grid.scale[part], zero, grid.tensor_scale)


def _solve_strip(
    problem: LayerProblem,
    factors: Sequence[HessianFactor],
    weight: Tensor,
    target: Tensor,
    column_weight: Tensor | None,
    searched: Grid,
    plain: Grid,
) -> _Solved:
    spec, cast = problem.scheme.weight, problem.weight_cast

    def error_of(codes: Tensor, grid: Grid) -> float:
        return _objective(problem, target - grid_values(codes, spec, grid), column_weight)

    plain_codes = grid_codes(weight, spec, cast, plain)
    baseline = error_of(plain_codes, plain)
    found = (grid_codes(target, spec, cast, searched), searched)
    if _keeps_size(spec, column_weight):
        found = (found[0], unbiased_scales(target, found[0], spec, searched))
    best, refused = error_of(*found), False
    if factors:
        compensated = compensate(target, searched, spec, factors)
        error = error_of(*compensated)
        refused = not error < best
        if not refused:
            found, best = compensated, error
        if problem.effort is Effort.HIGH:
            improved = improve(target, *found, spec, factors)
            error = error_of(*improved)
            if error < best:
                found, best = improved, error
    if baseline < best:  # the search minds only the diagonal of the Hessian
        found, best = (plain_codes, plain), baseline
    return _Solved(
        codes=found[0],
        grid=found[1],
        error=best,
        baseline_error=baseline,
        signal=_objective(problem, target, column_weight),
        noise=squared_norm(target - grid_values(*_with(found, spec))),
        weight_square=squared_norm(target),
        refused=refused,
    )


def _with(found: tuple[Tensor, Grid], spec: TensorSpec) -> tuple[Tensor, TensorSpec, Grid]:
    return found[0], spec, found[1]


def _objective(problem: LayerProblem, difference: Tensor, column_weight: Tensor | None) -> float:
    if problem.factors:
        return output_error(difference, problem.factors)
    return squared_norm(difference if column_weight is None else difference * column_weight.sqrt())


def _column_weight(problem: LayerProblem) -> Tensor | None:
    """[K] float32: what an error in each input feature counts; None without calibration data."""
    if problem.factors:
        return torch.cat([factor.hessian.diagonal() for factor in problem.factors])
    statistics = problem.statistics
    return None if statistics is None else statistics.weighed_mean_square().float()


def compensated_weight(factors: Sequence[HessianFactor]) -> Tensor:
    """[K] float32: what an error in each feature counts once the features after it make up for it, 1 / U_jj^2."""
    parts = []
    for factor in factors:
        part = torch.empty_like(factor.upper.diagonal())
        part[factor.order] = factor.upper.diagonal().square().reciprocal()
        parts.append(part)
    return torch.cat(parts)


def _solution(problem: LayerProblem, strips: list[_Solved], plain: Grid, compensated: bool) -> LayerSolution:
    spec, shape = problem.scheme.weight, (problem.weight.shape[0], problem.weight.shape[1])
    grid = strips[0].grid
    if len(strips) > 1:
        zeros = [strip.grid.zero_point for strip in strips if strip.grid.zero_point is not None]
        scales = torch.cat([strip.grid.scale for strip in strips])
        grid = Grid(scales, torch.cat(zeros) if zeros else None, grid.tensor_scale)
    different = grid.effective_scale() != plain.effective_scale()
    if grid.zero_point is not None and plain.zero_point is not None:
        different |= grid.zero_point != plain.zero_point
    signal = sum(strip.signal for strip in strips)
    noise = sum(strip.noise for strip in strips)
    weight_square = sum(strip.weight_square for strip in strips)
    zero_blocks = int((block_amax(problem.weight, spec.granularity) == 0).sum())
    return LayerSolution(
        quantized=QuantizedTensor(
            codes=torch.cat([strip.codes for strip in strips]),
            scale=grid.scale,
            zero_point=grid.zero_point,
            format=spec.format,
            granularity=spec.granularity,
            shape=shape,
            tensor_scale=grid.tensor_scale,
        ),
        error=sum(strip.error for strip in strips) / signal if signal > 0 else 0.0,
        baseline_error=sum(strip.baseline_error for strip in strips) / signal if signal > 0 else 0.0,
        weight_sqnr_db=10 * math.log10(weight_square / noise) if noise > 0 < weight_square else math.inf,
        searched_blocks=int(different.sum()),
        zero_blocks=zero_blocks,
        partial_blocks=_partial_regions(shape, spec.granularity.block_shape(shape)),
        notes=_notes(problem, strips, zero_blocks, compensated),
    )


def _partial_regions(shape: tuple[int, int], region: tuple[int, int]) -> int:
    """How many regions at the edge of a weight [N, K] have less than their size."""
    down, across = -(-shape[0] // region[0]), -(-shape[1] // region[1])
    whole = (shape[0] // region[0]) * (shape[1] // region[1])
    return down * across - whole


def _notes(
    problem: LayerProblem, strips: list[_Solved], zero_blocks: int, compensated: bool
) -> tuple[str, ...]:
    notes = []
    if any(strip.refused for strip in strips):
        notes.append("error compensation was no better than rounding; plain rounding kept")
    damping = max((factor.damping for factor in problem.factors), default=0.0)
    if compensated and damping > DAMPING:
        notes.append(f"Hessian damped by {damping:g} of its diagonal")
    if compensated and len(problem.factors) > 1:
        ranges = len(problem.factors)
        notes.append(f"features compensated in {ranges} separate ranges, to stay under the memory ceiling")
    if zero_blocks:
        notes.append(f"{zero_blocks} all-zero blocks written with scale 1")
    return tuple(notes)
