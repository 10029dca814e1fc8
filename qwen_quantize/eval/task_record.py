"""A run of tasks kept in a JSON file, to hold later runs against. The reader treats the file as a hostile one.

An object with `format` ("qwen_quantize tasks 1"), `tool_version`, `model`, `model_fingerprint`, `chip` (null where
no chip was computed), `harness` (what asked) and `tasks`, each with `name`, `metric`, `sha256`, `parts`, and of its
items `ids`, `documents` and `correct` in the same order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_quantize.checkpoint.disk import replacing
from qwen_quantize.checkpoint.json_file import read_object
from qwen_quantize.errors import UserError
from qwen_quantize.eval.task_answers import Item, TaskAnswers

FORMAT = "qwen_quantize tasks 1"
_MOST_BYTES = 256 << 20  # MMLU's 14,042 items take one megabyte
_LONGEST = 4096  # characters of a name
_AGAIN = "record it again with `eval --tasks ... --record FILE.json`"


@dataclass(frozen=True, slots=True)
class TaskRun:
    """A model's answers and what is needed to know which model it was."""

    tool_version: str
    model: str
    model_fingerprint: str
    chip: str | None
    harness: str
    tasks: tuple[TaskAnswers, ...]


def check_task_record_path(path: Path) -> None:
    """UserError, before the work, where a record cannot be written or would replace another kind of file."""
    if path.suffix != ".json":
        raise UserError(f"--record {path}: answers to tasks are kept in a file that ends in .json")
    if not path.parent.is_dir():
        raise UserError(f"--record {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UserError(f"--record {path} is a folder; name a file, such as tasks.json")
    if path.exists():
        try:
            read_task_run(path)
        except UserError as error:
            raise UserError(f"--record {path} exists and is no record of tasks; name another file") from error


def write_task_run(path: Path, run: TaskRun) -> None:
    """Whole or not at all; the same run gives the same bytes."""
    record = {
        "format": FORMAT,
        "tool_version": run.tool_version,
        "model": run.model,
        "model_fingerprint": run.model_fingerprint,
        "chip": run.chip,
        "harness": run.harness,
        "tasks": [
            {
                "name": task.name,
                "metric": task.metric,
                "sha256": task.sha256,
                "parts": list(task.parts),
                "ids": [item.id for item in task.items],
                "documents": [item.document for item in task.items],
                "correct": [item.correct for item in task.items],
            }
            for task in run.tasks
        ],
    }
    with replacing(path) as file:
        file.write((json.dumps(record, indent=1) + "\n").encode())


def read_task_run(path: Path) -> TaskRun:
    """UserError that names the file for whatever is wrong with it."""
    found = read_object(path, _MOST_BYTES)
    if found.get("format") != FORMAT:
        raise UserError(f"{path} is no record of tasks ({FORMAT!r} is not its format); {_AGAIN}")
    tasks = found.get("tasks")
    if not isinstance(tasks, list) or not tasks or not all(isinstance(task, dict) for task in tasks):
        raise UserError(f"{path}: 'tasks' must be a list of tasks; {_AGAIN}")
    run = TaskRun(
        tool_version=_line(path, found, "tool_version"),
        model=_line(path, found, "model"),
        model_fingerprint=_line(path, found, "model_fingerprint"),
        chip=None if found.get("chip") is None else _line(path, found, "chip"),
        harness=_line(path, found, "harness"),
        tasks=tuple(_task(path, task) for task in tasks),
    )
    if len({task.name for task in run.tasks}) != len(run.tasks):
        raise UserError(f"{path} has a task twice; {_AGAIN}")
    return run


def _task(path: Path, found: Mapping[str, Any]) -> TaskAnswers:
    name = _line(path, found, "name")
    ids, documents = (_lines(path, found, key) for key in ("ids", "documents"))
    correct = found.get("correct")
    if not isinstance(correct, list) or not all(isinstance(value, bool) for value in correct):
        raise UserError(f"{path}: 'correct' of task {name} must be a list of true and false; {_AGAIN}")
    if not ids or not len(ids) == len(documents) == len(correct) or len(set(ids)) != len(ids):
        raise UserError(f"{path}: task {name} needs items, each with one id of its own; {_AGAIN}")
    items = tuple(Item(*each) for each in zip(ids, documents, correct, strict=True))
    parts = tuple(_lines(path, found, "parts"))
    return TaskAnswers(name, _line(path, found, "metric"), _line(path, found, "sha256"), items, parts)


def _line(path: Path, found: Mapping[str, Any], key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
        raise UserError(f"{path}: {key!r} must be a line of text, found {value!r:.80}; {_AGAIN}")
    return value


def _lines(path: Path, found: Mapping[str, Any], key: str) -> list[str]:
    value = found.get(key)
    if not isinstance(value, list) or not all(
        isinstance(each, str) and len(each) <= _LONGEST and each.isprintable() for each in value
    ):
        raise UserError(f"{path}: {key!r} must be a list of lines of text; {_AGAIN}")
    return value
