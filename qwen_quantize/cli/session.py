"""What every command that runs a model does first: threads, sources, the chip of a folder, memory used."""

from __future__ import annotations

import json
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.devices import resolve_device
from qwen_quantize.embedded import heldout_text_path
from qwen_quantize.engine.linear import ActivationCast
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.tokenizer import Tokenizer
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.pipeline.run import MANIFEST_NAME
from qwen_quantize.pipeline.texts import EvaluationTokens, evaluation_windows, load_documents


def use_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


def peak_memory_bytes() -> int:
    """Largest resident size of this process so far (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True, slots=True)
class ChipQuestion:
    """Which chip's arithmetic a quantized model is to be judged under."""

    device: str | None
    versions: tuple[tuple[str, str], ...] = ()
    assume: tuple[tuple[str, str], ...] = ()
    with_claims: bool = False


def read_manifest(path: str) -> dict[str, Any] | None:
    """The manifest beside a model that this program wrote, or None."""
    file = Path(path) / MANIFEST_NAME
    if not file.is_file():
        return None
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def chip_of(question: ChipQuestion, manifest: Mapping[str, Any] | None) -> tuple[Arithmetic, str]:
    """The arithmetic to emulate and a word on where it comes from."""
    scheme = SCHEMES["ue8m0"]
    device, why = question.device, "asked for"
    versions, assume = dict(question.versions), dict(question.assume)
    with_claims = question.with_claims
    if device is None and manifest is not None:
        request = manifest.get("request", {})
        device = str(manifest["chip"]["name"])
        versions = {**request.get("versions", {}), **versions}
        assume = {**request.get("assume", {}), **assume}
        with_claims = with_claims or bool(request.get("with_claims", False))
        why = "from the model's manifest"
    if device is None:
        device, why = "cpu", "no chip named: nearest-even saturating casts"
    resolution = resolve_device(
        device, scheme, versions=versions, with_claims=with_claims, allow_unsupported=True
    )
    return resolve_arithmetic(resolution.profile, scheme, assume), f"{resolution.profile.name} ({why})"


def activation_cast(reader: ModelReader, arithmetic: Arithmetic) -> ActivationCast | None:
    """The cast of a quantized model's activations; None for an unquantized one."""
    if reader.quantization is None:
        return None
    activation = SCHEMES["ue8m0"].activation
    assert activation is not None
    return ActivationCast(
        activation.format,
        arithmetic.activation_cast,
        arithmetic.activation_scale_rule,
        reader.quantization.block[1],
    )


def open_reader(path: str) -> ModelReader:
    return ModelReader(open_source(path))


def read_text(
    text: str | None, tokenizer: Tokenizer, length: int, max_tokens: int
) -> tuple[EvaluationTokens, str]:
    """Evaluation windows of a text, by default of the novel that ships with the package."""
    source = text or str(heldout_text_path())
    documents = load_documents(source)
    return evaluation_windows(documents, tokenizer, length, max_tokens), text or "embedded held-out novel"
