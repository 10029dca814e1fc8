"""Error-compensated rounding (GPTQ, arXiv 2210.17323; the same matrix as LDLQ) on a fixed grid of scales."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from qwen_quantize.calibrators.ladder import ValueLadder, ladder_of
from qwen_quantize.calibrators.native import error_feedback, refine_values
from qwen_quantize.calibrators.problem import HessianFactor
from qwen_quantize.formats.spec import Format

_BLOCK = 128


def compensated_rounding(
    weight: Tensor,
    scale: Tensor,
    factors: Sequence[HessianFactor],
    format: Format,
    zero_point: Tensor | None = None,
) -> tuple[Tensor, float]:
    """Round `weight` column by column in the factor's order, each error spread over the columns not yet rounded.

    weight: [N, K] float32; scale, zero_point: [N, K] float32, fixed beforehand (static groups). Rounding is to
    nearest, ties to even, saturating; integers use their full range. Lazy blocks of 128 columns keep the
    trailing update a matrix product. Several factors belong to consecutive ranges of columns; no error crosses
    from one to the next.

    Returns the quantized values [N, K], (code - zero point) * scale, and the sum of trace(D H D^T) over the
    ranges, with D = W - Q, which the recursion yields for free.
    """
    ladder = ladder_of(format)
    if len(factors) == 1:
        return _compensated(weight, scale, zero_point, factors[0], ladder)
    values, loss = torch.empty_like(weight), 0.0
    for columns, factor in zip(ranges_of(factors), factors, strict=True):
        zero = None if zero_point is None else zero_point[:, columns]
        values[:, columns], part = _compensated(weight[:, columns], scale[:, columns], zero, factor, ladder)
        loss += part
    return values, loss


def ranges_of(factors: Sequence[HessianFactor]) -> list[slice]:
    """The columns that each factor describes."""
    ends = list(accumulate(factor.hessian.shape[0] for factor in factors))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _compensated(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, factor: HessianFactor, ladder: ValueLadder
) -> tuple[Tensor, float]:
    work = weight[:, factor.order].contiguous()
    columns = weight.shape[1]
    loss = 0.0
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        block = factor.order[first:last]
        errors = error_feedback(
            work,
            first,
            factor.upper[first:last, first:last].contiguous(),
            scale[:, block].contiguous(),
            None if zero_point is None else zero_point[:, block].contiguous(),
            ladder,
        )
        loss += squared_norm(errors)
        if last < columns:
            work[:, last:].addmm_(errors, factor.upper[first:last, last:], alpha=-1)
    values = torch.empty_like(weight)
    values[:, factor.order] = work
    return values, loss


def refined_rounding(
    weight: Tensor,
    values: Tensor,
    scale: Tensor,
    factors: Sequence[HessianFactor],
    format: Format,
    zero_point: Tensor | None = None,
    sweeps: int = 2,
) -> Tensor:
    """Values [N, K] with a smaller trace(D H D^T), by coordinate descent over the columns from `values` on.

    Arguments as of `compensated_rounding`; values lie on the grid. Each step puts one column of every row at
    its best value while the others stay, which has a closed form, so the objective never grows. Columns come in
    the factor's order; a sweep without a change is the last.
    """
    ladder = ladder_of(format)
    refined = torch.empty_like(weight)
    for columns, factor in zip(ranges_of(factors), factors, strict=True):
        part = values[:, columns].clone(memory_format=torch.contiguous_format)
        gradient = (weight[:, columns] - part) @ factor.hessian
        zero = None if zero_point is None else zero_point[:, columns].contiguous()
        grid = scale[:, columns].contiguous()
        for _ in range(sweeps):
            if not refine_values(part, gradient, grid, zero, factor.hessian, factor.order, ladder):
                break
        refined[:, columns] = part
    return refined


def output_error(difference: Tensor, factors: Sequence[HessianFactor]) -> float:
    """The sum of trace(D H D^T) over the factors' ranges of columns, for D [N, K] float32."""
    ranges = ranges_of(factors)
    return sum(quadratic(difference[:, c], f.hessian) for c, f in zip(ranges, factors, strict=True))


def quadratic(difference: Tensor, hessian: Tensor) -> float:
    """trace(D H D^T) for D [N, K], H [K, K], float32; rows are summed in float64."""
    return float(torch.linalg.vecdot(difference @ hessian, difference).sum(dtype=torch.float64))


def squared_norm(matrix: Tensor) -> float:
    """The sum of squares of a float32 matrix [N, K]; rows are summed in float64."""
    return float(torch.linalg.vector_norm(matrix, dim=1).double().square().sum())
