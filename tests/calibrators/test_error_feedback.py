"""Error-compensated rounding against a dense float64 solver that works column by column."""

from __future__ import annotations

import pytest
import torch

from qwen_quantize.calibrators.error_feedback import compensated_rounding, output_error, quadratic
from qwen_quantize.calibrators.hessian import factorize
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat, IntFormat
from qwen_quantize.formats.tables import E4M3FN, E5M2, INT4
from tests.calibrators.test_hessian import correlated


def dense_reference(
    weight: torch.Tensor, scale: torch.Tensor, hessian: torch.Tensor, format: FloatFormat | IntFormat
) -> torch.Tensor:
    """Optimal brain quantization in order of falling diagonal, in float64: after each column the inverse
    Hessian of the columns that remain is formed anew, and the error is spread by its first row (no Cholesky,
    no blocks)."""
    order = hessian.diagonal().argsort(descending=True, stable=True)
    work, scale = weight.double()[:, order], scale.double()[:, order]
    damped = (hessian + 0.01 * torch.diag(hessian.diagonal()))[order][:, order]
    quantized = torch.zeros_like(work)
    for column in range(work.shape[1]):
        inverse = torch.linalg.inv(damped[column:, column:])
        scaled = (work[:, column] / scale[:, column]).float()
        quantized[:, column] = quantize_values(scaled, format, RNE_SATURATE).double() * scale[:, column]
        error = (work[:, column] - quantized[:, column]) / inverse[0, 0]
        work[:, column:] -= error.unsqueeze(1) * inverse[0].unsqueeze(0)
    return quantized[:, order.argsort()]


def problem(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = correlated(4 * columns, columns, seed).double()
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed + 1))
    exponents = torch.randint(-7, -4, (rows, columns), generator=torch.Generator().manual_seed(seed + 2))
    return weight, torch.ldexp(torch.ones(rows, columns), exponents), x.T @ x / x.shape[0]


@pytest.mark.parametrize("format", [E4M3FN, E5M2], ids=lambda f: f.name)
def test_equals_dense_reference(format: FloatFormat) -> None:
    weight, scale, hessian = problem(12, 160)  # 160 columns: two lazy blocks, the second partial
    found, _ = compensated_rounding(weight, scale, [factorize(hessian, 0.01)], format)
    expected = dense_reference(weight, scale, hessian, format)
    # A value on a tie may fall either way in float32; the rest must be the same code.
    assert float((found.double() != expected).double().mean()) < 0.02
    found_error = quadratic(weight - found, hessian.float())
    assert found_error == pytest.approx(quadratic(weight - expected.float(), hessian.float()), rel=0.03)


def test_integers_equal_dense_reference() -> None:
    weight, _, hessian = problem(12, 64)
    scale = torch.full_like(weight, 0.5)
    found, _ = compensated_rounding(weight, scale, [factorize(hessian, 0.01)], INT4)
    expected = dense_reference(weight, scale, hessian, INT4)
    assert float((found.double() != expected).double().mean()) < 0.02


@pytest.mark.parametrize("seed", range(3))
def test_beats_rounding_on_its_own_objective(seed: int) -> None:
    weight, scale, hessian = problem(32, 128, seed)
    rounded = quantize_values(weight / scale, E4M3FN, RNE_SATURATE) * scale
    factor = factorize(hessian, 0.01)
    compensated, loss = compensated_rounding(weight, scale, [factor], E4M3FN)
    assert quadratic(weight - compensated, hessian.float()) < 0.8 * quadratic(
        weight - rounded, hessian.float()
    )
    assert loss == pytest.approx(quadratic(weight - compensated, factor.hessian), rel=1e-3)


def test_identity_hessian_is_plain_rounding() -> None:
    weight, scale, _ = problem(9, 140)
    factor = factorize(torch.eye(140, dtype=torch.float64))
    expected = quantize_values(weight / scale, E4M3FN, RNE_SATURATE) * scale
    assert torch.equal(compensated_rounding(weight, scale, [factor], E4M3FN)[0], expected)


def test_native_equals_torch_and_threads_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, scale, hessian = problem(70, 150)
    factor = factorize(hessian, 0.01)
    native, _ = compensated_rounding(weight, scale, [factor], E4M3FN)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone, _ = compensated_rounding(weight, scale, [factor], E4M3FN)
    torch.set_num_threads(threads)
    assert torch.equal(native, alone)
    monkeypatch.setattr("qwen_quantize.calibrators.native._library", lambda *_: None)
    assert torch.equal(native, compensated_rounding(weight, scale, [factor], E4M3FN)[0])


def test_ranges_are_compensated_separately() -> None:
    weight, scale, hessian = problem(12, 160)
    parts = [factorize(hessian[:96, :96], 0.01), factorize(hessian[96:, 96:], 0.01)]
    found, loss = compensated_rounding(weight, scale, parts, E4M3FN)
    first, first_loss = compensated_rounding(weight[:, :96], scale[:, :96], parts[:1], E4M3FN)
    second, second_loss = compensated_rounding(weight[:, 96:], scale[:, 96:], parts[1:], E4M3FN)
    assert torch.equal(found, torch.cat([first, second], dim=1))
    assert loss == pytest.approx(first_loss + second_loss)
    assert loss == pytest.approx(output_error(weight - found, parts), rel=1e-3)
