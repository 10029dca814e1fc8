"""Gains that make up for a narrow accumulator, and the overflow that an fp16 one has ahead."""

from __future__ import annotations

import math

import pytest
import torch

from qwen_quantize.calibrators.block_fp8 import solve_block_fp8
from qwen_quantize.calibrators.hessian import factorize_statistics
from qwen_quantize.calibrators.observers import InputObserver, TokenSample
from qwen_quantize.calibrators.output_gain import (
    half_headroom,
    output_gain,
    solve_with_output_gain,
)
from qwen_quantize.calibrators.problem import LayerProblem
from qwen_quantize.chip_profiles.dot_unit import with_any_exponent
from qwen_quantize.formats.blocks import Granularity, QuantizedTensor
from qwen_quantize.formats.cast_rule import RNE_SATURATE, Rounding
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.dot_record import DotUnit, Order
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.tables import E4M3FN

K, OUT = 256, 64


def unit_of(bits: int) -> DotUnit:
    operand = with_any_exponent(E4M3FN)
    return DotUnit(
        "narrow", operand, operand, Order.ALIGNED, products=16, fraction_bits=bits,
        alignment_rounding=Rounding.RTZ, mantissa_bits=23, final_rounding=Rounding.RNE, promotion_interval=None,
    )  # fmt: skip


def cast(x: torch.Tensor) -> torch.Tensor:
    return fake_quantize_groups(x, E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 128)


def problem_of(tokens: int) -> tuple[LayerProblem, TokenSample]:
    # Products of one sign: every sum grows, so that what alignment drops is always in the same direction.
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(tokens, K, generator=generator) + 0.1
    weight = torch.rand(OUT, K, generator=generator) + 0.1
    observer = InputObserver(K, cast, (K,), 512)
    observer.observe(x)
    statistics = observer.statistics()
    assert statistics.sample is not None
    problem = LayerProblem(
        "linear", weight, SCHEMES["ue8m0"], RNE_SATURATE, statistics, factorize_statistics(statistics)
    )
    return problem, statistics.sample


def test_gain_is_the_least_squares_of_each_output_drawn_to_the_common_one() -> None:
    emulated = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    own = torch.linspace(1.0, 1.1, 8)
    gain = output_gain(emulated * own, emulated, torch.ones(4096))
    common = float((emulated.square() * own).sum() / emulated.square().sum())
    assert torch.allclose(gain, (4096 * own + 256 * common) / (4096 + 256), atol=1e-5)


def test_gain_of_nothing_is_one() -> None:
    assert output_gain(torch.ones(4, 3), torch.zeros(4, 3), torch.ones(4)).tolist() == [1.0] * 3


def test_weights_make_up_for_what_a_narrow_unit_drops() -> None:
    problem, sample = problem_of(512)
    unit = unit_of(6)
    plain, gained = (
        solve_block_fp8(problem),
        solve_with_output_gain(problem, solve_block_fp8, unit, sample),
    )
    fresh = cast(torch.rand(300, K, generator=torch.Generator().manual_seed(7)) + 0.1)
    exact = fresh @ problem.weight.T
    errors = [
        float((emulated_matmul(fresh, solution.quantized.dequantize(), unit) - exact).square().mean())
        for solution in (plain, gained)
    ]
    assert errors[1] < errors[0] / 2
    assert any("output gain" in note and "unseen" in note for note in gained.notes)


def test_gain_is_refused_where_sums_lose_nothing() -> None:
    problem, sample = problem_of(512)
    found = solve_with_output_gain(problem, solve_block_fp8, unit_of(40), sample)
    assert torch.equal(found.quantized.codes, solve_block_fp8(problem).quantized.codes)
    assert any("refused" in note for note in found.notes)


def test_too_few_tokens_fit_nothing() -> None:
    problem, sample = problem_of(512)
    few = TokenSample(sample.inputs[:10], sample.weight[:10])
    found = solve_with_output_gain(problem, solve_block_fp8, unit_of(6), few)
    assert any("10 tokens are too few" in note for note in found.notes)


@pytest.mark.parametrize("group", [64, 128])
def test_fp16_headroom_is_the_largest_running_sum_of_codes(group: int) -> None:
    inputs = torch.full((1, K), 448.0)
    codes = torch.full((2, K), 0x7E, dtype=torch.uint8)  # 448
    weight = QuantizedTensor(codes, torch.ones(2, K // group), None, E4M3FN, Granularity.group(group), (2, K))
    sample = TokenSample(inputs, torch.ones(1))
    assert math.isclose(half_headroom(sample, weight, group, 16), 448 * 448 * group / 65504, rel_tol=1e-6)
