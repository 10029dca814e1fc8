"""Linears of one input stream, fused: plain, observed, and as the chip computes them.

Linears that read the same activations (query, key, value; gate, up) are one matrix product here, so an
activation is cast, and observed, once. What a linear does is the type of the group, not a hook on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.dot import emulated_matmul, prepare_right
from qwen_quantize.formats.dot_operands import RightOperand
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.unrounded_scales import fake_quantize_unrounded


class LinearGroup(Protocol):
    """Maps [..., in_features] to one output per member linear, in the blueprint's order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights it computes with."""
        ...

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class ActivationCast:
    """The dynamic cast of a linear's input: per token, in groups of `group_size` along the features.

    unrounded_scales: as if scales were float32 instead of powers of two; `scale_rule` does not count then.
    """

    format: Format
    rule: CastRule
    scale_rule: ScaleRule
    group_size: int
    unrounded_scales: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K] float32 -> the same shape: the values that the matrix unit sees, times their scales."""
        flat = x.reshape(-1, x.shape[-1])
        if self.unrounded_scales:
            return fake_quantize_unrounded(flat, self.format, self.rule, self.group_size).view(x.shape)
        cast = fake_quantize_groups(flat, self.format, self.rule, self.scale_rule, self.group_size)
        return cast.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class ChipCompute:
    """What a chip makes of quantized linears: the cast of their input, and the unit that adds the products.

    cast None: the input stays as it is. unit None: sums are float32.
    """

    cast: ActivationCast | None
    unit: DotUnit | None = None

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
    operands come times their scales; dot_unit.py says why that gives the unit's bits. A bias is added in float32.
    """

    inner: PlainGroup
    cast: ActivationCast | None
    right: RightOperand | None

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.cast is not None:
            x = self.cast(x)
        if self.right is None:
            return self.inner(x)
        flat = x.reshape(-1, x.shape[-1])
        product = emulated_matmul(flat, self.right, self.right.unit)
        if self.inner.bias is not None:
            product += self.inner.bias
        return torch.split(product.view(*x.shape[:-1], -1), list(self.inner.sizes), dim=-1)


def emulated(inner: PlainGroup, chip: ChipCompute) -> EmulatedGroup:
    """The group as `chip` runs it. ValueError for weights that its unit has no operands for."""
    right = None if chip.unit is None else prepare_right(inner.weight, chip.unit)
    return EmulatedGroup(inner, chip.cast, right)


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
