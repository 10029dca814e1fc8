"""What a user calls a device, and which profile that means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_quantize.chip_profiles.legality import Legality, Verdict, check, unsupported_error
from qwen_quantize.chip_profiles.loader import chip_names, load_profile, split_versions
from qwen_quantize.chip_profiles.reader import near
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.errors import UserError

if TYPE_CHECKING:
    from qwen_quantize.formats.schemes import Scheme


@dataclass(frozen=True, slots=True)
class Resolution:
    """The profile a device name stands for; `alias_explanation` is None for the profile's own name."""

    profile: ChipProfile
    alias_explanation: str | None
    verdict: Verdict


def resolve_device(
    text: str,
    scheme: Scheme,
    *,
    versions: Mapping[str, str] | None = None,
    with_claims: bool = False,
    allow_unsupported: bool = False,
    measured: Path | None = None,
) -> Resolution:
    """The profile that `text` means for `scheme`: a chip, alias, family or .toml file, each with @versions.

    A family resolves to its newest member whose documents allow the method. UserError for an unknown name,
    and, unless `allow_unsupported`, for a method that the chip cannot run.
    """

    def load(name: str) -> tuple[ChipProfile, Verdict]:
        profile = load_profile(
            f"{name}@{written}" if written else name,
            versions=versions,
            with_claims=with_claims,
            measured=measured,
        )
        return profile, check(profile, scheme)

    name, written = split_versions(text.strip())
    members = members_of(name)
    if len(members) == 1:
        profile, verdict = load(members[0])
        explanation = (
            None if members[0] == name.lower() or name.endswith(".toml") else f"{name} is {members[0]}"
        )
    else:
        candidates = [load(member) for member in members]
        profile, verdict = _choose(candidates)
        explanation = _explain(name, scheme, profile, verdict, candidates)
    if verdict.status is Legality.UNSUPPORTED and not allow_unsupported:
        raise unsupported_error(profile, scheme, verdict)
    return Resolution(profile, explanation, verdict)


def members_of(name: str) -> tuple[str, ...]:
    """The profiles that a name may mean, the newest of a family first; UserError for an unknown name."""
    if name.endswith(".toml"):
        return (name,)
    wanted = name.lower().replace("_", "-")
    chips = chip_names()
    for chip in chips:
        if wanted in (chip.name, *chip.aliases):
            return (chip.name,)
    family = [chip for chip in chips if wanted in (chip.family, *chip.family_aliases)]
    if not family:
        words = sorted({word for c in chips for word in (c.name, c.family, *c.aliases, *c.family_aliases)})
        hint = near(wanted, words)
        raise UserError(
            f"unknown device {name!r}: {f'{hint} ' if hint else ''}"
            "`qwen_quantize chips list` shows all chips; a path to a .toml profile works too"
        )
    return tuple(chip.name for chip in sorted(family, key=lambda chip: (-chip.generation, chip.name)))


def _choose(candidates: list[tuple[ChipProfile, Verdict]]) -> tuple[ChipProfile, Verdict]:
    for status in (Legality.ALLOWED, Legality.EMULATED, Legality.UNKNOWN):
        for profile, verdict in candidates:
            if verdict.status is status:
                return profile, verdict
    return candidates[0]


def _explain(
    name: str,
    scheme: Scheme,
    chosen: ChipProfile,
    verdict: Verdict,
    candidates: list[tuple[ChipProfile, Verdict]],
) -> str:
    """Why a family name became this chip, with the reason why each other kind of member did not."""
    words = {
        Legality.ALLOWED: f"its newest member whose documents allow {scheme.name}",
        Legality.EMULATED: f"its newest member that can emulate {scheme.name}",
        Legality.UNKNOWN: f"its newest member whose documents do not rule {scheme.name} out",
        Legality.UNSUPPORTED: "its newest member",
    }
    refused: dict[str, list[str]] = {}
    for profile, other in candidates:
        if profile.name != chosen.name and other.status in (Legality.UNSUPPORTED, Legality.UNKNOWN):
            # The note of a leaf differs from chip to chip; the reason before it is what members share.
            refused.setdefault(other.reason.split(" (")[0], []).append(profile.name)
    text = f"{name} is a family: {chosen.name} is {words[verdict.status]}"
    if refused:
        text += "; " + "; ".join(f"{', '.join(names)}: {reason}" for reason, names in refused.items())
    return text
