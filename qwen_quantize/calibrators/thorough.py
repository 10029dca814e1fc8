"""More work on a rounded weight: scales, zero points and codes of one region after another, found together.

What is solved is that of SignRound (arXiv 2309.05516), rounding directions and ranges at once, but on the second
moments alone and without gradients: given all other regions, what one should hold is known in closed form, and a
few grids around its own are tried for it, each with error compensation inside the region.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen_quantize.calibrators.error_feedback import compensated_rounding, ranges_of, refined_rounding
from qwen_quantize.calibrators.hessian import factorize
from qwen_quantize.calibrators.problem import HessianFactor
from qwen_quantize.calibrators.range_search import Grid, grid_values, stored_scale, value_codes
from qwen_quantize.calibrators.scale_refit import refitted_scales
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.schemes import TensorSpec
from qwen_quantize.formats.spec import IntFormat
from qwen_quantize.formats.tables import E4M3FN, E8M0

ROUNDS = 3
SWEEPS = 4
_SHARES = (0.9, 0.95, 0.975, 1.025, 1.05, 1.1)
_BLOCK_SHARES = (0.875, 1.125)  # neighbours of an E4M3 scale


def improve(
    target: Tensor,
    codes: Tensor,
    grid: Grid,
    spec: TensorSpec,
    factors: Sequence[HessianFactor],
    *,
    rounds: int = ROUNDS,
    sweeps: int = SWEEPS,
) -> tuple[Tensor, Grid]:
    """(codes, grid) of a weight [N, K] float32 with a smaller trace(D H D^T), D = W - Q, from those given.

    A round refits all scales, searches region by region, and ends with `sweeps` of coordinate descent on the codes
    over all columns. None of the rounds makes the objective larger but by float32 rounding.
    """
    shape = tuple(target.shape)
    for _ in range(rounds):
        if spec.scale_format not in (E8M0, E4M3FN):
            unit = Grid(torch.ones_like(grid.scale), grid.zero_point)
            steps = grid_values(codes, spec, unit)
            grid = refitted_scales(target, steps, grid, spec.granularity, spec.scale_format, factors)
        values = grid_values(codes, spec, grid)
        if spec.granularity.kind is not GranularityKind.TENSOR:
            values, grid = search_regions(target, values, grid, spec, factors)
        scale, zero = grid.expanded(spec.granularity, shape)
        values = refined_rounding(target, values, scale, factors, spec.format, zero, sweeps)
        codes = value_codes(values, spec, grid)
    return codes, grid


def neighbours(grid: Grid, spec: TensorSpec) -> list[Grid]:
    """Grids around `grid`, this first: other scales as their format holds them, and zero points one off."""
    found = [grid]
    if spec.scale_format == E8M0:
        shares: tuple[float, ...] = (0.5, 2.0)
    else:
        shares = _BLOCK_SHARES if spec.scale_format == E4M3FN else _SHARES
    for share in shares:
        scale = stored_scale(grid.scale * share, spec.scale_format)
        found.append(Grid(scale, grid.zero_point, grid.tensor_scale))
    if grid.zero_point is not None:
        assert isinstance(spec.format, IntFormat)
        low, high = float(spec.format.minimum), float(spec.format.maximum)
        for scale in [grid.scale, *(stored_scale(grid.scale * s, spec.scale_format) for s in (0.95, 1.05))]:
            for shift in (-1, 1):
                found.append(Grid(scale, (grid.zero_point + shift).clamp(low, high), grid.tensor_scale))
    return found


def search_regions(
    target: Tensor, values: Tensor, grid: Grid, spec: TensorSpec, factors: Sequence[HessianFactor]
) -> tuple[Tensor, Grid]:
    """(values, grid) after each region of columns in turn has taken the best of its neighbouring grids.

    With g = (W - V) H, the region's columns c would be best at V_c + g_c H_cc^-1 if they could be anything; that is
    rounded with error compensation under H_cc on each grid. Rows that share a scale are decided together.
    """
    shape = tuple(target.shape)
    rows, columns = spec.granularity.block_shape(shape)
    values, ranges = values.clone(), ranges_of(factors)
    scale, zero = grid.scale.clone(), None if grid.zero_point is None else grid.zero_point.clone()
    gradients = [(target[:, c] - values[:, c]) @ f.hessian for c, f in zip(ranges, factors, strict=True)]
    for region in range(scale.shape[1]):
        begin, end = region * columns, min((region + 1) * columns, shape[1])
        inside = [i for i, r in enumerate(ranges) if r.start <= begin and end <= r.stop]
        if not inside:  # a region that a memory ceiling has split
            continue
        hessian, offset = factors[inside[0]].hessian, ranges[inside[0]].start
        gradient = gradients[inside[0]]
        here = slice(begin - offset, end - offset)
        factor = factorize(hessian[here, here].double(), damping=0.0)
        current = values[:, begin:end]
        best_change = _region_target(gradient[:, here], factor)
        wanted = current + best_change
        start = Grid(
            scale[:, region : region + 1],
            None if zero is None else zero[:, region : region + 1],
            grid.tensor_scale,
        )
        least = _by_region(torch.linalg.vecdot(best_change @ factor.hessian, best_change), rows)
        chosen_values, chosen = current.clone(), start
        for candidate in neighbours(start, spec):
            spread, offsets = candidate.expanded(spec.granularity, tuple(current.shape))
            rounded, _ = compensated_rounding(wanted, spread, (factor,), spec.format, offsets)
            rounded = refined_rounding(wanted, rounded, spread, (factor,), spec.format, offsets, 1)
            difference = wanted - rounded
            loss = _by_region(torch.linalg.vecdot(difference @ factor.hessian, difference), rows)
            better = loss < least
            least = torch.where(better, loss, least)
            by_row = better.repeat_interleave(rows)[: shape[0]].unsqueeze(1)
            chosen_values = torch.where(by_row, rounded, chosen_values)
            better = better.unsqueeze(1)
            new_zero = None
            if chosen.zero_point is not None and candidate.zero_point is not None:
                new_zero = torch.where(better, candidate.zero_point, chosen.zero_point)
            chosen = Grid(torch.where(better, candidate.scale, chosen.scale), new_zero, grid.tensor_scale)
        gradient.addmm_(chosen_values - current, hessian[here], alpha=-1)
        values[:, begin:end] = chosen_values
        scale[:, region] = chosen.scale[:, 0]
        if zero is not None and chosen.zero_point is not None:
            zero[:, region] = chosen.zero_point[:, 0]
    return values, Grid(scale, zero, grid.tensor_scale)


def _region_target(gradient: Tensor, factor: HessianFactor) -> Tensor:
    """g H^-1 for g [N, k], from U with (P H P^T)^-1 = U^T U."""
    product = (gradient[:, factor.order] @ factor.upper.T) @ factor.upper
    solved = torch.empty_like(product)
    solved[:, factor.order] = product
    return solved


def _by_region(x: Tensor, rows: int) -> Tensor:
    """[N] -> sums over `rows` neighbours."""
    down = -(-x.shape[0] // rows)
    return torch.nn.functional.pad(x, (0, down * rows - x.shape[0])).view(down, rows).sum(dim=1)
