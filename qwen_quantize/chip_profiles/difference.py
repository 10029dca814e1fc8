"""What differs between two arithmetics, in words, and which of it the engine can compute.

An arithmetic is a mapping from the names of `Arithmetic.fields` to their values, wherever it comes from: a
profile, a manifest, a fingerprint of a device, a recorded run. Only fields that both sides state are compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen_quantize.chip_profiles.arithmetic import ASSUMABLE, EXACT, Accumulator, Arithmetic
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, NanResult, Overflow, Rounding, Subnormals

# What a change of each field is called; `{cast}` is the activation's cast, such as fp32->e4m3.
_NAMES: dict[str, str] = {
    "cast.rounding": "cast {cast}",
    "cast.overflow": "cast {cast}, overflow",
    "cast.subnormals": "cast {cast}, subnormals",
    "cast.nan": "cast {cast}, NaN",
    "cast.path": "cast {cast}, by way of",
    "scale.rule": "power-of-two scales of activations",
    "scale.static_format": "static scales",
    "accumulator.format": "accumulator type",
    "accumulator.fraction_bits": "accumulator",
    "accumulator.products_per_step": "accumulator, products aligned together",
    "accumulator.alignment_rounding": "accumulator, rounding of the alignment",
    "accumulator.final_rounding": "accumulator, final rounding",
    "accumulator.output_mantissa_bits": "accumulator, mantissa bits kept",
    "accumulator.promotion_interval": "accumulator, promotion",
}
# Fields whose effect the engine computes; a change of any other is named but cannot be tried out.
EMULATED = frozenset(
    (
        *("cast.rounding", "cast.overflow", "cast.subnormals", "cast.nan", "scale.rule"),
        *("accumulator.format", "accumulator.fraction_bits", "accumulator.products_per_step"),
        *("accumulator.alignment_rounding", "accumulator.final_rounding"),
        *("accumulator.output_mantissa_bits", "accumulator.promotion_interval"),
    )
)
# Only a method with scales fixed before run time ever reads this one.
WITHOUT_EFFECT_ON_DYNAMIC_SCALES = frozenset(("scale.static_format",))

_INTEGERS = (
    "accumulator.fraction_bits",
    "accumulator.products_per_step",
    "accumulator.output_mantissa_bits",
    "accumulator.promotion_interval",
)
_ROUNDINGS = ("accumulator.alignment_rounding", "accumulator.final_rounding")
_LARGEST_INTEGER = 1 << 32


@dataclass(frozen=True, slots=True)
class Change:
    """One field of the arithmetic that differs; `text` is for people: `cast fp32->e4m3: rne -> rtz`."""

    field: str
    before: str
    after: str
    text: str


@dataclass(frozen=True, slots=True)
class Difference:
    """`changed`: in the order of `Arithmetic.fields`; `not_compared`: fields that only one side states."""

    changed: tuple[Change, ...]
    not_compared: tuple[str, ...]


def difference(before: Mapping[str, str], after: Mapping[str, str], target: str = "e4m3fn") -> Difference:
    """The fields whose values differ. target: the format that activations are cast to."""
    order = [*_NAMES, *sorted({*before, *after} - _NAMES.keys())]
    changed = [
        Change(field, before[field], after[field], change_text(field, before[field], after[field], target))
        for field in order
        if field in before and field in after and before[field] != after[field]
    ]
    lonely = tuple(field for field in order if (field in before) != (field in after))
    return Difference(tuple(changed), lonely)


def change_text(field: str, before: str, after: str, target: str = "e4m3fn") -> str:
    """`accumulator: exact -> 13 bits`; a field of another name keeps it."""
    name = _NAMES.get(field, field).format(cast=f"fp32->{_short(target)}")
    return f"{name}: {_value(field, before)} -> {_value(field, after)}"


def arithmetic_from_fields(fields: Mapping[str, str], chip: str, scheme: str) -> Arithmetic:
    """The inverse of `Arithmetic.fields`, without assumptions and sources.

    A field that is missing is the exact, nearest-even, saturating one. UserError for an impossible value.
    """
    from qwen_quantize.formats.scales import ScaleRule

    stated = dict(fields)
    _check(stated)
    rounded = {name: Rounding(stated[name]) for name in _ROUNDINGS if name in stated}
    integers = {name: _integer(stated.get(name, EXACT)) for name in _INTEGERS}
    path = stated.get("cast.path", "direct")
    static = stated.get("scale.static_format", "fp32")
    return Arithmetic(
        chip=chip,
        scheme=scheme,
        activation_cast=CastRule(
            Rounding(stated.get("cast.rounding", "rne")),
            Overflow(stated.get("cast.overflow", "saturate")),
            Subnormals(stated.get("cast.subnormals", "keep")),
            NanResult(stated.get("cast.nan", "propagate")),
        ),
        weight_cast=RNE_SATURATE,
        accumulator=Accumulator(
            stated.get("accumulator.format", "fp32"),
            integers["accumulator.fraction_bits"],
            integers["accumulator.products_per_step"],
            rounded.get("accumulator.alignment_rounding", Rounding.RTZ),
            rounded.get("accumulator.final_rounding", Rounding.RNE),
            integers["accumulator.output_mantissa_bits"],
            integers["accumulator.promotion_interval"],
        ),
        activation_scale_rule=ScaleRule(stated.get("scale.rule", "rceil")),
        static_scale_format=None if static == "fp32" else static,
        assumptions=(),
        sources={},
        activation_path=() if path == "direct" else tuple(path.split()),
    )


def _check(stated: Mapping[str, str]) -> None:
    allowed = {**ASSUMABLE, **dict.fromkeys(_ROUNDINGS, tuple(Rounding))}
    for field, value in stated.items():
        if field in _INTEGERS:
            if value != EXACT and not (
                value.isascii() and value.isdigit() and 0 < int(value[:12]) < _LARGEST_INTEGER
            ):
                raise UserError(
                    f"arithmetic {field}: found {value!r}; allowed: {EXACT} or a whole number from 1"
                )
        elif field in allowed and value not in allowed[field]:
            raise UserError(f"arithmetic {field}: found {value!r}; allowed: {', '.join(allowed[field])}")


def _integer(value: str) -> int | None:
    return None if value == EXACT else int(value)


def _short(target: str) -> str:
    """`e4m3fn` is what everybody calls e4m3; `e4m3fnuz` is another format and keeps its name."""
    return target.removesuffix("fn")


def _value(field: str, value: str) -> str:
    if field == "accumulator.fraction_bits" and value != EXACT:
        return f"{value} bits"
    if field == "accumulator.promotion_interval":
        return "never" if value == EXACT else f"every {value} products"
    return value
