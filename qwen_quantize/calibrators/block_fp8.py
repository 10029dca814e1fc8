"""Solver of `ue8m0`: FP8 weights in blocks with power-of-two scales."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.error_feedback import compensated_rounding, output_error, squared_norm
from qwen_quantize.calibrators.hessian import DAMPING
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.calibrators.scale_search import search_exponents
from qwen_quantize.formats.block_kernels import dequantize_blocks, quantize_blocks
from qwen_quantize.formats.blocks import QuantizedTensor, block_amax, expand_scale
from qwen_quantize.formats.scales import ScaleRule, scale_exponents
from qwen_quantize.formats.spec import FloatFormat

STRIP_VALUES = 1 << 24  # of a weight that are solved together; about six copies of them live at a time


def exact_scale(exponents: Tensor) -> Tensor:
    """2^e as float32, exactly, also where it is subnormal (e = -127)."""
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents).float()


def solve_block_fp8(problem: LayerProblem) -> LayerSolution:
    """Choose scales by search; with calibration data also round with error compensation.

    The objective is the output error under the second moments, or the weight error without data. What is
    returned is never worse on it than round-to-nearest with the rceil rule, the baseline of the report. Rows
    do not depend on each other, so a large weight is solved in strips of whole blocks: memory beside weight
    and result does not grow with it.
    """
    spec = problem.scheme.weight
    if not isinstance(spec.format, FloatFormat):
        raise ValueError(f"{problem.scheme.name}: block FP8 needs a float format, not {spec.format.name}")
    total, columns = problem.weight.shape
    rows = spec.granularity.rows
    step = max(rows, STRIP_VALUES // columns // rows * rows)
    column_weight = _column_weight(problem)
    strips = [
        _solve_strip(problem, problem.weight[first : first + step], column_weight)
        for first in range(0, total, step)
    ]
    return _solution(problem, strips)


@dataclass(frozen=True, slots=True)
class _Strip:
    """Some rows of the result; sums of squares over them."""

    codes: Tensor
    exponents: Tensor
    error: float
    baseline_error: float
    signal: float
    noise: float
    weight_square: float
    searched_blocks: int
    zero_blocks: int
    compensation_refused: bool = False


def _solve_strip(problem: LayerProblem, weight: Tensor, column_weight: Tensor | None) -> _Strip:
    spec = problem.scheme.weight
    format = spec.format
    assert isinstance(format, FloatFormat)
    rows, columns = spec.granularity.rows, spec.granularity.cols
    weight = weight.contiguous()
    target = problem.towards(weight)
    choice = search_exponents(target, format, problem.weight_cast, rows, columns, column_weight)

    def rounded(values: Tensor, exponents: Tensor) -> Tensor:
        return quantize_blocks(values, exponents, format, problem.weight_cast, rows, columns)

    def values(codes: Tensor, exponents: Tensor) -> Tensor:
        return dequantize_blocks(codes, exact_scale(exponents), format, rows, columns)

    def strip(codes: Tensor, exponents: Tensor, error: float, baseline: float, refused: bool) -> _Strip:
        return _Strip(
            codes=codes,
            exponents=exponents,
            error=error,
            baseline_error=baseline,
            signal=_signal(problem, target, column_weight),
            noise=squared_norm(target - values(codes, exponents)),
            weight_square=squared_norm(target),
            searched_blocks=int((exponents != choice.baseline_exponents).sum()),
            zero_blocks=int((block_amax(target, spec.granularity) == 0).sum()),
            compensation_refused=refused,
        )

    exponents = choice.exponents
    if not problem.factors:
        error, baseline = float(choice.errors.sum()), float(choice.baseline_errors.sum())
        return strip(rounded(target, exponents), exponents, error, baseline, False)
    factors = problem.factors
    baseline_exponents = choice.baseline_exponents
    if problem.gain is not None:  # the baseline knows nothing of the chip
        amax = block_amax(weight, spec.granularity)
        baseline_exponents = scale_exponents(amax, format, ScaleRule.RCEIL)
    baseline_codes = rounded(weight, baseline_exponents)
    baseline = output_error(target - values(baseline_codes, baseline_exponents), factors)
    scale = expand_scale(exact_scale(exponents), spec.granularity, tuple(target.shape))
    compensated, error = compensated_rounding(target, scale, factors, format)
    if error < baseline:
        # The values are on the grid already, so this only finds their codes.
        codes = quantize_blocks(compensated, exponents, format, problem.weight_cast, rows, columns)
        return strip(codes, exponents, error, baseline, False)
    codes = rounded(target, exponents)
    error = output_error(target - values(codes, exponents), factors)
    if baseline < error:  # the search minds only the diagonal of the Hessian
        return strip(baseline_codes, baseline_exponents, baseline, baseline, True)
    return strip(codes, exponents, error, baseline, True)


def _signal(problem: LayerProblem, weight: Tensor, column_weight: Tensor | None) -> float:
    """What the error is relative to: the same objective of the weight itself."""
    if problem.factors:
        return output_error(weight, problem.factors)
    return squared_norm(weight if column_weight is None else weight * column_weight.sqrt())


def _column_weight(problem: LayerProblem) -> Tensor | None:
    """[K] float32: what an error in each input feature counts; None without calibration data."""
    if problem.factors:
        return torch.cat([factor.hessian.diagonal() for factor in problem.factors])
    if problem.statistics is not None:
        return problem.statistics.mean_square().float()
    return None


def _solution(problem: LayerProblem, strips: list[_Strip]) -> LayerSolution:
    signal = sum(strip.signal for strip in strips)
    noise = sum(strip.noise for strip in strips)
    weight_square = sum(strip.weight_square for strip in strips)
    exponents = torch.cat([strip.exponents for strip in strips])
    granularity = problem.scheme.weight.granularity
    zero = sum(strip.zero_blocks for strip in strips)
    return LayerSolution(
        quantized=QuantizedTensor(
            codes=strips[0].codes if len(strips) == 1 else torch.cat([strip.codes for strip in strips]),
            scale=exact_scale(exponents),
            zero_point=None,
            format=problem.scheme.weight.format,
            granularity=granularity,
            shape=tuple(problem.weight.shape),
        ),
        error=sum(strip.error for strip in strips) / signal if signal > 0 else 0.0,
        baseline_error=sum(strip.baseline_error for strip in strips) / signal if signal > 0 else 0.0,
        weight_sqnr_db=10 * math.log10(weight_square / noise) if noise > 0 < weight_square else math.inf,
        searched_blocks=sum(strip.searched_blocks for strip in strips),
        zero_blocks=zero,
        partial_blocks=partial_blocks(
            (problem.weight.shape[0], problem.weight.shape[1]), (granularity.rows, granularity.cols)
        ),
        notes=_notes(problem, strips, zero),
    )


def partial_blocks(shape: tuple[int, int], block: tuple[int, int]) -> int:
    """How many blocks of (rows, columns) stand at the edge of a weight [N, K] with less than their size."""
    down, across = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    below, right = shape[0] % block[0] != 0, shape[1] % block[1] != 0
    return across * below + down * right - (below and right)  # the corner is counted twice


def _notes(problem: LayerProblem, strips: list[_Strip], zero_blocks: int) -> tuple[str, ...]:
    notes = []
    if any(strip.compensation_refused for strip in strips):
        notes.append("error compensation was no better than the baseline; plain rounding kept")
    damping = max((factor.damping for factor in problem.factors), default=0.0)
    if damping > DAMPING:
        notes.append(f"Hessian damped by {damping:g} of its diagonal")
    if len(problem.factors) > 1:
        ranges = len(problem.factors)
        notes.append(f"features compensated in {ranges} separate ranges, to stay under the memory ceiling")
    if zero_blocks:
        notes.append(f"{zero_blocks} all-zero blocks written with scale 1")
    return tuple(notes)
