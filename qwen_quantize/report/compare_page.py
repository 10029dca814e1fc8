"""A comparison as one self-contained HTML page, with the plot of divergence against size."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from markupsafe import Markup

from qwen_quantize.report.compare import APART, BEST, Comparison, Row, cell, lines_of, notes, share_words
from qwen_quantize.report.numbers import human_bytes, scientific
from qwen_quantize.report.svg import (
    CHARACTER_WIDTH,
    Frame,
    Shape,
    legend,
    legend_height,
    linear_axis,
    log_axis,
    marker,
    polyline,
    text,
)
from qwen_quantize.report.template import NARROW, rendered

_SHAPES = tuple(Shape)
_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_LABEL_HEIGHT = 12.0
_WIDE = 900.0  # it is the only plot of its page


def render_comparison(found: Comparison) -> str:
    """The page of a comparison; equal comparisons give equal bytes, and every string in it is escaped."""
    rows = range(len(found.rows))
    return rendered(
        "compare.html",
        c=found,
        numbered=list(enumerate(found.rows, start=1)),
        cells=[[cell(found, index, measure) for measure in found.measures] for index in rows],
        loss=[[share_words(row, part) for part in found.parts] for row in found.rows],
        words=[line for line in lines_of(found) if line[0] == "assumed"],
        drawings=tuple(
            pareto(found, width, key) for width, key in ((_WIDE, "pareto-wide"), (NARROW, "pareto-narrow"))
        ),
        notes=notes(found),
        best=BEST,
        apart=APART,
    )


def pareto(found: Comparison, width: float, key: str) -> Markup | None:
    """Mean KL (logarithmic) against the whole model's bytes; None where no two results compare.

    The number of a result in the tables stands beside its marker and in the legend; the steps go along those that no
    other beats in both.
    """
    shown = [index for index, row in enumerate(found.rows) if _is_point(row) and not found.apart[index]]
    if len(shown) < 2:
        return None
    rows = found.rows
    chips = len({rows[index].chip for index in shown}) > 1
    groups = {index: _group(rows[index], chips) for index in shown}
    methods = list(dict.fromkeys(groups.values()))
    entries = [
        (
            _SHAPES[number % len(_SHAPES)],
            f"{_numbers(index for index in shown if groups[index] == name)} {name}",
        )
        for number, name in enumerate(methods)
    ]
    high = legend_height(entries, width - 8)
    frame = Frame(width, 310 + high, top=40 + high)
    size, unit = _unit([_bytes_of(rows[index]) for index in shown])
    x = linear_axis([_bytes_of(rows[index]) / size for index in shown]).resized(frame.left, frame.x_end)
    y = log_axis([_kl_of(rows[index]) for index in shown if _kl_of(rows[index]) > 0] or [1.0])
    y = y.resized(frame.y_end, frame.top)
    places = {index: (x.at(_bytes_of(rows[index]) / size), y.at(_kl_of(rows[index]))) for index in shown}
    line = [places[index] for index in found.frontier if index in places]
    parts = [
        legend(entries, 4, 2, width - 8),
        frame.axes(x, y, f"whole model ({unit}), smaller is better", "mean KL (nats, log), lower is better"),
        polyline(_steps(line), 0),
    ]
    taken, labels = list(places.values()), []
    for index in shown:
        at_x, at_y = places[index]
        series = methods.index(groups[index])
        words = (
            f"{index + 1} {rows[index].name}: {human_bytes(_bytes_of(rows[index]))}, "
            f"KL {scientific(_kl_of(rows[index]))}"
        )
        parts.append(marker(_SHAPES[series % len(_SHAPES)], at_x, at_y, series, words))
        label = str(index + 1)
        middle = _free(taken, at_x, at_y, CHARACTER_WIDTH * len(label) + 6, frame)
        taken.append(middle)
        labels.append(text(middle[0], middle[1] + 4, label, "middle", "strong over"))
    first = found.frontier[0]
    return frame.drawing(
        key,
        "Divergence against size",
        f"{len(shown)} results; the smallest that no other beats is {rows[first].name}.",
        [*parts, *labels],
    )


def _is_point(row: Row) -> bool:
    return row.output_bytes is not None and row.kl_mean is not None and math.isfinite(row.kl_mean)


def _bytes_of(row: Row) -> int:
    assert row.output_bytes is not None
    return row.output_bytes


def _kl_of(row: Row) -> float:
    assert row.kl_mean is not None
    return row.kl_mean


def _group(row: Row, chips: bool) -> str:
    """What a marker's shape stands for; chips: whether the results are of several."""
    name = row.method or "method not known"
    if row.scheme and row.scheme != row.method:
        name = f"{name} ({row.scheme})"
    return f"{name} on {row.chip or 'no chip'}" if chips else name


def _numbers(rows: Iterable[int]) -> str:
    """As they stand in the tables, the first few of many: `2`, `1, 4`, `1, 2, 3, …`."""
    listed = [str(row + 1) for row in rows]
    return ", ".join(listed if len(listed) <= 4 else [*listed[:3], "…"])


def _steps(corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """From each result on until the next, which costs more bytes, is better: between two there is no third."""
    turns = [(right[0], left[1]) for left, right in pairwise(corners)]
    return (
        [place for pair in zip(corners, [*turns, corners[-1]], strict=True) for place in pair]
        if corners
        else []
    )


def _unit(sizes: Sequence[int]) -> tuple[int, str]:
    return next((it for it in _UNITS if max(sizes) >= it[0]), (1, "bytes"))


def _free(
    taken: Sequence[tuple[float, float]], x: float, y: float, wide: float, frame: Frame
) -> tuple[float, float]:
    """The middle of a number beside the mark at (x, y) that covers no other mark, no earlier number and no axis."""
    places = [
        (x + turn_x * wide * far, y + turn_y * _LABEL_HEIGHT * far)
        for far in (1.0, 1.5, 2.0, 3.0, 4.0)
        for turn_x, turn_y in ((1, 0), (-1, 0), (0, -1), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))
    ]

    def covered(place: tuple[float, float]) -> bool:
        inside = frame.left < place[0] < frame.width - wide / 2 and frame.top - 8 < place[1] < frame.y_end - 4
        return not inside or any(
            abs(place[0] - a) < wide and abs(place[1] - b) < _LABEL_HEIGHT for a, b in taken
        )

    return next((place for place in places if not covered(place)), places[0])
