"""The named number formats. A new format is one record here and one line in `FORMATS`.

Limits checked against ml_dtypes and en_dtypes in the tests; OCP FP8, OCP MX v1.0, arXiv 2409.16626 (HiF8).
"""

from __future__ import annotations

import math

from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat, TableFormat

E4M3FN = FloatFormat("e4m3fn", 4, 3, bias=7, has_infinity=False, nan_codes=(0x7F, 0xFF))
E5M2 = FloatFormat("e5m2", 5, 2, bias=15, has_infinity=True, nan_codes=(0x7E, 0x7D, 0x7F, 0xFD, 0xFE, 0xFF))
E4M3FNUZ = FloatFormat(
    "e4m3fnuz", 4, 3, bias=8, has_infinity=False, nan_codes=(0x80,), has_negative_zero=False
)
E5M2FNUZ = FloatFormat(
    "e5m2fnuz", 5, 2, bias=16, has_infinity=False, nan_codes=(0x80,), has_negative_zero=False
)
E8M0 = FloatFormat(
    "e8m0",
    8,
    0,
    bias=127,
    has_infinity=False,
    nan_codes=(0xFF,),
    signed=False,
    has_zero=False,
    has_negative_zero=False,
)
E2M1 = FloatFormat("e2m1", 2, 1, bias=1, has_infinity=False, nan_codes=())
E1M2 = FloatFormat("e1m2", 1, 2, bias=1, has_infinity=False, nan_codes=())  # 0, 0.25 .. 1.75: Ascend 950
E2M3 = FloatFormat("e2m3", 2, 3, bias=1, has_infinity=False, nan_codes=())
E3M2 = FloatFormat("e3m2", 3, 2, bias=3, has_infinity=False, nan_codes=())
FP16 = FloatFormat("fp16", 5, 10, bias=15, has_infinity=True, nan_codes=(0x7E00,))
BF16 = FloatFormat("bf16", 8, 7, bias=127, has_infinity=True, nan_codes=(0x7FC0,))
FP32 = FloatFormat("fp32", 8, 23, bias=127, has_infinity=True, nan_codes=(0x7FC00000,))

INT4 = IntFormat("int4", 4, -8, 7)
INT8 = IntFormat("int8", 8, -128, 127)


def _hif8_magnitude(code: int) -> float:
    """The value of a non-negative HiF8 code: a prefix says how many exponent bits follow; then mantissa.

    The exponent is sign-magnitude with a hidden leading one (arXiv 2409.16626, section 2).
    """
    if code == 0x6F:
        return math.inf  # the pattern of 1.5 * 2^15
    if code < 0x08:  # prefix 0000: powers of two, three bits of exponent
        return math.ldexp(1.0, code - 23) if code else 0.0
    if code < 0x10:  # prefix 0001: exponent 0, no exponent bits
        return 1 + (code & 7) / 8
    if code < 0x20:  # prefix 001: exponent +-1, its sign only
        exponent_bits, mantissa_bits = 1, 3
    else:  # prefixes 01, 10, 11: 2, 3, 4 exponent bits
        exponent_bits = (code >> 5) + 1
        mantissa_bits = 5 - exponent_bits
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent_field = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    hidden_one = 1 << (exponent_bits - 1)
    magnitude = hidden_one | (exponent_field & (hidden_one - 1))
    exponent = -magnitude if exponent_field & hidden_one else magnitude
    return math.ldexp((1 << mantissa_bits) + mantissa, exponent - mantissa_bits)


_HIF8_POSITIVE = tuple(_hif8_magnitude(code) for code in range(128))
HIF8 = TableFormat(
    "hif8",
    (*_HIF8_POSITIVE, math.nan, *(-value for value in _HIF8_POSITIVE[1:])),  # 0x80 is NaN, not -0
    beyond_max=1.5 * 2.0**15,
    min_normal=2.0**-15,
)

FORMATS: dict[str, Format] = {
    "e4m3fn": E4M3FN,
    "e5m2": E5M2,
    "e4m3fnuz": E4M3FNUZ,
    "e5m2fnuz": E5M2FNUZ,
    "e8m0": E8M0,
    "e2m1": E2M1,
    "e1m2": E1M2,
    "e2m3": E2M3,
    "e3m2": E3M2,
    "hif8": HIF8,
    "int4": INT4,
    "int8": INT8,
    "fp16": FP16,
    "bf16": BF16,
    "fp32": FP32,
}


def format_named(name: str) -> Format:
    """The format called `name`, in any case; ValueError names the known ones."""
    try:
        return FORMATS[name.lower()]
    except KeyError:
        raise ValueError(f"unknown number format {name!r}; known: {', '.join(FORMATS)}") from None
