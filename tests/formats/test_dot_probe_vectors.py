"""Targeted dot products whose outcome tells a parameter of the unit, and what published units must answer.

A large P enters first, the small term under test second, -P last: what survives is the unit's view of the small
term. (Fasi et al., PeerJ CS 7:e330; Khattak and Mikaitis, HPEC 2025.)
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.dot_record import DotUnit, Joining, Order
from qwen_quantize.formats.dot_units import FMA_FP32, PUBLISHED_UNITS
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import FP16

P = (128.0, 128.0)  # 2^14
P225 = (192.0, 192.0)  # 2.25 * 2^14: its significand is in [2, 4)
P15 = (192.0, 128.0)  # 1.5 * 2^14
ZERO = (0.0, 0.0)
RNE_ALIGNED = DotUnit(
    "rne-aligned", FP16, FP16, Order.ALIGNED, products=8, fraction_bits=24, alignment_rounding=Rounding.RNE
)
FLOOR_ALIGNED = replace(RNE_ALIGNED, name="floor-aligned", alignment_rounding=Rounding.FLOOR)
NORMALISED = DotUnit(
    "normalised", FP16, FP16, Order.ALIGNED, products=16, fraction_bits=24, products_normalised=True
)
EXACT = PUBLISHED_UNITS["mi100-fp16"]

Product = tuple[float, float]


def value(unit: DotUnit, products: list[Product]) -> float:
    a = torch.tensor([[x for x, _ in products]])
    b = torch.tensor([[y for _, y in products]])
    return float(emulated_matmul(a, b, unit).item())


def minus(product: Product) -> Product:
    return -product[0], product[1]


def power(exponent: int, multiple: float = 1.0) -> Product:
    """multiple * 2^exponent as a product of two powers of nearly the same size."""
    half = exponent // 2
    return multiple * 2.0**half, 2.0 ** (exponent - half)


def survivors(unit: DotUnit, large: Product) -> int:
    """The last j for which [P, 2^(14 - j), -P] still gives the small term."""
    most = 26 if isinstance(unit.a_format, FloatFormat) and unit.a_format.min_exponent > -14 else 40
    kept = [
        j for j in range(1, most + 1) if value(unit, [large, power(14 - j), minus(large)]) == 2.0 ** (14 - j)
    ]
    assert kept == list(range(1, len(kept) + 1))
    return len(kept)


# Probe 1 (numbers as published: 23, 24, 25, 13) and 1b: the same with a product in [2, 4).
FRACTION_BITS = {
    "v100-fp16": 23,
    "t4-fp16": 24,
    "a100-fp16": 24,
    "ada-fp16": 24,
    "hopper-fp16": 25,
    "blackwell-fp16": 25,
    "ada-e4m3fn": 13,
    "hopper-e4m3fn": 13,
    "hopper-e5m2": 13,
    "blackwell-e4m3fn": 25,
    "mi300-fp16": 24,
}


@pytest.mark.parametrize(("name", "bits"), FRACTION_BITS.items(), ids=FRACTION_BITS)
def test_fraction_bits(name: str, bits: int) -> None:
    unit = PUBLISHED_UNITS[name]
    assert survivors(unit, P) == bits
    assert survivors(unit, P225) == bits


def test_fraction_bits_elsewhere() -> None:
    assert survivors(NORMALISED, P) == 24
    assert survivors(NORMALISED, P225) == 23  # one less: the product has moved up by a binade
    assert survivors(EXACT, P) == 40  # all that were tried
    assert survivors(FMA_FP32, P) == 23


# Probe 2: k u between P and -P in one block, in units of u = 2^(14 - F).
SHIFTS = (0.75, -0.75, 1.5, -1.5)
SHIFT_ROUNDINGS = (
    (PUBLISHED_UNITS["v100-fp16"], 23, (0, 0, 1, -1)),
    (PUBLISHED_UNITS["a100-fp16"], 24, (0, 0, 1, -1)),
    (PUBLISHED_UNITS["hopper-fp16"], 25, (0, 0, 1, -1)),
    (PUBLISHED_UNITS["hopper-e4m3fn"], 13, (0, 0, 1, -1)),
    (PUBLISHED_UNITS["mi300-fp16"], 24, (0, 0, 1, -1)),
    (FLOOR_ALIGNED, 24, (0, -1, 1, -2)),
    (RNE_ALIGNED, 24, (1, -1, 2, -2)),
    (FMA_FP32, 23, (1, -1, 2, -1.5)),  # plain float32: its last place is half as large just below P
    (EXACT, 24, (0.75, -0.75, 1.5, -1.5)),
)


@pytest.mark.parametrize(
    ("unit", "bits", "expected"), SHIFT_ROUNDINGS, ids=lambda x: getattr(x, "name", None)
)
def test_alignment_rounding(unit: DotUnit, bits: int, expected: tuple[float, ...]) -> None:
    found = [value(unit, [P, power(14 - bits - 2, 4 * k), minus(P)]) * 2.0 ** (bits - 14) for k in SHIFTS]
    assert tuple(found) == expected


# Probe 3: the first distance at which -P225 comes too late is the width of a block.
WIDTHS = {
    "v100-fp16": 4,
    "a100-fp16": 8,
    "a100-tf32": 4,
    "ada-e4m3fn": 16,
    "hopper-fp16": 16,
    "hopper-tf32": 8,
    "hopper-e4m3fn": 32,
    "blackwell-e4m3fn": 32,
}


@pytest.mark.parametrize(("name", "width"), WIDTHS.items(), ids=WIDTHS)
def test_block_width(name: str, width: int) -> None:
    unit = PUBLISHED_UNITS[name]
    assert unit.fraction_bits is not None
    small = power(14 - unit.fraction_bits)
    answers = [value(unit, [P225, small, *[ZERO] * (k - 2), minus(P225)]) for k in range(2, 65)]
    assert [answer != 0 for answer in answers] == [k < width for k in range(2, 65)]


# Probe 4: 3P + 3U is a tie between two sums, for both signs; in units of the last place, 2U.
def final_rounding(unit: DotUnit) -> tuple[float, float]:
    assert unit.products is not None
    small = 2.0 ** (14 - unit.mantissa_bits)
    answers = []
    for sign in (1, -1):
        large = (sign * P15[0], P15[1])
        block = [large, large, power(14 - unit.mantissa_bits, 3.0 * sign)]
        block += [ZERO] * (unit.products - 3)
        answers.append(value(unit, [*block, minus(large), minus(large)]) / (2 * small))
    return answers[0], answers[1]


@pytest.mark.parametrize("name", ["v100-fp16", "a100-fp16", "hopper-fp16", "ada-e4m3fn", "hopper-e4m3fn"])
def test_final_rounding_truncates_on_nvidia(name: str) -> None:
    assert final_rounding(PUBLISHED_UNITS[name]) == (1, -1)


@pytest.mark.parametrize("name", ["mi100-fp16", "mi300-fp16"])
def test_final_rounding_is_to_nearest_on_cdna(name: str) -> None:
    assert final_rounding(PUBLISHED_UNITS[name]) == (2, -2)


def test_directed_final_rounding() -> None:
    unit = PUBLISHED_UNITS["hopper-fp16"]
    assert final_rounding(replace(unit, final_rounding=Rounding.FLOOR)) == (1, -2)
    assert final_rounding(replace(unit, final_rounding=Rounding.CEIL)) == (2, -1)


# Probe 5: a small sum of either sign, left by an earlier block, beside 1.5 P and one last place.
SMALL_SUMS = {
    "mi300-fp16": (1, 0),
    "hopper-fp16": (1, 0),
    "blackwell-fp16": (1, 0),
    "a100-fp16": (1, 1),
    "v100-fp16": (1, 1),
    "mi100-fp16": (1, 1),
    "hopper-e4m3fn": (0, 0),
}


@pytest.mark.parametrize(("name", "expected"), SMALL_SUMS.items(), ids=SMALL_SUMS)
def test_a_small_sum_beside_large_products(name: str, expected: tuple[int, int]) -> None:
    unit = PUBLISHED_UNITS[name]
    assert unit.products is not None
    answers = []
    for sign in (1.0, -1.0):
        first = [power(14 - 25, sign), *[ZERO] * (unit.products - 1)]
        second = [P15, power(14 - 23), *[ZERO] * (unit.products - 2)]
        answers.append(value(unit, [*first, *second, minus(P15)]) / 2.0 ** (14 - 23))
    assert tuple(answers) == expected


# Probe 6: subnormal inputs, and a subnormal sum.
def test_subnormals() -> None:
    flushes = PUBLISHED_UNITS["mi250-fp16"]
    keeps = [
        PUBLISHED_UNITS[name]
        for name in ("v100-fp16", "a100-fp16", "hopper-fp16", "mi100-fp16", "mi300-fp16")
    ]
    tiny = (2.0**-24, 2.0**10)
    assert value(flushes, [tiny]) == 0
    assert [value(unit, [tiny]) for unit in keeps] == [2.0**-14] * len(keeps)
    small_sum = (2.0**-100, 2.0**-30)
    for name, expected in (("mi250-bf16", 0.0), ("mi100-bf16", 2.0**-130), ("mi300-bf16", 2.0**-130)):
        assert value(PUBLISHED_UNITS[name], [small_sum]) == expected
    assert value(PUBLISHED_UNITS["hopper-bf16"], [small_sum]) == 2.0**-130


# Probe 7: a register of 11 bits.
def test_half_precision_sums() -> None:
    products: list[Product] = [(2048.0, 1.0), *[ZERO] * 15, (1.0, 1.0), *[ZERO] * 15, (-2048.0, 1.0)]
    assert value(PUBLISHED_UNITS["hopper-fp16-fp16-sum"], products) == 0
    assert value(PUBLISHED_UNITS["hopper-fp16"], products) == 1


# Probe 8: 64 terms of half a last place after P.
def test_terms_that_are_lost_one_by_one() -> None:
    products = [P, *[power(14 - 24)] * 64, minus(P)]
    assert value(FMA_FP32, products) == 0
    # A tree of four loses the one that meets P alone, and no other.
    assert value(PUBLISHED_UNITS["mi250-fp16"], products) == 63 * 2.0**-10
    wide = replace(EXACT, products=64)  # P and 63 of the terms are rounded once, to 64 of them; one is left
    assert value(wide, products) == 65 * 2.0**-10


# Probe 12: infinities, NaN and the sign of zero.
def test_special_values() -> None:
    for name in ("v100-fp16", "hopper-fp16", "mi100-fp16", "mi300-fp16"):
        unit = PUBLISHED_UNITS[name]
        assert math.isnan(value(unit, [(math.inf, 1.0), (-math.inf, 1.0)]))
        assert math.isnan(value(unit, [(math.inf, 0.0)]))
        assert value(unit, [(-math.inf, 1.0), (65504.0, 65504.0)]) == -math.inf
    nan = torch.tensor([[math.nan]])
    for name, pattern in (("v100-fp16", 0x7FFFFFFF), ("v100-fp16-fp16-sum", 0x7FFFE000)):
        assert emulated_matmul(nan, nan, PUBLISHED_UNITS[name]).view(torch.int32).item() == pattern


# CDNA3: an infinity out of a product that float32 cannot hold, and the register that is too far below.
def test_cdna3() -> None:
    wide = PUBLISHED_UNITS["mi300-bf16"]
    large = (2.0**100, 2.0**100)
    assert value(wide, [large, minus((2.0**60, 2.0**60))]) == math.inf
    assert math.isnan(value(wide, [large, minus(large)]))
    assert value(PUBLISHED_UNITS["hopper-bf16"], [large, minus(large)]) == 0
    bytes_unit = PUBLISHED_UNITS["mi300-e4m3fnuz"]
    one = torch.tensor([[1.0]])
    for exponent, expected in ((-25, 2.0**-24 * -1 + 1), (-26, 1.0)):
        # -2^-25 is floored to -2^-24; at -2^-26 it does not take part.
        c = torch.tensor([[-(2.0**exponent)]])
        assert emulated_matmul(one, one, bytes_unit, c).item() == expected


def test_where_the_sum_joins() -> None:
    joined = PUBLISHED_UNITS["a100-fp16"]
    apart = replace(joined, joining=Joining.SEPARATE)
    c = torch.tensor([[1.0]])
    a = torch.full((1, 8), 2.0**-13)
    b = torch.full((1, 8), 2.0**-12)  # eight terms of 2^-25: cut beside 1, but not among themselves
    assert emulated_matmul(a, b, joined, c).item() == 1.0
    assert emulated_matmul(a, b, apart, c).item() == 1 + 2.0**-22
