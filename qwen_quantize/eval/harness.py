"""The engine as a model of lm-evaluation-harness, and its tasks run on it. Imports `lm_eval`: the extra `eval`.

`EngineLM` also serves scripts: `lm_eval.simple_evaluate(model=EngineLM(task_model), tasks=[...])`.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import yaml
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from qwen_quantize.embedded import local_tasks_path
from qwen_quantize.engine.tokenizer import Message
from qwen_quantize.errors import UserError
from qwen_quantize.eval.local_tasks import LOCAL_TASKS
from qwen_quantize.eval.task_answers import Item, TaskAnswers, digest
from qwen_quantize.eval.tasks import DEFAULT_NEW_TOKENS, Question, TaskModel

_METRICS = ("acc", "exact_match")  # preferred, in this order, among those that say right or wrong
_SHARED_TEXTS = ("document", "passage", "article", "story", "paragraph")  # fields that items have in common
_LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_REASON = 200  # characters of another library's message


class EngineLM(LM):  # type: ignore[misc]  # lm_eval has no types
    """A `TaskModel` under the names and conventions that lm-evaluation-harness calls."""

    def __init__(self, model: TaskModel) -> None:
        super().__init__()
        self._model = model

    @property
    def tokenizer_name(self) -> str:
        return self._model.tokenizer.sha256

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._model.tokenizer.sha256 if chat_template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        messages = [Message(turn["role"], turn["content"]) for turn in chat_history]
        return self._model.render(messages, add_generation_prompt)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        found = self._model.loglikelihood([request.args for request in requests])
        return [(each.log_probability, each.greedy) for each in found]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        return self._model.loglikelihood_rolling([request.args[0] for request in requests])

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Repeats of a question, which sampling would answer differently, are answered once."""
        questions = [_question(*request.args) for request in requests]
        different = list(dict.fromkeys(questions))
        answers = dict(zip(different, self._model.generate_until(different), strict=True))
        return [answers[question] for question in questions]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A task or group with its data at hand. tasks: lm_eval's, by name."""

    name: str
    tasks: Mapping[str, Any]


def version() -> str:
    return f"lm-eval {lm_eval.__version__}"


def prepare(names: Sequence[str], folder: Path | None, cache: Path) -> list[Prepared]:
    """Read or fetch the data of all tasks, so that none turns out to be missing after hours with the others.

    folder: of the user's own task files, whose `!function` entries are code that is run. cache: where the local
    tasks are unpacked to; it must live as long as the result.
    """
    ours = [name for name in names if name in LOCAL_TASKS]
    with _quiet():
        manager = TaskManager(
            include_path=None if folder is None else str(folder), include_defaults=ours != list(names)
        )
        return [Prepared(name, _load(manager, name, cache)) for name in names]


def run_prepared(
    task: Prepared, model: TaskModel, *, limit: int | None = None, fewshot: int | None = None
) -> TaskAnswers:
    """limit: items of each task of a group. Raises UserError where nothing says right or wrong of an answer."""
    with _quiet():
        results = lm_eval.simple_evaluate(
            model=EngineLM(model),
            tasks=list(task.tasks.values()),
            num_fewshot=fewshot,
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=model.chat,
        )
    samples: Mapping[str, Sequence[Mapping[str, Any]]] = results["samples"]
    parts = [name for name in task.tasks if samples.get(name)]
    if not parts:
        raise UserError(f"task {task.name} has no items")
    first = {name: _first_filter(samples[name]) for name in parts}
    metric = _metric(task.name, [sample for name in parts for sample in first[name]])
    several = len(task.tasks) > 1
    items = tuple(
        _item(name, sample, metric, f"{name}/" if several else "") for name in parts for sample in first[name]
    )
    asked = ([i.id, *_asked(s)] for i, s in zip(items, (s for n in parts for s in first[n]), strict=True))
    return TaskAnswers(task.name, metric, digest(asked), items, tuple(parts) if several else ())


def _load(manager: Any, name: str, cache: Path) -> dict[str, Any]:
    try:
        loaded = manager.load([_local(name, cache) if name in LOCAL_TASKS else name])
    except KeyError as error:
        if name in manager.all_tasks:
            raise UserError(f"task {name} cannot be set up: {_reason(error)}") from error
        close = difflib.get_close_matches(name, [*LOCAL_TASKS, *manager.all_tasks], 3)
        hint = f"; did you mean {' or '.join(close)}?" if close else ": `lm_eval ls tasks` lists all"
        raise UserError(f"lm-evaluation-harness has no task {name!r}{hint}") from error
    except ModuleNotFoundError as error:
        raise UserError(f"task {name} needs the package {error.name}; install it") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the data of task {name}{_data_set(manager, name)} cannot be had here ({_reason(error)}); fetch it where "
            "there is a network, and copy that machine's HF_HOME folder here"
        ) from error
    tasks: dict[str, Any] = loaded["tasks"]
    for leaf, task in tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise UserError(f"task {leaf} runs code that the model writes; this program does not")
        if getattr(task, "MULTIMODAL", False):
            raise UserError(f"task {leaf} shows pictures; the engine reads text only")
        if task.OUTPUT_TYPE == "loglikelihood_rolling":
            raise UserError(f"task {leaf} has no right and wrong: measure perplexity with `eval --text`")
    return tasks


def _local(name: str, cache: Path) -> dict[str, Any]:
    """The .yaml beside a local task's items, with the items' whole path."""
    folder = local_tasks_path()
    config: dict[str, Any] = yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
    data = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(cache)}
    return {**config, "dataset_kwargs": data}


def _data_set(manager: Any, name: str) -> str:
    """` (data set NAME)`, where the task's own file says which."""
    entry = manager.task_index.get(name)
    path = (entry.cfg or {}).get("dataset_path") if entry is not None else None
    return f" (data set {path})" if isinstance(path, str) else ""


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_REASON] or type(error).__name__


def _question(context: str, options: Mapping[str, Any]) -> Question:
    if options.get("do_sample") or (
        (options.get("temperature") or 0) > 0 and options.get("do_sample") is None
    ):
        raise UserError("a task draws its answers at random; the engine takes the likeliest token only")
    until = options.get("until") or []
    stops = [until] if isinstance(until, str) else until
    limit = next((int(options[name]) for name in _LIMITS if options.get(name)), DEFAULT_NEW_TOKENS)
    return Question(context, tuple(stop for stop in stops if stop), limit)


def _first_filter(samples: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """An answer read in several ways counts as the task's first way reads it."""
    return [sample for sample in samples if sample["filter"] == samples[0]["filter"]]


def _metric(name: str, samples: Sequence[Mapping[str, Any]]) -> str:
    found = [metric for metric in samples[0]["metrics"] if all(_is_verdict(s.get(metric)) for s in samples)]
    preferred = [metric for metric in _METRICS if metric in found]
    if found:
        return str([*preferred, *found][0])
    raise UserError(
        f"task {name} has no measure that says right or wrong, only {', '.join(samples[0]['metrics'])}"
    )


def _is_verdict(value: object) -> bool:
    # Of numpy's numbers too.
    return (isinstance(value, bool | int | float) and value in (0, 1)) or (
        type(value).__module__ == "numpy" and value in (0, 1)
    )


def _item(name: str, sample: Mapping[str, Any], metric: str, prefix: str) -> Item:
    doc = sample["doc"]
    identity = f"{prefix}{doc['id'] if name in LOCAL_TASKS else sample['doc_id']}"
    fields = doc if isinstance(doc, Mapping) else {}
    shared = next((fields[key] for key in _SHARED_TEXTS if isinstance(fields.get(key), str)), None)
    short = shared if name in LOCAL_TASKS else None if shared is None else digest([shared])[:16]
    return Item(identity, identity if short is None else f"{prefix}{short}", bool(sample[metric]))


def _asked(sample: Mapping[str, Any]) -> tuple[list[Any], Any]:
    return [list(arguments) for arguments in sample["arguments"]], sample["target"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Standard output is for this program's own result; bars of data sets would stand between its words."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if shown:
            datasets.enable_progress_bars()
