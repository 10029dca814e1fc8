"""`qwen_quantize probe`: find out a device's arithmetic, certify it, and write it down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.table import Table

from qwen_quantize.chip_profiles.device_versions import device_versions
from qwen_quantize.chip_profiles.devices import members_of
from qwen_quantize.chip_profiles.fingerprint import fingerprint_of, write_fingerprint
from qwen_quantize.chip_profiles.loader import load_profile, split_versions
from qwen_quantize.chip_profiles.probe import ProbeResult, probe
from qwen_quantize.chip_profiles.probe_device import ProbedDevice
from qwen_quantize.chip_profiles.probe_emulated import emulated_chip
from qwen_quantize.chip_profiles.probe_output import json_record, profile_text
from qwen_quantize.chip_profiles.probe_torch import PLUGINS, TorchDevice
from qwen_quantize.cli.console import Speaker
from qwen_quantize.errors import UserError

_KINDS = ("cpu", "cuda", "xpu", "mps", *PLUGINS)
EMULATED = "emulated:"


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """What was asked for. chip: whose profile the measured facts are laid over."""

    device: str
    output: Path | None
    fingerprint: Path | None
    chip: str | None
    quick: bool
    with_claims: bool


def run_probe(request: ProbeRequest, *, threads: int | None, as_json: bool, quiet: bool) -> None:
    """Probe, print, and write what was asked for."""
    if threads is not None:
        torch.set_num_threads(threads)
    for path in (request.output, request.fingerprint):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(f"{path}: the folder {path.absolute().parent} does not exist")
    if request.chip is not None:
        load_profile(request.chip)
    device = device_named(request.device, request.with_claims)
    speaker = Speaker(as_json, quiet)
    with speaker.progress("probe") as progress:
        result = probe(device, quick=request.quick, say=lambda what, done, total: progress(what, done, total))
    result = replace(result, about={**device_versions(request.device), **result.about})
    if not result.products and not result.casts:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(result.unavailable.items())[:3])
        raise UserError(
            f"--on {request.device}: there is nothing to probe{f': {reasons}' if reasons else ''}"
        )
    chip = request.chip or _chip_of(request.device)
    if request.output is not None:
        request.output.write_text(profile_text(result, chip), encoding="utf-8")
    fingerprint = fingerprint_of(result, device)
    if request.fingerprint is not None:
        write_fingerprint(fingerprint, request.fingerprint)
    speaker.show(*_tables(result))
    record = json_record(result)
    record["fingerprint"] = fingerprint.record()
    record["output"] = None if request.output is None else str(request.output)
    speaker.result(record)


def device_named(text: str, with_claims: bool = False) -> ProbedDevice:
    """The device that `--on` names; UserError when there is none."""
    if text.startswith(EMULATED):
        address = text.removeprefix(EMULATED)
        name, versions = split_versions(address)
        members = members_of(name) if not name.endswith(".toml") else (name,)
        if len(members) != 1:
            raise UserError(f"--on {text}: {name} is a family; name one of {', '.join(members)}")
        full = f"{members[0]}@{versions}" if versions else members[0]
        return emulated_chip(load_profile(full, with_claims=with_claims), text)
    kind, _, index = text.partition(":")
    if kind not in _KINDS or (":" in text and not index.isdigit()):
        raise UserError(
            f"--on {text!r}: no such device; write cpu, cuda:0, npu:0, mlu:0, musa:0, gcu:0 or emulated:CHIP@VERSION"
        )
    return TorchDevice(text)


def _chip_of(device: str) -> str | None:
    """An emulated chip at its versions; a real device does not say which profile is its own."""
    if not device.startswith(EMULATED):
        return None
    name, versions = split_versions(device.removeprefix(EMULATED))
    member = members_of(name)[0]
    return f"{member}@{versions}" if versions else member


def _tables(result: ProbeResult) -> tuple[list[Table], list[str]]:
    table = Table("what", "parameter", "value", "why", title=f"{result.device}")
    fractions = result.fractions
    lines = []
    for name, found in result.parameters().items():
        table.add_row(name, "explained", f"{fractions[name]:.6f}", "")
        lines.append(f"{name}\texplained fraction\t{fractions[name]:.6f}")
        for item in found.values():
            value = item.status if item.value is None else str(item.value)
            table.add_row("", item.name, value, item.why.replace("[", "\\["))
            lines.append(f"{name}\t{item.name}\t{value}\t{item.why}")
    for name, why in result.unavailable.items():
        table.add_row(name, "not available", "", why.replace("[", "\\["))
        lines.append(f"{name}\tnot available\t{why}")
    lines.append(f"{result.seconds:.1f} s")
    return [table], lines
