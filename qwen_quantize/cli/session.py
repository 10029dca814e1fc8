"""What every command that runs a model does first: threads, sources, the chip of a folder, memory used."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from qwen_quantize.checkpoint.json_file import RECORD_BYTES, read_object
from qwen_quantize.checkpoint.kv_channels import channel_kv_plan
from qwen_quantize.checkpoint.kv_side import read_kv_plan
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.devices import resolve_device
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.embedded import heldout_text_path
from qwen_quantize.engine.compute import FolderCompute, schemes_of
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import KvKind, parse_kv_scheme
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.pipeline.choices import own_assumptions
from qwen_quantize.pipeline.kv_cache import check_kv_plan, looks_at_text, plan_kv_cache
from qwen_quantize.pipeline.manifest import MANIFEST_NAME
from qwen_quantize.pipeline.run import check_token_ids, source_tokenizer
from qwen_quantize.pipeline.texts import EvaluationTokens, evaluation_windows, load_documents

REPORT_NAME = "report.html"
_WINDOW = 2048


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
    manifest = read_object(file, RECORD_BYTES)
    if not all(isinstance(manifest.get(key), dict) for key in ("tool", "chip", "request", "source")):
        raise UserError(f"{file} is no manifest of this program; remove it, or name the chip with --device")
    return manifest


def chip_of(question: ChipQuestion, manifest: Mapping[str, Any] | None) -> tuple[Arithmetic, str]:
    """The arithmetic to emulate and a word on where it comes from."""
    arithmetic, profile, why = resolve_chip(question, manifest)
    return arithmetic, f"{profile.name} ({why})"


def resolve_chip(
    question: ChipQuestion, manifest: Mapping[str, Any] | None, schemes: Sequence[Scheme] = ()
) -> tuple[Arithmetic, ChipProfile, str]:
    """The arithmetic to emulate, the profile it is from, and why this one.

    Without a device the manifest's chip counts, at the versions and with the assumptions it was made for. schemes:
    of the folder; the arithmetic is that of the first, of `ue8m0` if there is none.
    """
    scheme = schemes[0] if schemes else SCHEMES["ue8m0"]
    device, why = question.device, "asked for"
    versions, assume = dict(question.versions), assumed_by(question, manifest)
    with_claims = question.with_claims
    made_for: list[str] = []
    if device is None and manifest is not None:
        chip, request = manifest["chip"], manifest["request"]
        asked = str(request.get("device", ""))
        is_file = asked.split("@")[0].endswith(".toml")
        device = asked.split("@")[0] if is_file else str(chip.get("name"))
        if not versions and not question.assume and not with_claims:
            made_for = [str(chip["fingerprint"])] if chip.get("fingerprint") else []
            made_for += _strings(chip.get("fingerprints")).values()
        versions = {**_strings(chip.get("versions")), **versions}
        with_claims = with_claims or request.get("with_claims") is True
        why = "from the model's manifest"
    if device is None:
        device, why = "cpu", "no chip named: nearest-even saturating casts"
    resolution = resolve_device(
        device, scheme, versions=versions, with_claims=with_claims, allow_unsupported=True
    )
    arithmetic = resolve_arithmetic(resolution.profile, scheme, own_assumptions(scheme, assume, schemes))
    same = [replace(arithmetic, scheme=name) for name in SCHEMES if _is_of(name, scheme)]
    if made_for and not any(like.fingerprint in made_for for like in same):
        why += "; its profile computes otherwise than when the model was made"
    return arithmetic, resolution.profile, why


def assumed_by(question: ChipQuestion, manifest: Mapping[str, Any] | None) -> dict[str, str]:
    """What is to be assumed: the manifest's assumptions, if its chip counts, and those of the question."""
    own = (
        {} if manifest is None or question.device is not None else _strings(manifest["request"].get("assume"))
    )
    return {**own, **dict(question.assume)}


def _is_of(name: str, scheme: Scheme) -> bool:
    """Whether the named scheme casts inputs as `scheme` does; a linear's input does not tell w4a8 from w8a8."""
    return name == scheme.name or (name in SCHEMES and SCHEMES[name].activation == scheme.activation)


def _strings(value: object) -> dict[str, str]:
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def folder_schemes(reader: ModelReader) -> tuple[Scheme, ...]:
    """What the inputs of the model's quantized linears are cast to, most frequent first; () where none is."""
    return schemes_of(reader.quantized_linears())


def main_scheme(reader: ModelReader) -> Scheme:
    """The scheme whose arithmetic stands for the folder in records; `ue8m0` where no input is cast."""
    return next(iter(folder_schemes(reader)), SCHEMES["ue8m0"])


@dataclass(frozen=True, slots=True)
class FolderChip:
    """The chip that a folder is judged under. arithmetic: of the most frequent scheme.

    compute: how the chip runs its linears, None where no input is cast.
    """

    arithmetic: Arithmetic
    profile: ChipProfile
    why: str
    compute: FolderCompute | None

    @property
    def words(self) -> str:
        return f"{self.profile.name} ({self.why})"


def folder_chip(
    question: ChipQuestion, manifest: Mapping[str, Any] | None, reader: ModelReader
) -> FolderChip:
    """Each scheme of a mixed folder has its own arithmetic, and takes of the assumptions what it has a step for."""
    schemes = folder_schemes(reader)
    arithmetic, profile, why = resolve_chip(question, manifest, schemes)
    if not schemes:
        return FolderChip(arithmetic, profile, why, None)
    assume = assumed_by(question, manifest)
    arithmetics = {
        scheme: resolve_arithmetic(profile, scheme, own_assumptions(scheme, assume, schemes))
        for scheme in schemes
    }
    return FolderChip(arithmetic, profile, why, FolderCompute(reader.source, arithmetics))


def chip_compute(reader: ModelReader, *arithmetics: Arithmetic) -> FolderCompute | None:
    """How a chip of these arithmetics runs the model's linears; None where no input is cast.

    UserError for a scheme of the folder that none of them is for: one arithmetic is that of one scheme.
    """
    schemes = folder_schemes(reader)
    found = {
        scheme: arithmetic
        for scheme in schemes
        for arithmetic in reversed(arithmetics)
        if _is_of(arithmetic.scheme, scheme)
    }
    others = sorted({scheme.name for scheme in schemes if scheme not in found})
    if others:
        raise UserError(
            f"{reader.source.path} has inputs of scheme {', '.join(others)}, and the arithmetic is that of "
            f"{', '.join(one.scheme for one in arithmetics)}: only `eval` computes with several"
        )
    return FolderCompute(reader.source, found) if schemes else None


def folder_kv_plan(
    asked: str | None, path: str, reader: ModelReader, chip: FolderChip, windows: torch.Tensor | None
) -> KvPlan | None:
    """The key-value cache asked for, else the one that the model's folder names; None for float32.

    windows: text to weigh channels on where the scheme asked for has to.
    """
    if asked is not None:
        scheme = parse_kv_scheme(asked)
        if scheme.kind is KvKind.MIXED and windows is None:
            raise UserError(
                "--kv-cache mixed weighs channels by what a text needs of them, and there is none here; quantize with "
                "it, and the folder's own scheme is taken"
            )
        found = plan_kv_cache(scheme, reader, chip.profile, windows, chip.compute)
        if windows is None or not looks_at_text(scheme):
            return found
        return replace(
            found, notes=(*found.notes, "what it needs to know was found on the text measured here")
        )
    plan = read_kv_plan(Path(path)) or channel_kv_plan(reader.source, reader.blueprint)
    if plan is not None:
        check_kv_plan(plan, reader.blueprint.config, path)
    return plan


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
