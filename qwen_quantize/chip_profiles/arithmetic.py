"""A chip's arithmetic for one method: what its profile states, and what has to be assumed.

Only facts from documents, public code and measurements decide bits. Whatever else is missing gets a default
that is listed as an assumption with its reason, and that the user can set (`--assume cast.rounding=rtz`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
_FRACTION_BITS = (EXACT, *(str(bits) for bits in range(1, 64)))
# Every key that --assume takes, with its values.
ASSUMABLE: dict[str, tuple[str, ...]] = {
    "cast.rounding": tuple(Rounding),
    "cast.overflow": tuple(Overflow),
    "cast.subnormals": tuple(Subnormals),
    "cast.nan": tuple(NanResult),
    "scale.rule": SCALE_RULES[:-1],  # searching needs the values: no unit does that at run time
    "accumulator.format": ACCUMULATORS,
    "accumulator.fraction_bits": _FRACTION_BITS,
}
Settle = Callable[[str, Leaf, str, str], str]  # key, stated leaf, default, why the default -> value


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
    counts products.
    """

    format: str
    fraction_bits: int | None
    products_per_step: int | None
    alignment_rounding: Rounding
    final_rounding: Rounding
    output_mantissa_bits: int | None
    promotion_interval: int | None


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


def resolve_arithmetic(
    profile: ChipProfile, scheme: Scheme, assumptions: Mapping[str, str] | None = None
) -> Arithmetic:
    """The arithmetic of `scheme` on `profile`; `assumptions` are the user's, by the keys of ASSUMABLE."""
    from qwen_quantize.formats.scales import ScaleRule

    wanted = dict(assumptions or {})
    _check_assumptions(wanted)
    listed: list[Assumption] = []
    sources: dict[str, tuple[str, ...]] = {}

    used: set[str] = set()

    def settle(key: str, leaf: Leaf, default: str, why: str) -> str:
        """The user's choice, else the stated fact, else the default as an assumption."""
        used.add(key)
        if key in wanted:
            stated = f"; the profile states {leaf.value}" if decides(leaf, profile) else ""
            listed.append(Assumption(key, wanted[key], f"set by the user{stated}"))
            return wanted[key]
        if decides(leaf, profile):
            sources[key] = leaf.sources
            return str(leaf.value)
        if leaf.value is Absent.NOT_APPLICABLE:  # the question does not arise there: the method decides
            sources[key] = leaf.sources
            return default
        listed.append(Assumption(key, default, _why_open(leaf, why)))
        return default

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
    for key in sorted(set(wanted) - used):
        raise UserError(
            f"assumption {key}: {scheme.name} has no such step; it takes {', '.join(sorted(used))}"
        )
    return Arithmetic(
        profile.name,
        scheme.name,
        activation,
        RNE_SATURATE,
        accumulator,
        ScaleRule(rule),
        _static_format(profile),
        tuple(listed),
        sources,
        _path(profile, scheme),
    )


def _activation_cast(cast: Cast, target: str, settle: Settle) -> CastRule:
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


def _accumulator(profile: ChipProfile, scheme: Scheme, settle: Settle) -> Accumulator:
    facts, integer = _matmul(profile, scheme)
    default = "int32" if integer else "fp32"
    stored = settle("accumulator.format", facts.accumulator, default, "the usual width for such operands")
    bits: str = EXACT
    if not integer:  # integers add exactly
        why = "the width inside the matrix unit is not published; sums are computed in float32"
        bits = settle("accumulator.fraction_bits", facts.fraction_bits, EXACT, why)
    return Accumulator(
        stored,
        None if bits == EXACT else int(bits),
        _integer(facts.products_per_step, profile),
        _rounding(facts.alignment_rounding, Rounding.RTZ, profile),
        _rounding(facts.final_rounding, Rounding.RNE, profile),
        _integer(facts.output_mantissa_bits, profile),
        _integer(facts.promotion_interval, profile),
    )


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
            values = (
                f"exact, 1 .. {_FRACTION_BITS[-1]}"
                if ASSUMABLE[key] is _FRACTION_BITS
                else ", ".join(ASSUMABLE[key])
            )
            raise UserError(f"assumption {key}: found {value!r}; allowed: {values} {hint}".rstrip())
