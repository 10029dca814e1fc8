"""Values to codes and back.

What `encode` does with each input, under every rounding:

- NaN: the format's NaN, with its sign where the format has both; zero in a format without NaN or under
  NanResult.ZERO.
- Infinity: saturating, the largest finite value; else infinity, else NaN, else the largest value all the
  same.
- A finite value that rounds beyond the largest one: like infinity, except that RTZ, ODD, FLOOR of positive
  and CEIL of negative values give the largest finite value even when not saturating (IEEE 754). Rounding goes
  on past the largest value as if the exponents did: E4M3FN's 464 is the tie between 448 and 480 and stays 448
  under RNE.
- Zero, and what rounds to zero: keeps its sign where the format has a negative zero, else +0.
- Subnormals of the format: kept, or zero when the rule flushes (after rounding: what rounds up to the
  smallest normal value stays). Float32's own subnormals are always read exactly.
- E8M0, which holds scales and neither zero nor sign: see powers.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats import kernel_calls
from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.grid import byte_values, grid_for
from qwen_quantize.formats.powers import cast_to_powers
from qwen_quantize.formats.seeds import draw_seed
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat
from qwen_quantize.formats.twin import cast_to_codes

_SINGLE_BITS = 32


def code_dtype(fmt: Format) -> torch.dtype:
    """The dtype of codes: int8 for integers, uint8 up to 8 bits, else the int16 or int32 bit pattern."""
    if isinstance(fmt, IntFormat):
        return torch.int8
    if fmt.bits <= 8:
        return torch.uint8
    return torch.int16 if fmt.bits <= 16 else torch.int32


def encode(x: Tensor, fmt: Format, rule: CastRule, *, generator: torch.Generator | None = None) -> Tensor:
    """Codes of float32 x, any shape, dtype `code_dtype(fmt)`; the module says what special inputs become.

    ValueError: x is not float32, HYBRID outside HiF8, STOCHASTIC without a generator.
    """
    check_float32(x, "x")
    seed = draw_seed(rule, generator)
    if isinstance(fmt, FloatFormat) and not fmt.has_zero:
        return cast_to_powers(x, rule, seed).to(torch.uint8)
    if isinstance(fmt, FloatFormat) and fmt.bits == _SINGLE_BITS:
        return single_under_rule(x, rule).view(torch.int32)
    grid = grid_for(fmt, rule)
    library = kernel_calls.native_library() if fmt.bits <= 8 and x.device.type == "cpu" else None
    if library is None:
        return cast_to_codes(x, grid, None, seed).to(code_dtype(fmt))
    source = x.contiguous()
    out = torch.empty(x.shape, dtype=code_dtype(fmt))
    kernel_calls.encode(library, source, out, grid, seed)
    return out


def decode(codes: Tensor, fmt: Format) -> Tensor:
    """float32 values of `codes`, any shape; the exact inverse of `encode` on every finite value.

    ValueError unless codes have `code_dtype(fmt)` (uint8 and int8 are taken for each other). A byte that is
    no code of a format narrower than 8 bits gives NaN.
    """
    if fmt.bits > 8:
        if codes.dtype != code_dtype(fmt):
            raise ValueError(f"codes of {fmt.name} must be {code_dtype(fmt)}, not {codes.dtype}")
        if fmt.bits == _SINGLE_BITS:
            return codes.contiguous().view(torch.float32).clone()
        return (
            codes.contiguous().view(torch.float16 if fmt.name == "fp16" else torch.bfloat16).to(torch.float32)
        )
    table, source = byte_values(fmt), byte_codes(codes, fmt)
    library = kernel_calls.native_library() if codes.device.type == "cpu" else None
    if library is None:
        return table.to(codes.device)[source.to(torch.int64)]
    out = torch.empty(codes.shape, dtype=torch.float32)
    kernel_calls.decode(library, source, out, table)
    return out


def decode_table(fmt: Format) -> Tensor:
    """float32 [2 ** bits]: each code's value, for at most 8 bits; integers in two's complement order."""
    table = byte_values(fmt)
    if isinstance(fmt, IntFormat) and fmt.bits < 8:
        half = 1 << (fmt.bits - 1)
        return torch.cat((table[:half], table[-half:]))
    return table[: 1 << fmt.bits].clone()


def byte_codes(codes: Tensor, fmt: Format) -> Tensor:
    """`codes` as contiguous uint8 bytes; ValueError for any other dtype than uint8 and int8."""
    if codes.dtype not in (torch.uint8, torch.int8):
        raise ValueError(f"codes of {fmt.name} must be uint8 or int8, not {codes.dtype}")
    return codes.contiguous().view(torch.uint8)


def check_float32(x: Tensor, name: str) -> None:
    """ValueError unless x is float32: other inputs were rounded once already."""
    if x.dtype != torch.float32:
        raise ValueError(f"{name} must be float32, not {x.dtype}: convert it where that is meant")


def single_under_rule(x: Tensor, rule: CastRule) -> Tensor:
    """float32 to float32, a fresh tensor: nothing rounds, but the rest of the rule holds."""
    if rule.rounding is Rounding.HYBRID:
        raise ValueError("rounding hybrid exists for hif8 only, not for fp32")
    bits = x.contiguous().view(torch.int32)
    magnitude, sign = bits & 0x7FFFFFFF, bits & -0x80000000
    result = bits.clone()
    if rule.overflow is Overflow.SATURATE:
        result = torch.where(magnitude == 0x7F800000, sign | 0x7F7FFFFF, result)
    if rule.subnormals is Subnormals.FLUSH:
        result = torch.where(magnitude < 0x800000, sign, result)
    of_nan = sign | 0x7FC00000 if rule.nan is NanResult.PROPAGATE else torch.zeros_like(bits)
    return torch.where(magnitude > 0x7F800000, of_nan, result).view(torch.float32)
