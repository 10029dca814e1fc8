"""What `--before` and `--after` may name: a chip, a measured layer, a model folder, a fingerprint, a recorded run."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from pathlib import Path
from typing import Any

from qwen_quantize.checkpoint.json_file import RECORD_BYTES, read_object
from qwen_quantize.chip_profiles.arithmetic import ASSUMABLE, Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.behaviour import Behaviour, behaviour_of, read_behaviour
from qwen_quantize.chip_profiles.devices import members_of, resolve_device
from qwen_quantize.chip_profiles.difference import arithmetic_from_fields
from qwen_quantize.chip_profiles.fingerprint import KIND, fingerprint_from
from qwen_quantize.chip_profiles.loader import measured_chip, no_chip, split_versions
from qwen_quantize.errors import UserError
from qwen_quantize.eval.recording import RecordedRun, read_run
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.pipeline.manifest import MANIFEST_NAME

_FINGERPRINT_BYTES = 16 << 20
_FACTS = ("casts", "matmul")  # keys of a profile's arithmetic, which an arithmetic by fields has not
_LONGEST_VALUE = 200  # characters of one field of an arithmetic


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two arithmetics. fields: what it states of it, by the names of `Arithmetic.fields`.

    device: the chip as `--device` takes it, None where a file does not say. behaviour: the outputs for fixed inputs,
    None where the side has none. versions: of what made them.
    """

    name: str
    fields: Mapping[str, str]
    device: str | None
    with_claims: bool
    run: RecordedRun | None = None
    behaviour: Behaviour | None = None
    versions: Mapping[str, str] = dataclass_field(default_factory=dict)


def read_side(text: str, scheme: Scheme, assumed: Mapping[str, str], with_claims: bool) -> Side:
    """The arithmetic that `text` names; assumed: what a model's maker set for facts that nobody publishes."""
    path = Path(text)
    if text.endswith(".safetensors"):
        run = read_run(path)
        about = run.about
        fields = _checked_fields(about.arithmetic, text, scheme)
        return Side(text, fields, _device(about.chip, about.versions), about.with_claims, run)
    if (path / MANIFEST_NAME).is_file():
        return side_of_record(read_object(path / MANIFEST_NAME, RECORD_BYTES), text, scheme)
    if path.is_dir() and not _is_device(text):
        raise UserError(f"{text} holds no {MANIFEST_NAME}; name a folder that this program wrote, or a chip")
    if path.suffix == ".json":
        return side_of_record(read_object(path, RECORD_BYTES), text, scheme)
    if path.suffix == ".toml" and path.is_file():
        tables = _toml(path)
        if not _is_layer(tables, text) and (
            not isinstance(tables.get("chip"), dict) or "title" not in tables["chip"]
        ):
            return side_of_record(tables, text, scheme)
    resolution = resolve_device(text, scheme, with_claims=with_claims, allow_unsupported=True)
    stated = resolve_arithmetic(resolution.profile, scheme)
    open_fields = {assumption.field for assumption in stated.assumptions}
    chosen = {field: value for field, value in assumed.items() if field in open_fields}
    arithmetic = resolve_arithmetic(resolution.profile, scheme, chosen)
    behaviour = behaviour_of(arithmetic, scheme, resolution.profile.versions)
    fields = arithmetic.fields()
    return Side(text, fields, text, with_claims, behaviour=behaviour, versions=behaviour.versions)


def assumptions_for(side: Side, other: Side, device: str, scheme: Scheme) -> dict[str, str]:
    """What must be assumed of `device`, beside its profile, so that it computes as `side` says.

    As in `arithmetic_of`, a field that only `other` states counts as the same.
    """
    resolution = resolve_device(device, scheme, with_claims=side.with_claims, allow_unsupported=True)
    stated = resolve_arithmetic(resolution.profile, scheme).fields()
    return {
        field: value
        for field, value in {**other.fields, **side.fields}.items()
        if field in ASSUMABLE and field in stated and stated[field] != value
    }


def arithmetic_of(side: Side, other: Side, scheme: Scheme) -> Arithmetic:
    """To compute with: a field that only the other side states counts as the same on both."""
    return arithmetic_from_fields({**other.fields, **side.fields}, side.device or side.name, scheme.name)


def _is_device(text: str) -> bool:
    try:
        members_of(split_versions(text)[0])
    except UserError:
        return False
    return True


def _is_layer(tables: Mapping[str, Any], text: str) -> bool:
    """Whether a TOML file holds measured facts of a chip; UserError where it does not say of which."""
    if measured_chip(tables, text) is not None:
        return True
    arithmetic = tables.get("arithmetic")
    facts = isinstance(arithmetic, dict) and any(key in arithmetic for key in _FACTS)
    if facts and "chip" not in tables:
        raise no_chip(text)
    return False


def _side_of_fingerprint(record: Mapping[str, Any], text: str, scheme: Scheme) -> Side:
    """What `probe` wrote; UserError where it was changed since, or did not find what the scheme needs."""
    found = fingerprint_from(record, text)
    wanted = None if scheme.activation is None else scheme.activation.format.name
    if wanted is not None and found.operands != wanted:
        raise UserError(
            f"{text} is a fingerprint of {found.operands or 'no narrow'} arithmetic, and this model needs that of "
            f"{wanted}; probe a device that has it"
        )
    fields = _checked_fields(dict(found.arithmetic), text, scheme)
    return Side(text, fields, None, False, behaviour=found.behaviour, versions=found.versions)


def side_of_record(record: Mapping[str, Any], text: str, scheme: Scheme) -> Side:
    """A manifest, `chip.arithmetic`, or a fingerprint, `arithmetic`."""
    if record.get("kind") == KIND:
        return _side_of_fingerprint(record, text, scheme)
    chip = record.get("chip")
    inside = chip if isinstance(chip, dict) else {}
    arithmetic = inside.get("arithmetic", record.get("arithmetic"))
    if not isinstance(arithmetic, dict) or not arithmetic:
        raise UserError(f"{text} states no arithmetic: it has neither 'arithmetic' nor 'chip.arithmetic'")
    fields = _checked_fields(dict(_flat(arithmetic, text)), text, scheme)
    request = record.get("request")
    asked = request if isinstance(request, dict) else {}
    device = str(asked.get("device", "")).rpartition("@")[0] or str(asked.get("device", ""))
    name = device if device.endswith(".toml") else inside.get("name", chip)
    versions = inside.get("versions", record.get("versions"))
    behaviour = read_behaviour(inside.get("behaviour"), text)
    return Side(
        text,
        fields,
        _device(
            name if isinstance(name, str) and name else None, versions if isinstance(versions, dict) else {}
        ),
        asked.get("with_claims") is True,
        behaviour=behaviour,
        versions={} if behaviour is None else behaviour.versions,
    )


def _device(chip: str | None, versions: Mapping[str, Any]) -> str | None:
    """`example@firmware=1.3`: a chip and its versions as one word."""
    if chip is None or not versions:
        return chip
    return f"{chip}@{','.join(f'{component}={version}' for component, version in sorted(versions.items()))}"


def _flat(arithmetic: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    """`{"cast": {"rounding": "rne"}}` says the same as `{"cast.rounding": "rne"}`."""
    for key, value in arithmetic.items():
        field = f"{prefix}{key}"
        if isinstance(value, dict) and not prefix.count("."):
            yield from _flat(value, where, f"{field}.")
        elif isinstance(value, str | int) and not isinstance(value, bool):
            yield field, str(value)
        else:
            raise UserError(
                f"{where}: arithmetic {field} must be text or a whole number, found {value!r:.80}"
            )


def _checked_fields(fields: Mapping[str, str], where: str, scheme: Scheme) -> dict[str, str]:
    for field, value in fields.items():
        if len(field) + len(value) > _LONGEST_VALUE or not (field + value).isprintable():
            raise UserError(
                f"{where}: arithmetic {field!r:.80} must be a short line of text, found {value!r:.80}"
            )
    try:
        arithmetic_from_fields(fields, where, scheme.name)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    return dict(fields)


def _toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_FINGERPRINT_BYTES + 1)
        if len(data) > _FINGERPRINT_BYTES:
            raise UserError(f"{path} is larger than {_FINGERPRINT_BYTES} bytes, which no such file needs")
        return tomllib.loads(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not a TOML file: {error}") from error
