"""Random dot products from fixed seeds, in distributions that make a matrix unit lose bits.

Uniform or normal values seldom exercise an alignment. `mixed` spreads the exponents; in `zero_sum` the second half
takes back the first in another order, so that nothing but the accumulated rounding is left; `tiny` lives at the lower
end of the format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat

KINDS = ("normal", "mixed", "same_sign", "zero_sum", "sparse", "tiny")


def operands(
    fmt: FloatFormat, kind: str, rows: int, columns: int, k: int, seed: int
) -> tuple[Tensor, Tensor]:
    """a [rows, k] and b [columns, k] of values of `fmt`, float32; the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed * 1009 + KINDS.index(kind))
    if kind == "zero_sum":
        half = k // 2
        order = torch.randperm(half, generator=generator)
        a, b = _pair(fmt, "mixed", rows, columns, half, generator)
        return torch.cat((a, -a[:, order]), 1), torch.cat((b, b[:, order]), 1)
    return _pair(fmt, kind, rows, columns, k, generator)


def swapped(x: Tensor, first: int, second: int) -> Tensor:
    """x [n, K] with two columns exchanged."""
    order = torch.arange(x.shape[1])
    order[first], order[second] = second, first
    return x[:, order].contiguous()


def only_first(x: Tensor, count: int) -> Tensor:
    """x [n, K] with zeros from column `count` on."""
    out = torch.zeros_like(x)
    out[:, :count] = x[:, :count]
    return out


def _pair(
    fmt: FloatFormat, kind: str, rows: int, columns: int, k: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    a = _values(fmt, kind, rows, k, generator)
    b = _values(fmt, kind, columns, k, generator)
    if kind == "sparse":  # which places are empty is the same for all rows of a: whole steps vanish
        a = a * (torch.rand(k, generator=generator) < 0.35)
    return a, b


def _values(fmt: FloatFormat, kind: str, rows: int, k: int, generator: torch.Generator) -> Tensor:
    normal = torch.randn(rows, k, generator=generator)
    if kind == "normal":
        return quantize_values(normal * min(1.0, fmt.max / 8), fmt, RNE_SATURATE)
    if kind == "same_sign":
        return quantize_values(
            torch.rand(rows, k, generator=generator) * min(4.0, fmt.max), fmt, RNE_SATURATE
        )
    low, high = max(fmt.min_exponent, -9), min(fmt.emax - 1, 6)
    if kind == "tiny":
        low, high = max(fmt.min_exponent - fmt.mantissa_bits, -76), max(fmt.min_exponent + 6, -58)
    exponents = torch.randint(low, high + 1, (rows, k), generator=generator)
    significands = 1 + torch.rand(rows, k, generator=generator)
    signs = torch.where(torch.rand(rows, k, generator=generator) < 0.5, -1.0, 1.0)
    powers = ((exponents + 127) << 23).to(torch.int32).view(torch.float32)  # exact on every machine
    return quantize_values(signs * significands * powers, fmt, RNE_SATURATE)
