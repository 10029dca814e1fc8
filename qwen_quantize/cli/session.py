"""What every command that runs a model does first: threads, sources, the chip of a folder, memory used."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen_quantize.checkpoint.json_file import read_object
from qwen_quantize.checkpoint.layouts import BlockFp8Config
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.devices import resolve_device
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.embedded import heldout_text_path
from qwen_quantize.engine.linear import ActivationCast, ChipCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.spec import TableFormat
from qwen_quantize.formats.tables import E4M3FN
from qwen_quantize.pipeline.manifest import MANIFEST_NAME
from qwen_quantize.pipeline.run import check_token_ids, source_tokenizer
from qwen_quantize.pipeline.texts import EvaluationTokens, evaluation_windows, load_documents

REPORT_NAME = "report.html"
_WINDOW = 2048
_MANIFEST_BYTES = 256 << 20  # a record of every linear of the largest models is some tens of megabytes


def use_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def peak_memory_bytes() -> int:
    """Largest resident size of this program so far.

    Linux's VmHWM, not `getrusage`: that one also remembers the process that started this one.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class ChipQuestion:
    """Which chip's arithmetic a quantized model is to be judged under."""

    device: str | None
    versions: tuple[tuple[str, str], ...] = ()
    assume: tuple[tuple[str, str], ...] = ()
    with_claims: bool = False


def read_manifest(path: str) -> dict[str, Any] | None:
    """The manifest beside a model that this program wrote; None where there is none, UserError if damaged."""
    file = Path(path) / MANIFEST_NAME
    if not file.is_file():
        return None
    manifest = read_object(file, _MANIFEST_BYTES)
    if not all(isinstance(manifest.get(key), dict) for key in ("tool", "chip", "request", "source")):
        raise UserError(f"{file} is no manifest of this program; remove it, or name the chip with --device")
    return manifest


def chip_of(question: ChipQuestion, manifest: Mapping[str, Any] | None) -> tuple[Arithmetic, str]:
    """The arithmetic to emulate and a word on where it comes from."""
    arithmetic, profile, why = resolve_chip(question, manifest)
    return arithmetic, f"{profile.name} ({why})"


def resolve_chip(
    question: ChipQuestion, manifest: Mapping[str, Any] | None
) -> tuple[Arithmetic, ChipProfile, str]:
    """The arithmetic to emulate, the profile it is from, and why this one.

    Without a device the manifest's chip counts, at the versions and with the assumptions it was made for.
    """
    scheme = SCHEMES["ue8m0"]
    device, why = question.device, "asked for"
    versions, assume = dict(question.versions), dict(question.assume)
    with_claims, made_for = question.with_claims, None
    if device is None and manifest is not None:
        chip, request = manifest["chip"], manifest["request"]
        asked = str(request.get("device", ""))
        is_file = asked.split("@")[0].endswith(".toml")
        device = asked.split("@")[0] if is_file else str(chip.get("name"))
        if not versions and not assume and not with_claims:
            made_for = chip.get("fingerprint")
        versions = {**_strings(chip.get("versions")), **versions}
        assume = {**_strings(request.get("assume")), **assume}
        with_claims = with_claims or request.get("with_claims") is True
        why = "from the model's manifest"
    if device is None:
        device, why = "cpu", "no chip named: nearest-even saturating casts"
    resolution = resolve_device(
        device, scheme, versions=versions, with_claims=with_claims, allow_unsupported=True
    )
    arithmetic = resolve_arithmetic(resolution.profile, scheme, assume)
    if made_for is not None and arithmetic.fingerprint != made_for:
        why += "; its profile computes otherwise than when the model was made"
    return arithmetic, resolution.profile, why


def _strings(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def activation_cast(reader: ModelReader, arithmetic: Arithmetic) -> ActivationCast | None:
    """The cast of the activations of a model in block FP8; None for any other."""
    quantization = reader.linears.quantization
    if not isinstance(quantization, BlockFp8Config):
        return None
    activation = SCHEMES["ue8m0"].activation
    assert activation is not None
    return ActivationCast(
        activation.format,
        arithmetic.activation_cast,
        arithmetic.activation_scale_rule,
        quantization.block[1],
    )


def chip_compute(reader: ModelReader, arithmetic: Arithmetic) -> ChipCompute | None:
    """How the chip runs the linears of a model in block FP8; None for any other model."""
    cast = activation_cast(reader, arithmetic)
    if cast is None:
        return None
    assert not isinstance(cast.format, TableFormat)
    return ChipCompute(cast, dot_unit_of(arithmetic, E4M3FN, cast.format, cast.group_size))


def open_reader(path: str) -> ModelReader:
    return ModelReader(open_source(path))


def read_text(
    text: str | None, reader: ModelReader, length: int | None, max_tokens: int
) -> tuple[EvaluationTokens, str]:
    """Evaluation windows of a text, by default of the novel that ships with the package.

    `length` None means 2048 tokens, as published perplexities have, or the whole context if that is shorter.
    """
    config = reader.blueprint.config
    if length is None:
        length = min(_WINDOW, config.max_position)
    if length > config.max_position:
        raise UserError(
            f"windows of {length} tokens are more than this model's context of {config.max_position}"
        )
    source = text or str(heldout_text_path())
    try:
        windows = evaluation_windows(
            load_documents(source), source_tokenizer(reader.source), length, max_tokens
        )
    except UserError as error:
        raise UserError(f"the text to measure on, {source}: {error}") from error
    check_token_ids(windows.windows, reader)
    return windows, text or "embedded held-out novel"
