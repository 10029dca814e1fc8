"""Draw the README's plot from the comparison of tools: what each result costs in perplexity, by its size in bytes.

    python tools/readme_plot.py [--check] [--results benchmarks/results/peers.json] [--output docs/figures/accuracy.svg]

The results are what `python benchmarks/peers/run.py --json` prints. With --check nothing is written; the exit code is
1 when the figure is stale. Rows that did not run are not drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from qwen_quantize.report.svg import Axis, Frame, Shape, element, linear_ticks, marker, text, tick_label

ROOT = Path(__file__).resolve().parent.parent
OURS = "qwen_quantize"
_WIDTH, _ROW, _HEADING = 740.0, 16.0, 29.0
_TOP, _BOTTOM = 72.0, 42.0
_PANELS = ((242.0, 482.0), (496.0, 736.0))  # pixels from where to where, one panel for each text
_ROOM = 42.0  # for the figure right of a mark
_WORDS = {
    "w4a16 g64 symmetric": "4-bit weights in groups of 64, symmetric",
    "w4a16 g64 asymmetric": "4-bit weights in groups of 64, with zero points",
    "w8a8": "INT8 weights and activations",
    "fp8": "FP8 weights and activations",
    "mxfp4": "MXFP4 weights and activations",
    "mxfp8": "MXFP8 weights and activations",
}
_TITLES = {"like": "text like that of calibration", "unlike": "text unlike that of calibration"}
# For light and dark pages: a figure in a file of its own cannot see which it stands on.
_STYLE = """<style>
svg { background: #fff; font: 12px system-ui, "DejaVu Sans", sans-serif; }
text { fill: #16202b; } .label { fill: #55616e; } .strong { font-weight: 650; } .axis { stroke: #16202b; }
.grid { stroke: #d5dbe1; } .rule { stroke: #9aa5b1; } .error { stroke: #16202b; stroke-width: 1.2; }
.mark { fill: #16202b; stroke: #16202b; stroke-width: 1.4; } .hollow { fill: #fff; }
.value { font-size: 11px; }
</style>"""


@dataclass(frozen=True, slots=True)
class Line:
    """One result. rises: percent and its standard error, for each text."""

    task: str
    tool: str
    method: str
    size: int | None  # bytes of the linears
    rises: tuple[tuple[float, float], ...]

    @property
    def ours(self) -> bool:
        return self.tool == OURS


def lines_of(record: Mapping[str, Any]) -> list[Line]:
    """Rows that ran, smallest first; among rows of one task by the mean rise. ValueError where none ran."""
    texts = list(record["texts"])
    lines = [
        Line(
            row["task"],
            row["tool"],
            row["method"],
            row.get("linear_bytes"),
            tuple(
                (100 * row["texts"][name]["rise"], 100 * row["texts"][name]["rise_standard_error"])
                for name in texts
            ),
        )
        for row in record["rows"]
        if "texts" in row
    ]
    if not lines:
        raise ValueError("no row of the results ran: nothing can be drawn")

    def place(line: Line) -> tuple[int, str, float]:
        return _smallest(lines, line.task), line.task, sum(rise for rise, _ in line.rises)

    return sorted(lines, key=place)


def _sizes(lines: Sequence[Line], task: str) -> list[int]:
    return [line.size for line in lines if line.task == task and line.size is not None]


def _smallest(lines: Sequence[Line], task: str) -> int:
    return min(_sizes(lines, task), default=sys.maxsize)


def _heading(lines: Sequence[Line], task: str) -> str:
    sizes = sorted({f"{size / 1e6:.0f}" for size in _sizes(lines, task)}, key=float)
    words = _WORDS.get(task, task)
    return f"{words}: {'–'.join(dict.fromkeys((sizes[0], sizes[-1])))} MB" if sizes else words


def _described(lines: Sequence[Line], texts: Sequence[str]) -> str:
    """What the figure says, in words: the best of each task."""
    parts = []
    for task in dict.fromkeys(line.task for line in lines):
        best = next(line for line in lines if line.task == task)
        rises = " and ".join(
            f"{rise:.1f} % on {name} text" for name, (rise, _) in zip(texts, best.rises, strict=True)
        )
        parts.append(f"{_heading(lines, task)}: lowest is {best.tool} {best.method}, {rises}.")
    return " ".join(parts)


def _mark(line: Line, number: int, axis: Axis, y: float) -> Markup:
    rise, error = line.rises[number]
    at = axis.at(rise)
    low, high = axis.at(rise - 2 * error), axis.at(rise + 2 * error)
    beside = max(high, at + 4) + 5
    return Markup("").join(
        [
            element("line", class_="error", x1=low, x2=high, y1=y, y2=y),
            marker(Shape.DIAMOND if line.ours else Shape.RING, at, y, 0),
            text(beside, y + 4, f"{rise:.1f}", class_="value strong" if line.ours else "value label"),
        ]
    )


def _grid(axes: Sequence[Axis], top: float, end: float) -> Markup:
    """Of one group only, so that its heading stands free."""
    lines = [(axis.at(value), value) for axis in axes for value in linear_ticks(axis.low, axis.high, 6)]
    return Markup("").join(
        element("line", class_="grid" if value else "axis", x1=at, x2=at, y1=top, y2=end)
        for at, value in lines
    )


def _labels(axes: Sequence[Axis], texts: Mapping[str, str], end: float) -> Markup:
    parts = []
    for axis, (name, words) in zip(axes, texts.items(), strict=True):
        parts.append(text(axis.begin, _TOP - 26, _TITLES.get(name, name), class_="strong"))
        parts.append(text(axis.begin, _TOP - 11, words, class_="label"))
        for value in linear_ticks(axis.low, axis.high, 6):
            parts.append(text(axis.at(value), end + 15, tick_label(value), "middle"))
        middle = (axis.begin + axis.end) / 2
        parts.append(text(middle, end + 33, "rise of perplexity, % (± 2 s.e.)", "middle", "label"))
    return Markup("").join(parts)


def drawing(record: Mapping[str, Any]) -> str:
    """The SVG: a group of rows for each task, a panel for each of the two texts, filled marks for ours."""
    lines = lines_of(record)
    tasks = list(dict.fromkeys(line.task for line in lines))
    end = _TOP + _ROW * len(lines) + _HEADING * len(tasks) + 4
    reach = [rise + 2 * error for line in lines for rise, error in line.rises]
    least = [rise - 2 * error for line in lines for rise, error in line.rises]
    low, high = min(0.0, *least), max(1.0, *reach)
    axes = [
        # The axis goes on below the room of the last figure, so that grid and marks agree.
        Axis(low, high + (high - low) * _ROOM / (right - left - _ROOM), left, right)
        for left, right in _PANELS
    ]
    parts = [_labels(axes, record["texts"], end)]
    parts.append(marker(Shape.DIAMOND, 10, 15, 0))
    parts.append(text(20, 19, OURS, class_="strong"))
    parts.append(marker(Shape.RING, 10, 35, 0))
    parts.append(text(20, 39, "other tools"))
    parts.append(
        text(_PANELS[0][0], 19, f"{record['model'].split(' (')[0]}; further left is better", class_="label")
    )
    y = _TOP
    for task in tasks:
        y += _HEADING
        group = [line for line in lines if line.task == task]
        parts.append(element("line", class_="rule", x1=0, x2=_WIDTH, y1=y - 23, y2=y - 23))
        parts.append(text(6, y - 7, _heading(lines, task), class_="strong"))
        parts.append(_grid(axes, y - 2, y + _ROW * len(group) + 2))
        for line in group:
            y += _ROW
            name = f"{line.tool} {line.method}"
            parts.append(text(232, y - 4, name, "end", "strong" if line.ours else "label"))
            parts += [_mark(line, number, axis, y - 8) for number, axis in enumerate(axes)]
    frame = Frame(_WIDTH, end + _BOTTOM)
    title = f"What quantizing costs, by tool and method: {record['model']}"
    figure = str(frame.drawing("accuracy", title, _described(lines, list(record["texts"])), parts))
    namespace = '<svg xmlns="http://www.w3.org/2000/svg" '
    return figure.replace("<svg ", namespace, 1).replace("</title>", f"</title>{_STYLE}", 1) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1: stale")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json", help="JSON of run.py"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "figures" / "accuracy.svg")
    options = parser.parse_args(arguments)
    figure = drawing(json.loads(options.results.read_text(encoding="utf-8")))
    if options.check:
        if options.output.is_file() and options.output.read_text(encoding="utf-8") == figure:
            return 0
        print(f"{options.output} is stale: run `python tools/readme_plot.py`", file=sys.stderr)
        return 1
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(figure, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
