"""A chip's arithmetic for one method: what its profile states, and what has to be assumed.

Only facts from documents, public code and measurements decide bits. Whatever else is missing gets a default
that is listed as an assumption with its reason, and that the user can set (`--assume cast.rounding=rtz`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen_quantize.chip_profiles.leaf import UNSTATED, Absent, Leaf
from qwen_quantize.chip_profiles.reader import near
from qwen_quantize.chip_profiles.schema import ACCUMULATORS, SCALE_RULES, Cast, ChipProfile, Matmul
from qwen_quantize.chip_profiles.standing import cast_from, decides, matmul_for
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, NanResult, Overflow, Rounding, Subnormals

if TYPE_CHECKING:  # both import torch, and `chips` must not
    from qwen_quantize.formats.scales import ScaleRule
    from qwen_quantize.formats.schemes import Scheme

EXACT = "exact"
NEVER = "never"
FLOAT32_BITS = 23  # fraction bits of a float32
_FRACTION_BITS = (EXACT, *(str(bits) for bits in range(1, 64)))
_PRODUCTS = tuple(str(count) for count in range(1, 65))
_MANTISSA_BITS = tuple(str(bits) for bits in range(1, 24))
_INTERVALS = (NEVER, *(str(1 << power) for power in range(2, 17)))
_SUM_ROUNDINGS = ("rne", "rna", "rtz", "floor", "ceil")  # those that a sum can have
_STEP_BITS = 256  # of an operand's K that one step takes: 32 bytes on every published FP8 unit but one
# Every key that --assume takes, with its values.
ASSUMABLE: dict[str, tuple[str, ...]] = {
    "cast.rounding": tuple(Rounding),
    "cast.overflow": tuple(Overflow),
    "cast.subnormals": tuple(Subnormals),
    "cast.nan": tuple(NanResult),
    "scale.rule": SCALE_RULES[:-1],  # searching needs the values: no unit does that at run time
    "accumulator.format": ACCUMULATORS,
    "accumulator.fraction_bits": _FRACTION_BITS,
    "accumulator.products_per_step": _PRODUCTS,
    "accumulator.alignment_rounding": _SUM_ROUNDINGS,
    "accumulator.final_rounding": _SUM_ROUNDINGS,
    "accumulator.output_mantissa_bits": _MANTISSA_BITS,
    "accumulator.promotion_interval": _INTERVALS,
}


@dataclass(frozen=True, slots=True)
class Assumption:
    """A default that stands in for a fact nobody published, or a choice of the user."""

    field: str  # a key of ASSUMABLE
    assumed: str
    why: str


@dataclass(frozen=True, slots=True)
class Accumulator:
    """How a sum of products is kept. None means unstated, and is computed without that loss.

    `fraction_bits` are the bits below the largest exponent that survive the alignment of one step of
    `products_per_step` products; `output_mantissa_bits` those that the register keeps; `promotion_interval`
    counts products, and None is never. Only a `narrow` one needs the rest: they are then stated or assumed.
    """

    format: str
    fraction_bits: int | None
    products_per_step: int | None
    alignment_rounding: Rounding
    final_rounding: Rounding
    output_mantissa_bits: int | None
    promotion_interval: int | None

    @property
    def narrow(self) -> bool:
        """Whether sums lose bits that float32 would keep."""
        return is_narrow(self.format, self.fraction_bits, self.output_mantissa_bits)


def is_narrow(format_name: str, fraction_bits: int | None, mantissa_bits: int | None) -> bool:
    """Whether a float accumulator is worse than float32: fp16, or fewer than 23 bits in a step or kept."""
    if format_name == "int32":
        return False
    return format_name == "fp16" or any(
        bits is not None and bits < FLOAT32_BITS for bits in (fraction_bits, mantissa_bits)
    )


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One chip's arithmetic for one method; weights are cast on the host: to nearest, saturating.

    `activation_scale_rule` only matters when the activations have power-of-two scales. `static_scale_format`
    is None where the chip keeps float32 scales or where nothing is known.
    """

    chip: str
    scheme: str
    activation_cast: CastRule
    weight_cast: CastRule
    accumulator: Accumulator
    activation_scale_rule: ScaleRule
    static_scale_format: str | None
    assumptions: tuple[Assumption, ...]
    sources: Mapping[str, tuple[str, ...]]  # of the stated fields
    activation_path: tuple[
        str, ...
    ] = ()  # types that an activation is cast to first, each rounding once more

    def fields(self) -> dict[str, str]:
        """Everything that decides bits, by name; two runs with equal fields compute the same."""
        cast = self.activation_cast
        return {
            "cast.rounding": str(cast.rounding),
            "cast.overflow": str(cast.overflow),
            "cast.subnormals": str(cast.subnormals),
            "cast.nan": str(cast.nan),
            "cast.path": " ".join(self.activation_path) or "direct",
            "scale.rule": str(self.activation_scale_rule),
            "scale.static_format": self.static_scale_format or "fp32",
            "accumulator.format": self.accumulator.format,
            "accumulator.fraction_bits": _exact_or(self.accumulator.fraction_bits),
            "accumulator.products_per_step": _exact_or(self.accumulator.products_per_step),
            "accumulator.alignment_rounding": str(self.accumulator.alignment_rounding),
            "accumulator.final_rounding": str(self.accumulator.final_rounding),
            "accumulator.output_mantissa_bits": _exact_or(self.accumulator.output_mantissa_bits),
            "accumulator.promotion_interval": _exact_or(self.accumulator.promotion_interval),
        }

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over chip, method and `fields`: versions that compute alike have one fingerprint."""
        document = {"chip": self.chip, "scheme": self.scheme, **self.fields()}
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


@dataclass
class _Settling:
    """Settles one field after another: the user's choice, else the stated fact, else a default that is listed."""

    profile: ChipProfile
    wanted: Mapping[str, str]
    listed: list[Assumption] = field(default_factory=list)
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # keys that the user may set

    def __call__(self, key: str, leaf: Leaf, default: str, why: str) -> str:
        self.used.add(key)
        if key in self.wanted:
            stated = f"; the profile states {leaf.value}" if decides(leaf, self.profile) else ""
            self.listed.append(Assumption(key, self.wanted[key], f"set by the user{stated}"))
            return self.wanted[key]
        if decides(leaf, self.profile):
            self.sources[key] = leaf.sources
            return str(leaf.value)
        if leaf.value is Absent.NOT_APPLICABLE:  # the question does not arise there: the method decides
            self.sources[key] = leaf.sources
            return default
        self.listed.append(Assumption(key, default, _why_open(leaf, why)))
        return default

    def if_needed(self, needed: bool, key: str, leaf: Leaf, default: str, why: str) -> str | None:
        """The same, but None instead of an assumption where the field decides no bit."""
        self.used.add(key)
        if needed or key in self.wanted or decides(leaf, self.profile):
            return self(key, leaf, default, why)
        return None


def assumable_for(scheme: Scheme) -> tuple[str, ...]:
    """The keys of ASSUMABLE that name a step of `scheme`: those that `resolve_arithmetic` takes."""
    activation = scheme.activation
    integer = activation is not None and activation.format.name.startswith("int")
    steps = (
        {"accumulator.format"} if integer else {key for key in ASSUMABLE if key.startswith("accumulator.")}
    )
    if activation is not None:
        steps |= {"cast.rounding", "cast.overflow"}
        steps |= set() if integer else {"cast.subnormals", "cast.nan"}
        steps |= set() if activation.scale_rule is None else {"scale.rule"}
    return tuple(key for key in ASSUMABLE if key in steps)


def resolve_arithmetic(
    profile: ChipProfile, scheme: Scheme, assumptions: Mapping[str, str] | None = None
) -> Arithmetic:
    """The arithmetic of `scheme` on `profile`; `assumptions` are the user's, by the keys of ASSUMABLE."""
    from qwen_quantize.formats.scales import ScaleRule

    wanted = dict(assumptions or {})
    _check_assumptions(wanted)
    settle = _Settling(profile, wanted)
    activation = RNE_SATURATE
    rule = "rceil"
    if scheme.activation is not None:
        target = scheme.activation.format.name
        cast = cast_from(profile, target)[1]
        activation = _activation_cast(cast, target, settle)
        if scheme.activation.scale_rule is not None:
            scale = profile.arithmetic.scale
            own = (
                "rceil"
                if scheme.activation.scale_rule is ScaleRule.SEARCH
                else str(scheme.activation.scale_rule)
            )
            rule = settle("scale.rule", scale.dynamic_rule, own, _scale_reason(scale.dynamic_rules, own))
    accumulator = _accumulator(profile, scheme, settle)
    for key in sorted(set(wanted) - settle.used):
        raise UserError(
            f"assumption {key}: {scheme.name} has no such step; it takes {', '.join(sorted(settle.used))}"
        )
    return Arithmetic(
        profile.name,
        scheme.name,
        activation,
        RNE_SATURATE,
        accumulator,
        ScaleRule(rule),
        _static_format(profile),
        tuple(settle.listed),
        settle.sources,
        _path(profile, scheme),
    )


def _activation_cast(cast: Cast, target: str, settle: _Settling) -> CastRule:
    rounding = settle("cast.rounding", cast.rounding, "rne", "nearest-even is what most casts default to")
    overflow = settle("cast.overflow", cast.overflow, "saturate", _overflow_reason(cast.overflow_modes))
    if target.startswith("int"):  # no subnormals and no NaN to have
        return CastRule(Rounding(rounding), Overflow(overflow), Subnormals.KEEP)
    subnormals = settle(
        "cast.subnormals", cast.subnormals, "keep", "nothing says that the cast flushes its results"
    )
    stated_nan = cast.nan_saturating if overflow == "saturate" and cast.nan_saturating.known else cast.nan
    nan = settle(
        "cast.nan", stated_nan, "propagate", "nothing says that a NaN is lost; finite inputs never meet this"
    )
    return CastRule(Rounding(rounding), Overflow(overflow), Subnormals(subnormals), NanResult(nan))


def _path(profile: ChipProfile, scheme: Scheme) -> tuple[str, ...]:
    if scheme.activation is None:
        return ()
    direct = profile.arithmetic.casts.get(f"fp32->{scheme.activation.format.name}", Cast()).path
    steps = direct.texts()
    return () if isinstance(steps, Absent) or not decides(direct, profile) else steps


def _accumulator(profile: ChipProfile, scheme: Scheme, settle: _Settling) -> Accumulator:
    facts, integer = _matmul(profile, scheme)
    default = "int32" if integer else "fp32"
    stored = settle("accumulator.format", facts.accumulator, default, "the usual width for such operands")
    if integer:  # integers add exactly
        return Accumulator(
            stored,
            None,
            _integer(facts.products_per_step, profile),
            _rounding(facts.alignment_rounding, Rounding.RTZ, profile),
            _rounding(facts.final_rounding, Rounding.RNE, profile),
            _integer(facts.output_mantissa_bits, profile),
            _integer(facts.promotion_interval, profile),
        )
    why = "the width inside the matrix unit is not published; sums are computed in float32"
    text = settle("accumulator.fraction_bits", facts.fraction_bits, EXACT, why)
    bits = None if text == EXACT else int(text)
    kept = "10" if stored == "fp16" else str(FLOAT32_BITS)
    mantissa = settle.if_needed(
        is_narrow(stored, bits, None),
        *("accumulator.output_mantissa_bits", facts.output_mantissa_bits, kept),
        f"all that an {stored} register holds",
    )
    kept_bits = None if mantissa is None else int(mantissa)
    narrow = is_narrow(stored, bits, kept_bits)
    width = 16 if scheme.activation is None else scheme.activation.format.bits
    products = settle.if_needed(
        narrow,
        *("accumulator.products_per_step", facts.products_per_step, str(usual_step(width))),
        "32 bytes of K in a step, as on most published units",
    )
    alignment = settle.if_needed(
        narrow,
        *("accumulator.alignment_rounding", facts.alignment_rounding, "rtz"),
        "most published units drop the bits that alignment shifts out",
    )
    final = settle.if_needed(
        narrow,
        *("accumulator.final_rounding", facts.final_rounding, "rne"),
        "a sum is rounded as IEEE 754 has it",
    )
    group, why = _promotion(profile, scheme)
    leaf = facts.promotion_interval
    default = NEVER if leaf.value is Absent.NOT_APPLICABLE else group
    interval = settle.if_needed(narrow, "accumulator.promotion_interval", leaf, default, why)
    return Accumulator(
        stored,
        bits,
        None if products is None else int(products),
        Rounding(alignment or Rounding.RTZ),
        Rounding(final or Rounding.RNE),
        kept_bits,
        None if interval is None or interval == NEVER else int(interval),
    )


def usual_step(bits: int) -> int:
    """Products of a step for operands of `bits` bits where nobody states it."""
    return min(_STEP_BITS // bits, int(_PRODUCTS[-1]))


def _promotion(profile: ChipProfile, scheme: Scheme) -> tuple[str, str]:
    """(products after which a narrow register is most likely emptied into a float32 one, the reason)."""
    shape = None if scheme.activation is None else scheme.activation.granularity
    group = shape.cols if shape is not None and shape.kind == "group" else None
    scaled = profile.capability(
        "e8m0" if scheme.activation is None else scheme.activation.scale_format.name, "scale"
    )
    if group is None:
        return NEVER, "one scale serves the whole sum, so nothing makes a kernel leave the register"
    if decides(scaled, profile) and scaled.value is True:
        return NEVER, "the unit applies groups' scales itself, so nothing makes a kernel leave the register"
    return str(group), "the unit does not apply groups' scales, so a sum must leave it with each group"


def _matmul(profile: ChipProfile, scheme: Scheme) -> tuple[Matmul, bool]:
    """The facts of the product that the scheme's operands meet in, and whether it is an integer one."""
    if scheme.activation is None:
        wide = [facts for name in ("bf16", "fp16") if (facts := matmul_for(profile, name)) is not None]
        return (wide[0] if wide else Matmul()), False
    name = scheme.activation.format.name
    return matmul_for(profile, name) or Matmul(), name.startswith("int")


def _static_format(profile: ChipProfile) -> str | None:
    leaf = profile.arithmetic.scale.static_format
    value = leaf.text()
    return None if isinstance(value, Absent) or not decides(leaf, profile) else value


def _integer(leaf: Leaf, profile: ChipProfile) -> int | None:
    value = leaf.integer()
    return None if isinstance(value, Absent) or not decides(leaf, profile) else value


def _rounding(leaf: Leaf, default: Rounding, profile: ChipProfile) -> Rounding:
    value = leaf.text()
    return default if isinstance(value, Absent) or not decides(leaf, profile) else Rounding(value)


def _exact_or(value: int | None) -> str:
    return EXACT if value is None else str(value)


def _why_open(leaf: Leaf, why: str) -> str:
    """The reason for an assumption, with what weak or version-bound evidence there is."""
    if leaf == UNSTATED or leaf.value is Absent.UNKNOWN:
        return f"{leaf.note}; {why}" if leaf.note else why
    if isinstance(leaf.value, Absent):
        return f"the profile marks it {leaf.status}; {why}"
    return f"only {leaf.confidence} evidence says {leaf.value}, too weak to decide bits; {why}"


def _overflow_reason(modes: Leaf) -> str:
    offered = modes.texts()
    if isinstance(offered, Absent):
        return "the scales keep values in range, and the writer clamps"
    return f"the chip offers {' and '.join(offered)}; the scales keep values in range, and the writer clamps"


def _scale_reason(rules: Leaf, own: str) -> str:
    why = "it never clips" if own in ("rceil", "ceil") else "it is the method's own"
    offered = rules.texts()
    if isinstance(offered, Absent):
        return f"no document says how the engine rounds a power-of-two scale; {own}: {why}"
    return f"the chip offers {', '.join(offered)} and the serving engine chooses; {own}: {why}"


def _check_assumptions(wanted: Mapping[str, str]) -> None:
    for key, value in wanted.items():
        if key not in ASSUMABLE:
            hint = near(key, ASSUMABLE)
            raise UserError(f"unknown assumption {key!r}; allowed: {', '.join(ASSUMABLE)} {hint}".rstrip())
        if value not in ASSUMABLE[key]:
            hint = near(value, ASSUMABLE[key])
            values = _in_words(ASSUMABLE[key])
            raise UserError(f"assumption {key}: found {value!r}; allowed: {values} {hint}".rstrip())


def _in_words(values: tuple[str, ...]) -> str:
    """A list of values, with a run of whole numbers as its ends."""
    words = [value for value in values if not value.isdigit()]
    numbers = [value for value in values if value.isdigit()]
    if len(numbers) > 2 and int(numbers[-1]) - int(numbers[0]) == len(numbers) - 1:
        numbers = [f"{numbers[0]} .. {numbers[-1]}"]
    return ", ".join((*words, *numbers))
