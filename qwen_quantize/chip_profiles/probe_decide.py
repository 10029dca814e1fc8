"""What may be claimed of a unit: only what no other value could have produced.

A field is measured when each of its other values contradicts something seen in a group of dot products that the
model explains to the last bit. Where another value would have given the same bits everywhere, the field is unknown,
and the reason names the value that cannot be told apart.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from qwen_quantize.chip_profiles.probe_fit import DETAILS, LONGEST, Fit
from qwen_quantize.chip_profiles.probe_model import (
    Seen,
    SumModel,
    as_steps_of_one,
    explained,
    thinned,
    with_unit,
)
from qwen_quantize.formats.cast_rule import Overflow, Rounding
from qwen_quantize.formats.dot_record import DOT_ROUNDINGS, Joining, Order, Register
from qwen_quantize.formats.tables import FP32

Value = str | int | bool
MEASURED, UNKNOWN, NOT_APPLICABLE = "measured", "unknown", "not_applicable"
_MOST_STEPS = 64
_MOST_FRACTION_BITS = 63


@dataclass(frozen=True, slots=True)
class Parameter:
    """One finding: `value` is None unless it was measured; `why` is the evidence, or the reason why not."""

    name: str
    value: Value | None
    status: str
    why: str

    def record(self) -> dict[str, Value | None]:
        return {"value": self.value, "status": self.status, "why": self.why}


def decide(found: Fit) -> tuple[Parameter, ...]:
    """Every parameter of the product, measured or with the reason why not."""
    whole = found.whole
    if not whole:
        return tuple(Parameter(name, None, UNKNOWN, "no model explains what was seen") for name in _NAMES)
    judge = _Judge(found.model, whole)
    parameters = [_limited(_order(judge), found), _accumulator(judge)]
    if judge.model.unit.order is Order.ALIGNED:
        parameters += [
            judge.field("fraction_bits", [None, *range(1, _MOST_FRACTION_BITS + 1)], "exact"),
            judge.field("products_per_step", list(range(1, _MOST_STEPS + 1)), field="products"),
            _of_alignment(judge, "alignment_rounding", list(DOT_ROUNDINGS)),
            _of_alignment(judge, "products_normalised", [False, True]),
        ]
    else:
        why = "float32 additions, nothing is aligned in common"
        parameters.append(Parameter("fraction_bits", None, NOT_APPLICABLE, why))
        if judge.model.unit.products is not None:
            parameters.append(judge.field("products_per_step", [2, 4, 8, 16, 32, 64], field="products"))
        if judge.model.lanes > 1:
            parameters += [
                judge.of_model("lanes", [1, 2, 4, 8, 16, 32]),
                judge.of_model("lane_block", [16, 32, 64, 128], field="block"),
            ]
    parameters += [*_register(judge, whole, parameters[0]), _promotion(judge)]
    for field, options, shown_by in DETAILS:
        parameters.append(judge.field(field, list(options), shown_by=shown_by))
    if judge.model.unit.two_stage is not None:
        parameters += _second_stage(judge)
    if judge.model.unit.input_rounding is not None or judge.model.unit.a_format == FP32:
        parameters.append(_inputs(judge))
    if found.model.output != "fp32":
        parameters += [
            judge.of_output("output_rounding", "rounding", list(Rounding)[:6]),
            judge.of_output("output_overflow", "overflow", list(Overflow)),
        ]
    return tuple(parameters)


_NAMES = (
    "order",
    "accumulator",
    "fraction_bits",
    "products_per_step",
    "alignment_rounding",
    "final_rounding",
)


class _Judge:
    """Holds other models against the groups that `model` explains wholly."""

    def __init__(self, model: SumModel, whole: Sequence[Seen]) -> None:
        self.model = model
        self._short = [seen for seen in whole if not seen.name.startswith("random long")]
        self._long = [seen for seen in whole if seen.name.startswith("random long")]

    def conflict(
        self, other: SumModel, shown_by: tuple[str, ...] = (), likely: Collection[str] = ()
    ) -> str | None:
        """A group that `other` does not explain; only the short ones unless `shown_by` names some.

        The `likely` ones are tried first, and a part of each random group before its whole.
        """
        groups = self._short
        if shown_by:
            groups = [seen for seen in (*self._short, *self._long) if seen.name.startswith(shown_by)]
        groups = sorted(groups, key=lambda seen: seen.name not in likely)
        whole = [seen for seen in groups if not seen.paired]
        for seen in (*map(thinned, groups), *whole):
            if explained(other, seen) < 1.0:
                return seen.name
        return None

    def judge(
        self,
        name: str,
        value: Value,
        others: Iterable[tuple[str, SumModel | None]],
        shown_by: tuple[str, ...] = (),
    ) -> Parameter:
        """Measured if all `others` (their value as text, their model) conflict."""
        evidence: dict[str, None] = {}
        tried = 0
        for text, other in others:
            if other is None:
                continue
            tried += 1
            group = self.conflict(other, shown_by, evidence)
            if group is None:
                why = f"not observable: {value} and {text} give the same bits in all that was seen"
                return Parameter(name, None, UNKNOWN, why)
            evidence[group] = None
        if not tried:
            return Parameter(name, None, UNKNOWN, "nothing else could be tried against it")
        return Parameter(
            name, value, MEASURED, f"{tried} other values contradict {', '.join(list(evidence)[:4])}"
        )

    def field(
        self, name: str, options: Sequence[object], none: str = "none", *, field: str = "",
        shown_by: tuple[str, ...] = (),
    ) -> Parameter:  # fmt: skip
        """A field of the unit against its other values, the nearest first."""
        key = field or name
        own = getattr(self.model.unit, key)
        if isinstance(own, int) and not isinstance(own, bool):
            options = sorted(options, key=lambda x: abs(x - own) if isinstance(x, int) else 0)
        others = ((_text(x, none), with_unit(self.model, **{key: x})) for x in options if x != own)
        return self.judge(name, _value(own, none), others, shown_by)

    def of_model(self, name: str, options: Sequence[int], *, field: str = "") -> Parameter:
        """A field of the model itself."""
        key = field or name
        own = getattr(self.model, key)
        others = ((str(x), replace(self.model, **{key: x})) for x in options if x != own)  # type: ignore[arg-type]
        return self.judge(name, _value(own, "none"), others)

    def of_output(self, name: str, key: str, options: Sequence[object]) -> Parameter:
        """A field of the rule by which a sum becomes the output."""
        rule = self.model.output_rule
        own = getattr(rule, key)
        others = (
            (str(x), replace(self.model, output_rule=replace(rule, **{key: x})))  # type: ignore[arg-type]
            for x in options
            if x != own
        )
        return self.judge(name, str(own), others, ("13", "random", "7", "12"))


def _order(judge: _Judge) -> Parameter:
    model = judge.model
    others: list[tuple[str, SumModel | None]] = []
    if model.lanes > 1 or model.unit.order is not Order.FMA:
        plain = replace(model, lanes=1, block=None)
        cleared = {
            "products": None,
            "fraction_bits": None,
            "two_stage": None,
            "joining": Joining.WITH_PRODUCTS,
        }
        others.append(("a chain of multiply-adds", with_unit(plain, order=Order.FMA, **cleared, **_FLOAT32)))
    if model.unit.order is not Order.PAIRWISE or model.lanes > 1:
        bare = replace(model, lanes=1, block=None)
        for products in (None, 4):
            changes = {"products": products, "fraction_bits": None, "two_stage": None}
            more = {"joining": Joining.WITH_PRODUCTS, "order": Order.PAIRWISE, **_FLOAT32}
            others.append(("a tree of additions", with_unit(bare, **changes, **more)))
    for joining in (Joining.WITH_PRODUCTS, Joining.SEPARATE):
        if model.unit.order is Order.ALIGNED and joining is not model.unit.joining:
            others.append(
                (f"sums joining {joining}", with_unit(model, joining=joining, two_stage=None, lanes=1))
            )
    if model.unit.order is not Order.ALIGNED:
        for products in (2, 4):
            steps: dict[str, object] = {
                "order": Order.ALIGNED,
                "products": products,
                "promotion_interval": None,
            }
            others.append(
                (f"exact steps of {products}", with_unit(replace(model, lanes=1, block=None), **steps))
            )
    return judge.judge("order", describe(model), others)


def _limited(order: Parameter, found: Fit) -> Parameter:
    """`order` with the longest K that it holds for, where longer sums are not explained."""
    held = {seen.name for seen in found.whole}
    sums = {seen.name: seen.a.shape[1] for seen in found.groups if seen.name.startswith("random")}
    beyond = sorted({k for name, k in sums.items() if name not in held})
    if not beyond:
        return order
    longest = max((k for name, k in sums.items() if name in held), default=0)
    limit = f"; seen up to K = {longest}, not all sums of K = {', '.join(map(str, beyond))} are explained"
    return replace(order, why=order.why + limit)


def _register(judge: _Judge, whole: Sequence[Seen], order: Parameter) -> list[Parameter]:
    """How a sum is rounded, and to how many bits."""
    model = as_steps_of_one(judge.model) or judge.model
    if model.unit.order is Order.ALIGNED:
        steps = _Judge(model, whole)
        return [
            steps.field("final_rounding", list(DOT_ROUNDINGS)),
            steps.field("output_mantissa_bits", list(range(1, 24)), field="mantissa_bits"),
        ]
    if order.status != MEASURED:
        return [
            Parameter(name, None, UNKNOWN, order.why) for name in ("final_rounding", "output_mantissa_bits")
        ]
    why = f"float32 additions explain {', '.join(seen.name for seen in whole[:6])} bit by bit"
    return [
        Parameter("final_rounding", "rne", MEASURED, why),
        Parameter("output_mantissa_bits", 23, MEASURED, why),
    ]


_FLOAT32: dict[str, object] = {
    "alignment_rounding": Rounding.RTZ,
    "products_normalised": False,
    "lanes": 1,
    "register": Register.FP32,
    "mantissa_bits": 23,
    "final_rounding": Rounding.RNE,
}


def describe(model: SumModel) -> str:
    """The order of the additions in words."""
    unit = model.unit
    match unit.order:
        case Order.FMA if model.lanes > 1:
            return f"{model.lanes} float32 sums side by side in blocks of {model.block}, ascending K"
        case Order.FMA:
            return "chain of float32 multiply-adds, ascending K"
        case Order.PAIRWISE:
            return f"pairwise float32 tree over {unit.products or 'all'} products"
        case _:
            return f"aligned sums of {unit.products} products, joining {unit.joining}, ascending K"


def _accumulator(judge: _Judge) -> Parameter:
    unit = judge.model.unit
    own = unit.register
    other = Register.FP16 if own is Register.FP32 else Register.FP32
    base = as_steps_of_one(judge.model) or judge.model
    if base.unit.order is not Order.ALIGNED or base.lanes > 1:
        steps: dict[str, object] = {
            "order": Order.ALIGNED,
            "products": base.unit.products or 1,
            "promotion_interval": None,
        }
        base = with_unit(replace(base, lanes=1, block=None), **steps) or base
    kept = min(unit.mantissa_bits, 10)
    others = [
        (str(other), with_unit(base, register=other, mantissa_bits=bits))
        for bits in {kept, unit.mantissa_bits}
    ]
    return judge.judge("accumulator", str(own), others, ("7", "6", "4", "random mixed", "random zero"))


def _of_alignment(judge: _Judge, name: str, options: Sequence[object]) -> Parameter:
    if judge.model.unit.fraction_bits is None:
        return Parameter(name, None, NOT_APPLICABLE, "nothing is cut in the alignment")
    return judge.field(name, options)


def _promotion(judge: _Judge) -> Parameter:
    own = judge.model.unit.promotion_interval
    longest = max((seen.a.shape[1] for seen in judge._long), default=0)
    shown_by = ("random",)
    if own is None:
        options = [every for every in (16, 32, 64, 128, 256, 512, 1024) if every < longest]
        if not options:
            return Parameter("promotion_interval", None, UNKNOWN, "long sums are not explained by any model")
        found = judge.field("promotion_interval", [None, *options], shown_by=shown_by)
        if found.status == MEASURED:
            why = f"no partial sum moved on up to K = {longest}; {found.why}"
            return Parameter("promotion_interval", None, NOT_APPLICABLE, why)
        return found
    near = (None, own - 1, own + 1, own // 2, 2 * own)
    others = [every for every in near if every is None or 0 < every < LONGEST]
    return judge.field("promotion_interval", others, shown_by=shown_by)


def _second_stage(judge: _Judge) -> list[Parameter]:
    stage = judge.model.unit.two_stage
    assert stage is not None
    found = [judge.field("lanes", [1, 2])]
    for name, options in (
        ("sum_fraction_bits", range(20, 41)),
        ("register_fraction_bits", range(20, 41)),
        ("rounding", DOT_ROUNDINGS),
        ("dropped_below", (None, *range(20, 33))),
    ):
        own = getattr(stage, name)
        others = (
            (str(x), with_unit(judge.model, two_stage=replace(stage, **{name: x})))  # type: ignore[arg-type]
            for x in options
            if x != own
        )
        found.append(judge.judge(f"second_stage_{name}", _value(own, "none"), others))
    return found


def _inputs(judge: _Judge) -> Parameter:
    unit = judge.model.unit
    if unit.input_rounding is None:
        seen = judge.conflict(
            with_unit(judge.model, products=1, order=Order.ALIGNED, mantissa_bits=10) or judge.model
        )
        status = MEASURED if seen else UNKNOWN
        return Parameter(
            "input_rounding", "none" if seen else None, status, f"all 24 bits of factors act: {seen}"
        )
    options = [Rounding.RNE, Rounding.RNA, Rounding.RTZ, Rounding.FLOOR, Rounding.CEIL]
    return judge.field("input_rounding", options, shown_by=("10", "random"))


def _value(own: object, none: str) -> Value:
    return none if own is None else own if isinstance(own, bool | int) else str(own)


def _text(value: object, none: str) -> str:
    return none if value is None else str(value)
