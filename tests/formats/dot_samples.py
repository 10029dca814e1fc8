"""Operands that try a matrix unit's arithmetic, and the comparison of its kernel, its twin and its oracle."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import code_dtype, decode
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.dot_operands import inputs_of
from qwen_quantize.formats.dot_record import DotUnit, Order
from qwen_quantize.formats.dot_reference import dot_reference
from qwen_quantize.formats.dot_twin import matmul_by_twin
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat, IntFormat

KINDS = ("normal", "codes", "powers", "cancelling", "ties", "tiny", "mixed")
TRUNCATE = CastRule(Rounding.RTZ, Overflow.SATURATE, Subnormals.KEEP)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


def cast(x: Tensor, fmt: FloatFormat | IntFormat) -> Tensor:
    if isinstance(fmt, FloatFormat) and fmt.bits == 32:
        return x
    return quantize_values(x, fmt, TRUNCATE)


def any_codes(shape: tuple[int, ...], fmt: FloatFormat, generator: torch.Generator) -> Tensor:
    """Values of random codes: all exponents alike, subnormals, zeros of both signs, infinities and NaN."""
    if fmt.bits > 16:
        words = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
        return (words & -(1 << (23 - fmt.mantissa_bits))).view(torch.float32)
    codes = torch.randint(0, 1 << fmt.bits, shape, generator=generator)
    signed = codes - (1 << 16) * (codes >= 1 << 15) if fmt.bits == 16 else codes
    return decode(signed.to(code_dtype(fmt)), fmt)


def sample(kind: str, shape: tuple[int, int], fmt: FloatFormat, generator: torch.Generator) -> Tensor:
    """Finite values of `fmt` [rows, K]."""
    if kind == "normal":
        return cast(torch.randn(shape, generator=generator), fmt)
    if kind == "codes":
        x = any_codes(shape, fmt, generator)
        return torch.where(x.isfinite(), x, 0.0)
    signs = torch.randint(0, 2, shape, generator=generator) * 2.0 - 1
    if kind == "powers":  # a wide range of exponents, few mantissa bits
        span = min(-fmt.min_exponent, 40)
        exponents = torch.randint(-span, span, shape, generator=generator)
        mantissas = 1 + torch.randint(0, 4, shape, generator=generator) / 4
        return cast(signs * mantissas * torch.exp2(exponents.float()), fmt)
    if kind == "cancelling":  # neighbours nearly undo each other, whatever the other operand is like
        x = torch.randn(shape, generator=generator)
        x[:, 1::2] = -x[:, : shape[1] // 2 * 2 : 2] * (
            1 + (torch.rand(x[:, 1::2].shape, generator=generator) < 0.2) / 8
        )
        return cast(x, fmt)
    if kind == "ties":  # small integers over powers of two meet rounding boundaries exactly
        x = torch.randint(-8, 9, shape, generator=generator).float()
        return cast(x * torch.exp2(torch.randint(-7, 8, shape, generator=generator).float()), fmt)
    if kind == "tiny":  # subnormals and the smallest normal values
        steps = torch.randint(-(3 << fmt.mantissa_bits), 3 << fmt.mantissa_bits, shape, generator=generator)
        return cast(steps * fmt.min_subnormal, fmt)
    parts = [sample(other, shape, fmt, generator) for other in KINDS[:-1]]
    choice = torch.randint(0, len(parts), shape, generator=generator)
    return torch.stack(parts).gather(0, choice[None])[0]


def register_values(kind: str, shape: tuple[int, int], unit: DotUnit, generator: torch.Generator) -> Tensor:
    """Values for c: of the register's type and of the size of the products, zeros among them."""
    x = torch.randn(shape, generator=generator)
    if kind in ("codes", "powers", "mixed"):
        x = x * torch.exp2(torch.randint(-30, 30, shape, generator=generator).float())
    if kind == "tiny":
        x = x * float(unit.a_format.min_subnormal) * float(unit.b_format.min_subnormal)  # type: ignore[union-attr]
    x = torch.where(torch.rand(shape, generator=generator) < 0.2, 0.0, x)
    return x.to(torch.float16).float().clamp(-65504, 65504) if unit.min_exponent == -14 else x


def oracle(a: Tensor, b: Tensor, c: Tensor, unit: DotUnit) -> Tensor:
    """int32 bits [M, N] by `dot_reference`."""
    left = inputs_of(a, unit.a_format, unit, "a").tolist()
    right = inputs_of(b, unit.b_format, unit, "b").tolist()
    start = c.tolist()
    out = []
    for i, x in enumerate(left):
        for j, y in enumerate(right):
            value = dot_reference(x, y, unit, start[i][j])
            pattern = unit.nan_bits if value != value else struct.unpack("<I", struct.pack("<f", value))[0]
            out.append(pattern - (1 << 32) if pattern >= 1 << 31 else pattern)
    return torch.tensor(out, dtype=torch.int32).view(len(left), len(right))


def twin(a: Tensor, b: Tensor, c: Tensor, unit: DotUnit) -> Tensor:
    """The twin alone, as a machine without a compiler runs it."""
    a, b = inputs_of(a, unit.a_format, unit, "a"), inputs_of(b, unit.b_format, unit, "b")
    if unit.flush_inputs:
        c = torch.where(c.abs() < 2.0**unit.min_exponent, 0.0, c)
    x = matmul_by_twin(a, b, c, unit)
    nan = unit.nan_bits - (1 << 32) if unit.nan_bits >= 1 << 31 else unit.nan_bits
    return torch.where(x.isnan(), nan, bits(x)).to(torch.int32)


def check(a: Tensor, b: Tensor, c: Tensor, unit: DotUnit, note: str = "") -> None:
    """Kernel and twin against the oracle, bit for bit."""
    expected = oracle(a, b, c, unit)
    for who, found in (("kernel", bits(emulated_matmul(a, b, unit, c))), ("twin", twin(a, b, c, unit))):
        wrong = (found != expected).nonzero()
        if wrong.numel():
            i, j = wrong[0].tolist()
            got, want = (x[i, j].view(torch.float32).item() for x in (found, expected))
            raise AssertionError(
                f"{unit.name} {note}: {who} differs from the oracle in {len(wrong)} of {expected.numel()}: "
                f"{got!r}, not {want!r}, for a={a[i].tolist()} b={b[j].tolist()} c={c[i, j].item()!r}"
            )


def span(unit: DotUnit) -> int:
    """K of two blocks and a short third one."""
    if unit.order is Order.PAIRWISE and unit.products is None:
        return 21
    return 2 * (unit.products or 5) + 2
