"""Paths of casts and static scales, against the scalar reference and against bit patterns."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.formats.cast_path import (
    FP19,
    CastStep,
    cast_along,
    encode_along,
    requantize_to_int8,
    static_scale,
)
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import encode
from qwen_quantize.formats.reference import decode_scalar, encode_scalar
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, E5M2, FP16, INT8

ROUNDINGS = (Rounding.RNE, Rounding.RNA, Rounding.RTZ, Rounding.FLOOR, Rounding.CEIL, Rounding.ODD)
to_infinity = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
PATHS = {
    "fp16 int8": (CastStep(FP16, to_infinity), CastStep(INT8, RNE_SATURATE)),
    "bf16 e4m3fn": (CastStep(BF16, to_infinity), CastStep(E4M3FN, RNE_SATURATE)),
    "fp16 rtz, e5m2 odd": (
        CastStep(FP16, CastRule(Rounding.RTZ, Overflow.SATURATE, Subnormals.FLUSH)),
        CastStep(E5M2, CastRule(Rounding.ODD, Overflow.NONSATURATE, Subnormals.KEEP)),
    ),
    "bf16 fp16 int8": (
        CastStep(BF16, to_infinity),
        CastStep(FP16, to_infinity),
        CastStep(INT8, CastRule(Rounding.RNA, Overflow.SATURATE, Subnormals.KEEP)),
    ),
}


def along_scalar(x: float, path: tuple[CastStep, ...]) -> int:
    """The code of x by the slow reference, one step after the other."""
    for step in path[:-1]:
        code = encode_scalar(x, step.format, step.rule)
        negative = isinstance(step.format, FloatFormat) and bool(code & step.format.sign_mask)
        x = decode_scalar(code, step.format)
        x = math.copysign(x, -1.0 if negative else 1.0) if math.isnan(x) else x  # NaN keeps its sign
    return encode_scalar(x, path[-1].format, path[-1].rule)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(width=32), min_size=1, max_size=12))
def test_paths_equal_the_scalar_reference(path: tuple[CastStep, ...], values: list[float]) -> None:
    x = torch.tensor([*values, *(math.copysign(math.fmod(v, 200.0), v) for v in values if math.isfinite(v))])
    assert encode_along(x, path).tolist() == [along_scalar(v, path) for v in x.tolist()]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_paths_near_the_boundaries(path: tuple[CastStep, ...]) -> None:
    # Every boundary of the last step that the step before it can hide: halves and a little more or less.
    halves = torch.arange(-260, 261).float() / 2
    steps = torch.tensor([0.0, 2**-13, -(2**-13), 2**-9, -(2**-9), 2**-6, 3 * 2**-9])
    x = (halves[:, None] * (1 + steps[None, :])).flatten()
    assert encode_along(x, path).tolist() == [along_scalar(v, path) for v in x.tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_paths_on_many_values(path: tuple[CastStep, ...]) -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (100_000,), generator=torch.Generator().manual_seed(1))
    x = torch.cat((words.to(torch.int32).view(torch.float32), words.float() / 2**24))
    assert encode_along(x, path).tolist() == [along_scalar(v, path) for v in x.tolist()]


def test_two_roundings_are_not_one() -> None:
    x = torch.tensor([2.5001])
    path = PATHS["fp16 int8"]
    assert encode(x, INT8, RNE_SATURATE).item() == 3
    assert encode_along(x, path).item() == 2
    assert cast_along(x, path).item() == 2.0
    assert cast_along(x, ()) is x
    with pytest.raises(ValueError, match="needs a step"):
        encode_along(x, ())


def fp19_scalar(x: float, rounding: Rounding) -> float:
    """A positive normal float32 rounded to 11 significant bits, in fractions."""
    exponent = math.frexp(x)[1] - 1
    step = Fraction(2) ** (exponent - 10)
    below, rest = divmod(Fraction(x), step)
    up = {
        Rounding.RNE: rest > step / 2 or (rest == step / 2 and below % 2 == 1),
        Rounding.RNA: rest >= step / 2,
        Rounding.RTZ: False,
        Rounding.FLOOR: False,
        Rounding.CEIL: rest > 0,
        Rounding.ODD: rest > 0 and below % 2 == 0,
    }[rounding]
    return min(float((below + up) * step), FP19.max)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_static_scales(rounding: Rounding) -> None:
    words = torch.randint(0x00800000, 0x7F800000, (4000,), generator=torch.Generator().manual_seed(2))
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x1FFF, 0x3000])  # around the boundaries of 13 bits
    edge = (torch.arange(0x3F800000, 0x3F840000, 0x2000)[:, None] + low).flatten()
    x = torch.cat((words, edge, torch.tensor([0x7F7FFFFF, 0x00800000]))).to(torch.int32).view(torch.float32)
    expected = [fp19_scalar(v, rounding) for v in x.tolist()]
    assert static_scale(x, rounding).tolist() == expected


def test_a_truncated_scale_is_the_masked_bit_pattern() -> None:
    words = torch.arange(0x00800000, 0x7F800000, 4093)
    x = words.to(torch.int32).view(torch.float32)
    assert torch.equal(static_scale(x).view(torch.int32), (words & 0xFFFFE000).to(torch.int32))
    # The same in the bits that the vendor's document names.
    word = struct.unpack("<I", struct.pack("<f", static_scale(torch.tensor([0.1])).item()))[0]
    assert word & 0x1FFF == 0


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.0, 2.0**-127, -1.0])
def test_unusable_scales(value: float) -> None:
    with pytest.raises(ValueError, match="a static scale of type fp19"):
        static_scale(torch.tensor([1.0, value]))


def test_requantizing_clips_before_the_offset() -> None:
    sums = torch.tensor([100, 300, -300, 1000, 5, 7], dtype=torch.int32)
    one, half = torch.tensor([1.0]), torch.tensor([0.5])
    assert requantize_to_int8(sums, one, -200).tolist() == [-100, 55, -128, 55, -128, -128]
    assert requantize_to_int8(sums, half).tolist() == [50, 127, -128, 127, 2, 4]  # 2.5 and 3.5: to even
    scale = torch.tensor([[1 + 2.0**-11]])  # its last bit is cut off
    assert requantize_to_int8(torch.tensor([[64.0]]), scale).item() == 64
    assert requantize_to_int8(torch.tensor([math.nan, math.inf]), one).tolist() == [0, 127]
    with pytest.raises(ValueError, match="nine bits"):
        requantize_to_int8(sums, one, 256)
