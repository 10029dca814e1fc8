"""A device's fingerprint: what `regress` compares before and after an upgrade.

`parameters` and `arithmetic` say what is computed, `hashes` which bits came out of the probe's questions, `behaviour`
which bits come out of the inputs that every manifest is hashed over too, `versions` with what; `timings` stand apart,
because they differ from run to run. `digest` covers parameters, hashes and behaviour only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_quantize.chip_profiles.arithmetic import EXACT
from qwen_quantize.chip_profiles.behaviour import (
    Behaviour,
    device_behaviour,
    program_versions,
    read_behaviour,
)
from qwen_quantize.chip_profiles.probe import ProbeResult, hash_of
from qwen_quantize.chip_profiles.probe_decide import MEASURED, NOT_APPLICABLE, Parameter
from qwen_quantize.chip_profiles.probe_device import ProbedDevice
from qwen_quantize.chip_profiles.probe_output import today
from qwen_quantize.errors import UserError

KIND = "qwen_quantize fingerprint 1"
_LARGEST_FILE = 16 << 20
_CAST_FIELDS = ("rounding", "overflow", "subnormals", "nan", "path")
_SUM_FIELDS = {
    "accumulator": "format",
    **{name: name for name in ("fraction_bits", "products_per_step", "alignment_rounding", "final_rounding")},
    **{name: name for name in ("output_mantissa_bits", "promotion_interval")},
}
_TYPES = ("e4m3fn", "e4m3fnuz", "int8", "bf16", "fp16")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One device on one day; `arithmetic` has the names of `Arithmetic.fields`, for the type `operands`.

    behaviour: of every product and cast that the probe had findings of, None in files of older versions.
    """

    device: str
    date: str
    operands: str
    arithmetic: Mapping[str, str]
    parameters: Mapping[str, Mapping[str, Any]]
    explained_fraction: Mapping[str, float]
    hashes: Mapping[str, Mapping[str, str]]
    versions: Mapping[str, str]
    timings: Mapping[str, float]
    behaviour: Behaviour | None = None

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over what was computed, not over names, dates and times."""
        document: dict[str, Any] = {"parameters": self.parameters, "hashes": self.hashes}
        if self.behaviour is not None:
            document["behaviour"] = self.behaviour.digest
        return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()

    def record(self) -> dict[str, Any]:
        """As it is written."""
        behaviour = None if self.behaviour is None else self.behaviour.record()
        return {"kind": KIND, "digest": self.digest, **asdict(self), "behaviour": behaviour}


def fingerprint_of(result: ProbeResult, device: ProbedDevice | None = None) -> Fingerprint:
    """The fingerprint of a probed device; device: the same one, to be asked for its behaviour too."""
    found = result.parameters()
    operands = next((name for name in _TYPES if f"fp32->{name}" in found or _product(found, name)), "")
    hashes: dict[str, Mapping[str, str]] = {item.pair.name: dict(item.hashes) for item in result.products}
    hashes |= {f"fp32->{item.target}": {"codes": hash_of(item.codes)} for item in result.casts if item.path}
    behaviour = None
    if device is not None:
        pairs, casts = [item.pair for item in result.products], [item.target for item in result.casts]
        behaviour = device_behaviour(device, pairs, casts)
    return Fingerprint(
        device=result.device,
        date=today(),
        operands=operands,
        arithmetic=_arithmetic(found, operands),
        parameters={
            name: {key: item.value for key, item in items.items() if item.status == MEASURED}
            for name, items in found.items()
        },
        explained_fraction=result.fractions,
        hashes=hashes,
        versions={**program_versions(), **result.about},
        timings=dict(result.timings),
        behaviour=behaviour,
    )


def write_fingerprint(fingerprint: Fingerprint, path: Path) -> None:
    """One JSON document at `path`."""
    path.write_text(json.dumps(fingerprint.record(), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def load_fingerprint(path: Path) -> Fingerprint:
    """UserError where `path` cannot be read, is no fingerprint, or was changed since it was written."""
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UserError(f"{path} is larger than any fingerprint ({_LARGEST_FILE} bytes)")
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: the fingerprint cannot be read: {error}") from error
    return fingerprint_from(record, str(path))


def fingerprint_from(record: object, path: str) -> Fingerprint:
    """The inverse of `Fingerprint.record`; UserError as for `load_fingerprint`, which calls the file `path`."""
    if not isinstance(record, dict) or record.get("kind") != KIND:
        raise UserError(f"{path} is no fingerprint; `qwen_quantize probe --fingerprint FILE` writes one")
    texts, mappings = ("device", "date", "operands"), (
        "arithmetic", "parameters", "explained_fraction", "hashes", "versions", "timings"
    )  # fmt: skip
    for key in texts:
        if not isinstance(record.get(key), str):
            raise UserError(f"{path}: {key} must be a string, found {record.get(key)!r:.80}")
    for key in mappings:
        if not isinstance(record.get(key), dict):
            raise UserError(f"{path}: {key} must be an object, found {record.get(key)!r:.80}")
    behaviour = read_behaviour(record.get("behaviour"), path)
    loaded = Fingerprint(**{key: record[key] for key in (*texts, *mappings)}, behaviour=behaviour)
    if loaded.digest != record.get("digest"):
        raise UserError(f"{path}: the digest does not fit the contents: the file was changed")
    return loaded


def _product(found: Mapping[str, Mapping[str, Parameter]], operands: str) -> Mapping[str, Parameter]:
    names = (name for name in found if name.startswith(f"{operands}*{operands}->"))
    return found[name] if (name := next(names, None)) is not None else {}


def _arithmetic(found: Mapping[str, Mapping[str, Parameter]], operands: str) -> dict[str, str]:
    """What was measured, by the names of `Arithmetic.fields`."""
    fields = {}
    cast = found.get(f"fp32->{operands}", {})
    for name in _CAST_FIELDS:
        item = cast.get(name)
        if item is not None and item.status == MEASURED:
            fields[f"cast.{name}"] = str(item.value)
    for name, field in _SUM_FIELDS.items():
        item = _product(found, operands).get(name)
        if item is None:
            continue
        if item.status == MEASURED:
            fields[f"accumulator.{field}"] = str(item.value)
        elif item.status == NOT_APPLICABLE and name in ("fraction_bits", "promotion_interval"):
            fields[f"accumulator.{field}"] = EXACT
    return fields
