"""Scale exponents against exact fractions, next to every power of two that float32 has."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from qwen_quantize.formats.scales import (
    ScaleRule,
    e8m0_to_exponents,
    exponents_to_e8m0,
    exponents_to_scale,
    nvfp4_tensor_scale,
    scale_exponents,
)  # fmt: skip
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import E2M1, E2M3, E3M2, E4M3FN, E4M3FNUZ, E5M2, HIF8, INT4, INT8

FORMATS = [E4M3FN, E5M2, E4M3FNUZ, E2M1, E2M3, E3M2, HIF8, INT8, INT4]


def amax_points() -> np.ndarray:
    """2^k, 1.5 2^k, 1.75 2^k, ... with their float32 neighbours, for every k that float32 has."""
    exact = [
        math.ldexp(part, k) for k in range(-149, 128) for part in (1, 1.5, 1.75, 1.8125, 1.9375, 1.984375)
    ]
    exact = np.array([v for v in exact if v <= 3.4028234663852886e38], np.float32)
    points = np.concatenate(
        [exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(3.4e38))]
    )
    return np.unique(points[points > 0])


def floor_log2(x: Fraction) -> int:
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= x else exponent - 1


def ceil_log2(x: Fraction) -> int:
    floor = floor_log2(x)
    return floor if Fraction(2) ** floor == x else floor + 1


def exact_exponent(amax: Fraction, fmt: Format, rule: ScaleRule, threshold: float | None) -> int:
    """The rules as their sources write them, with logarithms of fractions."""
    largest = Fraction(fmt.max)
    emax = floor_log2(largest)
    match rule:
        case ScaleRule.FLOOR:
            exponent = floor_log2(amax) - emax
        case ScaleRule.CEIL:
            exponent = ceil_log2(amax) - emax
        case ScaleRule.RCEIL:
            exponent = ceil_log2(amax / (largest if threshold is None else Fraction(threshold)))
        case _:  # EVEN: round the significand half up at the element's mantissa width, then floor
            step = Fraction(2) ** (floor_log2(amax) - fmt.mantissa_bits_at_max)
            exponent = floor_log2((amax / step + Fraction(1, 2)).__floor__() * step) - emax
    return max(-127, min(127, exponent))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_rule_is_exact_for_every_exponent(fmt: Format) -> None:
    points = amax_points()
    fractions = [Fraction(float(v)) for v in points]
    cases: list[tuple[ScaleRule, float | None]] = [
        (ScaleRule.FLOOR, None), (ScaleRule.CEIL, None), (ScaleRule.RCEIL, None), (ScaleRule.EVEN, None),
        (ScaleRule.RCEIL, 7.0), (ScaleRule.RCEIL, 7.25), (ScaleRule.RCEIL, 448.0),
    ]  # fmt: skip
    for rule, threshold in cases:
        found = scale_exponents(torch.from_numpy(points), fmt, rule, threshold=threshold)
        assert found.dtype == torch.int32
        expected = [exact_exponent(v, fmt, rule, threshold) for v in fractions]
        wrong = [
            (p, f, e) for p, f, e in zip(points.tolist(), found.tolist(), expected, strict=True) if f != e
        ]
        assert not wrong, f"{rule} {threshold}: {len(wrong)} wrong, first (amax, found, exact) {wrong[:4]}"


def test_table_of_published_examples() -> None:
    """The biased exponents that several checkpoints' writers give (OCP floor, round from 1.75, round up)."""
    cases = {
        (E4M3FN, 400.0): (127, 127), (E4M3FN, 448.0): (127, 127), (E4M3FN, 449.0): (127, 128),
        (E4M3FN, 500.0): (127, 128), (E2M1, 6.0): (127, 127), (E2M1, 6.5): (127, 128),
        (E2M1, 7.0): (127, 128),
    }  # fmt: skip
    for (fmt, amax), (floor, rceil) in cases.items():
        value = torch.tensor([amax])
        assert int(exponents_to_e8m0(scale_exponents(value, fmt, ScaleRule.FLOOR))) == floor
        assert int(exponents_to_e8m0(scale_exponents(value, fmt, ScaleRule.RCEIL))) == rceil
    tie = torch.tensor([7.0])  # EVEN goes up at the tie, RCEIL@7 does not
    assert int(scale_exponents(tie, E2M1, ScaleRule.EVEN)) == 1
    assert int(scale_exponents(tie, E2M1, ScaleRule.RCEIL, threshold=7.0)) == 0
    assert int(scale_exponents(torch.tensor([5e4]), HIF8, ScaleRule.RCEIL)) == 1
    assert int(scale_exponents(torch.tensor([127.5]), INT8, ScaleRule.RCEIL)) == 1


def test_zero_and_bad_amax() -> None:
    assert scale_exponents(torch.zeros(2, 3), E4M3FN, ScaleRule.RCEIL).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert scale_exponents(torch.zeros(0), E4M3FN, ScaleRule.FLOOR).shape == (0,)
    for bad in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match=r"amax at \(1,\) is"):
            scale_exponents(torch.tensor([1.0, bad]), E4M3FN, ScaleRule.RCEIL)
    with pytest.raises(ValueError, match="search"):
        scale_exponents(torch.ones(1), E4M3FN, ScaleRule.SEARCH)
    with pytest.raises(ValueError, match="threshold"):
        scale_exponents(torch.ones(1), E4M3FN, ScaleRule.FLOOR, threshold=7.0)
    with pytest.raises(ValueError, match=r"0\.1"):
        scale_exponents(torch.ones(1), E4M3FN, ScaleRule.RCEIL, threshold=0.1)
    with pytest.raises(ValueError, match="float32"):
        scale_exponents(torch.ones(1, dtype=torch.float64), E4M3FN, ScaleRule.FLOOR)


def test_exponents_scales_and_codes() -> None:
    exponents = torch.arange(-127, 128, dtype=torch.int32)
    assert exponents_to_scale(exponents).tolist() == [math.ldexp(1.0, e) for e in range(-127, 128)]
    codes = exponents_to_e8m0(exponents)
    assert codes.tolist() == list(range(255))
    assert torch.equal(e8m0_to_exponents(codes), exponents)
    with pytest.raises(ValueError, match="0xFF"):
        e8m0_to_exponents(torch.tensor([255], dtype=torch.uint8))
    with pytest.raises(ValueError, match="128"):
        exponents_to_scale(torch.tensor([128], dtype=torch.int32))


def test_nvfp4_second_level_scale() -> None:
    scale = nvfp4_tensor_scale(torch.tensor([10.0, 0.0]))
    assert scale.tolist() == [pytest.approx(0.00372024, rel=1e-6), 1.0]
    assert 1 / float(scale[0]) == pytest.approx(268.8, rel=1e-6)
