"""Solver of `ue8m0`: FP8 weights in blocks with power-of-two scales."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qwen_quantize.calibrators.error_feedback import compensated_rounding, quadratic, squared_norm
from qwen_quantize.calibrators.hessian import DAMPING
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.calibrators.scale_search import ScaleChoice, search_exponents
from qwen_quantize.formats.block_kernels import dequantize_blocks, quantize_blocks
from qwen_quantize.formats.blocks import block_amax, expand_scale
from qwen_quantize.formats.spec import FloatFormat


def exact_scale(exponents: Tensor) -> Tensor:
    """2^e as float32, exactly, also where it is subnormal (e = -127)."""
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float64), exponents).float()


def solve_block_fp8(problem: LayerProblem) -> LayerSolution:
    """Choose scales by search; with calibration data also round with error compensation.

    The objective is the output error under the second moments, or the weight error without data. What is
    returned is never worse on it than round-to-nearest with the rceil rule, the baseline of the report.
    """
    spec = problem.scheme.weight
    format = spec.format
    if not isinstance(format, FloatFormat):
        raise ValueError(f"{problem.scheme.name}: block FP8 needs a float format, not {format.name}")
    rows, columns = spec.granularity.rows, spec.granularity.cols
    weight = problem.weight
    column_weight = _column_weight(problem)
    choice = search_exponents(weight, format, problem.weight_cast, rows, columns, column_weight)

    def rounded(exponents: Tensor) -> Tensor:
        return quantize_blocks(weight, exponents, format, problem.weight_cast, rows, columns)

    def values(codes: Tensor, exponents: Tensor) -> Tensor:
        return dequantize_blocks(codes, exact_scale(exponents), format, rows, columns)

    notes: list[str] = []
    codes, exponents = rounded(choice.exponents), choice.exponents
    if problem.factor is None:
        signal = _weighted_norm(weight, column_weight)
        error = float(choice.errors.sum()) / signal if signal > 0 else 0.0
        baseline = float(choice.baseline_errors.sum()) / signal if signal > 0 else 0.0
        return _solution(problem, choice, codes, exponents, error, baseline, values(codes, exponents), notes)

    hessian = problem.factor.hessian
    signal = quadratic(weight, hessian) or 1.0
    baseline_codes = rounded(choice.baseline_exponents)
    baseline = quadratic(weight - values(baseline_codes, choice.baseline_exponents), hessian)
    scale = expand_scale(exact_scale(exponents), spec.granularity, tuple(weight.shape))
    compensated, error = compensated_rounding(weight, scale, problem.factor, format)
    if error < baseline:
        # The values are on the grid already, so this only finds their codes.
        codes = quantize_blocks(compensated, exponents, format, problem.weight_cast, rows, columns)
    else:
        notes.append("error compensation was no better than the baseline; plain rounding kept")
        error = quadratic(weight - values(codes, exponents), hessian)
        if baseline < error:  # the search minds only the diagonal of the Hessian
            codes, exponents, error = baseline_codes, choice.baseline_exponents, baseline
    if problem.factor.damping > DAMPING:
        notes.append(f"Hessian damped by {problem.factor.damping:g} of its diagonal")
    return _solution(
        problem, choice, codes, exponents, error / signal, baseline / signal, values(codes, exponents), notes
    )


def _column_weight(problem: LayerProblem) -> Tensor | None:
    """[K] float32: what an error in each input feature counts; None without calibration data."""
    if problem.factor is not None:
        return problem.factor.hessian.diagonal().contiguous()
    if problem.statistics is not None:
        return problem.statistics.mean_square().float()
    return None


def _weighted_norm(weight: Tensor, column_weight: Tensor | None) -> float:
    return squared_norm(weight if column_weight is None else weight * column_weight.sqrt())


def _solution(
    problem: LayerProblem,
    choice: ScaleChoice,
    codes: Tensor,
    exponents: Tensor,
    error: float,
    baseline: float,
    values: Tensor,
    notes: list[str],
) -> LayerSolution:
    weight = problem.weight
    rows, columns = problem.scheme.weight.granularity.rows, problem.scheme.weight.granularity.cols
    noise, signal = squared_norm(weight - values), squared_norm(weight)
    zero = int((block_amax(weight, problem.scheme.weight.granularity) == 0).sum())
    grid_rows, grid_columns = exponents.shape
    partial = (grid_columns if weight.shape[0] % rows else 0) + (
        grid_rows if weight.shape[1] % columns else 0
    )
    if weight.shape[0] % rows and weight.shape[1] % columns:
        partial -= 1  # the corner was counted twice
    if zero:
        notes.append(f"{zero} all-zero blocks written with scale 1")
    return LayerSolution(
        codes=codes,
        exponents=exponents,
        error=error,
        baseline_error=baseline,
        weight_sqnr_db=10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf,
        searched_blocks=int((exponents != choice.baseline_exponents).sum()),
        zero_blocks=zero,
        partial_blocks=partial,
        notes=tuple(notes),
    )
