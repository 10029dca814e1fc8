"""The few parts our plots are drawn with: axes, markers, legends, the frame of one inline SVG.

Lengths are CSS pixels at 1:1. Colours come from the page through classes; what tells series apart is shape,
filling and dash, so that a plot also reads in black and white.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from markupsafe import Markup

CHARACTER_WIDTH = 7.3  # of a wide 12 px sans-serif: which one the reader has is not known
LARGEST, SMALLEST = 1e300, 1e-300  # what an axis can show: room for the round numbers around it
_LEGEND_LINE = 18.0


class Shape(StrEnum):
    """Markers; those named `RING` are hollow."""

    DOT = "dot"
    RING = "ring"
    SQUARE = "square"
    TRIANGLE = "triangle"
    DIAMOND = "diamond"
    TRIANGLE_RING = "triangle-ring"
    SQUARE_RING = "square-ring"
    DIAMOND_RING = "diamond-ring"


def coordinate(x: float) -> str:
    """One decimal and no trailing zero: the same number always gives the same bytes."""
    text = f"{x:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Axis:
    """A map from low..high to the pixels begin..end; `whole` has ticks on integers only."""

    low: float
    high: float
    begin: float
    end: float
    logarithmic: bool = False
    whole: bool = False

    def at(self, value: float) -> float:
        """The pixel of a value; values outside land on the nearer end, as does 0 on a logarithmic axis."""
        low, high = self._scaled(self.low), self._scaled(self.high)
        clamped = min(max(value, self.low), self.high)
        share = (self._scaled(clamped) - low) / (high - low)
        return self.begin + share * (self.end - self.begin)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    @property
    def unit(self) -> float:
        """Pixels from one whole number to the next, on an axis that is not logarithmic."""
        return (self.end - self.begin) / (self.high - self.low)

    def resized(self, begin: float, end: float) -> Axis:
        return replace(self, begin=begin, end=end)

    def ticks(self, most: int) -> list[float]:
        if self.logarithmic:
            return log_ticks(self.low, self.high, most)
        return linear_ticks(self.low, self.high, most, smallest_step=1.0 if self.whole else 0.0)


def linear_ticks(low: float, high: float, most: int, smallest_step: float = 0.0) -> list[float]:
    """At most `most` round values (steps of 1, 2 or 5 times a power of ten) inside low..high."""
    step = max(smallest_step, 10.0 ** math.floor(math.log10((high - low) / most)))
    factors = (1, 2, 5, 10, 20, 50)
    step = next(
        f * step for f in factors if math.floor(high / (f * step)) - math.ceil(low / (f * step)) < most
    )
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten inside low..high, every n-th where they are many; 1-2-5 steps where they are few."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    tight = (low * (1 - 1e-9), high * (1 + 1e-9))
    decades = [10.0**k for k in range(first, last + 1) if tight[0] <= 10.0**k <= tight[1]]
    if len(decades) > 2 or len(decades) > most:
        return decades[:: max(1, math.ceil(len(decades) / most))]
    fine = [f * 10.0**k for k in range(first, last + 1) for f in (1, 2, 5)]
    fine = [value for value in fine if tight[0] <= value <= tight[1]]
    return fine if len(fine) <= most else decades


def linear_axis(values: Sequence[float], *, from_zero: bool = False) -> Axis:
    """An axis around values, with some air; its pixels are set when the plot knows its size."""
    shown = [min(max(value, -LARGEST), LARGEST) for value in values]
    low, high = (0.0 if from_zero else min(shown)), max(shown)
    size = max(1.0, abs(low), abs(high))
    air = 0.08 * (high - low) if high - low > 1e-6 * size else 0.1 * size  # equal values get an axis too
    return Axis(low if from_zero else low - air, high + air, 0, 1)


def log_axis(values: Sequence[float]) -> Axis:
    """A logarithmic axis around positive values, ending at 1, 2 or 5 times a power of ten."""
    shown = [min(max(value, SMALLEST), LARGEST) for value in values]
    low, high = _round_down(min(shown)), _round_up(max(shown))
    if high <= low * 1.0001:
        low, high = low / 10, high * 10
    return Axis(low, high, 0, 1, logarithmic=True)


def _round_down(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return max(f * power for f in (0.5, 1, 2, 5) if f * power <= value * (1 + 1e-9))


def _round_up(value: float) -> float:
    power = 10.0 ** math.floor(math.log10(value))
    return min(f * power for f in (1, 2, 5, 10) if f * power >= value * (1 - 1e-9))


def tick_label(value: float) -> str:
    """0.5, 20, 1e-4: as short as it stays exact for round numbers."""
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.6g}"


def element(name: str, body: str | Markup = "", **attributes: str | float) -> Markup:
    """One escaped element; `class_` is class, underscores become hyphens, floats become coordinates."""
    listed = Markup("").join(
        Markup(' {}="{}"').format(
            key.rstrip("_").replace("_", "-"), coordinate(value) if isinstance(value, int | float) else value
        )
        for key, value in attributes.items()
    )
    if body:
        return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), listed, body)
    return Markup("<{}{}/>").format(Markup(name), listed)


def text(x: float, y: float, words: str, anchor: str = "start", class_: str = "") -> Markup:
    if class_:
        return element("text", words, class_=class_, x=x, y=y, text_anchor=anchor)
    return element("text", words, x=x, y=y, text_anchor=anchor)


def marker(shape: Shape, x: float, y: float, series: int, tooltip: str = "") -> Markup:
    """A centred marker of about 7 px in the colour of series 0..3, with a tooltip for the mouse."""
    class_ = f"mark s{series}{' hollow' if 'ring' in shape else ''}"
    title: str | Markup = element("title", tooltip) if tooltip else ""
    match shape:
        case Shape.DOT | Shape.RING:
            return element("circle", title, class_=class_, cx=x, cy=y, r=3)
        case Shape.SQUARE | Shape.SQUARE_RING:
            return element("rect", title, class_=class_, x=x - 2.7, y=y - 2.7, width=5.4, height=5.4)
        case Shape.TRIANGLE | Shape.TRIANGLE_RING:
            corners = [(x, y - 4), (x + 3.7, y + 2.8), (x - 3.7, y + 2.8)]
        case Shape.DIAMOND | Shape.DIAMOND_RING:
            corners = [(x, y - 4), (x + 4, y), (x, y + 4), (x - 4, y)]
    return element("polygon", title, class_=class_, points=points(corners))


def points(pairs: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{coordinate(x)},{coordinate(y)}" for x, y in pairs)


def polyline(pairs: Sequence[tuple[float, float]], series: int) -> Markup:
    """A thin line through points; nothing for fewer than two."""
    if len(pairs) < 2:
        return Markup("")
    return element("polyline", class_=f"line s{series}", points=points(pairs))


def legend_height(entries: Sequence[tuple[Shape, str]], width: float) -> float:
    return _LEGEND_LINE * (1 + max((line for *_, line in _legend_places(entries, width)), default=-1))


def legend(entries: Sequence[tuple[Shape, str]], left: float, top: float, width: float) -> Markup:
    """Marker and words in a row, going on in the next line where they do not fit."""
    parts = []
    for series, ((shape, words), (x, line)) in enumerate(
        zip(entries, _legend_places(entries, width), strict=True)
    ):
        y = top + 9 + line * _LEGEND_LINE
        parts.append(marker(shape, left + x + 5, y, series))
        parts.append(text(left + x + 14, y + 4, words))
    return Markup("").join(parts)


def _legend_places(entries: Sequence[tuple[Shape, str]], width: float) -> list[tuple[float, int]]:
    places, x, line = [], 0.0, 0
    for _, words in entries:
        needed = 14 + CHARACTER_WIDTH * len(words)
        if x and x + needed > width:
            x, line = 0.0, line + 1
        places.append((x, line))
        x += needed + 16
    return places


@dataclass(frozen=True, slots=True)
class Frame:
    """One plot's size and the margins that its labels need."""

    width: float
    height: float
    left: float = 52.0
    right: float = 12.0
    top: float = 28.0
    bottom: float = 40.0

    @property
    def x_end(self) -> float:
        return self.width - self.right

    @property
    def y_end(self) -> float:
        return self.height - self.bottom

    def axes(self, x: Axis, y: Axis, x_label: str, y_label: str) -> Markup:
        """Grid, ticks and labels; the y label lies above its axis, where it is read at ease."""
        parts = [text(4, self.top - 12, y_label, class_="label")]
        for value in y.ticks(max(2, int((self.y_end - self.top) // 20))):
            at = y.at(value)
            parts.append(element("line", class_="grid", x1=self.left, x2=self.x_end, y1=at, y2=at))
            parts.append(text(self.left - 6, at + 4, tick_label(value), "end"))
        for value in x.ticks(max(2, int((self.x_end - self.left) // 52))):
            at = x.at(value)
            parts.append(element("line", class_="tick", x1=at, x2=at, y1=self.y_end, y2=self.y_end + 4))
            parts.append(text(at, self.y_end + 17, tick_label(value), "middle"))
        parts.append(
            element("line", class_="axis", x1=self.left, x2=self.x_end, y1=self.y_end, y2=self.y_end)
        )
        middle = (self.left + self.x_end) / 2
        parts.append(text(middle, self.height - 6, x_label, "middle", "label"))
        return Markup("").join(parts)

    def drawing(
        self, key: str, title: str, description: str, parts: Sequence[Markup], class_: str = ""
    ) -> Markup:
        """The finished SVG; `key`, unique in the page, names the accessible title and description."""
        return Markup(
            '<svg class="{cls}" role="img" aria-labelledby="{key}-title {key}-desc" viewBox="0 0 {w} {h}"'
            ' width="{w}" height="{h}"><title id="{key}-title">{title}</title>'
            '<desc id="{key}-desc">{desc}</desc>{body}</svg>'
        ).format(
            cls=class_ or "plot",
            key=key,
            w=coordinate(self.width),
            h=coordinate(self.height),
            title=title,
            desc=description,
            body=Markup("").join(parts),
        )


def layer_axis(layers: Sequence[int]) -> Axis:
    """The x axis of plots over layers: whole numbers only, half a layer of air on both sides."""
    return Axis(min(layers) - 0.5, max(layers) + 0.5, 0, 1, whole=True)
