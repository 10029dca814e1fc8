"""One self-contained HTML page of what `bench` measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from qwen_quantize.report.numbers import duration, human_bytes, significant
from qwen_quantize.report.svg import Axis, Frame, element, linear_axis

_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Speed of {{ r.model }}</title><style>
:root { color-scheme: light dark; --ink: #16202b; --dim: #55616e; --paper: #fff; --one: #0b5cad; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8edf2; --dim: #a3b0bd; --paper: #12171d; --one: #6cb2ff; } }
body { margin: 0 auto; max-width: 960px; padding: 24px; background: var(--paper); color: var(--ink);
 font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: right; padding: 4px 8px; }
th:first-child, td:first-child { text-align: left; } tr { border-bottom: 1px solid var(--dim); }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; } svg text { fill: var(--ink); }
svg .axis, svg .tick, svg .grid { stroke: var(--dim); stroke-width: .5; } svg .mark { fill: var(--one); }
</style></head><body>
<h1>Speed of {{ r.model }}</h1>
<p>{{ r.engine }}, on {{ r.device }}, {{ r.threads }} threads. A bound is what memory or arithmetic alone would
allow; it is no prediction.</p>
<table><tr><th>Load</th><th>Batch</th><th>Prompt</th><th>New</th><th>First token</th><th>Prefill, tokens/s</th>
<th>Decode, tokens/s</th><th>p50</th><th>p95</th><th>p99</th><th>Of the bound</th><th>Cache</th></tr>
{% for l in r.loads %}<tr><td>{{ l.load }}</td><td>{{ l.batch }}</td><td>{{ l.prompt_tokens }}</td>
<td>{{ l.new_tokens }}</td><td>{{ l.time_to_first_token_seconds | duration }}</td>
<td>{{ l.prefill_tokens_per_second | number }}</td><td>{{ l.decode_tokens_per_second | number }}</td>
<td>{{ l.step_p50_seconds | ms }}</td><td>{{ l.step_p95_seconds | ms }}</td><td>{{ l.step_p99_seconds | ms }}</td>
<td>{{ (100 * l.bandwidth_bound_fraction) | number if l.bandwidth_bound_fraction is not none else "unknown" }} %</td>
<td>{{ l.cache_bytes | bytes }}</td></tr>{% endfor %}</table>
<p>Weights {{ r.weight_bytes | bytes }}, peak memory {{ r.peak_memory_bytes | bytes }}.</p>
{% for heading, drawing in drawings %}<h2>{{ heading }}</h2>{{ drawing }}{% endfor %}
</body></html>
"""


def render_bench(record: Mapping[str, Any]) -> str:
    """The page of what `bench --json` prints; equal bytes for equal records."""
    environment = Environment(loader=BaseLoader(), autoescape=True, undefined=StrictUndefined)
    environment.filters |= {
        "bytes": human_bytes,
        "duration": duration,
        "number": significant,
        "ms": lambda seconds: f"{significant(1000 * seconds)} ms",
    }
    drawings = [
        (f"Load {load['load']}: milliseconds of each decoding step", _steps(load)) for load in record["loads"]
    ]
    page: str = environment.from_string(_PAGE).render(r=record, drawings=drawings)
    return page


def _steps(load: Mapping[str, Any]) -> Markup:
    seconds = load["step_seconds"]
    frame = Frame(720, 240, top=16)
    x = Axis(0, len(seconds) + 1, frame.left, frame.x_end, whole=True)
    y = linear_axis([1000 * value for value in seconds], from_zero=True).resized(frame.y_end, frame.top)
    marks = [
        element("circle", class_="mark", cx=x.at(index + 1), cy=y.at(1000 * value), r=2)
        for index, value in enumerate(seconds)
    ]
    title = f"Decoding steps of load {load['load']}"
    parts = [frame.axes(x, y, "step", "ms"), *marks]
    return frame.drawing(f"steps-{load['load']}", title, "Time of each step in order.", parts)
