"""Conversion at memory speed gives what the solver without data gives: the same codes and exponents, bit for bit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qwen_quantize.calibrators import block_convert
from qwen_quantize.calibrators.block_convert import (
    BlockConversion,
    NotFiniteError,
    find_not_finite,
    quantize_rows,
    requantize_blocks,
)
from qwen_quantize.calibrators.block_fp8 import exact_scale, solve_block_fp8
from qwen_quantize.calibrators.problem import LayerProblem
from qwen_quantize.calibrators.scale_search import search_exponents
from qwen_quantize.formats.block_kernels import dequantize_blocks
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.tables import E4M3FN

TRUNCATING = CastRule(Rounding.RTZ, Overflow.SATURATE, Subnormals.KEEP)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHAPES = [(1, 1), (128, 128), (130, 300), (64, 33), (3, 1100)]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codes_like(shape: tuple[int, ...], seed: int) -> Tensor:
    """Any E4M3 codes but NaN."""
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(seed))
    return torch.where((codes & 0x7F) == 0x7F, codes - 9, codes)


def check(
    found: BlockConversion, weight: Tensor, block: tuple[int, int], rule: CastRule = RNE_SATURATE
) -> None:
    """Against the search, and the solver's relative errors where its float32 norms do not overflow."""
    choice = search_exponents(weight, E4M3FN, rule, *block, None)
    scheme = SCHEMES["ue8m0"].with_block(*block)
    solution = solve_block_fp8(LayerProblem("x", weight, scheme, rule))
    assert torch.equal(found.codes, solution.quantized.codes)
    assert torch.equal(exact_scale(found.exponents), solution.quantized.scale)
    assert found.searched_blocks == solution.searched_blocks
    assert found.zero_blocks == solution.zero_blocks
    assert found.noise == pytest.approx(float(choice.errors.sum()), rel=1e-9, abs=0)
    assert found.baseline_noise == pytest.approx(float(choice.baseline_errors.sum()), rel=1e-9, abs=0)
    assert found.signal == pytest.approx(float(weight.double().square().sum()), rel=1e-9, abs=0)
    if found.signal and math.isfinite(float(weight.square().sum())) and found.signal > 1e-20:
        assert solution.error == pytest.approx(found.noise / found.signal, rel=1e-5)


@pytest.fixture(params=["native", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to convert: the compiled kernels, and the general ones without a compiler."""
    if request.param == "torch":
        monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    else:
        assert block_convert._library(RNE_SATURATE) is not None, "these tests need a C compiler"
    return str(request.param)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (1, 32), (100, 700)])
def test_floats(shape: tuple[int, int], block: tuple[int, int]) -> None:
    for seed, dtype in enumerate(DTYPES):
        weight = (torch.randn(shape, generator=generator(seed)) * 0.02).to(dtype)
        check(quantize_rows(weight, block, RNE_SATURATE, threads=2), weight.float(), block)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("block", [(128, 128), (32, 32), (100, 700)])
def test_codes(shape: tuple[int, int], block: tuple[int, int]) -> None:
    codes = codes_like(shape, 1)
    grid = (math.ceil(shape[0] / block[0]), math.ceil(shape[1] / block[1]))
    scale = torch.rand(grid, generator=generator(2)) * 1e-3 + 1e-5
    weight = dequantize_blocks(codes, scale, E4M3FN, *block)
    check(requantize_blocks(codes, scale, block, RNE_SATURATE, threads=2), weight, block)


@pytest.mark.parametrize("exponent", [-149, -140, -126, -100, -20, 0, 7, 8, 9, 20, 100, 119, 120, 127])
def test_magnitudes_from_subnormal_to_huge(exponent: int) -> None:
    """Scales at both ends of E8M0, and weights among which float32's own subnormals are."""
    spread = torch.randn(64, 96, generator=generator(3)).double() * 0.1
    spread *= torch.ldexp(
        torch.ones_like(spread), torch.randint(-40, 1, spread.shape, generator=generator(4))
    )
    weight = torch.ldexp(spread, torch.tensor(exponent)).float()
    check(quantize_rows(weight, (32, 32), RNE_SATURATE), weight, (32, 32))
    codes = codes_like((64, 96), 5)
    scale = torch.ldexp(torch.rand(2, 3, generator=generator(6)) + 1, torch.tensor(min(exponent, 117)))
    weight = dequantize_blocks(codes, scale, E4M3FN, 32, 32)
    check(requantize_blocks(codes, scale, (32, 32), RNE_SATURATE), weight, (32, 32))


def test_the_smallest_error_beside_a_huge_weight() -> None:
    """In units of the scale the small weight is no float32 any more."""
    weight = torch.zeros(8, 8)
    weight[0, 0], weight[0, 1] = 2.0**100, 2.0**-149
    found = quantize_rows(weight, (8, 8), RNE_SATURATE)
    assert found.noise == 2.0**-298
    check(found, weight, (8, 8))


def test_every_float16() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).reshape(256, 256)
    halves = bits.view(torch.float16)
    weight = torch.where(halves.isfinite(), halves, torch.zeros_like(halves))
    check(quantize_rows(weight, (16, 8), RNE_SATURATE), weight.float(), (16, 8))


def test_power_of_two_scales_change_no_value() -> None:
    codes = codes_like((256, 256), 7)
    codes[0, 0] = codes[0, 128] = codes[128, 0] = codes[128, 128] = 0x7E  # every block reaches 448
    scale = torch.tensor([[0.5, 2.0**-20], [1.0, 8.0]])
    found = requantize_blocks(codes, scale, (128, 128), RNE_SATURATE)
    assert torch.equal(found.codes, codes)
    assert torch.equal(torch.exp2(found.exponents.float()), scale)
    assert found.noise == 0


def test_zero_blocks_and_signs() -> None:
    codes = torch.zeros(64, 64, dtype=torch.uint8)
    codes[0, :32] = 0x80  # negative zeros stay what they are
    codes[32:, 32:] = codes_like((32, 32), 8)
    scale = torch.tensor([[1.3, 0.0], [1e-3, -1.7]])
    codes[:32, 32:] = codes_like((32, 32), 9)  # times a scale of zero
    found = requantize_blocks(codes, scale, (32, 32), RNE_SATURATE)
    check(found, dequantize_blocks(codes, scale, E4M3FN, 32, 32), (32, 32))
    assert found.zero_blocks == 3
    assert found.exponents.flatten().tolist()[:3] == [0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 255).filter(lambda code: code & 0x7F != 0x7F), min_size=1, max_size=48),
    st.floats(2.0**-149, 2.0**118, width=32),
    st.integers(1, 9),
)
def test_few_codes(values: list[int], scale: float, columns: int) -> None:
    """Blocks of a handful of elements, where ties and near ties of the two exponents are common."""
    rows = math.ceil(len(values) / columns)
    codes = torch.tensor(values + [values[0]] * (rows * columns - len(values)), dtype=torch.uint8)
    codes, grid = codes.reshape(rows, columns), torch.tensor([[scale]])
    block = (max(rows, 2), 12)
    weight = dequantize_blocks(codes, grid, E4M3FN, *block)
    check(requantize_blocks(codes, grid, block, RNE_SATURATE), weight, block)
    check(quantize_rows(weight, block, RNE_SATURATE), weight, block)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(-1.5 * 2.0**127, 1.5 * 2.0**127, width=32), min_size=1, max_size=40), st.integers(1, 9)
)
def test_any_floats(values: list[float], columns: int) -> None:
    rows = math.ceil(len(values) / columns)
    weight = torch.tensor(values + [0.0] * (rows * columns - len(values))).reshape(rows, columns)
    check(quantize_rows(weight, (2, 4), RNE_SATURATE), weight, (2, 4))
    bfloat = weight.bfloat16()
    bfloat = torch.where(bfloat.isfinite(), bfloat, torch.zeros_like(bfloat))
    check(quantize_rows(bfloat, (2, 4), RNE_SATURATE), bfloat.float(), (2, 4))


def test_other_casts_take_the_general_kernels() -> None:
    weight = torch.randn(60, 70, generator=generator(10))
    check(quantize_rows(weight, (32, 32), TRUNCATING), weight, (32, 32), TRUNCATING)
    codes, scale = codes_like((60, 70), 11), torch.rand(2, 3, generator=generator(12)) + 0.1
    found = requantize_blocks(codes, scale, (32, 32), TRUNCATING)
    check(found, dequantize_blocks(codes, scale, E4M3FN, 32, 32), (32, 32), TRUNCATING)


def test_both_ways_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = codes_like((100, 200), 13), torch.rand(4, 7, generator=generator(14)) + 0.1
    weight = torch.randn(100, 200, generator=generator(15)).bfloat16()
    native = (
        requantize_blocks(codes, scale, (32, 32), RNE_SATURATE),
        quantize_rows(weight, (32, 32), RNE_SATURATE),
    )
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    twin = (
        requantize_blocks(codes, scale, (32, 32), RNE_SATURATE),
        quantize_rows(weight, (32, 32), RNE_SATURATE),
    )
    for ours, theirs in zip(native, twin, strict=True):
        assert torch.equal(ours.codes, theirs.codes)
        assert torch.equal(ours.exponents, theirs.exponents)
        assert ours.noise == pytest.approx(theirs.noise, rel=1e-9, abs=0)
        assert ours.signal == pytest.approx(theirs.signal, rel=1e-9, abs=0)
        assert ours.searched_blocks == theirs.searched_blocks


def test_near_ties_are_decided_as_the_search_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sums over counts cannot decide, errors are added as elsewhere; here that is made so for every block."""
    source, always = block_convert.SOURCE.read_text(), tmp_path / "always.c"
    assert source.count("<= most * result[0]") == 1
    always.write_text(source.replace("<= most * result[0]", "<= 1e300"))
    for seed, shape in enumerate(((128, 128), (100, 77), (3, 5))):
        codes, scale = codes_like(shape, seed), torch.tensor([[1.0 + seed / 3]])
        weight = dequantize_blocks(codes, scale, E4M3FN, 128, 128)
        choice = search_exponents(weight, E4M3FN, RNE_SATURATE, 128, 128, None)
        with monkeypatch.context() as patch:
            patch.setattr(block_convert, "SOURCE", always)
            found = requantize_blocks(codes, scale, (128, 128), RNE_SATURATE)
        assert found.noise == float(choice.errors)  # to the last bit
        assert found.baseline_noise == float(choice.baseline_errors)
        check(found, weight, (128, 128))


def test_threads_change_nothing() -> None:
    weight = torch.randn(300, 500, generator=generator(16))
    one, four = (quantize_rows(weight, (32, 32), RNE_SATURATE, threads=threads) for threads in (1, 4))
    assert torch.equal(one.codes, four.codes)
    assert (one.noise, one.baseline_noise, one.signal) == (four.noise, four.baseline_noise, four.signal)


@pytest.mark.usefixtures("either")
def test_the_output_may_be_given() -> None:
    weight = torch.randn(40, 50, generator=generator(17)).half()
    out = torch.zeros(40 * 50 + 3, dtype=torch.uint8)[3:].view(40, 50)
    found = quantize_rows(weight, (32, 32), RNE_SATURATE, out=out)
    assert found.codes.data_ptr() == out.data_ptr()
    assert torch.equal(out, quantize_rows(weight, (32, 32), RNE_SATURATE).codes)
    with pytest.raises(ValueError, match="out must be"):
        quantize_rows(weight, (32, 32), RNE_SATURATE, out=out[:3])


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_floats_that_are_not_finite(dtype: torch.dtype, value: float) -> None:
    weight = torch.randn(70, 90, generator=generator(18)).to(dtype)
    weight[65, 80] = weight[33, 40] = value
    with pytest.raises(NotFiniteError, match=r"\[33, 40\]") as caught:
        quantize_rows(weight, (32, 32), RNE_SATURATE)
    assert caught.value.place == (33, 40)
    assert str(caught.value.value) == str(value)
    assert str(find_not_finite(weight)) == str(((33, 40), value))


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_not_a_number(code: int) -> None:
    codes, scale = codes_like((70, 90), 19), torch.ones(3, 3)
    codes[50, 60] = code
    with pytest.raises(NotFiniteError, match=r"\[50, 60\] is -?nan"):
        requantize_blocks(codes, scale, (32, 32), RNE_SATURATE)


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("value", [math.nan, math.inf, 2.0**125])
def test_scales_that_are_not_finite(value: float) -> None:
    codes, scale = codes_like((70, 90), 20), torch.ones(3, 3)
    codes[32:64, 64:] = 0
    codes[40, 70] = 0x7E
    scale[1, 2] = value
    with pytest.raises(NotFiniteError) as caught:
        requantize_blocks(codes, scale, (32, 32), RNE_SATURATE)
    # Zero times infinity is no number either; a large scale overflows only where the code is large.
    assert caught.value.place == ((40, 70) if value == 2.0**125 else (32, 64))


def test_finite_tensors_of_any_shape() -> None:
    assert find_not_finite(torch.zeros(3, 4, 5)) is None
    assert find_not_finite(torch.zeros(0)) is None
    large = torch.zeros(3, 70000)
    large[2, 69999] = math.inf
    assert find_not_finite(large) == ((2, 69999), math.inf)
    assert find_not_finite(large.double()) == ((2, 69999), math.inf)
    assert find_not_finite(torch.tensor(-math.inf)) == ((), -math.inf)
    eight = torch.zeros(2, 3, dtype=torch.uint8)
    assert find_not_finite(eight.view(torch.float8_e4m3fn)) is None
    eight[1, 0] = 0x7F
    found = find_not_finite(eight.view(torch.float8_e4m3fn))
    assert found is not None
    assert found[0] == (1, 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda: quantize_rows(torch.zeros(4, 4, dtype=torch.float64), (2, 2), RNE_SATURATE),
        lambda: quantize_rows(torch.zeros(4), (2, 2), RNE_SATURATE),
        lambda: quantize_rows(torch.zeros(4, 4), (0, 2), RNE_SATURATE),
        lambda: requantize_blocks(torch.zeros(4, 4), torch.ones(2, 2), (2, 2), RNE_SATURATE),
        lambda: requantize_blocks(
            torch.zeros(4, 4, dtype=torch.uint8), torch.ones(1, 2), (2, 2), RNE_SATURATE
        ),
    ],
)
def test_bad_arguments(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r"must be|need"):
        call()
