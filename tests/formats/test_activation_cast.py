"""Casts of activations: against plain float32 and float64 references, and the C kernels against their twins."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from qwen_quantize.formats.activation_cast import (
    ActivationCast,
    GroupCast,
    NvFp4Cast,
    ShiftedCast,
    TensorCast,
    TokenCast,
)
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.tables import BF16, E2M1, E4M3FN, FP16, HIF8, INT8

RNA = CastRule(Rounding.RNA, Overflow.SATURATE, Subnormals.KEEP)
RTZ = replace(RNE_SATURATE, rounding=Rounding.RTZ)
CASTS: tuple[ActivationCast, ...] = (
    GroupCast(E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 32),
    TokenCast(INT8, RNE_SATURATE),
    TokenCast(INT8, RTZ, path=(FP16,)),
    TokenCast(INT8, RNE_SATURATE, BF16),
    TokenCast(E4M3FN, RNE_SATURATE),
    TokenCast(E4M3FN, RTZ, group_size=48),
    TokenCast(HIF8, RNA),
    TensorCast(INT8, RNE_SATURATE, 0.03),
    TensorCast(E4M3FN, RTZ, 0.03),
    ShiftedCast(INT8, RNE_SATURATE),
    ShiftedCast(INT8, RTZ, 0.03, -7),
    NvFp4Cast(E2M1, RNE_SATURATE, None),
    NvFp4Cast(E2M1, RNE_SATURATE, 2.0**-9 / 3),
)


def draw(rows: int, columns: int, seed: int) -> Tensor:
    """Tokens of very different sizes, with outliers, zeros, and one token of zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x[:, :3] *= 30
    x *= 10.0 ** torch.randint(-12, 6, (rows, 1), generator=generator)
    x[torch.rand(x.shape, generator=generator) < 0.05] = 0
    x[rows // 2] = 0
    return x


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def test_int8_per_token_is_that_of_the_int8_kernel() -> None:
    x = draw(64, 200, seed=1)
    amax = x.abs().amax(dim=1, keepdim=True)
    multiplier = torch.where(amax > 0, torch.full_like(amax, 127) / amax, 0)
    codes = torch.round(x * multiplier).clamp(-128, 127)
    assert codes.abs().max() == 127
    found, scale = TokenCast(INT8, RNE_SATURATE).operands(x)
    assert torch.equal(found, codes)
    used = amax[:, 0] > 0
    assert scale is not None
    assert torch.equal(scale[used], (amax / 127)[used])
    assert torch.equal(TokenCast(INT8, RNE_SATURATE)(x), codes * (amax / 127))


def test_fp8_per_token_is_that_of_the_fp8_kernel() -> None:
    x = draw(64, 200, seed=2)
    scale = (x.abs().amax(dim=1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    cast = TokenCast(E4M3FN, RNE_SATURATE)
    found, scales = cast.operands(x)
    assert torch.equal(found, codes)
    assert scales is not None
    assert torch.equal(scales, scale)
    assert same_bits(cast(x), codes * scale)


def test_hif8_per_token_is_the_nearest_value_and_the_largest_becomes_15() -> None:
    x = draw(16, 96, seed=3)
    cast = TokenCast(HIF8, RNA)
    codes, scale = cast.operands(x)
    assert scale is not None
    table = np.array(sorted({v for v in HIF8.values if math.isfinite(v)}))
    exact = (x / scale).clamp(-15, 15).double().numpy()
    for value, code in zip(exact.flatten(), codes.double().numpy().flatten(), strict=True):
        gaps = np.abs(table - value)
        nearest = table[gaps == gaps.min()]
        assert code == (nearest[np.abs(nearest).argmax()])
    used = x.abs().amax(dim=1) > 0
    assert torch.equal(codes.abs().amax(dim=1)[used], torch.full((int(used.sum()),), 15.0))


def test_nvfp4_against_a_loop_over_blocks() -> None:
    x = draw(12, 70, seed=4) * 1e6
    for given_scale in (None, 0.004):
        found, outer = NvFp4Cast(E2M1, RNE_SATURATE, given_scale).operands(x)
        ladder = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
        even = np.array([0, 2, 4, 6])
        for row, values in enumerate(x.numpy()):
            largest = np.abs(values).max()
            second = (
                np.float32(largest / np.float32(2688)) if given_scale is None else np.float32(given_scale)
            )
            second = np.float32(1) if largest == 0 and given_scale is None else second
            assert outer[row, 0] == second
            for start in range(0, 70, 16):
                block = values[start : start + 16]
                wanted = np.float32(np.float32(np.abs(block).max() / np.float32(6)) / second)
                narrow = torch.tensor(wanted).clamp(max=448).to(torch.float8_e4m3fn).float().numpy()
                for offset, value in enumerate(block):
                    total = np.float32(narrow * second)
                    scaled = 0.0 if total == 0 else abs(float(np.float32(value / total)))
                    gaps = np.abs(ladder - min(scaled, 6))
                    rank = min(np.flatnonzero(gaps == gaps.min()), key=lambda r: (r not in even, r))
                    expected = math.copysign(ladder[rank] * float(narrow), value)
                    assert float(found[row, start + offset]) == expected


def test_zero_points_are_those_of_the_int8_kernel() -> None:
    x = draw(64, 200, seed=8)
    x += 0.7 * x.abs().amax(dim=1, keepdim=True)
    least, most = x.amin(dim=1, keepdim=True), x.amax(dim=1, keepdim=True)
    scale = (most - least) / torch.full_like(most, 255)
    spread = (most > least)[:, 0]
    zero = torch.round(-128 - least / scale)
    codes = (torch.round(x * (torch.ones_like(scale) / scale)) + zero).clamp(-128, 127)
    assert codes[spread].min() == -128
    assert codes[spread].max() == 127
    found = ShiftedCast(INT8, RNE_SATURATE)(x)
    assert torch.equal(found[spread], ((codes - zero) * scale)[spread])
    equal = torch.full((1, 40), 3.7)
    assert float((ShiftedCast(INT8, RNE_SATURATE)(equal) - equal).abs().max()) <= 3.7 * 2.0**-20
    fixed = ShiftedCast(INT8, RNE_SATURATE, 0.5, -100)
    assert fixed(torch.tensor([[-20.0, -1.3, 0.0, 120.0]])).tolist() == [[-14.0, -1.5, 0.0, 113.5]]


def test_a_path_rounds_twice() -> None:
    """2.5 + 2^-11 in units of the scale: fp16 makes 2.5 of it, and nearest-even 2 of that."""
    x = torch.tensor([[127.0, 2.5 + 2.0**-11]])
    assert TokenCast(INT8, RNE_SATURATE).operands(x)[0].tolist() == [[127, 3]]
    assert TokenCast(INT8, RNE_SATURATE, path=(FP16,)).operands(x)[0].tolist() == [[127, 2]]
    static = TensorCast(INT8, RNE_SATURATE, 1.0)
    assert static(x).tolist() == [[127, 3]]
    assert replace(static, path=(FP16,))(x).tolist() == [[127, 2]]


def test_static_scales_saturate_where_the_kernels_do() -> None:
    x = torch.tensor([[-300.0, -0.6, 0.5, 300.0]])
    assert TensorCast(INT8, RNE_SATURATE, 1.0)(x).tolist() == [[-128, -1, 0, 127]]
    beyond = replace(RNE_SATURATE, overflow=Overflow.NONSATURATE)
    assert TensorCast(E4M3FN, beyond, 0.5)(x).tolist() == [[-224, -0.625, 0.5, 224]]
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="positive and finite"):
            TensorCast(INT8, RNE_SATURATE, scale)
        with pytest.raises(ValueError, match="positive and finite"):
            NvFp4Cast(E2M1, RNE_SATURATE, scale)


@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_kernels_and_twins_agree(cast: ActivationCast, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(9, 1100, seed=5)
    x[1, 7], x[2, 900], x[3, 1] = math.nan, math.inf, -0.0
    x[4] *= 1e-38
    fast, (operands, scale) = cast(x), cast.operands(x)
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    slow, (again, slow_scale) = cast(x), cast.operands(x)
    assert same_bits(fast, slow)
    assert same_bits(operands, again)
    assert (scale is None) == (slow_scale is None)
    assert scale is None or slow_scale is None or same_bits(scale, slow_scale)


@pytest.mark.parametrize("cast", CASTS, ids=repr)
def test_shapes_zeros_and_operands(cast: ActivationCast) -> None:
    x = draw(6, 64, seed=6).view(2, 3, 64)
    values = cast(x)
    assert values.shape == x.shape
    operands, scale = cast.operands(x)
    assert torch.allclose(values, operands if scale is None else operands * scale, rtol=0, atol=0)
    assert not cast(torch.zeros(2, 64)).any()
    assert cast(torch.zeros(0, 64)).shape == (0, 64)
    assert cast(x[1, 2]).shape == (64,)
    assert same_bits(cast(x[1, 2]), values[1, 2])  # a token does not depend on the others
    assert not cast.unrounded().rounds_scales
    assert cast.format == cast.unrounded().format


@pytest.mark.parametrize("cast", [c for c in CASTS if getattr(c, "scale", None) is None], ids=repr)
def test_a_token_with_a_nan_or_an_infinity_is_lost(cast: ActivationCast) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        x = draw(3, 16, seed=7)
        x[1, 3] = bad
        values = cast(x)
        assert values[1].isnan().all()
        assert values[[0, 2]].isfinite().all()


def test_other_inputs_are_refused() -> None:
    for cast in CASTS:
        with pytest.raises(ValueError, match="must be float32"):
            cast(torch.zeros(2, 32, dtype=torch.bfloat16))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.integers(-30, 30),
)
def test_int8_is_within_half_a_step_and_follows_powers_of_two(numbers: list[float], power: int) -> None:
    x = torch.tensor([numbers], dtype=torch.float32)
    cast = TokenCast(INT8, RNE_SATURATE)
    values, amax = cast(x), float(x.abs().max())
    assert float((values - x).abs().max()) <= amax / 127 * 0.50002 + 2.0**-126
    assert same_bits(cast(-x) + 0.0, -values + 0.0)
    if amax * 2.0**power > 2.0**-100 and amax > 2.0**-100:
        assert torch.equal(cast(x * 2.0**power), values * 2.0**power)


@given(st.lists(st.floats(-448, 448, width=32), min_size=2, max_size=40), st.sampled_from([4, 5]))
def test_casting_twice_is_casting_once(numbers: list[float], index: int) -> None:
    """Where the largest element becomes the largest code, the second cast finds the first one's scale again."""
    cast = CASTS[index]
    assert isinstance(cast, TokenCast)
    x = torch.tensor([[448.0, *numbers][:48]], dtype=torch.float32)
    once = cast(x)
    assert torch.equal(cast(once), once)
