"""Which facts may decide bits, and how much of a chip's arithmetic they cover."""

from __future__ import annotations

from enum import StrEnum

from qwen_quantize.chip_profiles.leaf import DECIDES_BITS, Absent, Leaf
from qwen_quantize.chip_profiles.schema import Cast, ChipProfile, Matmul

# Narrow operand types in the order in which `chips list` asks for them.
NARROW_TYPES = ("e4m3fn", "e4m3fnuz", "hif8", "int8")
_CAST_SOURCES = ("fp32", "bf16", "fp16")


class Standing(StrEnum):
    """How much of the arithmetic of a chip's narrowest documented product is public."""

    STATED = "stated"
    PARTLY = "partly"
    UNKNOWN = "unknown"


def decides(leaf: Leaf, profile: ChipProfile) -> bool:
    """Whether the leaf's value may decide bits: strong evidence always, weaker only with the claims."""
    return leaf.known and (leaf.confidence in DECIDES_BITS or profile.with_claims)


def cast_from(profile: ChipProfile, target: str) -> tuple[str, Cast]:
    """The cast to `target` that the profile knows, from the widest type, and its key; else an empty one."""
    for source in _CAST_SOURCES:
        key = f"{source}->{target}"
        cast = profile.arithmetic.casts.get(key)
        if cast is not None and cast.rounding.value is not Absent.NOT_SUPPORTED:
            return key, cast
    return f"fp32->{target}", Cast()


def matmul_for(profile: ChipProfile, operand: str) -> Matmul | None:
    """The facts of the product of two `operand`s, None when the profile has none."""
    return profile.arithmetic.matmul.get(f"{operand}*{operand}")


def standing(profile: ChipProfile) -> Standing:
    """How much of the arithmetic is stated, by version or outright, for the chip's first narrow operand type.

    The facts that count are the cast's rounding and overflow, for floats also its subnormals, and the
    accumulator's type. A fact that hangs on an unstated version counts: it is stated, once the version is.
    """
    operand = next((n for n in NARROW_TYPES if profile.capability(n, "matrix").value is True), None)
    if operand is None:
        return Standing.UNKNOWN
    key, cast = cast_from(profile, operand)
    matmul = matmul_for(profile, operand) or Matmul()
    wanted = {
        f"arithmetic.casts.{key}.rounding": cast.rounding,
        f"arithmetic.casts.{key}.overflow": cast.overflow,
    }
    if not operand.startswith("int"):
        wanted[f"arithmetic.casts.{key}.subnormals"] = cast.subnormals
    wanted[f"arithmetic.matmul.{operand}*{operand}.accumulator"] = matmul.accumulator
    stated = [decides(leaf, profile) or path in profile.undecided for path, leaf in wanted.items()]
    return Standing.STATED if all(stated) else Standing.PARTLY if any(stated) else Standing.UNKNOWN
