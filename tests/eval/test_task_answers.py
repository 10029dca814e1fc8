"""Statistics of right and wrong against exact counting, and the file that keeps the answers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from qwen_quantize.errors import UserError
from qwen_quantize.eval.local_tasks import LOCAL_TASKS, read_items
from qwen_quantize.eval.regression import mcnemar
from qwen_quantize.eval.task_answers import Item, TaskAnswers, accuracy_of, change_of, clustered_error, wilson
from qwen_quantize.eval.task_record import TaskRun, check_task_record_path, read_task_run, write_task_run

NAMES = ("before", "after")


def answers(correct: str, documents: str | None = None) -> TaskAnswers:
    """`1` for right, `0` for wrong; a letter for each item's document."""
    own = documents or "".join(chr(65 + i) for i in range(len(correct)))
    items = tuple(
        Item(str(i), document, value == "1")
        for i, (value, document) in enumerate(zip(correct, own, strict=True))
    )
    return TaskAnswers("task", "acc", "abc", items)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 6), (7, 2), (5, 5), (40, 25), (300, 260)])
def test_mcnemar_counts_exactly(lost: int, gained: int) -> None:
    n = lost + gained

    def tail(k: int) -> Fraction:
        return Fraction(sum(math.comb(n, i) for i in range(k, n + 1)), 2**n)

    found = mcnemar(lost, gained)
    assert found.p_harm == pytest.approx(float(tail(lost)), rel=1e-9)
    assert found.p_change == pytest.approx(min(1.0, 2 * float(tail(max(lost, gained)))), rel=1e-9)


def test_items_of_their_own_have_the_binomial_error() -> None:
    found = accuracy_of(answers("1101101110").items)
    assert (found.items, found.documents, found.accuracy) == (10, 10, 0.7)
    assert found.standard_error == pytest.approx(math.sqrt(0.7 * 0.3 / 9))
    assert found.lower < 0.7 < found.upper


def test_documents_that_agree_in_themselves_count_once() -> None:
    one_each = [1.0, 1.0, 0.0, 1.0, 0.0]
    fourfold = [value for value in one_each for _ in range(4)]
    documents = [name for name in "abcde" for _ in range(4)]
    assert clustered_error(fourfold, documents) == pytest.approx(clustered_error(one_each, list("abcde")))
    alone = accuracy_of(answers("11010").items)
    repeated = accuracy_of(answers("11110000111100001111"[:20], "aaaabbbbccccddddeeee").items)
    assert repeated.standard_error > 1.9 * math.sqrt(0.6 * 0.4 / 19)
    assert alone.accuracy == repeated.accuracy == 0.6
    assert math.isnan(clustered_error([1.0, 0.0], ["a", "a"]))


def test_wilson_against_the_roots_of_its_equation() -> None:
    """The bounds are where (p - x)^2 = z^2 x (1 - x) / n."""
    for p, n in ((0.1, 10.0), (0.5, 30.0), (0.0, 20.0), (1.0, 7.0), (0.93, 1000.0)):
        for x in wilson(p, n):
            assert 0 <= x <= 1
            assert (p - x) ** 2 == pytest.approx(1.959963984540054**2 * x * (1 - x) / n, abs=1e-12)
    assert wilson(0.5, math.nan) == (0.0, 1.0)


def test_change_counts_flips_both_ways() -> None:
    before, after = answers("1111100000"), answers("1100010000")
    found = change_of(before, after, NAMES)
    assert (found.flips.lost, found.flips.gained) == (3, 1)
    assert found.difference == pytest.approx(-0.2)
    # Differences: three of -1, one of +1, six of 0.
    expected = math.sqrt((3 * 0.8**2 + 1.2**2 + 6 * 0.2**2) / 10 / 9)
    assert found.standard_error == pytest.approx(expected)
    assert (found.lower, found.upper) == pytest.approx(
        (-0.2 - 1.959964 * expected, -0.2 + 1.959964 * expected), abs=1e-6
    )
    nothing = change_of(before, before, NAMES)
    assert (nothing.difference, nothing.standard_error, nothing.flips.p_change) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (replace(answers("11"), metric="exact_match"), "right and wrong is"),
        (answers("111"), "only one of them has item 2;"),
        (replace(answers("11"), sha256="xyz"), "the prompts are not the same"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: TaskAnswers, words: str) -> None:
    with pytest.raises(UserError, match=words):
        change_of(answers("11"), other, NAMES)


def test_local_items_are_whole() -> None:
    for name in LOCAL_TASKS:
        items = read_items(name)
        assert len(items) > 100
        assert len({item.id for item in items}) == len(items)
        assert len({item.document for item in items}) > 50
        for item in items:
            assert len(item.choices) == len(set(item.choices)) == (1 if item.answer is None else 4)
            assert all(choice.startswith(" ") and choice.strip() for choice in item.choices)
        if items[0].answer is not None:
            counts = [sum(item.answer == place for item in items) for place in range(4)]
            assert max(counts) - min(counts) <= 1


# --- the file ---


def recorded() -> TaskRun:
    several = replace(answers("10"), name="group", parts=("a", "b"))
    return TaskRun("0.1", "folder", "f00d", None, "qwen_quantize", (answers("1101"), several))


def test_a_record_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    write_task_run(path, recorded())
    assert read_task_run(path) == recorded()
    check_task_record_path(path)  # may be written again


def test_records_are_not_written_anywhere(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "folder.json").mkdir()
    for name, words in (
        ("run.safetensors", "ends in .json"),
        ("no/run.json", "there is no folder"),
        ("folder.json", "is a folder"),
        ("other.json", "no record of tasks"),
    ):
        with pytest.raises(UserError, match=words):
            check_task_record_path(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(format=2), "no record of tasks"),
        (lambda r: r.update(tasks=[]), "'tasks' must be"),
        (lambda r: r.update(tasks=[r["tasks"][0]] * 2), "a task twice"),
        (lambda r: r.update(model="a\nb"), "'model' must be a line"),
        (lambda r: r["tasks"][0].update(correct=[1, 0, 1, 1]), "list of true and false"),
        (lambda r: r["tasks"][0].update(ids=["0", "0", "1", "2"]), "one id of its own"),
        (lambda r: r["tasks"][0].update(documents=["a"]), "one id of its own"),
        (lambda r: r["tasks"][0].update(ids=[], documents=[], correct=[]), "one id of its own"),
        (lambda r: r["tasks"][0].update(parts="ab"), "'parts' must be a list"),
    ],
)
def test_damaged_records_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    write_task_run(path, recorded())
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=words):
        read_task_run(path)
