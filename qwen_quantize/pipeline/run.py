"""One quantization run from request to a staged folder; the command line validates, reports and publishes it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import qwen_quantize
from qwen_quantize.checkpoint.compressed_tensors import CompressedTensorsLayout
from qwen_quantize.checkpoint.kv_side import compressed_kv_scheme
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.writer import OutputFolder, filling, require_free_space
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.tokenizer import Tokenizer, load_tokenizer
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kernel_calls import native_library
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.pipeline.allocator import give_back_freed_memory
from qwen_quantize.pipeline.calibrate import calibrate
from qwen_quantize.pipeline.calibration import Calibration
from qwen_quantize.pipeline.compile import compile_halves
from qwen_quantize.pipeline.convert_rest import convert_rest
from qwen_quantize.pipeline.hidden import HiddenStates
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.output_files import output_files, write_reordered
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.recipe import Output, Recipe
from qwen_quantize.pipeline.solve_rest import solve_rest
from qwen_quantize.pipeline.solving import require_finite
from qwen_quantize.pipeline.statistics_folder import StatisticsFolder, read_statistics
from qwen_quantize.pipeline.tensors import Action, kept_matrices
from qwen_quantize.pipeline.texts import CalibrationTokens, calibration_batches, load_documents

Progress = Callable[[str, int, int], None]

_ROWS_CHECKED = 4096  # rows of an embedding that are looked at together


@dataclass(frozen=True, slots=True)
class StagedRun:
    """Every weight is written and readable under `folder.staging`; manifest and report are still to come."""

    plan: Plan
    folder: OutputFolder
    journal: Journal
    calibration: CalibrationTokens | StatisticsFolder | None


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


def read_calibration(recipe: Recipe, reader: ModelReader) -> CalibrationTokens | None:
    """The calibration windows that the recipe names; None without a dataset."""
    if recipe.dataset is None:
        return None
    documents = load_documents(recipe.dataset, column=recipe.column)
    tokenizer = source_tokenizer(reader.source)
    calibration = calibration_batches(documents, tokenizer, recipe.samples, recipe.length, recipe.seed)
    check_token_ids(calibration.tokens, reader)
    return calibration


def quantize(
    plan: Plan, source: CheckpointSource, reader: ModelReader | None, output: Output, progress: Progress
) -> StagedRun:
    """Write every weight into the staging folder. A UserError leaves nothing behind, unless it is resumable.

    reader: of the source, where its architecture has a forward pass.
    """
    calibration: CalibrationTokens | StatisticsFolder | None = None
    if plan.recipe.statistics is not None:
        calibration = read_statistics(plan.recipe.statistics)
        calibration.require_model(source)
    elif reader is not None:
        calibration = read_calibration(plan.recipe, reader)
        give_back_freed_memory()  # documents and tokenizer
    if not output.resume:
        require_free_space(output.path.parent, plan.disk_bytes)
    files = output_files(plan, source)
    folder = files.open(output.path, resume=output.resume, overwrite=output.overwrite)
    with filling(folder):
        return _fill(plan, source, reader, calibration, folder, output.resume, progress)


def _fill(
    plan: Plan,
    source: CheckpointSource,
    reader: ModelReader | None,
    calibration: CalibrationTokens | StatisticsFolder | None,
    folder: OutputFolder,
    resume: bool,
    progress: Progress,
) -> StagedRun:
    identity = {
        "version": qwen_quantize.__version__,
        "torch version": torch.__version__,
        "request": plan.recipe.as_record(),
        "source": source.fingerprint(),
        "calibration text": None if calibration is None else calibration.sha256,
        "chip": "+".join(dict.fromkeys(one.arithmetic.fingerprint for one in plan.distinct_choices)),
        # Sums depend on how they are split, so a resumed run must split them the same way.
        "number of threads": 1 if isinstance(calibration, StatisticsFolder) else torch.get_num_threads(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "kernels": "native" if native_library() is not None else "torch",
    }
    journal = Journal(folder.staging / "journal.jsonl", identity, resume)
    if calibration is not None and reader is not None and plan.blueprint is not None:
        if not journal.units:
            check_outside_layers(source, plan.blueprint)
        collected = isinstance(calibration, StatisticsFolder)
        windows, length = (0, 0) if isinstance(calibration, StatisticsFolder) else calibration.tokens.shape
        states = HiddenStates(folder.staging / "work", windows, length, plan.blueprint.config.hidden_size)
        dtypes = {
            tensor.name: tensor.outputs[0].dtype for tensor in plan.tensors if tensor.action is Action.KEEP
        }
        run = Calibration(
            plan, plan.blueprint, reader, folder, journal, states, dtypes, propagates=not collected
        )
        if isinstance(calibration, StatisticsFolder):
            compile_halves(run, calibration, progress)
        else:
            calibrate(run, calibration.tokens, progress)
        give_back_freed_memory()  # what solving took; what follows works in other sizes
    if not plan.converts_by_pieces:
        solve_rest(plan, source, folder, journal, progress)
    convert_rest(plan, source, folder, journal, progress)
    write_reordered(plan, source, folder)
    folder.add_file("config.json", _config_bytes(plan, source))
    for name, content in source.side_files().items():
        folder.add_file(name, content)
    for name, described in plan.layout.side_files(plan.schemes, plan.outputs).items():
        folder.add_file(name, described)
    folder.sync()
    folder.write_index()
    return StagedRun(plan, folder, journal, calibration)


def check_outside_layers(source: CheckpointSource, blueprint: Blueprint) -> None:
    """Embedding, head and final norm are written last but checked first: no hours lost to a NaN in them."""
    family, config = blueprint.family, blueprint.config
    names = [family.embedding, family.final_norm]
    if not config.tie_word_embeddings:
        names.append(family.head)
    for name in names:
        rows = source.info(name).shape[0]
        for start in range(0, rows, _ROWS_CHECKED):
            part = source.read_rows(name, start, min(start + _ROWS_CHECKED, rows))
            if part.dtype.is_floating_point and part.element_size() > 1:
                require_finite(source.path, name, part.float(), start)


def _config_bytes(plan: Plan, source: CheckpointSource) -> bytes:
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    kept = dict.fromkeys((*plan.selection.kept, *kept_matrices(plan.tensors)))
    described = plan.layout.quantization_config(plan.schemes, list(kept))
    if described:
        if (
            plan.kv_outputs
            and plan.kv_scheme is not None
            and isinstance(plan.layout, CompressedTensorsLayout)
        ):
            described["kv_cache_scheme"] = compressed_kv_scheme(plan.kv_scheme)
        config["quantization_config"] = described
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
