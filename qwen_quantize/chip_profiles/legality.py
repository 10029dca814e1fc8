"""Whether a chip's documents allow a method, and what comes nearest when they do not.

A method multiplies two operands in the matrix unit. With quantized activations both take the activation's
format, after the weights were widened to it where that is exact; without, the weights are widened to 16 bits.
Scales of 32 elements or fewer change inside one step of the matrix unit, so that the unit itself has to apply
them; wider groups are summed apart and scaled afterwards, which every chip can.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from qwen_quantize.chip_profiles.leaf import Absent, Confidence, Leaf
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.errors import UserError

if TYPE_CHECKING:  # schemes import torch, and `chips list` must not
    from qwen_quantize.formats.schemes import Scheme, TensorSpec

WIDEST_GROUP_IN_THE_UNIT = 32
_MATRIX_TYPES = ("bf16", "fp16", "hif8", "e4m3fn", "e4m3fnuz", "e5m2", "int8", "e2m3", "e2m1", "int4")
# Operands that another type holds exactly: a weight so stored may be widened before the product.
_WIDENS_TO = {"int4": ("int8",), "e2m1": ("e4m3fn", "e2m3"), "e2m3": ("e4m3fn",)}


class Legality(StrEnum):
    """What the documents say about a method on a chip."""

    ALLOWED = "allowed"
    EMULATED = "emulated"  # runs, but computed in a wider type: no speed is won
    UNKNOWN = "unknown"  # no public document says
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer, why, the methods that are allowed instead (nearest first), and the source codes."""

    status: Legality
    reason: str
    nearest: tuple[str, ...]
    sources: tuple[str, ...]


def check(profile: ChipProfile, scheme: Scheme) -> Verdict:
    """Whether `profile`'s matrix unit can do `scheme`."""
    status, reason, sources = _judge(profile, scheme)
    nearest = () if status is Legality.ALLOWED else _nearest(profile, scheme)
    return Verdict(status, reason, nearest, sources)


def matrix_types(profile: ChipProfile) -> tuple[str, ...]:
    """The element types that a document gives the matrix unit, widest first."""
    return tuple(name for name in _MATRIX_TYPES if _says(profile.capability(name, "matrix"), True))


def unsupported_error(profile: ChipProfile, scheme: Scheme, verdict: Verdict) -> UserError:
    """What to tell somebody who asked for a method that the chip cannot do."""
    can = ", ".join(matrix_types(profile)) or "nothing that is documented"
    instead = (
        f"allowed there: {', '.join(verdict.nearest)}"
        if verdict.nearest
        else "no other method is allowed there"
    )
    return UserError(
        f"{profile.name} cannot run {scheme.name}: {verdict.reason}; its matrix unit takes {can}; {instead}. "
        f"--allow-unsupported goes on all the same: the files are written, and {consequence(profile, scheme)}"
    )


def consequence(profile: ChipProfile, scheme: Scheme) -> str:
    """What happens on the chip to a checkpoint that its matrix unit cannot multiply, as half a sentence."""
    wide = next(
        (name for name in ("bf16", "fp16", "fp32") if _says(profile.capability(name, "matrix"), True)), None
    )
    if wide is None:
        return (
            "an engine on the chip either widens the weights before each product or refuses the checkpoint."
        )
    return (
        f"an engine on the chip either refuses the checkpoint or widens the weights to {wide} first: "
        f"memory is saved, no arithmetic is, and {scheme.name}'s activation rounding does not take place."
    )


def _judge(profile: ChipProfile, scheme: Scheme) -> tuple[Legality, str, tuple[str, ...]]:
    if scheme.activation is None:
        return _weight_only(profile, scheme)
    operand = scheme.activation.format.name
    matrix = profile.capability(operand, "matrix")
    if _says(matrix, True) and _says(profile.capability(operand, "emulated"), True):
        return Legality.EMULATED, f"{operand} products are computed in a wider type", matrix.sources
    if _denied(matrix):
        return Legality.UNSUPPORTED, f"its matrix unit has no {operand}{_because(matrix)}", matrix.sources
    if not _says(matrix, True):
        return (
            Legality.UNKNOWN,
            f"no public document says whether its matrix unit takes {operand}{_because(matrix)}",
            matrix.sources,
        )
    weight = scheme.weight.format.name
    if weight != operand and operand not in _WIDENS_TO.get(weight, ()):
        return Legality.UNSUPPORTED, f"{weight} weights do not widen exactly to {operand}", matrix.sources
    for spec in (scheme.weight, scheme.activation):
        answer = _fine_scales(profile, spec)
        if answer is not None:
            return answer
    widened = "" if weight == operand else f", after its {weight} weights are widened"
    claimed = ", by a trade-press claim" if matrix.confidence is Confidence.CLAIM else ""
    return Legality.ALLOWED, f"its matrix unit takes {operand}{widened}{claimed}", matrix.sources


def _weight_only(profile: ChipProfile, scheme: Scheme) -> tuple[Legality, str, tuple[str, ...]]:
    wide = [profile.capability(name, "matrix") for name in ("bf16", "fp16")]
    for name, leaf in zip(("bf16", "fp16"), wide, strict=True):
        if _says(leaf, True):
            reason = f"{scheme.weight.format.name} weights are widened to {name}, which its matrix unit takes"
            return Legality.ALLOWED, reason, leaf.sources
    if all(_denied(leaf) for leaf in wide):
        return Legality.UNSUPPORTED, "its matrix unit takes neither bf16 nor fp16", wide[0].sources
    return (
        Legality.UNKNOWN,
        "no public document says whether its matrix unit takes bf16 or fp16",
        wide[0].sources,
    )


def _fine_scales(profile: ChipProfile, spec: TensorSpec) -> tuple[Legality, str, tuple[str, ...]] | None:
    """None when the scales of `spec` are no obstacle."""
    granularity = spec.granularity
    if granularity.kind not in ("group", "block") or granularity.cols > WIDEST_GROUP_IN_THE_UNIT:
        return None
    name = spec.scale_format.name
    leaf = profile.capability(name, "scale")
    what = f"{name} scales for {granularity.cols} elements"
    if _denied(leaf):
        return Legality.UNSUPPORTED, f"its matrix unit does not apply {what}{_because(leaf)}", leaf.sources
    if not _says(leaf, True):
        return (
            Legality.UNKNOWN,
            f"no public document says whether its matrix unit applies {what}",
            leaf.sources,
        )
    return None


def _nearest(profile: ChipProfile, scheme: Scheme) -> tuple[str, ...]:
    from qwen_quantize.formats.schemes import SCHEMES

    allowed = [other for other in SCHEMES.values() if _judge(profile, other)[0] is Legality.ALLOWED]
    return tuple(other.name for other in sorted(allowed, key=lambda other: _distance(scheme, other)))


def _distance(scheme: Scheme, other: Scheme) -> tuple[int, int]:
    """How far `other` is, in activation bits and then in weight bits."""

    def bits(spec: TensorSpec | None) -> int:
        return 16 if spec is None else spec.format.bits

    return (
        abs(bits(scheme.activation) - bits(other.activation)),
        abs(bits(scheme.weight) - bits(other.weight)),
    )


def _says(leaf: Leaf, answer: bool) -> bool:
    value = leaf.flag()
    return not isinstance(value, Absent) and value is answer


def _denied(leaf: Leaf) -> bool:
    return _says(leaf, False) or leaf.value is Absent.NOT_SUPPORTED


def _because(leaf: Leaf) -> str:
    return f" ({leaf.note})" if leaf.note else ""
