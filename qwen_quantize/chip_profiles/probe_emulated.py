"""A chip that is not there: its profile's arithmetic, or any hidden one, behind the calls of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qwen_quantize.chip_profiles.leaf import Absent, Leaf
from qwen_quantize.chip_profiles.probe_device import Pair, Unavailable, operand_format
from qwen_quantize.chip_profiles.schema import Cast, ChipProfile, Matmul
from qwen_quantize.chip_profiles.standing import decides
from qwen_quantize.formats.cast_path import CastStep, encode_along
from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode
from qwen_quantize.formats.dot import emulated_integer_matmul, emulated_matmul
from qwen_quantize.formats.dot_record import DotUnit, Order, Register, SumOverflow
from qwen_quantize.formats.spec import FloatFormat, IntFormat
from qwen_quantize.formats.tables import FORMATS, FP32

# A cast to an intermediate type on the way; IEEE types overflow to infinity.
STEP_RULE = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
# How a sum becomes a narrower output.
OUTPUT_RULE = STEP_RULE


class EmulatedDevice:
    """Hidden units and casts; units: by operand type. outputs: the types that each result is offered in."""

    def __init__(
        self,
        name: str,
        units: Mapping[str, DotUnit],
        casts: Mapping[str, Sequence[CastStep]],
        *,
        outputs: Sequence[str] = ("fp32",),
        output_rule: CastRule = OUTPUT_RULE,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._units = dict(units)
        self._casts = {target: tuple(path) for target, path in casts.items()}
        self._outputs = tuple(outputs)
        self._output_rule = output_rule
        self._versions = dict(versions or {})
        self._generator = torch.Generator().manual_seed(1)

    @property
    def name(self) -> str:
        return self._name

    def pairs(self) -> tuple[Pair, ...]:
        found = []
        for operands, unit in self._units.items():
            integer = unit.register is Register.INT32
            found += [Pair(operands, output) for output in (("int32",) if integer else self._outputs)]
        return tuple(found)

    def casts(self) -> tuple[str, ...]:
        return tuple(self._casts)

    def matmul(self, a: Tensor, b: Tensor, pair: Pair) -> Tensor:
        unit = self._units.get(pair.operands)
        if unit is None:
            raise Unavailable(f"{self._name} states nothing of {pair.operands} operands")
        if pair.output == "int32":
            return emulated_integer_matmul(a, b, unit)
        sums = emulated_matmul(a, b, unit)
        if pair.output == "fp32":
            return sums
        fmt = FORMATS[pair.output]
        return decode(encode_along(sums, (CastStep(fmt, self._output_rule),)), fmt)

    def cast(self, x: Tensor, target: str) -> Tensor:
        path = self._casts.get(target)
        if path is None:
            raise Unavailable(f"{self._name} states no cast to {target}")
        return encode_along(x, path, generator=self._generator)

    def about(self) -> Mapping[str, str]:
        return {"device": self._name, "kernel": "emulated", "torch": str(torch.__version__), **self._versions}


def emulated_chip(profile: ChipProfile, name: str) -> EmulatedDevice:
    """The device that computes as `profile` states; what it leaves open is exact, to nearest, saturating.

    Only facts that decide bits count (`standing.decides`). A product without fraction bits and step is plain
    float32. Products of two different types are left out.
    """
    units = {}
    for key, facts in profile.arithmetic.matmul.items():
        left, _, right = key.partition("*")
        if left == right and any(decides(leaf, profile) for leaf in _leaves(facts)):
            units[left] = unit_of(profile, left, facts)
    casts = {}
    for key, cast in profile.arithmetic.casts.items():
        source, _, target = key.partition("->")
        if source == "fp32" and target in FORMATS and decides(cast.rounding, profile):
            casts[target] = steps_of(profile, target, cast)
    return EmulatedDevice(name, units, casts, versions=profile.versions)


def unit_of(profile: ChipProfile, operands: str, facts: Matmul) -> DotUnit:
    """The unit that the stated facts of one product describe."""
    fmt = operand_format(operands)
    accumulator = _text(facts.accumulator, profile)
    overflow = _text(facts.overflow, profile)
    name = f"{profile.name}-{operands}"
    if isinstance(fmt, IntFormat):
        saturates = overflow == "saturate"
        how = SumOverflow.SATURATE if saturates else SumOverflow.WRAP
        return DotUnit(name, fmt, fmt, Order.ALIGNED, register=Register.INT32, overflow=how)
    products = _integer(facts.products_per_step, profile)
    order = _text(facts.order, profile) or ""
    table = fmt if isinstance(fmt, FloatFormat) else FP32
    if products is None:
        return DotUnit(name, table, table, Order.UNSPECIFIED)
    if order.startswith("pairwise") or "tree" in order:
        return DotUnit(name, table, table, Order.PAIRWISE, products=products)
    half = accumulator == "fp16"
    return DotUnit(
        name,
        table,
        table,
        Order.ALIGNED,
        products=products,
        fraction_bits=_integer(facts.fraction_bits, profile),
        alignment_rounding=Rounding(_text(facts.alignment_rounding, profile) or "rtz"),
        final_rounding=Rounding(_text(facts.final_rounding, profile) or "rne"),
        register=Register.FP16 if half else Register.FP32,
        mantissa_bits=_integer(facts.output_mantissa_bits, profile) or (10 if half else 23),
        promotion_interval=_integer(facts.promotion_interval, profile),
        overflow=SumOverflow.SATURATE if overflow == "saturate" else SumOverflow.INFINITY,
        input_rounding=Rounding.RTZ if operands == "tf32" else None,
    )


def steps_of(profile: ChipProfile, target: str, cast: Cast) -> tuple[CastStep, ...]:
    """The cast float32 -> target, by way of the types that the profile names."""
    path = cast.path.texts()
    between = () if isinstance(path, Absent) or not decides(cast.path, profile) else path
    rule = CastRule(
        Rounding(_text(cast.rounding, profile) or "rne"),
        Overflow(_text(cast.overflow, profile) or "saturate"),
        Subnormals(_text(cast.subnormals, profile) or "keep"),
        NanResult(_text(cast.nan, profile) or "propagate"),
    )
    return (*(CastStep(FORMATS[name], STEP_RULE) for name in between), CastStep(FORMATS[target], rule))


def _leaves(facts: Matmul) -> tuple[Leaf, ...]:
    return (facts.accumulator, facts.fraction_bits, facts.products_per_step, facts.final_rounding)


def _text(leaf: Leaf, profile: ChipProfile) -> str | None:
    value = leaf.text()
    return None if isinstance(value, Absent) or not decides(leaf, profile) else value


def _integer(leaf: Leaf, profile: ChipProfile) -> int | None:
    value = leaf.integer()
    return None if isinstance(value, Absent) or not decides(leaf, profile) else value
