"""The fused activation path and the tile functions against scalar loops in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from qwen_quantize.formats.block_kernels import block_squared_error, dequantize_blocks, quantize_blocks
from qwen_quantize.formats.blocks import Granularity, QuantizedTensor, block_amax, expand_scale
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.reference import decode_scalar, encode_scalar
from qwen_quantize.formats.scales import ScaleRule, exponents_to_scale, scale_exponents
from qwen_quantize.formats.spec import Format, IntFormat
from qwen_quantize.formats.tables import BF16, E2M1, E4M3FN, E5M2, E8M0, HIF8, INT4, INT8
from tests.formats.test_cast_exhaustive import both_paths

CEIL = CastRule(Rounding.CEIL, Overflow.SATURATE, Subnormals.KEEP)
ODD = CastRule(Rounding.ODD, Overflow.NONSATURATE, Subnormals.KEEP)
FLUSH = CastRule(Rounding.RTZ, Overflow.SATURATE, Subnormals.FLUSH)


def to_single(value: Fraction) -> float:
    """An exact product as float32: one rounding to nearest even, infinity beyond."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(float(value)))  # few bits: the double is exact


def scalar_groups(
    x: torch.Tensor, fmt: Format, rule: CastRule, scale_rule: ScaleRule, size: int
) -> torch.Tensor:
    out = x.clone()
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], size):
            group = x[row, start : start + size]
            if not bool(group.isfinite().all()):
                out[row, start : start + size] = math.nan
                continue
            e = int(scale_exponents(group.abs().max(), fmt, scale_rule))
            for i, v in enumerate(group.tolist()):
                scaled: float | Fraction = Fraction(v) / Fraction(2) ** e
                if v == 0:
                    scaled = v  # keeps the sign of zero
                value = decode_scalar(encode_scalar(scaled, fmt, rule), fmt)
                out[row, start + i] = (
                    math.copysign(0.0, value) if value == 0 else to_single(Fraction(value) * Fraction(2) ** e)
                )
    return out


def awkward_rows(columns: int) -> torch.Tensor:
    """Rows at both ends of float32's range, with zeros, spreads wider than any format, and bad values."""
    rng = np.random.default_rng(11)
    base = rng.standard_normal((1, columns)).astype(np.float32)
    rows = [base * np.float32(2.0**k) for k in (0, 7, -30, -110, -120, -126, 125)]
    subnormal = rng.integers(0, 1 << 12, (1, columns)).astype(np.int32).view(np.float32)
    subnormal[0, :2] = 0.0  # scaling up by 2^127 must leave zero alone
    rows += [subnormal, -subnormal, np.zeros((1, columns), np.float32), -np.zeros((1, columns), np.float32)]
    rows.append(
        (base * np.float32(2.0) ** rng.integers(-60, 60, (1, columns)).astype(np.float32)).astype(np.float32)
    )
    rows.append(np.full((1, columns), 3.4e38, np.float32))
    bad = np.repeat(base, 3, axis=0)
    bad[0, 3], bad[1, 5], bad[2, columns - 1] = np.nan, np.inf, -np.inf
    return torch.from_numpy(np.nan_to_num(np.concatenate(rows), posinf=3e38, neginf=-3e38)), torch.from_numpy(
        bad
    )


@pytest.mark.parametrize("fmt", [E4M3FN, E5M2, E2M1, HIF8, INT8, BF16], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("rule", [RNE_SATURATE, CEIL, ODD, FLUSH], ids=["rne", "ceil", "odd", "rtz-flush"])
def test_groups_equal_the_scalar_path(fmt: Format, rule: CastRule, monkeypatch: pytest.MonkeyPatch) -> None:
    good, bad = awkward_rows(41)
    x = torch.cat((good, bad))
    for size in (16, 64):
        found = both_paths(monkeypatch, fake_quantize_groups, x, fmt, rule, ScaleRule.RCEIL, size)
        expected = scalar_groups(x, fmt, rule, ScaleRule.RCEIL, size)
        same = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
        assert bool(same.all()), (found[~same][:4], expected[~same][:4], x[~same][:4])


@pytest.mark.parametrize("scale_rule", [ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.EVEN])
def test_groups_under_other_scale_rules(scale_rule: ScaleRule, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 100, generator=torch.Generator().manual_seed(4))
    found = both_paths(monkeypatch, fake_quantize_groups, x, E2M1, RNE_SATURATE, scale_rule, 32)
    assert torch.equal(found, scalar_groups(x, E2M1, RNE_SATURATE, scale_rule, 32))


def test_groups_large_in_place_stochastic_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(4))
    stochastic = CastRule(Rounding.STOCHASTIC, Overflow.SATURATE, Subnormals.KEEP)

    def cast() -> torch.Tensor:
        generator = torch.Generator().manual_seed(9)
        return fake_quantize_groups(x, E4M3FN, stochastic, ScaleRule.RCEIL, 128, generator=generator)

    assert not torch.equal(both_paths(monkeypatch, cast), x)
    expected = both_paths(monkeypatch, fake_quantize_groups, x, E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 128)
    assert fake_quantize_groups(x, E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 128, x) is x
    assert torch.equal(x, expected)
    seven = fake_quantize_groups(
        torch.tensor([[6.9, 1.0]]), E2M1, RNE_SATURATE, ScaleRule.RCEIL, 2, threshold=7.25
    )
    assert seven.tolist() == [[6.0, 1.0]]
    assert fake_quantize_groups(torch.zeros(0, 8), E2M1, RNE_SATURATE, ScaleRule.RCEIL, 4).shape == (0, 8)
    with pytest.raises(ValueError, match="search"):
        fake_quantize_groups(x, E4M3FN, RNE_SATURATE, ScaleRule.SEARCH, 128)
    with pytest.raises(ValueError, match="group_size"):
        fake_quantize_groups(x, E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 0)
    with pytest.raises(ValueError, match="no zero"):
        fake_quantize_groups(x, E8M0, RNE_SATURATE, ScaleRule.RCEIL, 128)


@pytest.mark.parametrize("fmt", [E4M3FN, E2M1, HIF8, INT4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("tile", [(8, 16), (1, 32), (5, 7), (64, 64), (1, 45)])
def test_blocks_equal_naive_loops(
    fmt: Format, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, columns = 19, 45
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, columns, generator=generator)
    weight[0, :4] = torch.tensor([0.0, -0.0, 1e-40, -3e38])
    column_weight = torch.rand(columns, generator=generator)
    grid = (math.ceil(rows / tile[0]), math.ceil(columns / tile[1]))
    exponents = torch.randint(-6, 4, (3, *grid), generator=generator, dtype=torch.int32)
    exponents[2, 0, 0] = -127
    rule = CastRule(Rounding.RNA, Overflow.SATURATE, Subnormals.KEEP)
    for weighting in (None, column_weight):
        errors = both_paths(monkeypatch, block_squared_error, weight, exponents, fmt, rule, *tile, weighting)
        assert errors.shape == exponents.shape
        for candidate in range(3):
            codes = both_paths(monkeypatch, quantize_blocks, weight, exponents[candidate], fmt, rule, *tile)
            scale = exponents_to_scale(exponents[candidate])
            values = both_paths(monkeypatch, dequantize_blocks, codes, scale, fmt, *tile)
            expected = np.zeros(grid)
            for row in range(rows):
                for column in range(columns):
                    block = (row // tile[0], column // tile[1])
                    e = int(exponents[candidate][block])
                    w = float(weight[row, column])
                    code = encode_scalar(w if w == 0 else Fraction(w) / Fraction(2) ** e, fmt, rule)
                    assert int(codes[row, column]) == code
                    value = to_single(Fraction(decode_scalar(code, fmt)) * Fraction(2) ** e)
                    assert float(values[row, column]) == value
                    expected[block] += (1.0 if weighting is None else float(weighting[column])) * (
                        w - value
                    ) ** 2
            np.testing.assert_allclose(errors[candidate].numpy(), expected, rtol=1e-13)
    assert codes.dtype == (torch.int8 if isinstance(fmt, IntFormat) else torch.uint8)


def test_blocks_do_not_depend_on_threads() -> None:
    weight = torch.randn(700, 900, generator=torch.Generator().manual_seed(1))
    exponents = torch.randint(
        -9, -5, (2, 6, 8), generator=torch.Generator().manual_seed(2), dtype=torch.int32
    )
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            codes = quantize_blocks(weight, exponents[0], E4M3FN, RNE_SATURATE, 128, 128)
            errors = block_squared_error(weight, exponents, E4M3FN, RNE_SATURATE, 128, 128)
            results.append((codes, errors))
    finally:
        torch.set_num_threads(threads)
    for codes, errors in results[1:]:
        assert torch.equal(codes, results[0][0])
        assert torch.equal(errors.view(torch.int64), results[0][1].view(torch.int64))


def test_block_refusals() -> None:
    weight = torch.zeros(4, 4)
    grid = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"must have shape \(1, 1\)"):
        quantize_blocks(weight, torch.zeros(2, 1, dtype=torch.int32), E4M3FN, RNE_SATURATE, 4, 4)
    with pytest.raises(ValueError, match="16 bits"):
        quantize_blocks(weight, grid, BF16, RNE_SATURATE, 4, 4)
    with pytest.raises(ValueError, match="-200"):
        quantize_blocks(weight, grid - 200, E4M3FN, RNE_SATURATE, 4, 4)
    rule = CastRule(Rounding.STOCHASTIC, Overflow.SATURATE, Subnormals.KEEP)
    with pytest.raises(ValueError, match="random"):
        block_squared_error(weight, grid[None], E4M3FN, rule, 4, 4)
    with pytest.raises(ValueError, match="column_weight"):
        block_squared_error(weight, grid[None], E4M3FN, RNE_SATURATE, 4, 4, torch.ones(3))


def test_granularity_shapes_and_amax() -> None:
    x = torch.arange(2 * 5 * 7, dtype=torch.float32).reshape(2, 5, 7)
    cases = {
        Granularity.tensor(): (2, 1, 1), Granularity.channel(): (2, 5, 1), Granularity.token(): (2, 5, 1),
        Granularity.group(3): (2, 5, 3), Granularity.block(2, 4): (2, 3, 2),
    }  # fmt: skip
    for granularity, shape in cases.items():
        assert granularity.scale_shape((2, 5, 7)) == shape
        amax = block_amax(x, granularity)
        assert tuple(amax.shape) == shape
        covered = expand_scale(amax, granularity, (2, 5, 7))
        assert covered.shape == x.shape
        assert bool((covered >= x).all())
        assert set(amax.flatten().tolist()) <= set(x.flatten().tolist())
    assert bool(block_amax(torch.tensor([[1.0, math.nan]]), Granularity.group(2)).isnan())
    with pytest.raises(ValueError, match="rows 0"):
        Granularity.block(0, 4)
    with pytest.raises(ValueError, match="matrix"):
        Granularity.channel().scale_shape((4,))


def test_quantized_tensor_multiplies_the_scale() -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(3))
    scale = block_amax(x, Granularity.block(4, 4)) / 448
    expanded = expand_scale(scale, Granularity.block(4, 4), (6, 10))
    codes = encode(x / expanded, E4M3FN, RNE_SATURATE)
    quantized = QuantizedTensor(codes, scale, None, E4M3FN, Granularity.block(4, 4), (6, 10))
    assert torch.equal(quantized.dequantize(), decode(codes, E4M3FN) * expanded)
    assert bool(((quantized.dequantize() - x).abs() <= x.abs() / 16 + 448 * expanded * 2.0**-18).all())
    integers = torch.randint(-8, 8, (2, 6, 10), dtype=torch.int8, generator=torch.Generator().manual_seed(3))
    zero = torch.full((2, 6, 1), 3, dtype=torch.int8)
    signed_scale = torch.full((2, 6, 1), -0.5)
    with_zero = QuantizedTensor(integers, signed_scale, zero, INT4, Granularity.channel(), (2, 6, 10))
    assert torch.equal(with_zero.dequantize(), (integers.float() - 3) * -0.5)
    with pytest.raises(ValueError, match="float32"):
        QuantizedTensor(codes, scale.half(), None, E4M3FN, Granularity.block(4, 4), (6, 10))
    with pytest.raises(ValueError, match="need"):
        QuantizedTensor(codes, scale[:1], None, E4M3FN, Granularity.block(4, 4), (6, 10))
