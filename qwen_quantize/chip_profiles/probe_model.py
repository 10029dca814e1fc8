"""A hypothesis about how a device multiplies matrices, and how much of what was seen it explains.

Beside the orders of `DotUnit` a processor may keep several float32 sums at once: with `lanes`, product k of a block
of `block` products goes to lane k mod `lanes`, each lane starts from zero, and the lanes' sums and then the blocks'
are added in order as float32. (An AMX tile of bfloat16: 2 lanes, blocks of 32, subnormals flushed.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_quantize.chip_profiles.probe_device import Pair, ProbedDevice
from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.dot_record import DotUnit, Order
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.tables import FORMATS

OUTPUT_RULE = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
ROWS = 64  # rows of one call: enough for a library to choose the kernel that it uses for real work

_PART = (8, 32)  # rows and columns of a random group by which models are ranked


@dataclass(frozen=True, slots=True)
class SumModel:
    """How the products come together (`unit`, `lanes`, `block`) and become an `output` by `output_rule`."""

    unit: DotUnit
    output: str = "fp32"
    output_rule: CastRule = OUTPUT_RULE
    lanes: int = 1
    block: int | None = None

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """float32 [M, N] of a [M, K] and b [N, K], as this model says the device gives it."""
        sums = emulated_matmul(a, b, self.unit) if self.lanes == 1 else self._in_lanes(a, b)
        return (
            sums if self.output == "fp32" else quantize_values(sums, FORMATS[self.output], self.output_rule)
        )

    def _in_lanes(self, a: Tensor, b: Tensor) -> Tensor:
        k = a.shape[1]
        block = self.block or k
        total = None
        for first in range(0, k, block):
            left, right = a[:, first : first + block], b[:, first : first + block]
            lanes = min(self.lanes, left.shape[1])
            sums = [
                emulated_matmul(
                    left[:, lane::lanes].contiguous(), right[:, lane::lanes].contiguous(), self.unit
                )
                for lane in range(lanes)
            ]
            of_block = sums[0]
            for other in sums[1:]:
                of_block = _flushed(of_block + other, self.unit)
            total = of_block if total is None else _flushed(total + of_block, self.unit)
        return torch.zeros(a.shape[0], b.shape[0]) if total is None else total


@dataclass(frozen=True, slots=True)
class Seen:
    """What the device gave for a [M, K] and b [N, K]: out [M, N], or [M] where only row i meets row i."""

    name: str
    a: Tensor
    b: Tensor
    out: Tensor
    paired: bool
    labels: tuple[str, ...] = ()  # of the rows of a paired group

    @property
    def dots(self) -> int:
        return self.out.numel()

    @property
    def exact_bits(self) -> bool:
        """Whether NaN patterns count; elsewhere any NaN equals any other."""
        return self.name.startswith("12 ")


def thinned(seen: Seen) -> Seen:
    """A part of a random group, enough to rank models by; a paired group as it is."""
    if seen.paired:
        return seen
    rows, columns = _PART
    a, b, out = seen.a[:rows], seen.b[:columns], seen.out[:rows, :columns]
    return replace(seen, a=a.contiguous(), b=b.contiguous(), out=out.contiguous())


def ask(
    device: ProbedDevice, pair: Pair, name: str, a: Tensor, b: Tensor, labels: Sequence[str] = ()
) -> Seen:
    """All products of the rows of a [M, K] with those of b [N, K]."""
    return Seen(name, a, b, device.matmul(a, b, pair), paired=False, labels=tuple(labels))


def ask_paired(
    device: ProbedDevice, pair: Pair, name: str, a: Tensor, b: Tensor, labels: Sequence[str] = ()
) -> Seen:
    """The products of row i of a with row i of b, computed `ROWS` at a time with all others of their call."""
    outs = []
    for first in range(0, a.shape[0], ROWS):
        left, right = _padded(a[first : first + ROWS]), _padded(b[first : first + ROWS])
        outs.append(device.matmul(left, right, pair).diagonal()[: a.shape[0] - first])
    return Seen(name, a, b, torch.cat(outs), paired=True, labels=tuple(labels))


def agreement(model: SumModel, seen: Seen) -> Tensor:
    """Boolean, of the shape of `seen.out`: where the model gives the device's bits."""
    if not seen.paired:
        return _same(model.matmul(seen.a, seen.b), seen)
    outs = [
        model.matmul(seen.a[first : first + ROWS], seen.b[first : first + ROWS]).diagonal()
        for first in range(0, seen.a.shape[0], ROWS)
    ]
    return _same(torch.cat(outs), seen)


def explained(model: SumModel, seen: Seen) -> float:
    """The fraction of `seen` that the model gives bit for bit."""
    return float(agreement(model, seen).to(torch.float64).mean())


def score(model: SumModel, groups: Sequence[Seen]) -> float:
    """The mean over the groups of what is explained: a small group weighs as much as a large one."""
    return sum(explained(model, seen) for seen in groups) / max(len(groups), 1)


def with_unit(model: SumModel, **changes: object) -> SumModel | None:
    """The model with fields of its unit changed; None where no unit has such fields together."""
    try:
        return replace(model, unit=replace(model.unit, **changes))  # type: ignore[arg-type]
    except ValueError:
        return None


def as_steps_of_one(model: SumModel) -> SumModel | None:
    """A chain of float32 multiply-adds as aligned steps of one exact product, which can then be varied."""
    if model.unit.order is not Order.FMA or model.lanes != 1:
        return None
    return with_unit(model, order=Order.ALIGNED, products=1)


def _same(ours: Tensor, seen: Seen) -> Tensor:
    theirs = seen.out
    same = ours.contiguous().view(torch.int32) == theirs.contiguous().view(torch.int32)
    return same if seen.exact_bits else same | (ours.isnan() & theirs.isnan())


def _padded(x: Tensor) -> Tensor:
    if x.shape[0] == ROWS:
        return x
    return torch.cat((x, x[-1:].expand(ROWS - x.shape[0], -1))).contiguous()


def _flushed(x: Tensor, unit: DotUnit) -> Tensor:
    if not unit.flush_outputs:
        return x
    return torch.where(x.abs() < 2.0**unit.min_exponent, torch.copysign(torch.zeros_like(x), x), x)
