"""What a model got right in a task, and what the accuracy and its change are worth.

Items of one document (a passage, an article) tend to be right or wrong together, so errors are taken over
documents: the variance of a mean of n items is sum over documents of (sum of residuals)^2 / n^2, times G / (G - 1)
for G documents (Miller, "Adding error bars to evals", 2024, gives it for evaluations). The interval of an accuracy
is Wilson's at the number of independent items that has that error, and never more than there are. A change is
judged in pairs: McNemar's exact test counts only the items whose answer flipped.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qwen_quantize.errors import UserError
from qwen_quantize.eval.regression import McNemar, mcnemar

_Z95 = 1.959963984540054  # the normal's 97.5 % point: two-sided intervals at 95 %
_NAMED = 3  # items that a message names


@dataclass(frozen=True, slots=True)
class Item:
    """One question. document: what it shares with others, its own id where it shares nothing."""

    id: str
    document: str
    correct: bool


@dataclass(frozen=True, slots=True)
class TaskAnswers:
    """items: in the task's order. metric: what says right or wrong; sha256: of everything that was asked.

    A task that is a group of others has their names in `parts`, and items whose id begins with part and slash.
    """

    name: str
    metric: str
    sha256: str
    items: tuple[Item, ...]
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Accuracy:
    """lower, upper: a 95 % interval; standard_error: over documents, NaN where there is only one."""

    items: int
    documents: int
    accuracy: float
    standard_error: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Change:
    """Accuracy now minus before, of the same items, its error over documents and a 95 % interval."""

    difference: float
    standard_error: float
    lower: float
    upper: float
    flips: McNemar


def digest(asked: Iterable[object]) -> str:
    """SHA-256 of prompts, possible answers and whatever else is asked, as JSON."""
    total = hashlib.sha256()
    for each in asked:
        total.update(
            json.dumps(each, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "replace")
        )
        total.update(b"\n")
    return total.hexdigest()


def accuracy_of(items: Sequence[Item]) -> Accuracy:
    """At least one item."""
    values = [float(item.correct) for item in items]
    documents = [item.document for item in items]
    p = math.fsum(values) / len(values)
    error = clustered_error(values, documents)
    lower, upper = wilson(p, _independent_items(p, error, len(items)))
    return Accuracy(len(items), len(set(documents)), p, error, lower, upper)


def change_of(before: TaskAnswers, after: TaskAnswers, names: tuple[str, str]) -> Change:
    """UserError, which calls the two runs by `names`, unless both answered the same items."""
    check_same_items(before, after, names)
    known = {item.id: item.correct for item in before.items}
    pairs = [(known[item.id], item.correct) for item in after.items]
    flips = mcnemar(
        lost=sum(was and not now for was, now in pairs), gained=sum(now and not was for was, now in pairs)
    )
    differences = [float(now) - float(was) for was, now in pairs]
    mean = math.fsum(differences) / len(differences)
    error = clustered_error(differences, [item.document for item in after.items])
    return Change(mean, error, max(-1.0, mean - _Z95 * error), min(1.0, mean + _Z95 * error), flips)


def check_same_items(before: TaskAnswers, after: TaskAnswers, names: tuple[str, str]) -> None:
    """UserError for another metric, other items, or other questions under the same names."""
    first, second = names
    if before.metric != after.metric:
        raise UserError(
            f"{first} and {second} cannot be compared in {after.name}: right and wrong is {before.metric} in one, "
            f"{after.metric} in the other"
        )
    apart = sorted({item.id for item in before.items} ^ {item.id for item in after.items})
    if apart:
        more = "" if len(apart) <= _NAMED else f" and {len(apart) - _NAMED} more"
        raise UserError(
            f"{first} and {second} cannot be compared in {after.name}: only one of them has item "
            f"{', '.join(apart[:_NAMED])}{more}; run both with the same --limit and version of the task"
        )
    if before.sha256 != after.sha256:
        raise UserError(
            f"{first} and {second} cannot be compared in {after.name}: the prompts are not the same; run both with the "
            "same --fewshot, --chat and version of the task"
        )


def clustered_error(values: Sequence[float], documents: Sequence[str]) -> float:
    """Standard error of the mean of values that are independent between documents; NaN for one document."""
    mean = math.fsum(values) / len(values)
    sums: dict[str, float] = {}
    for value, document in zip(values, documents, strict=True):
        sums[document] = sums.get(document, 0.0) + value - mean
    if len(sums) < 2:
        return math.nan
    square = math.fsum(each * each for each in sums.values())
    return math.sqrt(square * len(sums) / (len(sums) - 1)) / len(values)


def wilson(p: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % score interval of a share p of n items; (0, 1) where n is no number."""
    if math.isnan(n):
        return 0.0, 1.0
    z2 = _Z95 * _Z95 / n
    middle = (p + z2 / 2) / (1 + z2)
    half = _Z95 * math.sqrt(p * (1 - p) / n + z2 / (4 * n)) / (1 + z2)
    # At p = 0 and 1 rounding would leave a trace of the half that cancels.
    return (0.0 if p == 0 else middle - half), (1.0 if p == 1 else middle + half)


def _independent_items(p: float, error: float, items: int) -> float:
    """How many independent items would have this error: fewer than there are, where documents agree in themselves."""
    if math.isnan(error):
        return math.nan
    return items if error == 0 else max(1.0, min(items, p * (1 - p) / (error * error)))
