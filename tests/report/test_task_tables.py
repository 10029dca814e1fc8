"""The tables of tasks at the width of a terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from qwen_quantize.report.task_tables import task_lines, task_tables

TASK: dict[str, Any] = {
    "name": "heldout_[sentence]",
    "items": 1234,
    "metric": "acc",
    "accuracy": 0.295,
    "lower": 0.239,
    "upper": 0.358,
    "flips": {"right_to_wrong": 12, "wrong_to_right": 7},
    "reference_accuracy": 0.316,
    "difference": -0.021,
    "difference_standard_error": 0.019,
    "p_change": 0.359,
}
RECORD: dict[str, Any] = {
    "model": "out",
    "against": "model",
    "chip": None,
    "notes": ["two prompts were cut"],
    "seconds": 12.0,
    "tasks": [TASK, {**TASK, "name": "alone", "flips": None}],
}


def drawn(record: dict[str, Any]) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(*task_tables(record))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_eighty_columns_hold_names_and_flips() -> None:
    text = drawn(RECORD)
    rows = [line.split() for line in text.splitlines()]
    assert ["heldout_[sentence]", "1,234", "29.5%", "23.9", "-", "35.8", "acc"] in rows
    assert ["heldout_[sentence]", "31.6%", "-2.1%", "±", "1.9%", "12", "7", "0.359"] in rows
    assert sum(row[:1] == ["alone"] for row in rows) == 1
    assert "two prompts were cut" in text


def test_without_a_reference_there_are_no_flips() -> None:
    assert "Flips" not in drawn({**RECORD, "tasks": RECORD["tasks"][1:]})


def test_lines_say_the_same() -> None:
    lines = task_lines(RECORD)
    assert "note: two prompts were cut" in lines
    assert "12 right -> wrong, 7 wrong -> right, McNemar p = 0.359" in lines[-2]
    assert lines[-1] == "alone: 29.5% (23.9-35.8) right of 1,234 (acc)"
