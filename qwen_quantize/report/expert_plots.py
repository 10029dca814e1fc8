"""The plots of mixtures of experts: tokens per expert, and how far routers still choose alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from markupsafe import Markup

from qwen_quantize.report.experts import routed_layers
from qwen_quantize.report.numbers import percent
from qwen_quantize.report.record import Expert, LayerFidelity
from qwen_quantize.report.svg import (
    CHARACTER_WIDTH,
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
    points,
    polyline,
    text,
)

_MOST_SINGLE = 400  # experts that are drawn one by one; of more, a layer shows its spread
_NO_TOKEN = 0.5  # where a logarithmic axis that must show 0 tokens ends


@dataclass(frozen=True, slots=True)
class Spread:
    """Tokens per expert of one layer, quartiles by nearest rank; needed: the most that an expert needs."""

    experts: int
    starved: int
    fewest: int
    lower: int
    median: int
    upper: int
    most: int
    needed: int


def by_layer(experts: Sequence[Expert]) -> dict[int, list[Expert]]:
    """Layer, ascending -> its experts in order."""
    found: dict[int, list[Expert]] = {}
    for expert in sorted(experts, key=lambda it: (it.layer, it.expert)):
        found.setdefault(expert.layer, []).append(expert)
    return found


def spread(experts: Sequence[Expert]) -> Spread:
    """Of one layer; at least one expert."""
    tokens = sorted(it.tokens for it in experts)
    last = len(tokens) - 1
    return Spread(
        experts=len(tokens),
        starved=sum(it.starved for it in experts),
        fewest=tokens[0],
        lower=tokens[round(last * 0.25)],
        median=tokens[round(last * 0.5)],
        upper=tokens[round(last * 0.75)],
        most=tokens[-1],
        needed=max(it.needed for it in experts),
    )


def drawn_one_by_one(experts: Sequence[Expert]) -> bool:
    return len(experts) <= _MOST_SINGLE


def tokens_per_expert(experts: Sequence[Expert], width: float, key: str) -> Markup | None:
    """Tokens over layers on a logarithmic axis, starved experts as hollow triangles; None without experts."""
    if not experts:
        return None
    layers = by_layer(experts)
    spreads = {layer: spread(members) for layer, members in layers.items()}
    single = drawn_one_by_one(experts)
    starved = sum(it.starved for it in spreads.values())
    if single:
        entries = [(Shape.DOT, "enough tokens"), (Shape.TRIANGLE_RING, "starved")]
    else:
        entries = [(Shape.DOT, "median"), (Shape.TRIANGLE_RING, "fewest, if starved")]
    rows = legend_height(entries, width - 8)
    frame = Frame(width, 242 + rows, top=28 + rows)
    x = layer_axis(list(layers)).resized(frame.left, frame.x_end)
    y = _token_axis(spreads.values()).resized(frame.y_end, frame.top)
    parts = [legend(entries, 4, 2, width - 8), frame.axes(x, y, "layer", "tokens (log)")]
    for layer, members in layers.items():
        if single:
            parts += _single_experts(members, x.at(layer), x.unit, y)
        else:
            parts.append(_layer_spread(layer, spreads[layer], x, y))
    parts.append(_needed_line(spreads, frame, x, y))
    fewest, most = min(it.tokens for it in experts), max(it.tokens for it in experts)
    return frame.drawing(
        key,
        "Tokens per expert by layer",
        f"From {fewest:,} to {most:,} tokens; {starved:,} of {len(experts):,} experts in {len(layers):,} "
        f"{'layer' if len(layers) == 1 else 'layers'} are starved.",
        parts,
    )


def _token_axis(spreads: Collection[Spread]) -> Axis:
    values = [float(n) for it in spreads for n in (it.fewest, it.most, it.needed) if n > 0]
    if any(it.fewest == 0 for it in spreads):
        values.append(_NO_TOKEN)
    return log_axis(values)


def _needed_line(spreads: Mapping[int, Spread], frame: Frame, x: Axis, y: Axis) -> Markup:
    """Dashed, with a step where layers need different numbers; its key stands above the plot, at the right."""
    known = {layer: it.needed for layer, it in spreads.items() if it.needed > 0}
    if not known:
        return Markup("")
    corners = [(x.at(layer + side), y.at(needed)) for layer, needed in known.items() for side in (-0.5, 0.5)]
    low, high = min(known.values()), max(known.values())
    words = f"{high:,} needed" if low == high else f"{low:,} to {high:,} needed"
    start, row = frame.x_end - CHARACTER_WIDTH * len(words) - 6, frame.top - 12
    key = element("line", class_="needed", x1=start - 28, x2=start, y1=row - 4, y2=row - 4)
    line = element("polyline", class_="needed", points=points(corners))
    return line + key + text(start + 6, row, words)


def _single_experts(members: Sequence[Expert], centre: float, pitch: float, y: Axis) -> list[Markup]:
    """One mark an expert, side by side in the order of their numbers inside the layer's column."""
    step = 0.8 * pitch / len(members)
    parts = []
    for place, it in enumerate(members):
        at = centre + (place - (len(members) - 1) / 2) * step
        words = f"layer {it.layer}, expert {it.expert}: {it.tokens:,} tokens, {it.needed:,} needed"
        shape, series = (Shape.TRIANGLE_RING, 1) if it.starved else (Shape.DOT, 0)
        parts.append(marker(shape, at, y.at(it.tokens), series, f"{words} ({it.policy or 'own'})"))
    return parts


def _layer_spread(layer: int, it: Spread, x: Axis, y: Axis) -> Markup:
    """A line from fewest to most, a box over the middle half, the median; a triangle where some starve."""
    at, wide = x.at(layer), min(max(0.6 * x.unit, 2.0), 12.0)
    words = (
        f"layer {layer}: {it.fewest:,} to {it.most:,} tokens, median {it.median:,}; "
        f"{it.starved:,} of {it.experts:,} experts starved, {it.needed:,} needed"
    )
    high, low = y.at(it.upper), y.at(it.lower)
    parts = [
        element("title", words),
        element("line", class_="span", x1=at, x2=at, y1=y.at(it.most), y2=y.at(it.fewest)),
        element("rect", class_="box", x=at - wide / 2, y=high, width=wide, height=max(low - high, 1.0)),
        element("circle", class_="mark s0", cx=at, cy=y.at(it.median), r=min(3.0, wide / 2 + 0.5)),
    ]
    if it.starved:
        parts.append(marker(Shape.TRIANGLE_RING, at, y.at(it.fewest), 1))
    return element("g", Markup("").join(parts))


def router_agreement(layers: Sequence[LayerFidelity], width: float, key: str) -> Markup | None:
    """Per cent of the reference's experts that are chosen too, over layers; None where it was not measured."""
    routed = [(layer, share) for layer, share in routed_layers(layers) if math.isfinite(share)]
    if not routed:
        return None
    frame = Frame(width, 260)
    x = layer_axis([layer for layer, _ in routed]).resized(frame.left, frame.x_end)
    y = linear_axis([100 * share for _, share in routed])
    low, high = max(y.low, 0.0), min(y.high, 100.0)
    if low < high:  # air above 100 % would promise what cannot be
        y = replace(y, low=low, high=high)
    y = y.resized(frame.y_end, frame.top)
    parts = [frame.axes(x, y, "layer", "same experts chosen (%), higher is better")]
    parts.append(polyline([(x.at(layer), y.at(100 * share)) for layer, share in routed], 0))
    for layer, share in routed:
        words = f"layer {layer}: {percent(share)}"
        parts.append(marker(Shape.DOT, x.at(layer), y.at(100 * share), 0, words))
    worst, least = min(routed, key=lambda pair: pair[1])
    return frame.drawing(
        key,
        "Router agreement over layers",
        f"Lowest {percent(least)} in layer {worst}, of {len(routed)} layers with a router.",
        parts,
    )
