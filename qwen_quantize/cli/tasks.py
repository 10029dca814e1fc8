"""`qwen_quantize eval --tasks`: how many answers are right, and which ones quantizing flipped."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import qwen_quantize
from qwen_quantize.cli.console import Speaker, StageProgress
from qwen_quantize.cli.doctor import memory_bytes
from qwen_quantize.cli.evaluate import EvalRequest, check_comparable, reference_path
from qwen_quantize.cli.session import (
    ChipQuestion,
    folder_chip,
    folder_kv_plan,
    open_reader,
    peak_memory_bytes,
    read_manifest,
    use_threads,
)
from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import UserError
from qwen_quantize.eval.local_tasks import LOCAL_GROUP, LOCAL_TASKS, run_local
from qwen_quantize.eval.task_answers import TaskAnswers, accuracy_of, change_of
from qwen_quantize.eval.task_record import TaskRun, check_task_record_path, read_task_run, write_task_run
from qwen_quantize.eval.tasks import TaskModel
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.pipeline.kv_cache import kv_record
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.report.numbers import human_bytes
from qwen_quantize.report.task_tables import task_lines, task_tables

_BYTES_PER_WEIGHT = 4  # the engine computes in float32

RunTask = Callable[[str, TaskModel], TaskAnswers]


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """Of `eval --tasks` alone. names: as asked for; limit: items of each task; folder: of own task files."""

    names: tuple[str, ...]
    limit: int | None = None
    fewshot: int | None = None
    chat: bool = False
    folder: Path | None = None


def parse_names(text: str) -> tuple[str, ...]:
    """`a,b`; `heldout` is all local tasks. UserError for an empty list and for a name that comes twice."""
    names: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        names += LOCAL_TASKS if name == LOCAL_GROUP else [name] if name else []
    if not names:
        raise UserError(f"--tasks names no task; try --tasks {LOCAL_GROUP}")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(f"--tasks names {twice[0]} twice")
    return tuple(names)


def has_harness() -> bool:
    """Whether lm-evaluation-harness is installed."""
    return importlib.util.find_spec("lm_eval") is not None


def run_tasks(
    request: EvalRequest,
    options: TaskOptions,
    *,
    threads: int | None,
    as_json: bool,
    quiet: bool,
    verbose: bool = False,
) -> None:
    use_threads(threads)
    begin = time.perf_counter()
    speaker = Speaker(as_json, quiet, verbose)
    if request.record is not None:
        check_task_record_path(Path(request.record))
    reader = open_reader(request.model)
    manifest = read_manifest(request.model)
    against = reference_path(request, manifest)
    recorded = _recorded(against, options)
    reference = None if against is None or recorded is not None else open_reader(against)
    if reference is not None:
        check_comparable(reader, reference)
    chip = folder_chip(
        ChipQuestion(request.device, request.versions, request.assume, request.with_claims), manifest, reader
    )
    compute = None if request.weights_only else chip.compute
    kv_plan = folder_kv_plan(request.kv_cache, request.model, reader, chip, None)
    notes: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        harness, run_task = _runner(options, Path(scratch))
        with speaker.progress("tasks") as progress:
            answers, more = _answers(reader, compute, kv_plan, options, run_task, progress)
            notes += more
        if reference is not None:
            with speaker.progress("tasks of the reference") as progress:
                before, _ = _answers(reference, None, None, options, run_task, progress)
        else:
            before = () if recorded is None else recorded.tasks
    if recorded is not None and recorded.harness != harness:
        notes.append(f"the recorded run was asked by {recorded.harness}, this one by {harness}")
    words = chip.words if compute is not None else None
    names = (str(against), request.model)
    record = {
        "model": request.model,
        "against": against,
        "chip": words,
        "kv_cache": None if kv_plan is None else kv_record(kv_plan, reader.blueprint.config.max_position),
        "harness": harness,
        "tasks": [_task_record(task, before, names) for task in answers],
        "notes": notes,
        "seconds": time.perf_counter() - begin,
        "peak_memory_bytes": peak_memory_bytes(),
    }
    if request.record is not None:
        fingerprint = reader.source.fingerprint()
        run = TaskRun(qwen_quantize.__version__, request.model, fingerprint, words, harness, answers)
        write_task_run(Path(request.record), run)
        record["record"] = request.record
    speaker.show(task_tables(record), task_lines(record))
    speaker.result(record)


def _recorded(against: str | None, options: TaskOptions) -> TaskRun | None:
    """The recorded run that --against names, None where it names a model; UserError where tasks are missing in it."""
    if against is None or Path(against).suffix != ".json":
        return None
    run = read_task_run(Path(against))
    missing = sorted(set(options.names) - {task.name for task in run.tasks})
    if missing:
        raise UserError(f"{against} has no answers to {', '.join(missing)}; record a run of the same tasks")
    return run


def _runner(options: TaskOptions, scratch: Path) -> tuple[str, RunTask]:
    """(who asks, how one task is asked): lm-evaluation-harness, or for the local tasks this program without it."""
    if not has_harness():
        foreign = [name for name in options.names if name not in LOCAL_TASKS]
        if foreign or options.folder is not None or options.fewshot or options.chat:
            what = f"task {foreign[0]}" if foreign else "--tasks-folder, --fewshot and --chat"
            raise UserError(
                f"{what} needs lm-evaluation-harness: pip install 'qwen-quantize[eval]'; without it there are "
                f"{', '.join(LOCAL_TASKS)}"
            )
        return "qwen_quantize", lambda name, model: run_local(name, model, options.limit)
    # Read when that library is imported: its bars would stand between this program's own.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from qwen_quantize.eval.harness import prepare, run_prepared, version

    prepared = {task.name: task for task in prepare(options.names, options.folder, scratch)}
    return version(), lambda name, model: run_prepared(
        prepared[name], model, limit=options.limit, fewshot=options.fewshot
    )


def _answers(
    reader: ModelReader,
    compute: Compute | None,
    kv_plan: KvPlan | None,
    options: TaskOptions,
    run_task: RunTask,
    progress: StageProgress,
) -> tuple[tuple[TaskAnswers, ...], list[str]]:
    """(a model's answers to each task, what to know of them)."""
    current = [""]
    model = TaskModel(
        StreamedModel(reader, compute, kv_plan),
        source_tokenizer(reader.source),
        reader.blueprint.config.max_position,
        lambda: _load(reader, compute),
        lambda what, done, total: progress(f"{current[0]}, {what}", done, total),
        kv_plan=kv_plan,
        chat=options.chat,
    )
    answers = []
    for name in options.names:
        current[0] = name
        answers.append(run_task(name, model))
    if not model.shortened:
        return tuple(answers), []
    return tuple(answers), [
        f"{model.shortened} prompts were longer than the context of {model.context} tokens: their beginnings were "
        "cut off"
    ]


def _load(reader: ModelReader, compute: Compute | None) -> Model:
    """The whole model, which writing answers needs; UserError where this machine's memory does not hold it."""
    source = reader.source
    needed = sum(_BYTES_PER_WEIGHT * _elements(source.info(name).shape) for name in source.names())
    free = memory_bytes()
    if free is not None and needed > free:
        raise UserError(
            f"a task asks for written answers, for which the whole model must be in memory: it takes "
            f"{human_bytes(needed)}, and {human_bytes(free)} are free; tasks that choose among answers need one layer"
        )
    return load_model(reader, compute)


def _elements(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _task_record(task: TaskAnswers, before: Sequence[TaskAnswers], names: tuple[str, str]) -> dict[str, Any]:
    record: dict[str, Any] = {"name": task.name, "metric": task.metric, **asdict(accuracy_of(task.items))}
    record["parts"] = [
        {"name": part, **asdict(accuracy_of([item for item in task.items if item.id.startswith(f"{part}/")]))}
        for part in task.parts
    ]
    then = next((other for other in before if other.name == task.name), None)
    if then is None:
        return {**record, "flips": None}
    change = change_of(then, task, names)
    return {
        **record,
        "reference_accuracy": accuracy_of(then.items).accuracy,
        "difference": change.difference,
        "difference_standard_error": change.standard_error,
        "difference_lower": change.lower,
        "difference_upper": change.upper,
        "flips": {"right_to_wrong": change.flips.lost, "wrong_to_right": change.flips.gained},
        "p_change": change.flips.p_change,
        "p_harm": change.flips.p_harm,
    }
