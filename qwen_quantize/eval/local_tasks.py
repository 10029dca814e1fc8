"""The small tasks that ship with the package, made from the held-out novel, so that they need no network.

They are questions of language, not of knowledge: enough to see answers flip, no measure of what a model knows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.embedded import local_tasks_path
from qwen_quantize.eval.task_answers import Item, TaskAnswers, digest
from qwen_quantize.eval.tasks import TaskModel

LOCAL_TASKS = ("heldout_cloze", "heldout_word", "heldout_sentence")
LOCAL_GROUP = "heldout"  # all of them, each for itself
METRIC = "acc"


@dataclass(frozen=True, slots=True)
class LocalItem:
    """choices: what may follow the context; answer: which of them does, None for a cloze item, which has one."""

    id: str
    document: str
    context: str
    choices: tuple[str, ...]
    answer: int | None


def read_items(name: str, limit: int | None = None) -> list[LocalItem]:
    """The first `limit` items of a task of LOCAL_TASKS."""
    lines = (local_tasks_path() / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_item(json.loads(line)) for line in lines[:limit]]


def run_local(name: str, model: TaskModel, limit: int | None = None) -> TaskAnswers:
    """Without lm-evaluation-harness, and with the answers that it finds.

    A choice is right where the right answer is the likeliest, the first of equals counting; a cloze item where
    each token of its word is the likeliest.
    """
    items = read_items(name, limit)
    asked = [(item.context, choice) for item in items for choice in item.choices]
    scores = iter(model.loglikelihood(asked))
    answered = []
    for item in items:
        found = [next(scores) for _ in item.choices]
        likeliest = max(range(len(found)), key=lambda i: found[i].log_probability)
        correct = found[0].greedy if item.answer is None else likeliest == item.answer
        answered.append(Item(item.id, item.document, correct))
    questions = (
        [
            item.id,
            [[item.context, choice] for choice in item.choices],
            item.choices[0] if item.answer is None else item.answer,
        ]
        for item in items
    )
    return TaskAnswers(name, METRIC, digest(questions), tuple(answered))


def _item(record: Mapping[str, Any]) -> LocalItem:
    cloze = "target" in record
    return LocalItem(
        record["id"],
        record["document"],
        record["context"],
        (record["target"],) if cloze else tuple(record["choices"]),
        None if cloze else record["answer"],
    )
