"""One self-contained HTML page of what `bench` measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from qwen_quantize.report.svg import Axis, Frame, Shape, linear_axis, marker
from qwen_quantize.report.template import NARROW, WIDE, rendered


def render_bench(record: Mapping[str, Any]) -> str:
    """The page of what `bench --json` prints; equal bytes for equal records."""
    drawings = [
        (load["load"], _steps(load, WIDE, "wide"), _steps(load, NARROW, "narrow")) for load in record["loads"]
    ]
    return rendered("bench.html", r=record, drawings=drawings)


def _steps(load: Mapping[str, Any], width: float, key: str) -> Markup:
    seconds = load["step_seconds"]
    frame = Frame(width, 240)
    x = Axis(0, len(seconds) + 1, frame.left, frame.x_end, whole=True)
    y = linear_axis([1000 * value for value in seconds], from_zero=True).resized(frame.y_end, frame.top)
    marks = [
        marker(Shape.DOT, x.at(index), y.at(1000 * value), 0, f"step {index}: {1000 * value:.3g} ms")
        for index, value in enumerate(seconds, start=1)
    ]
    return frame.drawing(
        f"steps-{load['load']}-{key}",
        f"Decoding steps of load {load['load']}",
        f"{len(seconds)} steps in order, from {1000 * min(seconds):.3g} to {1000 * max(seconds):.3g} ms.",
        [frame.axes(x, y, "step", "milliseconds, lower is better"), *marks],
    )
