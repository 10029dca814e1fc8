"""The report's plots: records in, one inline SVG out. Each returns None where there is nothing to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from qwen_quantize.report.linears import Linear
from qwen_quantize.report.numbers import decibels, percent, significant
from qwen_quantize.report.record import LayerFidelity, LayerRecord, Measured
from qwen_quantize.report.svg import (
    CHARACTER_WIDTH,
    LARGEST,
    SMALLEST,
    Axis,
    Frame,
    Shape,
    element,
    layer_axis,
    legend,
    legend_height,
    linear_axis,
    log_axis,
    marker,
    polyline,
    text,
)

_STREAM_SHAPES = (
    Shape.DOT,
    Shape.SQUARE,
    Shape.TRIANGLE_RING,
    Shape.RING,
    Shape.DIAMOND,
    Shape.TRIANGLE,
    Shape.SQUARE_RING,
    Shape.DIAMOND_RING,
)
_MOST_ROWS = 40  # of the exponent strip; a wider range shares rows


@dataclass(frozen=True, slots=True)
class ErrorPoint:
    """One linear's error and its round-to-nearest baseline; of several in a layer (experts) the worst."""

    layer: int
    error: float | None
    baseline_error: float | None


def hidden_state_sqnr(layers: Sequence[LayerFidelity], width: float, key: str) -> Markup | None:
    """SQNR in dB after each layer; None when no layer has a finite one."""
    finite = [layer for layer in layers if math.isfinite(layer.sqnr_db)]
    if not finite:
        return None
    entries: list[tuple[Shape, str]] = []
    if len(finite) < len(layers):
        entries = [(Shape.DOT, "SQNR after the layer"), (Shape.TRIANGLE_RING, "exact (infinite)")]
    frame = Frame(width, 260, top=28 + legend_height(entries, width - 8))
    x = layer_axis([layer.layer for layer in layers]).resized(frame.left, frame.x_end)
    y = linear_axis([layer.sqnr_db for layer in finite]).resized(frame.y_end, frame.top)
    parts = [legend(entries, 4, 2, width - 8), frame.axes(x, y, "layer", "SQNR (dB), higher is better")]
    parts.append(polyline([(x.at(it.layer), y.at(it.sqnr_db)) for it in finite], 0))
    for it in layers:
        words = f"layer {it.layer}: {decibels(it.sqnr_db, 2, unit=True)}, cosine {significant(it.cosine, 6)}"
        shape, series = (Shape.DOT, 0) if math.isfinite(it.sqnr_db) else (Shape.TRIANGLE_RING, 1)
        parts.append(marker(shape, x.at(it.layer), y.at(it.sqnr_db), series, words))
    first, last = finite[0], finite[-1]
    return frame.drawing(
        key,
        "Hidden-state SQNR over layers",
        f"{decibels(first.sqnr_db)} dB after layer {first.layer}, "
        f"{decibels(last.sqnr_db)} dB after layer {last.layer}.",
        parts,
    )


def worst_by_layer(linears: Sequence[Linear]) -> dict[str, list[ErrorPoint]]:
    """Kind of linear -> one point a layer, in order of layers; kinds in order of appearance."""
    worst: dict[str, dict[int, Linear]] = {}
    for linear in linears:
        if linear.layer is None or linear.error is None:
            continue
        layers = worst.setdefault(linear.kind, {})
        other = layers.get(linear.layer)
        if other is None or other.error is None or linear.error > other.error:
            layers[linear.layer] = linear
    return {
        kind: [ErrorPoint(layer, it.error, it.baseline_error) for layer, it in sorted(layers.items())]
        for kind, layers in worst.items()
    }


def error_axes(series: Mapping[str, Sequence[ErrorPoint]]) -> tuple[Axis, Axis] | None:
    """The axes that all kinds share, so that panels can be compared; None without a positive error."""
    every = [point for kind in series.values() for point in kind]
    values = [v for point in every for v in (point.error, point.baseline_error) if v is not None]
    positive = [v for v in values if v > 0 and math.isfinite(v)]
    if not positive:
        return None
    return layer_axis([point.layer for point in every]), log_axis(positive)


def linear_errors(
    kind: str, series: Sequence[ErrorPoint], axes: tuple[Axis, Axis], y_label: str, key: str
) -> Markup:
    """One small panel: error (filled) and baseline (hollow) over layers; a zero error lies on the axis."""
    frame = Frame(300, 204, top=44)
    x, y = axes[0].resized(frame.left, frame.x_end), axes[1].resized(frame.y_end, frame.top)
    parts = [text(4, 14, _shortened(kind, 300), class_="panel"), frame.axes(x, y, "layer", y_label)]
    baseline = [(point.layer, point.baseline_error) for point in series if point.baseline_error is not None]
    parts.append(polyline([(x.at(at), y.at(value)) for at, value in baseline], 1))
    for at, value in baseline:
        words = f"layer {at}: round to nearest {significant(value)}"
        parts.append(marker(Shape.RING, x.at(at), y.at(value), 1, words))
    ours = [(point.layer, point.error) for point in series if point.error is not None]
    parts.append(polyline([(x.at(at), y.at(value)) for at, value in ours], 0))
    for at, value in ours:
        parts.append(marker(Shape.DIAMOND, x.at(at), y.at(value), 0, f"layer {at}: {significant(value)}"))
    return frame.drawing(
        key,
        f"{kind}: error over layers",
        f"From {significant(min(v for _, v in ours))} to {significant(max(v for _, v in ours))}.",
        parts,
        "plot small",
    )


def scale_exponents(layers: Sequence[LayerRecord], width: float, key: str) -> Markup | None:
    """Heat strip: a column a layer, a row an exponent, the darker the more of the layer's blocks have it."""
    counts = {layer.layer: _layer_exponents(layer) for layer in layers}
    counts = {layer: found for layer, found in counts.items() if found}
    if not counts:
        return None
    low, high = min(min(found) for found in counts.values()), max(max(found) for found in counts.values())
    step = math.ceil((high - low + 1) / _MOST_ROWS)
    rows = (high - low) // step + 1
    frame = Frame(width, 86 + max(120.0, min(12.0 * rows, 260.0)), top=46)
    x = layer_axis(list(counts)).resized(frame.left, frame.x_end)
    y = Axis(low - 0.5, low - 0.5 + rows * step, frame.y_end, frame.top, whole=True)
    pitch = min(x.unit, 60.0)
    tall = (frame.y_end - frame.top) / rows
    parts = [
        _shade_legend(width),
        frame.axes(x, y, "layer", "exponent of the scale (2^exponent <= scale)"),
    ]
    for layer, found in counts.items():
        total = sum(found.values())
        for row in range(rows):
            bottom = low + row * step
            share = sum(found.get(exponent, 0) for exponent in range(bottom, bottom + step)) / total
            if share == 0:
                continue
            span = f"{bottom}" if step == 1 else f"{bottom} to {bottom + step - 1}"
            parts.append(
                element(
                    "rect",
                    element(
                        "title", f"layer {layer}, exponent {span}: {percent(share, 1)} of {total} blocks"
                    ),
                    class_=f"cell h{_shade(share)}",
                    x=x.at(layer) - pitch / 2 + 0.5,
                    y=y.at(bottom - 0.5) - tall,
                    width=max(pitch - 1, 1.0),
                    height=max(tall - 0.5, 1.0),
                )
            )
    return frame.drawing(
        key,
        "Scale exponents by layer",
        f"E8M0 exponents from {low} to {high} over {len(counts)} layers.",
        parts,
    )


def _layer_exponents(layer: LayerRecord) -> dict[int, int]:
    counts: dict[int, int] = {}
    for linear in layer.linears:
        for exponent, count in linear.exponents.items():
            if count:
                counts[exponent] = counts.get(exponent, 0) + count
    return counts


def _shade(share: float) -> int:
    """1 (under 1%), 2 (under 5%), 3 (under 20%), 4 (under 50%), 5: roughly even steps to the eye."""
    return 1 + sum(share >= edge for edge in (0.01, 0.05, 0.2, 0.5))


def _shade_legend(width: float) -> Markup:
    title = "share of the layer's blocks:" if width > 400 else "share:"
    pitch = 64 if width > 400 else 56
    parts = [text(4, 14, title)]
    for shade, words in enumerate(("<1%", "<5%", "<20%", "<50%", "50%+"), start=1):
        left = 4 + CHARACTER_WIDTH * len(title) + 8 + pitch * (shade - 1)
        parts.append(element("rect", class_=f"cell h{shade}", x=left, y=4, width=12, height=12))
        parts.append(text(left + 16, 14, words))
    return Markup("").join(parts)


def kl_histogram(measured: Measured, width: float, key: str) -> Markup | None:
    """Share of tokens by KL divergence on a logarithmic axis, with median, 90 % and 99 % marked."""
    edges, counts = measured.kl_edges, measured.kl_counts
    total = sum(counts)
    usable = total > 0 and len(edges) == len(counts) + 1 and edges[0] >= SMALLEST and edges[-1] <= LARGEST
    if not usable or any(b <= a for a, b in pairwise(edges)):
        return None
    first = next(index for index, count in enumerate(counts) if count)
    last = next(index for index in reversed(range(len(counts))) if counts[index])
    frame = Frame(width, 260, top=62)
    x = Axis(edges[first], edges[last + 1], frame.left, frame.x_end, logarithmic=True)
    y = linear_axis([100 * count / total for count in counts], from_zero=True).resized(frame.y_end, frame.top)
    parts = [frame.axes(x, y, "KL divergence of a token (nats), lower is better", "")]
    parts.append(text(4, 14, "tokens (%)", class_="label"))
    for index in range(first, last + 1):
        share = 100 * counts[index] / total
        left, right = x.at(edges[index]), x.at(edges[index + 1])
        words = (
            f"{significant(edges[index])} to {significant(edges[index + 1])} nats: {counts[index]:,} tokens"
        )
        parts.append(
            element(
                "rect",
                element("title", words),
                class_="bar",
                x=left + 0.5,
                y=y.at(share),
                width=max(right - left - 1, 0.5),
                height=frame.y_end - y.at(share),
            )
        )
    marks = (("p50", measured.kl_p50), ("p90", measured.kl_p90), ("p99", measured.kl_p99))
    known = [
        (x.at(value), 26 + 14.0 * row, f"{name} {significant(value)}", row)
        for row, (name, value) in enumerate(marks)
        if value is not None
    ]
    parts += [
        element("line", class_=f"quantile q{row}", x1=at, x2=at, y1=top - 8, y2=frame.y_end)
        for at, top, _, row in known
    ]
    parts += [_beside(frame, at, top, words) for at, top, words, _ in known]
    summary = ", ".join(f"{name} {significant(value)}" for name, value in marks)
    return frame.drawing(key, "KL divergence over tokens", f"{summary} nats over {total} tokens.", parts)


def _beside(frame: Frame, x: float, y: float, words: str) -> Markup:
    """The label of a vertical line, in its own row on the side that has room; over the lines it crosses there."""
    if x + 5 + CHARACTER_WIDTH * len(words) > frame.width:
        return text(x - 4, y, words, "end", "strong over")
    return text(x + 4, y, words, class_="strong over")


def input_outliers(layers: Sequence[LayerRecord], width: float, key: str) -> Markup | None:
    """amax / rms of each input stream over layers; None without calibration."""
    series: dict[str, list[tuple[int, float]]] = {}
    for layer in layers:
        for stream in layer.streams:
            crest = stream.crest
            if crest is not None and crest > 0 and math.isfinite(crest):
                series.setdefault(stream.stream, []).append((layer.layer, crest))
    if not series:
        return None
    shapes = [_STREAM_SHAPES[index % len(_STREAM_SHAPES)] for index in range(len(series))]
    names = [_shortened(name.replace("_", " "), width) for name in series]
    entries = list(zip(shapes, names, strict=True))
    rows = legend_height(entries, width - 8)
    frame = Frame(width, 242 + rows, top=28 + rows)
    x = layer_axis([at for line in series.values() for at, _ in line]).resized(frame.left, frame.x_end)
    y = log_axis([value for line in series.values() for _, value in line]).resized(frame.y_end, frame.top)
    parts = [
        legend(entries, 4, 2, width - 8),
        frame.axes(x, y, "layer", "largest input over its rms (ratio)"),
    ]
    for index, (name, line) in enumerate(series.items()):
        parts.append(polyline([(x.at(at), y.at(value)) for at, value in line], index))
        for at, value in line:
            words = f"{name}, layer {at}: {significant(value)}"
            parts.append(marker(shapes[index], x.at(at), y.at(value), index, words))
    loudest, (at, top) = max(
        ((name, point) for name, line in series.items() for point in line), key=lambda pair: pair[1][1]
    )
    return frame.drawing(
        key,
        "Input outliers by layer",
        f"The loudest is {significant(top)} times the rms: {loudest} of layer {at}.",
        parts,
    )


def _shortened(words: str, width: float) -> str:
    most = int((width - 20) / (CHARACTER_WIDTH + 0.6))
    return words if len(words) <= most else words[: most - 1] + "…"
