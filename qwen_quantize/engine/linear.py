"""Linears of one input stream, fused: plain, observed, and as the chip computes them.

Linears that read the same activations (query, key, value; gate, up) are one matrix product here, so an
activation is cast, and observed, once. What a linear does is the type of the group, not a hook on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.formats.activation_cast import ActivationCast
from qwen_quantize.formats.cast_path import static_scale
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.dot import emulated_matmul, prepare_right
from qwen_quantize.formats.dot_operands import RightOperand
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import FP32

_MKLDNN: Any = torch.backends.mkldnn  # its stub lacks what it has


class LinearGroup(Protocol):
    """Maps [..., in_features] to one output per member linear, in the blueprint's order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights it computes with."""
        ...

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class ChipCompute:
    """What a chip makes of quantized linears: the cast of their input, and the unit that adds the products.

    cast None: the input stays as it is. unit None: sums are float32. bare: the unit adds codes, and the scales of
    a token and of a row of the weight multiply finished sums; else both operands come times their scales.
    sum_scale_format: the type of those two scales' product, where the chip keeps it in fewer bits than a float32.
    """

    cast: ActivationCast | None
    unit: DotUnit | None = None
    bare: bool = False
    sum_scale_format: FloatFormat | None = None

    @property
    def changes_nothing(self) -> bool:
        return self.cast is None and self.unit is None


@dataclass(frozen=True, slots=True)
class PlainGroup:
    """Full-precision linears. weight: [sum of out_features, in_features]; sizes: each member's rows."""

    weight: Tensor
    bias: Tensor | None
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return torch.split(functional.linear(x, self.weight, self.bias), list(self.sizes), dim=-1)


@dataclass(frozen=True, slots=True)
class Bfloat16Group:
    """A group whose products are of numbers rounded to bfloat16, with float32 sums, where the CPU has a unit for that.

    Elsewhere, and with a torch older than this setting, they stay float32. It is what a chip makes of 16-bit
    activations, and several times as fast. The setting is the whole process's while the group runs.
    """

    inner: LinearGroup

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        products = getattr(_MKLDNN, "matmul", None)
        if products is None:
            return self.inner(x)
        before = products.fp32_precision
        products.fp32_precision = "bf16"
        try:
            return self.inner(x)
        finally:
            products.fp32_precision = before


@dataclass(frozen=True, slots=True)
class ObservedGroup:
    """A group whose input is shown to an observer before it is used."""

    inner: LinearGroup
    observe: Callable[[Tensor], None]

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        self.observe(x)
        return self.inner(x)


@dataclass(frozen=True, slots=True)
class WatchedGroup:
    """A last group whose input is shown to an observer and whose outputs nobody needs: they are zeros."""

    inner: PlainGroup
    observe: Callable[[Tensor], None]

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        self.observe(x)
        return tuple(torch.zeros(*x.shape[:-1], size) for size in self.inner.sizes)


@dataclass(frozen=True, slots=True)
class EmulatedGroup:
    """Quantized linears as the chip runs them: activations cast, then multiplied with the decoded weights.

    `right` are the weights as the chip's matrix unit reads them, prepared once; None where sums are float32. Both
    operands come times their scales; dot_unit.py says why that gives the unit's bits. `sums`: they come without
    the scales of a token and of a row, which multiply the sums. A bias is added in float32.
    """

    inner: PlainGroup
    cast: ActivationCast | None
    right: RightOperand | None
    sums: SumScales | None = None

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        scale: Tensor | None = None
        if self.cast is not None and self.sums is not None:
            x, scale = self.cast.operands(x)
        elif self.cast is not None:
            x = self.cast(x)
        if self.right is None and self.sums is None:
            return self.inner(x)
        flat = x.reshape(-1, x.shape[-1])
        if self.right is None:
            product = functional.linear(flat, self.inner.weight)
        else:
            product = emulated_matmul(flat, self.right, self.right.unit)
        product = product.view(*x.shape[:-1], -1)
        if self.sums is not None:
            product = self.sums.apply(product, scale)
        if self.inner.bias is not None:
            product += self.inner.bias
        return torch.split(product, list(self.inner.sizes), dim=-1)


@dataclass(frozen=True, slots=True)
class SumScales:
    """What finished sums are multiplied with: row, [out_features], and the tokens' scales, in this order.

    row None: the weights hold their scales. format: the two are multiplied first, and cut to this type.
    """

    row: Tensor | None
    format: FloatFormat | None

    def apply(self, sums: Tensor, token: Tensor | None) -> Tensor:
        """sums: [..., out_features]; token: what `ActivationCast.operands` gives."""
        if self.format is not None and self.row is not None and token is not None:
            scale = (self.row * token).clamp(min=self.format.min_normal)  # below it are rows of zeros only
            return sums * static_scale(scale, fmt=self.format)
        if self.row is not None:
            sums = sums * self.row
        return sums if token is None else sums * token


def emulated(inner: PlainGroup, chip: ChipCompute, row_scale: Tensor | None = None) -> EmulatedGroup:
    """The group as `chip` runs it. ValueError for weights that its unit has no operands for.

    row_scale: float32 [out_features], the scales that multiply whole rows of the weights. Only a chip that adds
    codes (`bare`) asks for them; without them the rows enter its unit as float32 values, times their scales.
    """
    unit = chip.unit
    if not chip.bare:
        right = None if unit is None else prepare_right(inner.weight, unit)
        return EmulatedGroup(inner, chip.cast, right)
    sums = SumScales(row_scale, chip.sum_scale_format)
    if row_scale is not None:
        # A quotient is a rounding away from its code. Rows of zeros may have any scale, zero too.
        codes = inner.weight / torch.where(row_scale == 0, 1.0, row_scale).unsqueeze(1)
        if unit is None:  # only integers have no unit and yet their own arithmetic
            codes = codes.round()
        elif unit.b_format != FP32:
            codes = quantize_values(codes, unit.b_format, RNE_SATURATE)
        inner = PlainGroup(codes, inner.bias, inner.sizes)
    elif unit is not None:
        unit = replace(unit, b_format=FP32)
    right = None if unit is None else prepare_right(inner.weight, unit)
    return EmulatedGroup(inner, chip.cast, right, sums)


@dataclass(frozen=True, slots=True)
class MixedGroup:
    """Linears of one stream of which only some are quantized; each part is its own group of one."""

    parts: tuple[LinearGroup, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(output for part in self.parts for output in part(x))


def fuse(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> PlainGroup:
    """One group of float32 linears [out_i, in]; a missing bias counts as zero if another member has one."""
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [torch.zeros(w.shape[0]) if b is None else b for w, b in zip(weights, biases, strict=True)]
        )
    weight = weights[0] if len(weights) == 1 else torch.cat(tuple(weights))
    return PlainGroup(weight, bias, tuple(w.shape[0] for w in weights))
