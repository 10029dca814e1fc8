"""How many answers to tasks were right, and which flipped, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from qwen_quantize.report.numbers import duration, percent, significant


def task_lines(record: Mapping[str, Any]) -> list[str]:
    """The same facts as `task_tables`, one task a line."""
    lines = [f"{name}: {value}" for name, value in _facts(record)]
    for task in record["tasks"]:
        line = f"{task['name']}: {_accuracy(task)} right of {task['items']:,} ({task['metric']})"
        if task.get("flips") is not None:
            flips = task["flips"]
            line += (
                f"; before {percent(task['reference_accuracy'], 1)}, change {_change(task)}; "
                f"{flips['right_to_wrong']} right -> wrong, {flips['wrong_to_right']} wrong -> right, "
                f"McNemar p = {significant(task['p_change'])}"
            )
        lines.append(line)
    return lines


def task_tables(record: Mapping[str, Any]) -> list[Table]:
    """One row a task; with a reference, its accuracy, the change in pairs and the flips both ways."""
    paired = any(task.get("flips") is not None for task in record["tasks"])
    table = Table(
        title="Tasks",
        title_justify="left",
        title_style="bold",
        box=box.HORIZONTALS,
        pad_edge=False,
        expand=True,
        caption=Text(" · ".join(f"{name} {value}" for name, value in _facts(record))),
        caption_justify="left",
    )
    table.add_column("task", overflow="fold", ratio=1)
    table.add_column("items", justify="right", no_wrap=True)
    table.add_column("right, 95 %", justify="right", overflow="fold")
    if paired:
        table.add_column("before", justify="right", no_wrap=True)
        table.add_column("change ± error", justify="right", overflow="fold")
        table.add_column("right→ wrong", justify="right")
        table.add_column("wrong→ right", justify="right")
        table.add_column("p", justify="right", no_wrap=True)
    for task in record["tasks"]:
        row: list[str | Text] = [Text(task["name"]), f"{task['items']:,}", _accuracy(task)]
        if paired:
            flips = task["flips"]
            row += [
                percent(task["reference_accuracy"], 1),
                _change(task),
                str(flips["right_to_wrong"]),
                str(flips["wrong_to_right"]),
                significant(task["p_change"]),
            ]
        table.add_row(*row)
    return [table]


def _facts(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("model", str(record["model"]))]
    if record["against"] is not None:
        facts.append(("against", str(record["against"])))
    if record["chip"] is not None:
        facts.append(("chip", str(record["chip"])))
    facts += [("note", note) for note in record["notes"]]
    return [*facts, ("time", duration(record["seconds"]))]


def _accuracy(task: Mapping[str, Any]) -> str:
    return f"{percent(task['accuracy'], 1)} ({100 * task['lower']:.1f}-{100 * task['upper']:.1f})"


def _change(task: Mapping[str, Any]) -> str:
    error = task["difference_standard_error"]
    return f"{percent(task['difference'], 1, signed=True)} ± {percent(error, 1)}"
