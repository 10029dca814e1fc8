"""How a page is made of its template: everything escaped, the style sheet inside, nothing loaded from anywhere."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import BaseLoader, Environment, StrictUndefined
from markupsafe import Markup

from qwen_quantize.report import numbers

WIDE, NARROW = 600.0, 340.0  # each large plot is drawn for both kinds of screen; the style sheet shows one


def rendered(name: str, **values: Any) -> str:
    """The template `name` of this room with these values, every string of which is escaped."""
    environment = Environment(
        loader=BaseLoader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "bytes": numbers.human_bytes,
        "count": numbers.human_count,
        "percent": numbers.percent,
        "signed_percent": lambda value: numbers.percent(value, signed=True),
        "significant": numbers.significant,
        "scientific": numbers.scientific,
        "decibels": numbers.decibels,
        "duration": numbers.duration,
        "milliseconds": lambda seconds: f"{numbers.significant(1000 * seconds)} ms",
        "integer": lambda value: f"{value:,}",
        "shape": lambda shape: "×".join(str(size) for size in shape),
    }
    style = Markup(_source("style.css").rstrip("\n"))
    page: str = environment.from_string(_source(name)).render(style=style, **values)
    return page


def _source(name: str) -> str:
    return files("qwen_quantize.report").joinpath(name).read_text(encoding="utf-8")
