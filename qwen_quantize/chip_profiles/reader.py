"""From the tables of a profile file to checked leaves by path.

A leaf is written as an inline table, `{ value = 64, unit = "GB", source = ["WP950"], confidence = "press" }`,
or, in a table that names `source` and `confidence` once for all leaves below it, as a bare value. A bare
value without such names, a name that the schema does not know and a value of another type are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from qwen_quantize.chip_profiles.leaf import (
    Absent,
    Alternative,
    Confidence,
    Leaf,
    LeafKind,
    LeafSpec,
    Status,
    Value,
)
from qwen_quantize.chip_profiles.schema import COMPONENTS, DTYPES, ChipFacts, Place, field_names, place_of
from qwen_quantize.chip_profiles.sources import source_table
from qwen_quantize.errors import UserError

Path = tuple[str, ...]
_LEAF_KEYS = ("value", "status", "confidence", "source", "unit", "note", "alternatives", "applies_to")
_ALTERNATIVE_KEYS = ("value", "source", "confidence", "note")
_WRITTEN_CONFIDENCE = tuple(item.value for item in Confidence if item is not Confidence.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Defaults:
    """The source codes and the confidence that bare values of a table have."""

    sources: tuple[str, ...] = ()
    confidence: Confidence | None = None


def read_facts(tables: Mapping[str, Any], file: str) -> dict[Path, Leaf]:
    """All leaves of a profile's tables by path, checked against the schema; UserError on the first fault."""
    found: dict[Path, Leaf] = {}
    _read_group(tables, ChipFacts, (), Defaults(), file, found)
    return found


def read_leaf(raw: object, path: Path, file: str) -> Leaf:
    """One leaf at `path`, which must be a leaf's place in the schema."""
    return _leaf(raw, spec_at(path, file), path, Defaults(), file)


def spec_at(path: Path, file: str) -> LeafSpec:
    """What the leaf at `path` may hold; UserError when the schema has no leaf there."""
    group: type = ChipFacts
    rest = path
    while rest:
        place = place_of(group, rest[0])
        if place is None:
            refuse(file, path, f"no such field; {_allowed(rest[0], field_names(group))}")
        used = 2 if place.many else 1
        if len(rest) < used or (place.spec is not None and len(rest) > used):
            refuse(file, path, "this is not the path of a single fact")
        if place.many:
            _check_key(rest[1], place, path, file)
        rest = rest[used:]
        if place.spec is not None:
            return place.spec
        assert place.group is not None
        group = place.group
    raise fault(file, path, "this is not the path of a single fact")


def fault(file: str, path: Iterable[str], problem: str) -> UserError:
    """The error for something wrong at `path` of `file`."""
    return UserError(f"{file}: {'.'.join(path) or 'the file'}: {problem}")


def refuse(file: str, path: Iterable[str], problem: str) -> NoReturn:
    """Raise the error for something wrong at `path` of `file`."""
    raise fault(file, path, problem)


def near(name: str, choices: Iterable[str]) -> str:
    """ "did you mean `x`?" when a choice is close to `name`, else an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(f'`{item}`' for item in close)}?" if close else ""


def _allowed(name: str, choices: Iterable[str]) -> str:
    names = tuple(choices)
    hint = near(name, names)
    return f"allowed: {', '.join(names)}{f' ({hint})' if hint else ''}"


def _read_group(
    table: Mapping[str, Any], group: type, path: Path, defaults: Defaults, file: str, found: dict[Path, Leaf]
) -> None:
    defaults = _defaults(table, path, defaults, file)
    for name, raw in table.items():
        if name in ("source", "confidence"):
            continue
        place = place_of(group, name)
        here = (*path, name)
        if place is None:
            refuse(file, here, f"no such field; {_allowed(name, field_names(group))}")
        if not place.many:
            _read_place(raw, place, here, defaults, file, found)
            continue
        if not isinstance(raw, dict):
            refuse(file, here, f"found {raw!r}, expected a table of named entries")
        inner = _defaults(raw, here, defaults, file)
        for key, entry in raw.items():
            if key not in ("source", "confidence"):
                _check_key(key, place, (*here, key), file)
                _read_place(entry, place, (*here, key), inner, file, found)


def _read_place(
    raw: object, place: Place, path: Path, defaults: Defaults, file: str, found: dict[Path, Leaf]
) -> None:
    if place.spec is not None:
        found[path] = _leaf(raw, place.spec, path, defaults, file)
        return
    assert place.group is not None
    if not isinstance(raw, dict):
        refuse(file, path, f"found {raw!r}, expected a table with {', '.join(field_names(place.group))}")
    _read_group(raw, place.group, path, defaults, file, found)


def _defaults(table: Mapping[str, Any], path: Path, outer: Defaults, file: str) -> Defaults:
    sources = outer.sources
    confidence = outer.confidence
    if "source" in table:
        sources = _sources(table["source"], path, file)
    if "confidence" in table:
        confidence = _confidence(table["confidence"], path, file)
    return Defaults(sources, confidence)


def _check_key(key: str, place: Place, path: Path, file: str) -> None:
    if "." in key or not key:
        refuse(file, path, f"the name {key!r} must not be empty or contain a dot")
    match place.keys:
        case "dtype":
            types = [key]
        case "cast":
            types = key.split("->")
            if len(types) != 2:
                refuse(file, path, f"found {key!r}, expected a cast such as `fp32->e4m3fn`")
        case "pair":
            types = key.split("*")
            if len(types) != 2:
                refuse(file, path, f"found {key!r}, expected an operand pair such as `e4m3fn*e4m3fn`")
        case "peak":
            types = [key.split("@")[0]]
        case "component":
            types = []
            if key not in COMPONENTS:
                refuse(file, path, f"found {key!r}; {_allowed(key, COMPONENTS)}")
        case _:
            types = []
    for name in types:
        if name not in DTYPES:
            refuse(file, path, f"found the element type {name!r}; {_allowed(name, DTYPES)}")


def _leaf(raw: object, spec: LeafSpec, path: Path, defaults: Defaults, file: str) -> Leaf:
    if not isinstance(raw, dict):
        if not defaults.sources or defaults.confidence is None:
            refuse(
                file,
                path,
                f"the bare value {raw!r} has no source: give the table `source` and `confidence`, "
                "or write { value = ..., source = [...], confidence = ... }",
            )
        raw = {"value": raw}
    for key in raw:
        if key not in _LEAF_KEYS:
            refuse(file, (*path, key), f"no such key of a fact; {_allowed(key, _LEAF_KEYS)}")
    status = _status(raw, path, file)
    sources = _sources(raw["source"], path, file) if "source" in raw else defaults.sources
    if status is Status.UNKNOWN and "source" not in raw:
        sources = ("SURVEY",)
    if not sources:
        refuse(file, path, "no `source`: each fact cites at least one code of sources.toml")
    confidence = _confidence(raw["confidence"], path, file) if "confidence" in raw else defaults.confidence
    if status is Status.UNKNOWN or (confidence is None and status is Status.NOT_APPLICABLE):
        confidence = Confidence.UNKNOWN
    if confidence is None:
        refuse(file, path, f"no `confidence`; allowed: {', '.join(_WRITTEN_CONFIDENCE)}")
    alternatives = _alternatives(raw.get("alternatives", []), spec, path, file)
    if status is Status.DISPUTED and len(alternatives) < 2:
        refuse(file, path, f"a disputed fact lists at least two alternatives, found {len(alternatives)}")
    value = _value(raw["value"], spec, path, file) if status is Status.KNOWN else Absent(status.value)
    return Leaf(
        value,
        status,
        confidence,
        sources,
        unit=_unit(raw, spec, path, file) if spec.units else _no_unit(raw, path, file),
        note=_text(raw, "note", path, file),
        alternatives=alternatives,
        applies_to=_text(raw, "applies_to", path, file),
    )


def _status(raw: Mapping[str, Any], path: Path, file: str) -> Status:
    written = raw.get("status", "known")
    if written not in tuple(Status):
        refuse(file, (*path, "status"), f"found {written!r}; allowed: {', '.join(Status)}")
    status = Status(written)
    if status is Status.KNOWN and "value" not in raw:
        refuse(file, path, 'a known fact needs `value`; write status = "unknown" when nothing is known')
    if status is not Status.KNOWN and "value" in raw:
        refuse(file, path, f"status {status} excludes a value, found {raw['value']!r}")
    return status


def _sources(raw: object, path: Path, file: str) -> tuple[str, ...]:
    if not isinstance(raw, list) or not raw or not all(isinstance(code, str) for code in raw):
        refuse(file, (*path, "source"), f"found {raw!r}, expected a list of source codes")
    codes = tuple(str(code) for code in raw)
    for code in codes:
        if code not in source_table():
            hint = near(code, source_table())
            refuse(
                file, (*path, "source"), f"the source code {code!r} is not in sources.toml {hint}".rstrip()
            )
    return codes


def _confidence(raw: object, path: Path, file: str) -> Confidence:
    if raw not in _WRITTEN_CONFIDENCE:
        refuse(file, (*path, "confidence"), f"found {raw!r}; allowed: {', '.join(_WRITTEN_CONFIDENCE)}")
    return Confidence(str(raw))


def _alternatives(raw: object, spec: LeafSpec, path: Path, file: str) -> tuple[Alternative, ...]:
    here = (*path, "alternatives")
    if not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        refuse(file, here, f"found {raw!r}, expected a list of tables with value and source")
    found = []
    for item in raw:
        for key in item:
            if key not in _ALTERNATIVE_KEYS:
                refuse(file, here, f"found the key {key!r}; {_allowed(key, _ALTERNATIVE_KEYS)}")
        if "value" not in item or "source" not in item:
            refuse(file, here, f"found {item!r}, expected value and source")
        confidence = (
            _confidence(item["confidence"], here, file) if "confidence" in item else Confidence.UNKNOWN
        )
        value = _value(item["value"], spec, here, file)
        found.append(
            Alternative(value, _sources(item["source"], here, file), confidence, item.get("note", ""))
        )
    return tuple(found)


def _value(raw: object, spec: LeafSpec, path: Path, file: str) -> Value:
    value = _typed(raw, spec.kind)
    if value is None:
        refuse(file, path, f"found {raw!r}, expected {spec.kind}")
    listed = value if isinstance(value, tuple) else (value,)
    for item in listed:
        if spec.choices and item not in spec.choices:
            refuse(file, path, f"found {item!r}; {_allowed(str(item), spec.choices)}")
    if (
        spec.kind in (LeafKind.INTEGER, LeafKind.NUMBER)
        and isinstance(value, int | float)
        and not 0 <= value < 1e18
    ):
        refuse(file, path, f"found {value}, expected a number that is not negative and finite")
    return value


def _typed(raw: object, kind: LeafKind) -> Value | None:
    """`raw` as the leaf's type, None when it has another; a bool is no number here."""
    match kind:
        case LeafKind.FLAG:
            return raw if isinstance(raw, bool) else None
        case LeafKind.INTEGER:
            return raw if isinstance(raw, int) and not isinstance(raw, bool) else None
        case LeafKind.NUMBER:
            return raw if isinstance(raw, int | float) and not isinstance(raw, bool) else None
        case LeafKind.TEXT:
            return raw if isinstance(raw, str) and raw else None
        case LeafKind.TEXTS:
            if isinstance(raw, list) and raw and all(isinstance(item, str) and item for item in raw):
                return tuple(raw)
            return None
        case LeafKind.INTEGERS:
            if isinstance(raw, list) and raw and all(type(item) is int for item in raw):
                return tuple(raw)
            return None


def _unit(raw: Mapping[str, Any], spec: LeafSpec, path: Path, file: str) -> str:
    unit = raw.get("unit", spec.units[0])
    if unit not in spec.units:
        refuse(file, (*path, "unit"), f"found {unit!r}; allowed: {', '.join(spec.units)}")
    return str(unit)


def _no_unit(raw: Mapping[str, Any], path: Path, file: str) -> str:
    if "unit" in raw:
        refuse(file, (*path, "unit"), f"found {raw['unit']!r}, but this fact has no unit")
    return ""


def _text(raw: Mapping[str, Any], key: str, path: Path, file: str) -> str:
    text = raw.get(key, "")
    if not isinstance(text, str):
        refuse(file, (*path, key), f"found {text!r}, expected a string")
    return text
