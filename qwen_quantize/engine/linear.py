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
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.spec import Format


class LinearGroup(Protocol):
    """Maps [..., in_features] to one output per member linear, in the blueprint's order."""

    @property
    def nbytes(self) -> int:
        """Bytes of the weights it computes with."""
        ...

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True, slots=True)
class ActivationCast:
    """The dynamic cast of a linear's input: per token, in groups of `group_size` along the features."""

    format: Format
    rule: CastRule
    scale_rule: ScaleRule
    group_size: int

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., K] float32 -> the same shape: the values that the matrix unit sees, times their scales."""
        flat = x.reshape(-1, x.shape[-1])
        cast = fake_quantize_groups(flat, self.format, self.rule, self.scale_rule, self.group_size)
        return cast.reshape(x.shape)


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

    The products of two FP8 values are exact in float32; the sum is float32 (chips with a narrower
    accumulator need more than this type).
    """

    inner: PlainGroup
    cast: ActivationCast

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.inner(self.cast(x))


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
