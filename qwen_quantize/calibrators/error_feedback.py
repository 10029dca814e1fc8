"""Error-compensated rounding (GPTQ, arXiv 2210.17323; the same matrix as LDLQ) on a fixed grid of scales."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from qwen_quantize.calibrators.native import error_feedback
from qwen_quantize.calibrators.problem import HessianFactor
from qwen_quantize.formats.spec import FloatFormat, IntFormat

_BLOCK = 128


def grid_of(format: FloatFormat | IntFormat) -> tuple[int, int, float]:
    """(mantissa bits, smallest normal exponent, largest value) of a format's value grid.

    An integer format is the float grid whose every value is subnormal: one step everywhere.
    """
    if isinstance(format, IntFormat):
        return format.bits - 1, format.bits - 1, float(format.maximum)
    return format.mantissa_bits, 1 - format.bias, format.max


def compensated_rounding(
    weight: Tensor, scale: Tensor, factors: Sequence[HessianFactor], format: FloatFormat | IntFormat
) -> tuple[Tensor, float]:
    """Round `weight` column by column in the factor's order, each error spread over the columns not yet rounded.

    weight: [N, K] float32; scale: [N, K] float32 powers of two, fixed beforehand (static groups). Rounding
    is to nearest, ties to even, saturating. Lazy blocks of 128 columns keep the trailing update a matrix
    product. Several factors belong to consecutive ranges of columns; no error crosses from one to the next.

    Returns the quantized values [N, K], each a multiple of its scale that `format` holds, and the sum of
    trace(D H D^T) over the ranges, with D = W - Q, which the recursion yields for free.
    """
    if len(factors) == 1:
        return _compensated(weight, scale, factors[0], format)
    values, loss = torch.empty_like(weight), 0.0
    for columns, factor in zip(ranges_of(factors), factors, strict=True):
        values[:, columns], part = _compensated(weight[:, columns], scale[:, columns], factor, format)
        loss += part
    return values, loss


def ranges_of(factors: Sequence[HessianFactor]) -> list[slice]:
    """The columns that each factor describes."""
    ends = list(accumulate(factor.hessian.shape[0] for factor in factors))
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def _compensated(
    weight: Tensor, scale: Tensor, factor: HessianFactor, format: FloatFormat | IntFormat
) -> tuple[Tensor, float]:
    mantissa_bits, emin, maximum = grid_of(format)
    work = weight[:, factor.order].contiguous()
    scale = scale[:, factor.order]
    columns = weight.shape[1]
    loss = 0.0
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        errors = error_feedback(
            work,
            first,
            factor.upper[first:last, first:last].contiguous(),
            scale[:, first:last].contiguous(),
            mantissa_bits,
            emin,
            maximum,
        )
        loss += squared_norm(errors)
        if last < columns:
            work[:, last:].addmm_(errors, factor.upper[first:last, last:], alpha=-1)
    values = torch.empty_like(weight)
    values[:, factor.order] = work
    return values, loss


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
