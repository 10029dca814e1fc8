"""Chip profiles from their files, with version overrides, claims and measurements laid over them.

The order is: the profile's own facts; the trade-press claims, when asked for; the overrides whose version
range holds the stated version; what a probe measured. Two overrides that match one fact are an error, and a
fact with overrides whose component has no stated version is unknown: the plain value need not hold.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from qwen_quantize.chip_profiles.build import build_facts
from qwen_quantize.chip_profiles.leaf import Absent, Alternative, Confidence, Leaf, absent
from qwen_quantize.chip_profiles.reader import Path as KeyPath
from qwen_quantize.chip_profiles.reader import near, read_facts, read_leaf, refuse
from qwen_quantize.chip_profiles.schema import COMPONENTS, ChipName, ChipProfile, Override
from qwen_quantize.chip_profiles.versions import Version, in_range, range_clauses
from qwen_quantize.errors import UserError

_TEXT_KEYS = ("name", "title", "vendor", "family")
_CHIP_KEYS = (*_TEXT_KEYS, "generation", "aliases", "family_aliases", "default_component")
_HEADER = re.compile(r"^\[", re.MULTILINE)
_OVERRIDE_KEYS = ("component", "versions", "field", "fact")


def list_profiles() -> tuple[str, ...]:
    """The names of the shipped profiles, sorted."""
    folder = files("qwen_quantize.chip_profiles")
    names = (entry.name for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted(name.removesuffix(".toml") for name in names if name != "sources.toml"))


def load_profile(
    name_or_path: str | Path,
    *,
    versions: Mapping[str, str] | None = None,
    with_claims: bool = False,
    measured: Path | None = None,
) -> ChipProfile:
    """The profile of a shipped chip or of a .toml file, resolved for `versions` (component: version).

    `name@1.3` states the version of the profile's default component, `name@driver=5.1,firmware=1.3` names
    them. `measured` is a TOML or JSON file with facts of confidence `measured`. A .toml file of such facts that
    says of which chip they are stands for that chip with the facts laid over. UserError names file, key, value
    found and values allowed.
    """
    name, written = split_versions(str(name_or_path))
    text, file = _profile_text(name)
    tables = _parse(text, file)
    base = measured_chip(tables, file)
    if base is not None:
        if measured is not None:
            raise UserError(
                f"{file} holds measured facts itself: no more can be laid over it, from {measured}"
            )
        base_name, base_written = split_versions(base)
        every = ",".join(filter(None, (base_written, written)))
        address = f"{base_name}@{every}" if every else base_name
        return load_profile(address, versions=versions, with_claims=with_claims, measured=Path(name))
    chip = read_chip(tables.pop("chip", None), file)
    stated = _stated_versions(written, versions or {}, chip, file)
    overrides = _read_overrides(tables.pop("overrides", []), file)
    facts = read_facts(tables, file)
    _no_claims(facts, overrides, file)
    if with_claims:
        facts, overrides = _lay_claims(chip.name, facts, overrides)
    facts, undecided = _apply_overrides(facts, overrides, stated, file)
    if measured is not None:
        for path, leaf in _read_measured(measured).items():
            facts[path] = _over(facts.get(path), leaf)
            undecided.pop(".".join(path), None)
    return ChipProfile(chip, build_facts(facts), stated, with_claims, overrides, undecided, file)


def measured_chip(tables: Mapping[str, Any], file: str) -> str | None:
    """The chip, with or without @versions, that a layer was measured on, after its [probe]; None without one.

    UserError for a [probe] that names none.
    """
    if "chip" in tables or "probe" not in tables:
        return None
    probe = tables["probe"]
    chip = probe.get("chip") if isinstance(probe, dict) else None
    if not isinstance(chip, str) or not chip:
        raise no_chip(file)
    return chip


def no_chip(file: str) -> UserError:
    """The error for measured facts that belong to no chip."""
    return UserError(
        f'{file}: these facts do not say of which chip they are: begin the file with [probe] and chip = "NAME"'
    )


def split_versions(text: str) -> tuple[str, str]:
    """`name` and what follows the last `@`, empty when there is none or when it belongs to a path."""
    name, mark, version = text.rpartition("@")
    if not mark or "/" in version or text.endswith(".toml"):
        return text, ""
    return name, version


@cache
def chip_names() -> tuple[ChipName, ...]:
    """What each shipped chip is called, in the order of `list_profiles`."""
    found = []
    for name in list_profiles():
        text, file = _profile_text(name)
        # [chip] is the first table of each file; reading only it keeps look-ups fast.
        headers = [match.start() for match in _HEADER.finditer(text)]
        top = text[: headers[1]] if len(headers) > 1 else text
        found.append(read_chip(_parse(top, file).get("chip"), file))
    return tuple(found)


def read_chip(raw: object, file: str) -> ChipName:
    """The [chip] table; UserError when a name is missing or has another type."""
    if not isinstance(raw, dict):
        refuse(file, ("chip",), f"found {raw!r}, expected a table [chip] with {', '.join(_CHIP_KEYS)}")
    for key in raw:
        if key not in _CHIP_KEYS:
            refuse(
                file,
                ("chip", key),
                f"no such field; allowed: {', '.join(_CHIP_KEYS)} {near(key, _CHIP_KEYS)}",
            )
    for key in _TEXT_KEYS:
        if not isinstance(raw.get(key), str) or not raw[key]:
            refuse(file, ("chip", key), f"found {raw.get(key)!r}, expected a string")
    if type(raw.get("generation")) is not int:
        refuse(file, ("chip", "generation"), f"found {raw.get('generation')!r}, expected a whole number")
    component = raw.get("default_component", "firmware")
    if component not in COMPONENTS:
        refuse(file, ("chip", "default_component"), f"found {component!r}; allowed: {', '.join(COMPONENTS)}")
    return ChipName(
        raw["name"],
        raw["title"],
        raw["vendor"],
        raw["family"],
        raw["generation"],
        _names(raw, "aliases", file),
        _names(raw, "family_aliases", file),
        component,
    )


def _names(raw: Mapping[str, Any], key: str, file: str) -> tuple[str, ...]:
    names = raw.get(key, [])
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        refuse(file, ("chip", key), f"found {names!r}, expected a list of strings")
    return tuple(name.lower() for name in names)


def _profile_text(name: str) -> tuple[str, str]:
    """The text of a profile and how to call its file in messages."""
    if name.endswith(".toml"):
        try:
            return Path(name).read_text(encoding="utf-8"), name
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{name}: the chip profile cannot be read: {error}") from error
    if name not in list_profiles():
        hint = near(name, list_profiles())
        raise UserError(
            f"no chip profile `{name}` {hint} (`qwen_quantize chips list` shows them all)".replace("  ", " ")
        )
    return (files("qwen_quantize.chip_profiles") / f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml"


def _parse(text: str, file: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{file}: not a TOML file: {error}") from error


def _stated_versions(written: str, versions: Mapping[str, str], chip: ChipName, file: str) -> dict[str, str]:
    stated = dict(versions)
    for part in filter(None, written.split(",")):
        component, mark, version = part.partition("=")
        key, value = (component, version) if mark else (chip.default_component, part)
        if key in stated and stated[key] != value:
            raise UserError(f"{chip.name}: {key} is given twice, as {value} and as {stated[key]}")
        stated[key] = value
    for component, version in stated.items():
        if component not in COMPONENTS:
            hint = near(component, COMPONENTS)
            raise UserError(
                f"{file}: unknown component {component!r}; allowed: {', '.join(COMPONENTS)} {hint}".rstrip()
            )
        try:
            Version(version)
        except ValueError as error:
            raise UserError(f"{file}: {component} {error}; write it like 1.3, V1.3 or 8.0.RC1") from error
    return stated


def _read_overrides(raw: object, file: str) -> tuple[Override, ...]:
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        refuse(file, ("overrides",), "expected [[overrides]] tables")
    found = []
    for index, item in enumerate(raw):
        here = (f"overrides[{index}]",)
        for key in _OVERRIDE_KEYS:
            if key not in item:
                refuse(file, (*here, key), f"missing; an override has {', '.join(_OVERRIDE_KEYS)}")
        for key in item:
            if key not in _OVERRIDE_KEYS:
                refuse(file, (*here, key), f"no such field; allowed: {', '.join(_OVERRIDE_KEYS)}")
        if item["component"] not in COMPONENTS:
            refuse(
                file, (*here, "component"), f"found {item['component']!r}; allowed: {', '.join(COMPONENTS)}"
            )
        try:
            range_clauses(str(item["versions"]))
        except ValueError as error:
            refuse(file, (*here, "versions"), f'{error}; write it like ">=1.3,<2.0"')
        path: KeyPath = tuple(str(item["field"]).split("."))
        leaf = read_leaf(item["fact"], path, file)
        found.append(Override(item["component"], str(item["versions"]), path, leaf))
    return tuple(found)


def _apply_overrides(
    facts: Mapping[KeyPath, Leaf], overrides: tuple[Override, ...], versions: Mapping[str, str], file: str
) -> tuple[dict[KeyPath, Leaf], dict[str, str]]:
    resolved = dict(facts)
    undecided: dict[str, str] = {}
    matched: dict[KeyPath, Override] = {}
    for item in overrides:
        version = versions.get(item.component)
        dotted = ".".join(item.path)
        if version is None:
            undecided[dotted] = item.component
            continue
        if not in_range(version, item.versions):
            continue
        other = matched.get(item.path)
        if other is not None:
            refuse(
                file,
                item.path,
                f"two overrides match: {other.component} {other.versions} and "
                f"{item.component} {item.versions}; "
                "make their ranges disjoint",
            )
        matched[item.path] = item
        resolved[item.path] = item.leaf
    for dotted, component in undecided.items():
        note = f"depends on the {component} version, which is not stated"
        sources = tuple(
            dict.fromkeys(s for o in overrides if ".".join(o.path) == dotted for s in o.leaf.sources)
        )
        resolved[tuple(dotted.split("."))] = absent(Absent.UNKNOWN, sources=sources, note=note)
    return resolved, undecided


def _lay_claims(
    name: str, facts: Mapping[KeyPath, Leaf], overrides: tuple[Override, ...]
) -> tuple[dict[KeyPath, Leaf], tuple[Override, ...]]:
    entry = files("qwen_quantize.chip_profiles") / "claims" / f"{name}.toml"
    if not entry.is_file():
        return dict(facts), overrides
    file = f"claims/{name}.toml"
    tables = _parse(entry.read_text(encoding="utf-8"), file)
    claimed_overrides = _read_overrides(tables.pop("overrides", []), file)
    claimed = read_facts(tables, file)
    only_confidence(claimed, Confidence.CLAIM, file)
    only_confidence({item.path: item.leaf for item in claimed_overrides}, Confidence.CLAIM, file)
    laid = dict(facts)
    for path, leaf in claimed.items():
        laid[path] = _over(laid.get(path), leaf)
    return laid, (*overrides, *claimed_overrides)


def _over(below: Leaf | None, above: Leaf) -> Leaf:
    """`above`, with the value that it hides among its alternatives."""
    if below is None or isinstance(below.value, Absent):
        return above
    hidden = Alternative(below.value, below.sources, below.confidence, below.note)
    return replace(above, alternatives=(*above.alternatives, hidden))


def _no_claims(facts: Mapping[KeyPath, Leaf], overrides: tuple[Override, ...], file: str) -> None:
    for path, leaf in (*facts.items(), *((item.path, item.leaf) for item in overrides)):
        if leaf.confidence is Confidence.CLAIM:
            refuse(file, path, "a trade-press claim belongs into an overlay in claims/, not into the profile")


def only_confidence(facts: Mapping[KeyPath, Leaf], wanted: Confidence, file: str) -> None:
    """UserError unless every stated leaf has the confidence `wanted`."""
    for path, leaf in facts.items():
        if leaf.confidence not in (wanted, Confidence.UNKNOWN):
            refuse(file, path, f"found the confidence {leaf.confidence}; this file holds only {wanted}")


def _read_measured(path: Path) -> dict[KeyPath, Leaf]:
    try:
        text = path.read_text(encoding="utf-8")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: the measured facts cannot be read: {error}") from error
    if not isinstance(tables, dict):
        raise UserError(f"{path}: expected a table of facts, found {type(tables).__name__}")
    tables.pop("probe", None)  # who measured, when and with what: kept for people
    facts = read_facts(tables, str(path))
    only_confidence(facts, Confidence.MEASURED, str(path))
    return facts
