"""One quantization run from request to a staged folder; the command line validates, reports and publishes it."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qwen_quantize
from qwen_quantize.checkpoint.layouts import deepseek_quantization_config
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.writer import OutputFolder, plan_shards, require_free_space
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.tokenizer import Tokenizer, load_tokenizer
from qwen_quantize.errors import ResumableError, UserError
from qwen_quantize.formats.kernel_calls import native_library
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.recipe import Output
from qwen_quantize.pipeline.stream import LinearRecord, quantize_layers, require_finite, write_rest
from qwen_quantize.pipeline.texts import CalibrationTokens, calibration_batches, load_documents

Progress = Callable[[str, int, int], None]

MANIFEST_NAME = "qwen_quantize.json"


@dataclass(frozen=True, slots=True)
class StagedRun:
    """Every weight is written and readable under `folder.staging`; manifest and report are still to come."""

    plan: Plan
    folder: OutputFolder
    journal: Journal
    calibration: CalibrationTokens | None
    head: tuple[LinearRecord, ...]


@contextmanager
def side_folder(source: CheckpointSource) -> Iterator[Path]:
    """A temporary folder with the source's config, tokenizer and other side files."""
    with tempfile.TemporaryDirectory(prefix="qwen_quantize-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(source.config), encoding="utf-8")
        for file, content in source.side_files().items():
            data = content if isinstance(content, bytes) else Path(content).read_bytes()
            (folder / file).write_bytes(data)
        yield folder


def source_tokenizer(source: CheckpointSource) -> Tokenizer:
    """The tokenizer that came with the model."""
    with side_folder(source) as folder:
        try:
            return load_tokenizer(folder)
        except UserError as error:  # the user knows the model's place, not the temporary one
            raise UserError(str(error).replace(str(folder), str(source.path))) from error


def check_token_ids(tokens: Tensor, reader: ModelReader) -> None:
    """UserError if the tokenizer gives ids that the model has no embedding for."""
    size = reader.blueprint.config.vocab_size
    if tokens.numel() and int(tokens.max()) >= size:
        raise UserError(
            f"{reader.source.path}: the tokenizer gives id {int(tokens.max())}, the model knows {size} tokens; "
            "tokenizer and model do not belong together"
        )


def read_calibration(plan: Plan, reader: ModelReader) -> CalibrationTokens | None:
    """The calibration windows that the recipe names; None without a dataset."""
    recipe = plan.recipe
    if recipe.dataset is None:
        return None
    documents = load_documents(recipe.dataset, column=recipe.column)
    tokenizer = source_tokenizer(reader.source)
    calibration = calibration_batches(documents, tokenizer, recipe.samples, recipe.length, recipe.seed)
    check_token_ids(calibration.tokens, reader)
    return calibration


def quantize(plan: Plan, reader: ModelReader, output: Output, progress: Progress) -> StagedRun:
    """Write every weight into the staging folder. A UserError leaves nothing behind, unless it is resumable."""
    calibration = read_calibration(plan, reader)
    if not output.resume:
        tokens = 0 if calibration is None else calibration.tokens.numel()
        hidden = 2 * 4 * tokens * plan.blueprint.config.hidden_size
        require_free_space(output.path.parent, plan.output_bytes + hidden)
    folder = OutputFolder(
        output.path,
        plan_shards(plan.outputs, plan.recipe.max_shard_bytes),
        resume=output.resume,
        overwrite=output.overwrite,
    )
    try:
        return _fill(plan, reader, calibration, folder, output.resume, progress)
    except ResumableError:
        folder.close()
        raise
    except UserError:
        if folder.resumed:
            folder.close()  # finished layers are worth more than a tidy folder
        else:
            folder.discard()
        raise
    except BaseException:
        folder.close()
        raise


def _fill(
    plan: Plan,
    reader: ModelReader,
    calibration: CalibrationTokens | None,
    folder: OutputFolder,
    resume: bool,
    progress: Progress,
) -> StagedRun:
    source = reader.source
    identity = {
        "version": qwen_quantize.__version__,
        "torch version": torch.__version__,
        "request": plan.recipe.as_record(),
        "source": source.fingerprint(),
        "calibration text": None if calibration is None else calibration.sha256,
        "chip": plan.arithmetic.fingerprint,
        # Sums depend on how they are split, so a resumed run must split them the same way.
        "number of threads": torch.get_num_threads(),
        "kernels": "native" if native_library() is not None else "torch",
    }
    journal = Journal(folder.staging / "journal.jsonl", identity, resume)
    if journal.next_layer() == 0:
        _check_outside_layers(plan, reader)
    tokens = None if calibration is None else calibration.tokens
    quantize_layers(plan, reader, folder, journal, tokens, progress)
    head = write_rest(plan, reader, folder)
    folder.add_file("config.json", _config_bytes(plan, source))
    for name, content in source.side_files().items():
        folder.add_file(name, content)
    folder.sync()
    folder.write_index()
    return StagedRun(plan, folder, journal, calibration, tuple(head))


def _check_outside_layers(plan: Plan, reader: ModelReader) -> None:
    """Embedding, head and final norm are written last but checked first: no hours lost to a NaN in them."""
    family, config = plan.blueprint.family, plan.blueprint.config
    names = [family.embedding, family.final_norm]
    if not config.tie_word_embeddings:
        names.append(family.head)
    for name in names:
        tensor = reader.source.read(name)
        if name.endswith(".weight") and tensor.dtype == torch.float8_e4m3fn:
            tensor = reader.read_linear(name.removesuffix(".weight"))
        require_finite(reader, name, tensor)


def _config_bytes(plan: Plan, source: CheckpointSource) -> bytes:
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    kept = list(plan.selection.kept)
    config["quantization_config"] = deepseek_quantization_config(plan.block, kept)
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def build_manifest(
    staged: StagedRun, source: CheckpointSource, validation: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The record of what was done: everything in it is reproducible, so it holds no times."""
    plan = staged.plan
    arithmetic, profile = plan.arithmetic, plan.resolution.profile
    cast = arithmetic.activation_cast
    actions = [tensor.action.value for tensor in plan.tensors]
    source_bytes = sum(source.info(name).nbytes for name in source.names())
    activation = plan.scheme.activation
    calibration = staged.calibration
    local = Path(plan.recipe.model_path)
    notes = list(plan.notes)
    if calibration is not None and calibration.note:
        notes.append(f"calibration text: {calibration.note}")
    return {
        "tool": {"name": "qwen_quantize", "version": qwen_quantize.__version__},
        "source": {
            "path": str(local.resolve() if local.exists() else local),
            "kind": source.kind,
            "architecture": plan.blueprint.config.architecture,
            "fingerprint": source.fingerprint(),
            "parameters": sum(math.prod(shape) for shape in plan.blueprint.expected_tensors().values()),
        },
        "request": plan.recipe.as_record(),
        "chip": {
            "name": profile.name,
            "vendor": profile.chip.vendor,
            "asked": plan.recipe.device,
            "why": plan.resolution.alias_explanation,
            "versions": dict(profile.versions),
            "fingerprint": arithmetic.fingerprint,
            "activation_cast": {
                "rounding": cast.rounding.value,
                "overflow": cast.overflow.value,
                "subnormals": cast.subnormals.value,
                "nan": cast.nan.value,
            },
            "activation_scale_rule": arithmetic.activation_scale_rule.value,
            "accumulator": arithmetic.accumulator.format,
            "arithmetic": arithmetic.fields(),
            "support": plan.resolution.verdict.status.value,
            "support_reason": plan.resolution.verdict.reason,
        },
        "method": plan.method.name,
        "layout": plan.layout.name,
        "block": list(plan.block),
        "scheme": {
            "weight": plan.scheme.weight.format.name,
            "activation": None if activation is None else activation.format.name,
            "scale": plan.scheme.weight.scale_format.name,
        },
        "calibration": None
        if calibration is None
        else {
            "dataset": plan.recipe.dataset,
            "windows": calibration.tokens.shape[0],
            "length": calibration.tokens.shape[1],
            "tokens": calibration.tokens.numel(),
            "sha256": calibration.sha256,
            "note": calibration.note,
        },
        "assumptions": [asdict(assumption) for assumption in arithmetic.assumptions],
        "notes": notes,
        "tensors": {
            "quantized": actions.count("quantize"),
            "kept": actions.count("keep"),
            "dropped": actions.count("drop"),
        },
        "output_bytes": plan.output_bytes,
        "source_bytes": source_bytes,
        "layers": [
            {"layer": layer, **{key: record[key] for key in ("linears", "streams")}}
            for layer, record in sorted(staged.journal.layers.items())
        ],
        "head": [asdict(record) for record in staged.head],
        "validation": None if validation is None else dict(validation),
    }
