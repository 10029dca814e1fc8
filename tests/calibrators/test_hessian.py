"""The Cholesky core against dense float64 algebra."""

from __future__ import annotations

import pytest
import torch

from qwen_quantize.calibrators.hessian import factorize, hessian_of
from qwen_quantize.calibrators.observers import InputObserver


def correlated(rows: int, features: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(rows, features, generator=generator)
    mix = torch.eye(features) + 1.2 * torch.randn(features, features, generator=generator) / features**0.5
    return (base @ mix) * torch.linspace(0.2, 3, features)


def test_factor_is_the_upper_cholesky_of_the_inverse() -> None:
    x = correlated(400, 48).double()
    hessian = x.T @ x / 400
    factor = factorize(hessian, damping=0.01)
    damped = hessian + 0.01 * torch.diag(hessian.diagonal())
    ordered = damped[factor.order][:, factor.order]
    assert ordered.diagonal().tolist() == sorted(damped.diagonal().tolist(), reverse=True)
    expected = torch.linalg.cholesky(torch.linalg.inv(ordered), upper=True)
    torch.testing.assert_close(factor.upper.double(), expected, rtol=1e-5, atol=1e-5)
    assert factor.damping == 0.01


def test_floor_is_a_share_of_the_median_diagonal() -> None:
    x = correlated(400, 49).double()
    x[:, 7] *= 1000  # a massive feature does not move it
    hessian = x.T @ x / 400
    factor = factorize(hessian, damping=0.05, floor=0.5)
    diagonal = hessian.diagonal()
    expected = hessian + torch.diag(0.05 * diagonal + 0.5 * diagonal.median())
    torch.testing.assert_close(factor.hessian.double(), expected, rtol=1e-4, atol=1e-5)
    ordered = expected[factor.order][:, factor.order]
    identity = factor.upper.double() @ ordered @ factor.upper.double().T
    torch.testing.assert_close(identity, torch.eye(49, dtype=torch.float64), rtol=0, atol=1e-3)


def test_singular_hessian_is_damped_more_and_says_so() -> None:
    hessian = torch.eye(6, dtype=torch.float64)
    hessian[0, 1] = hessian[1, 0] = 1.05  # not positive definite: only a larger share mends it
    assert factorize(hessian, 0.01).damping > 0.01


def test_hopeless_hessian_is_refused() -> None:
    hessian = torch.full((4, 4), 100.0, dtype=torch.float64).fill_diagonal_(1)
    with pytest.raises(ValueError, match="4 features"):
        factorize(hessian)


def test_dead_features_get_a_unit_diagonal() -> None:
    observer = InputObserver(4, None, (4,))
    x = correlated(50, 4)
    x[:, 2] = 0
    observer.observe(x)
    statistics = observer.statistics()
    hessian = hessian_of(statistics.second_moments[0], statistics.weight_total)
    assert hessian[2, 2] == 1
    assert torch.equal(hessian[2, [0, 1, 3]], torch.zeros(3, dtype=torch.float64))
