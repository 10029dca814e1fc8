"""The one Cholesky core that every error-compensating solver uses."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.calibrators.problem import HessianFactor

# Large beside GPTQ's 0.01: FP8 leaves little to win, and on text unlike the calibration text weak damping loses
# more than it wins (`benchmarks/constants.py`).
DAMPING = 0.2
# For four-bit weights, whose errors are worth mending, a floor under the small eigenvalues does better than damping
# alone: a direction hardly seen in calibration may well be used by other text (`benchmarks/constants.py`).
GRID_DAMPING = 0.05
GRID_FLOOR = 0.5
_MAX_RELATIVE_DAMPING = 10.0
_INVERSE_BLOCK = 512  # columns that one triangular solve makes


def hessian_of(moment: Tensor, weight_total: float) -> Tensor:
    """[K, K] float64 weighted mean of Q(x) Q(x)^T; features that never fired get 1 on the diagonal (GPTQ)."""
    hessian = moment / (weight_total or 1.0)
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1.0
    return hessian


def factorize_statistics(
    statistics: InputStatistics, damping: float = DAMPING, floor: float = 0.0
) -> tuple[HessianFactor, ...]:
    """One factor per range of features, in their order; damping and floor as in `factorize`."""
    if not statistics.second_moments:
        raise ValueError("these statistics were gathered without second moments")
    return tuple(
        factorize(hessian_of(moment, statistics.weight_total), damping, floor)
        for moment in statistics.second_moments
    )


def factorize(hessian: Tensor, damping: float = DAMPING, floor: float = 0.0) -> HessianFactor:
    """The damped Hessian and the upper factor U of its inverse, features in order of falling diagonal.

    hessian: [K, K] float64. Each diagonal entry grows by `damping` of itself and by `floor` of the median entry.
    GPTQ adds a share of the mean instead; one massive activation then outweighs every other feature and nothing is
    compensated.
    Where that is not enough for a Cholesky factorization, the share grows tenfold until it is, and the
    record says what was used. With H = R R^T, R upper, U is R^-1. At most two more [K, K] float64 matrices
    live beside `hessian`.
    """
    size = hessian.shape[0]
    diagonal = hessian.diagonal().clone()
    least = diagonal.abs().mean().clamp(min=torch.finfo(torch.float64).tiny) * 1e-8
    added = least + floor * diagonal.abs().median()
    # Features that matter most are rounded first, while most others can still mend their error.
    order = diagonal.argsort(descending=True, stable=True)
    backward = order.flip(0)
    used = damping
    while True:
        # J H J = L L^T with J the reversal gives H = R R^T with R = J L J, upper triangular.
        reversed_ = hessian[backward.unsqueeze(1), backward]
        reversed_.diagonal().add_((used * diagonal.abs() + added)[backward])
        lower, info = torch.linalg.cholesky_ex(reversed_)
        del reversed_
        if int(info) == 0:
            break
        used *= 10
        if used > _MAX_RELATIVE_DAMPING:
            raise ValueError(
                f"the Hessian of {size} features has no Cholesky factor even with damping {used}"
            )
    damped = hessian.float()
    damped.diagonal().copy_(diagonal + used * diagonal.abs() + added)
    return HessianFactor(damped, _flipped_inverse(lower), order, used)


def _flipped_inverse(lower: Tensor) -> Tensor:
    """J L^-1 J as float32 [K, K], upper triangular, for L [K, K] float64 lower triangular.

    Column blocks: the rows above a block are zero, which saves two thirds of the work and a matrix.
    """
    size = lower.shape[0]
    upper = torch.zeros(size, size)
    for first in range(0, size, _INVERSE_BLOCK):
        width = min(_INVERSE_BLOCK, size - first)
        unit = torch.zeros(size - first, width, dtype=torch.float64)
        unit[:width].fill_diagonal_(1.0)
        columns = torch.linalg.solve_triangular(lower[first:, first:], unit, upper=False)
        upper[: size - first, size - first - width : size - first] = columns.flip(0, 1)
    return upper
