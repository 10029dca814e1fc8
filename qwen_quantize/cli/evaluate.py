"""`qwen_quantize eval`, and the same measurement for validation after quantizing."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer

import qwen_quantize
from qwen_quantize.chip_profiles.arithmetic import Arithmetic
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.cli.attribute import attribution_record
from qwen_quantize.cli.console import Speaker, StageProgress
from qwen_quantize.cli.session import (
    ChipQuestion,
    folder_chip,
    folder_kv_plan,
    open_reader,
    peak_memory_bytes,
    read_manifest,
    read_text,
    use_threads,
)
from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import UserError
from qwen_quantize.eval.compare import Watch, evaluate
from qwen_quantize.eval.recording import RecordedRun, RunAbout, check_record_path, write_run
from qwen_quantize.eval.token_scores import ScoreRecorder
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.pipeline.kv_cache import kv_lines, kv_record
from qwen_quantize.pipeline.manifest import MANIFEST_NAME
from qwen_quantize.pipeline.rotated_reference import RotatedReference
from qwen_quantize.pipeline.rotated_source import Rotate, Rotating
from qwen_quantize.pipeline.texts import EvaluationTokens
from qwen_quantize.report.attribution_tables import attribution_lines, attribution_tables
from qwen_quantize.report.tables import comparison_lines, comparison_tables


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """The options of `qwen_quantize eval`."""

    model: str
    against: str | None
    device: str | None
    text: str | None
    max_tokens: int
    length: int | None
    weights_only: bool
    versions: tuple[tuple[str, str], ...]
    assume: tuple[tuple[str, str], ...]
    with_claims: bool
    record: str | None = None
    attribute: bool = False
    kv_cache: str | None = None


def measure(
    reader: ModelReader,
    reference: ModelReader | None,
    chip: Compute | None,
    windows: EvaluationTokens,
    progress: StageProgress,
    watch: Watch | None = None,
    kv_plan: KvPlan | None = None,
    rotating: Rotating | None = None,
) -> dict[str, Any]:
    """Score a model, in lockstep with its reference if there is one; the record that reports are made of.

    rotating: what was done to the model, and not to its reference.
    """
    comparison = evaluate(
        StreamedModel(reader, chip, kv_plan),
        windows.windows,
        None if reference is None else _beside(reference, rotating),
        progress,
        watch,
    )
    return {"text_sha256": windows.text_sha256, **asdict(comparison)}


def _beside(reference: ModelReader, rotating: Rotating | None) -> StreamedModel:
    """The reference with its residual stream turned as the model's is."""
    rotation = None if rotating is None else rotating.residual(reference.blueprint.config.hidden_size)
    return StreamedModel(reference) if rotation is None else RotatedReference(reference, rotation)


def rotation_of(manifest: dict[str, Any] | None, path: str | None) -> Rotating | None:
    """How the model was rotated before it was quantized, if `path` is the one that it was made from."""
    if manifest is None or path is None or path != str(manifest["source"].get("path")):
        return None
    return Rotating.parse(str(manifest["request"].get("rotate", Rotate.NONE)))


def reference_path(request: EvalRequest, manifest: dict[str, Any] | None) -> str | None:
    """What to compare with: as asked, else the model that the manifest says this one was made from."""
    if request.against == "none":
        return None
    if request.against is not None:
        return request.against
    if manifest is None:
        return None
    path = str(manifest["source"].get("path"))
    if not Path(path).exists():
        raise UserError(
            f"the model it was made from, {path}, is not here; name it with --against, or --against none"
        )
    return path


def check_comparable(reader: ModelReader, reference: ModelReader) -> None:
    ours, theirs = reader.blueprint.config, reference.blueprint.config
    for key in ("vocab_size", "hidden_size", "num_layers"):
        if getattr(ours, key) != getattr(theirs, key):
            raise UserError(
                f"{reader.source.path} and {reference.source.path} are different models: {key} is "
                f"{getattr(ours, key)} and {getattr(theirs, key)}"
            )


def run_eval(
    request: EvalRequest, *, threads: int | None, as_json: bool, quiet: bool, verbose: bool = False
) -> None:
    use_threads(threads)
    begin = time.perf_counter()
    speaker = Speaker(as_json, quiet, verbose)
    if request.record is not None:
        check_record_path(Path(request.record))
    reader = open_reader(request.model)
    manifest = read_manifest(request.model)
    path = reference_path(request, manifest)
    reference = None if path is None else open_reader(path)
    if reference is not None:
        check_comparable(reader, reference)
    if request.attribute and reference is None:
        raise UserError("--attribute compares with the unquantized model; name it with --against")
    rotating = rotation_of(manifest, path)
    if request.attribute and rotating is not None and rotating.kind is not Rotate.NONE:
        raise UserError(
            f"--attribute runs the original weights under the cast of the quantized ones, and those of {request.model} "
            "are rotated; quantize without --rotate to attribute its loss"
        )
    question = ChipQuestion(request.device, request.versions, request.assume, request.with_claims)
    chip = folder_chip(question, manifest, reader)
    arithmetic = chip.arithmetic
    compute = None if request.weights_only else chip.compute
    if chip.compute is None and next(reader.quantized_linears(), None) is not None:
        speaker.say("only weights are quantized: activations stay in 16 bits, and no chip's cast is emulated")
    windows, text = read_text(request.text, reader, request.length, request.max_tokens)
    kv_plan = folder_kv_plan(request.kv_cache, request.model, reader, chip, windows.windows)
    for line in [] if kv_plan is None else kv_lines(kv_plan, windows.windows.shape[1]):
        speaker.say(line)
    recorder = None if request.record is None else ScoreRecorder()
    with speaker.progress("eval") as progress:
        watch = None if recorder is None else recorder.add
        record = measure(reader, reference, compute, windows, progress, watch, kv_plan, rotating)
    attribution = None
    if request.attribute and reference is not None:
        with speaker.progress("attribute") as progress:
            attribution = attribution_record(reader, reference, compute, windows, progress)
    if recorder is not None and request.record is not None:
        computed = (arithmetic, chip.profile) if compute is not None else None
        about = _about(request, reader, computed, (text, windows.text_sha256))
        write_run(Path(request.record), RecordedRun(about, recorder.scores(windows.document_ids)))
    record = {
        "model": request.model,
        "against": path,
        "chip": chip.words if compute is not None else None,
        "activation_rounding": arithmetic.activation_cast.rounding.value if compute is not None else None,
        "text": text,
        "kv_cache": None if kv_plan is None else kv_record(kv_plan, windows.windows.shape[1]),
        **record,
        "seconds": time.perf_counter() - begin,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if request.record is not None:
        record["record"] = request.record
    speaker.show(comparison_tables(record), comparison_lines(record))
    if attribution is not None:
        record["attribution"] = attribution
        speaker.show(attribution_tables(attribution), attribution_lines(attribution))
    speaker.result(record)
    if attribution is not None and not attribution["everything_off_is_the_reference"]:
        raise typer.Exit(1)


def _about(
    request: EvalRequest,
    reader: ModelReader,
    computed: tuple[Arithmetic, ChipProfile] | None,
    text: tuple[str, str],
) -> RunAbout:
    """computed: the arithmetic that was emulated and its chip, None where none was; text: (name, SHA-256)."""
    manifest = Path(request.model) / MANIFEST_NAME
    arithmetic, profile = computed or (None, None)
    return RunAbout(
        tool_version=qwen_quantize.__version__,
        model=request.model,
        model_fingerprint=reader.source.fingerprint(),
        manifest_sha256=hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else "",
        chip=None if profile is None else profile.name,
        versions={} if profile is None else dict(profile.versions),
        with_claims=profile is not None and profile.with_claims,
        arithmetic={} if arithmetic is None else arithmetic.fields(),
        arithmetic_fingerprint="" if arithmetic is None else arithmetic.fingerprint,
        text=text[0],
        text_sha256=text[1],
        max_tokens=request.max_tokens,
    )
