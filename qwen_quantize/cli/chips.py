"""`qwen_quantize chips`: what is known of each chip, from where, and how well. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from qwen_quantize.chip_profiles.leaf import UNSTATED, Absent, Leaf
from qwen_quantize.chip_profiles.loader import list_profiles, load_profile
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.chip_profiles.sources import source_table
from qwen_quantize.chip_profiles.standing import standing
from qwen_quantize.cli.console import Speaker
from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Driver, Firmware, Json, Toolkit

chips_app = typer.Typer(
    help="What is known of each chip, and from where.",
    no_args_is_help=False,
    invoke_without_command=True,
    rich_markup_mode=None,
)

Claims = Annotated[bool, typer.Option("--with-claims", help="Lay the trade-press claims over the profiles.")]
_MATRIX_COLUMNS = (("FP8", ("e4m3fn", "e4m3fnuz")), ("INT8", ("int8",)), ("INT4", ("int4",)))


@chips_app.callback()
def chips(context: typer.Context, as_json: Json = False) -> None:
    """What is known of each chip, and from where."""
    if context.invoked_subcommand is None:
        list_chips(as_json=as_json)


@chips_app.command("list")
def list_chips(as_json: Json = False, with_claims: Claims = False) -> None:
    """All chips: matrix types, memory, and how much of their arithmetic is public."""
    with guard(as_json):
        profiles = [load_profile(name, with_claims=with_claims) for name in list_profiles()]
        records = [_summary(profile) for profile in profiles]
        speaker = Speaker(as_json, quiet=as_json)
        table = Table("chip", "family", *(title for title, _ in _MATRIX_COLUMNS), "memory", "arithmetic")
        lines = []
        for record in records:
            cells = [
                str(record[key]) for key in ("name", "family", "fp8", "int8", "int4", "memory", "arithmetic")
            ]
            table.add_row(*cells)
            lines.append("\t".join(cells))
        speaker.show([table], lines)
        speaker.result({"chips": records})


@chips_app.command("show")
def show_chip(
    name: Annotated[str, typer.Argument(help="A chip, chip@version, or a path to a .toml profile.")],
    as_json: Json = False,
    with_claims: Claims = False,
    firmware: Firmware = None,
    driver: Driver = None,
    toolkit: Toolkit = None,
    measured: Annotated[
        Path | None, typer.Option("--measured", help="Lay what `probe --output` measured over the profile.")
    ] = None,
) -> None:
    """Every fact about one chip with its status, confidence and source."""
    with guard(as_json):
        from qwen_quantize.chip_profiles.devices import members_of
        from qwen_quantize.chip_profiles.loader import split_versions
        from qwen_quantize.chip_profiles.measured import device_with_layer

        if measured is not None:
            name = device_with_layer(name, measured)
        named = {"firmware": firmware, "driver": driver, "toolkit": toolkit}
        versions = {key: value for key, value in named.items() if value is not None}
        plain, written = split_versions(name)
        speaker = Speaker(as_json, quiet=as_json)
        shown = []
        for member in members_of(plain):
            address = f"{member}@{written}" if written else member
            profile = load_profile(address, versions=versions, with_claims=with_claims)
            speaker.show(*_sheet(profile))
            shown.append(_record(profile))
        speaker.result(shown[0] if len(shown) == 1 else {"family": plain, "chips": shown})


@chips_app.command("validate")
def validate(
    file: Annotated[Path, typer.Argument(help="A .toml profile.")],
    as_json: Json = False,
) -> None:
    """Check a profile file against the schema; exit code 2 and the first fault when it does not hold."""
    with guard(as_json):
        profile = load_profile(_as_path(file))
        stated = sum(1 for _ in profile.stated_leaves())
        speaker = Speaker(as_json, quiet=as_json)
        speaker.say(f"{file}: {profile.name} is valid, {stated} facts stated, arithmetic {standing(profile)}")
        speaker.result(
            {
                "file": str(file),
                "valid": True,
                "name": profile.name,
                "facts": stated,
                "arithmetic": standing(profile),
            }
        )


def _as_path(file: Path) -> Path:
    """A path is a profile by its ending; other endings would be taken for a chip's name."""
    from qwen_quantize.errors import UserError

    if file.suffix != ".toml":
        raise UserError(f"{file}: a chip profile is a .toml file")
    return file


def _summary(profile: ChipProfile) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": profile.name,
        "title": profile.chip.title,
        "family": profile.family,
        "aliases": list(profile.chip.aliases),
    }
    for title, types in _MATRIX_COLUMNS:
        record[title.lower()] = _matrix_word(profile, types)
    record["memory"] = _value_words(profile.memory.capacity)
    record["arithmetic"] = str(standing(profile))
    return record


def _matrix_word(profile: ChipProfile, types: tuple[str, ...]) -> str:
    """yes, emulated, no or unknown, for the first of `types` that the matrix unit takes."""
    leaves = [profile.capability(name, "matrix") for name in types]
    for name, leaf in zip(types, leaves, strict=True):
        if leaf.value is True:
            return "emulated" if profile.capability(name, "emulated").value is True else "yes"
    denied = leaves[0].value is False or leaves[0].value is Absent.NOT_SUPPORTED
    return "no" if denied else "unknown"


def _sheet(profile: ChipProfile) -> tuple[list[Table], list[str]]:
    tables: list[Table] = []
    lines = [f"{profile.name}\t{profile.chip.title}\tarithmetic {standing(profile)}"]
    group = ""
    table = Table()
    for path, leaf in profile.leaves():
        head, _, rest = path.partition(".")
        if head != group:
            group = head
            table = Table(
                "fact", "value", "status", "confidence", "source", "note", title=f"{profile.name}: {head}"
            )
            tables.append(table)
        cells = (
            rest or head,
            _value_words(leaf),
            str(leaf.status),
            str(leaf.confidence),
            " ".join(leaf.sources),
            _notes(leaf),
        )
        table.add_row(*(cell.replace("[", "\\[") for cell in cells), style=None if leaf.known else "dim")
        lines.append("\t".join((path, *cells[1:])))
    return tables, lines


def _value_words(leaf: Leaf) -> str:
    value = leaf.value
    if isinstance(value, Absent):
        return str(value.value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = (
        ", ".join(map(str, value))
        if isinstance(value, tuple)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )
    return f"{text} {leaf.unit}".rstrip()


def _notes(leaf: Leaf) -> str:
    parts = [f"for {leaf.applies_to}"] if leaf.applies_to else []
    parts += [leaf.note] if leaf.note else []
    for other in leaf.alternatives:
        why = f": {other.note}" if other.note else ""
        parts.append(f"also {other.value} ({', '.join(other.sources)}{why})")
    return "; ".join(parts)


def _record(profile: ChipProfile) -> dict[str, Any]:
    facts = {path: _leaf_record(leaf) for path, leaf in profile.leaves() if leaf != UNSTATED}
    cited = sorted({code for _, leaf in profile.leaves() for code in leaf.sources})
    table = source_table()
    return {
        "name": profile.name,
        "title": profile.chip.title,
        "vendor": profile.chip.vendor,
        "family": profile.family,
        "aliases": list(profile.chip.aliases),
        "versions": dict(profile.versions),
        "depends_on_version": dict(profile.undecided),
        "with_claims": profile.with_claims,
        "arithmetic": str(standing(profile)),
        "facts": facts,
        "sources": {code: {"title": table[code].title, "where": table[code].where} for code in cited},
    }


def _leaf_record(leaf: Leaf) -> dict[str, Any]:
    record: dict[str, Any] = {
        "value": None if isinstance(leaf.value, Absent) else leaf.value,
        "status": str(leaf.status),
        "confidence": str(leaf.confidence),
        "source": list(leaf.sources),
    }
    for key, text in (("unit", leaf.unit), ("applies_to", leaf.applies_to), ("note", leaf.note)):
        if text:
            record[key] = text
    if leaf.alternatives:
        record["alternatives"] = [
            {"value": other.value, "source": list(other.sources), "note": other.note}
            for other in leaf.alternatives
        ]
    return record
