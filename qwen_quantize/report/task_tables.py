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
    """Right answers, a row a task; with a reference a second table of the flips both ways. Made for 80 columns."""
    right = _table("Tasks", ("items", "right", "95 % interval", "measure"))
    for task in record["tasks"]:
        interval = f"{100 * task['lower']:.1f} - {100 * task['upper']:.1f}"
        right.add_row(
            Text(task["name"]),
            f"{task['items']:,}",
            percent(task["accuracy"], 1),
            interval,
            Text(task["metric"]),
        )
    tables = [right]
    paired = [task for task in record["tasks"] if task.get("flips") is not None]
    if paired:
        flips = _table("Flips", ("before", "change", "right→wrong", "wrong→right", "p"))
        for task in paired:
            flips.add_row(
                Text(task["name"]),
                percent(task["reference_accuracy"], 1),
                _change(task),
                str(task["flips"]["right_to_wrong"]),
                str(task["flips"]["wrong_to_right"]),
                significant(task["p_change"]),
            )
        tables.append(flips)
    facts = " · ".join(f"{name} {value}" for name, value in _facts(record))
    tables[-1].caption = Text(facts)
    return tables


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.HORIZONTALS,
        pad_edge=False,
        expand=True,
        caption_justify="left",
    )
    table.add_column("task", overflow="fold", ratio=1)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


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
