"""The answer of `regress` for people: what changed, what the tests say, what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from qwen_quantize.report.numbers import duration, percent, scientific, significant

Fact = tuple[str, str]


def regression_lines(record: Mapping[str, Any]) -> list[str]:
    """The same facts as `regression_tables`, one a line."""
    lines = [f"{name}: {value}" for name, value in _facts(record)]
    for row in _rows(record):
        lines.append(
            f"{row[0]}: perplexity {row[1]}, KL from the unquantized model mean {row[2]}, p99 {row[3]}"
        )
    return lines


def regression_tables(record: Mapping[str, Any]) -> list[Table]:
    """One table of facts and, after a recalibration, one that shows the three models side by side."""
    table = _table("Regression", show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, value in _facts(record):
        table.add_row(name, Text(value))
    rows = _rows(record)
    if not rows:
        return [table]
    compared = _table("Before, after, recalibrated", show_header=True)
    for name in ("", "perplexity", "KL, mean", "KL, p99"):
        compared.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in rows:
        compared.add_row(*row)
    return [table, compared]


def _facts(record: Mapping[str, Any]) -> list[Fact]:
    facts = [("model", str(record["model"]))]
    facts.append(("compared", f"{record['before']} with {record['after']}"))
    changed = [("changed", change["text"]) for change in record["changed"]]
    facts += changed or [("changed", "nothing in the arithmetic")]
    if record["tests"]:
        before, after = record["perplexity_before"], record["perplexity_after"]
        words = (
            f"{significant(before, 4)} -> {significant(after, 4)} ({percent(record['rise'], signed=True)})"
        )
        facts.append(("perplexity", f"{words} on {record['tokens']:,} tokens of {record['text']}"))
    for test in record["tests"]:
        facts.append((test["name"], f"{'passed' if test['passed'] else 'FAILED'}: {test['text']}"))
    facts += [("note", note) for note in record["notes"]]
    certain = "" if record["conclusive"] else " (not certain)"
    facts.append(("verdict", f"{record['verdict']}{certain}: {record['advice']}"))
    if record["command"]:
        facts.append(("command", record["command"]))
    again = record.get("recalibrated")
    if again is not None:
        recovered = percent(again["recovered_fraction"], 0)
        facts.append(
            ("recalibrated", f"{again['output_path']}, {recovered} of the added perplexity recovered")
        )
        facts += [("on condition", condition) for condition in again.get("conditions", [])]
    facts.append(("time", duration(record["seconds"])))
    return facts


def _rows(record: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    again = record.get("recalibrated")
    return [
        (
            row["name"],
            significant(row["perplexity"], 4),
            scientific(row["kl_mean"]),
            scientific(row["kl_p99"]),
        )
        for row in ([] if again is None else again["rows"])
    ]


def _table(title: str, *, show_header: bool) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.HORIZONTALS,
        show_header=show_header,
        pad_edge=False,
        expand=True,
    )
