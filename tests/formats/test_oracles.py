"""Our formats and our reference against libraries that others wrote: ml_dtypes, en_dtypes, numpy, torch."""

from __future__ import annotations

import itertools
import math

import en_dtypes
import ml_dtypes
import numpy as np
import pytest
import torch

from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.reference import decode_scalar, encode_scalar
from qwen_quantize.formats.spec import FloatFormat, Format
from qwen_quantize.formats.tables import (
    BF16,
    E1M2,
    E2M1,
    E2M3,
    E3M2,
    E4M3FN,
    E4M3FNUZ,
    E5M2,
    E5M2FNUZ,
    E8M0,
    FORMATS,
    FP16,
    FP32,
    HIF8,
    INT8,
    format_named,
)  # fmt: skip

RNE = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
RNA = CastRule(Rounding.RNA, Overflow.NONSATURATE, Subnormals.KEEP)
ML_DTYPES: list[tuple[FloatFormat, type]] = [
    (E4M3FN, ml_dtypes.float8_e4m3fn),
    (E5M2, ml_dtypes.float8_e5m2),
    (E4M3FNUZ, ml_dtypes.float8_e4m3fnuz),
    (E5M2FNUZ, ml_dtypes.float8_e5m2fnuz),
    (E8M0, ml_dtypes.float8_e8m0fnu),
    (E2M1, ml_dtypes.float4_e2m1fn),
    (E2M3, ml_dtypes.float6_e2m3fn),
    (E3M2, ml_dtypes.float6_e3m2fn),
]
ALL_LIBRARIES: list[tuple[Format, type]] = [
    *ML_DTYPES,
    (HIF8, en_dtypes.hifloat8),
    (E1M2, en_dtypes.float4_e1m2),
]


def points_around(fmt: Format) -> np.ndarray:
    """Codes' values, midpoints and quarter points with float32 neighbours, of both signs, and far ones."""
    finite = sorted(
        {v for c in range(1 << fmt.bits) if math.isfinite(v := decode_scalar(c, fmt)) and v >= 0} | {0.0}
    )
    ladder = [*finite, fmt.beyond_max]
    between = [a + (b - a) * part for a, b in itertools.pairwise(ladder) for part in (0.25, 0.5, 0.75)]
    with np.errstate(over="ignore", under="ignore"):
        exact = np.array([*ladder, *between, 1e30, 1e-30]).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    near = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(3e38))])
    return np.concatenate([near, -near, np.array([np.inf, -np.inf, np.nan], np.float32)])


@pytest.mark.parametrize(("fmt", "library"), ALL_LIBRARIES, ids=lambda p: getattr(p, "name", ""))
def test_every_code_decodes_as_the_library(fmt: Format, library: type) -> None:
    codes = np.arange(1 << fmt.bits, dtype=np.uint8)
    theirs = codes.view(library).astype(np.float32)
    ours = np.array([decode_scalar(int(code), fmt) for code in codes], np.float32)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(np.signbit(ours[ours == 0]), np.signbit(theirs[theirs == 0]))
    np.testing.assert_array_equal(decode(torch.from_numpy(codes), fmt).numpy(), theirs)


@pytest.mark.parametrize(("fmt", "library"), ML_DTYPES, ids=lambda p: getattr(p, "name", ""))
def test_rne_encodes_as_ml_dtypes(fmt: FloatFormat, library: type) -> None:
    x = points_around(fmt)
    if not fmt.nan_codes:
        x = x[~np.isnan(x)]  # ml_dtypes makes -0 of it, we make +0; see test_nan_without_nan
    if (
        fmt is E8M0
    ):  # between its two smallest values ml_dtypes 0.6 always rounds up, even 2^-127 * (1 + 2^-22)
        x = x[~((x > 2.0**-127) & (x < 2.0**-126))]
    with np.errstate(all="ignore"):
        theirs = x.astype(library).view(np.uint8)
    ours = np.array([encode_scalar(float(v), fmt, RNE) for v in x])
    wrong = ours != theirs
    assert not wrong.any(), list(zip(x[wrong], ours[wrong], theirs[wrong], strict=True))[:5]


def test_nan_without_nan_is_positive_zero() -> None:
    for fmt in (E2M1, E2M3, E3M2, E1M2):
        assert encode_scalar(math.nan, fmt, RNE) == encode_scalar(-math.nan, fmt, RNE) == 0


@pytest.mark.parametrize(
    ("fmt", "library"), [(HIF8, en_dtypes.hifloat8), (E1M2, en_dtypes.float4_e1m2)], ids=["hif8", "e1m2"]
)
def test_rna_encodes_as_en_dtypes(fmt: Format, library: type) -> None:
    x = points_around(fmt)
    rule = RNA if fmt is HIF8 else CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
    with np.errstate(all="ignore"):
        theirs = x.astype(library).view(np.uint8)
    ours = np.array([encode_scalar(float(v), fmt, rule) for v in x])
    different = ours != theirs
    different &= ~np.isnan(x) | (fmt is HIF8)
    assert not different.any(), list(zip(x[different], ours[different], theirs[different], strict=True))[:5]


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=["fp16", "bf16"])
def test_sixteen_bits_all_codes_and_midpoints(fmt: FloatFormat) -> None:
    """All 65536 codes back and forth, and every midpoint with its float32 neighbours under RNE."""
    library = np.float16 if fmt is FP16 else ml_dtypes.bfloat16
    codes = np.arange(1 << 16, dtype=np.uint16)
    theirs = codes.view(library).astype(np.float32)
    ours = decode(torch.from_numpy(codes.view(np.int16)), fmt).numpy()
    np.testing.assert_array_equal(ours, theirs)
    for code in (*range(0, 1 << 16, 251), fmt.max_code, 0x7C00, 0x7F80, 0x7FC0, 0x8001):
        reference = decode_scalar(code, fmt)
        assert reference == theirs[code] or (math.isnan(reference) and math.isnan(theirs[code]))
    finite = np.sort(np.unique(np.abs(theirs[np.isfinite(theirs)].astype(np.float64))))
    middle = ((finite[:-1] + finite[1:]) / 2).astype(np.float32)
    last = np.float32(fmt.max + (fmt.beyond_max - fmt.max) / 2)
    x = np.concatenate([finite.astype(np.float32), middle, [last, np.inf]]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore"):
        expected = x.astype(library).view(np.uint16)
    found = encode(torch.from_numpy(x), fmt, RNE).numpy().view(np.uint16)
    np.testing.assert_array_equal(found, expected)


def test_e4m3fn_equals_torch_when_clamped() -> None:
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1)) * 100
    saturating = CastRule(Rounding.RNE, Overflow.SATURATE, Subnormals.KEEP)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(encode(x, E4M3FN, saturating), expected)


LIMITS = {  # name: (bits, max, emax, smallest normal, smallest value)
    "e4m3fn": (8, 448.0, 8, 2.0**-6, 2.0**-9),
    "e5m2": (8, 57344.0, 15, 2.0**-14, 2.0**-16),
    "e4m3fnuz": (8, 240.0, 7, 2.0**-7, 2.0**-10),
    "e5m2fnuz": (8, 57344.0, 15, 2.0**-15, 2.0**-17),
    "e8m0": (8, 2.0**127, 127, 2.0**-127, 2.0**-127),
    "e2m1": (4, 6.0, 2, 1.0, 0.5),
    "e1m2": (4, 1.75, 0, 1.0, 0.25),
    "e2m3": (6, 7.5, 2, 1.0, 0.125),
    "e3m2": (6, 28.0, 4, 0.25, 0.0625),
    "hif8": (8, 32768.0, 15, 2.0**-15, 2.0**-22),
    "fp16": (16, 65504.0, 15, 2.0**-14, 2.0**-24),
    "bf16": (16, 3.3895313892515355e38, 127, 2.0**-126, 2.0**-133),
    "fp32": (32, 3.4028234663852886e38, 127, 2.0**-126, 2.0**-149),
}


def test_limits_are_those_of_the_specifications() -> None:
    for name, (bits, largest, emax, normal, smallest) in LIMITS.items():
        fmt = format_named(name.upper())
        assert (fmt.bits, fmt.max, fmt.emax, fmt.min_normal, fmt.min_subnormal) == (
            bits, largest, emax, normal, smallest,
        ), name  # fmt: skip
    assert (INT8.max, INT8.emax, INT8.minimum) == (127.0, 6, -128)
    assert set(FORMATS) == {*LIMITS, "int4", "int8"}
    assert all(fmt.name == name for name, fmt in FORMATS.items())
    assert FP32.nan_code == 0x7FC00000
    with pytest.raises(ValueError, match="known: e4m3fn"):
        format_named("e9m9")


def test_hybrid_by_hand() -> None:
    """HiF8 HYBRID, worked from the register Cast's pseudo-code; the literal rule moves 16.0 to 20."""
    rule = CastRule(Rounding.HYBRID, Overflow.SATURATE, Subnormals.KEEP)
    low = 2.0**-23  # one unit of the float32 mantissa
    cases = {
        1.0625: 1.125,  # |E| <= 3: ties away
        16.0: 20.0,  # fraction 0 >= threshold 0
        16.0 * (1 + low): 16.0,  # threshold 1, fraction 0
        16.0 * (1.125 + 0x2000 * low): 20.0,  # fraction 0x2000 + 0x40 >= 0x2000
        16.0 * (1.125 + 0x3000 * low): 16.0,  # fraction 0x2000 + 0x60 < 0x3000
        2.0**-23: 2.0**-22,  # {1, 0} >= 0
        2.0**-23
        * (1 + 0x3FFF * low): 0.0,  # 0x2001... the leading one and few bits below: 0x2000 + 1 < 0x3FFF
        2.0**-24: 0.0,
        1e30: 32768.0,
    }
    x = torch.tensor(list(cases))
    assert decode(encode(x, HIF8, rule), HIF8).tolist() == list(cases.values())
