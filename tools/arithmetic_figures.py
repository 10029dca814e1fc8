"""Write the figures of docs/explanation/arithmetic.md into docs/figures, computed by the package itself.

With --check nothing is written; the exit code is 1 when a figure is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from markupsafe import Markup

from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.dot_units import PUBLISHED_UNITS
from qwen_quantize.formats.scales import ScaleRule, exponents_to_scale, scale_exponents
from qwen_quantize.formats.tables import FORMATS
from qwen_quantize.report.svg import Axis, Frame, Shape, legend, legend_height, log_axis, marker, polyline

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "figures"
_SHAPES = (Shape.DOT, Shape.RING, Shape.SQUARE, Shape.TRIANGLE)
_WIDTH, _HEIGHT = 640.0, 300.0
# Both for light and for dark pages: a figure in a file of its own cannot see which it stands on.
_STYLE = """<style>
svg { background: #fff; font: 12px system-ui, "DejaVu Sans", sans-serif; }
text { fill: #16202b; } .label { fill: #55616e; } .axis, .tick { stroke: #16202b; } .grid { stroke: #d5dbe1; }
.s0 { --own: #0b5cad; } .s1 { --own: #8a5a00; } .s2 { --own: #2c7a4b; } .s3 { --own: #8b3a8f; }
.mark { fill: var(--own); stroke: var(--own); stroke-width: 1.2; } .hollow { fill: #fff; stroke-width: 1.5; }
.line { fill: none; stroke: var(--own); stroke-width: 1.3; } .line.s1 { stroke-dasharray: 4 3; }
.line.s2 { stroke-dasharray: 1.5 2.5; } .line.s3 { stroke-dasharray: 7 3 1.5 3; }
</style>"""
Series = dict[str, list[tuple[float, float]]]


def _drawn(
    key: str, title: str, words: tuple[str, str, str], series: Series, x: Axis, y: Axis, marks: bool
) -> str:
    """words: what the figure shows, and the labels of x and y."""
    entries = list(zip(_SHAPES, series, strict=False))
    high = legend_height(entries, _WIDTH - 8)
    frame = Frame(_WIDTH, _HEIGHT + high, top=28 + high)
    x, y = x.resized(frame.left, frame.x_end), y.resized(frame.y_end, frame.top)
    parts: list[Markup] = [legend(entries, 4, 2, _WIDTH - 8), frame.axes(x, y, words[1], words[2])]
    for index, line in enumerate(series.values()):
        places = [(x.at(a), y.at(b)) for a, b in line]
        parts.append(polyline(places, index))
        # Lines of many points get a mark here and there, not at the same places: none shall hide another's.
        shown = places if marks else places[index * 5 :: 21]
        parts += [marker(_SHAPES[index], a, b, index) for a, b in shown]
    drawing = str(frame.drawing(key, title, words[0], parts))
    namespace = '<svg xmlns="http://www.w3.org/2000/svg" '
    return drawing.replace("<svg ", namespace, 1).replace("</title>", f"</title>{_STYLE}", 1) + "\n"


def rounding() -> str:
    """E4M3 around 1: what each rounding makes of the values between its steps."""
    values = torch.linspace(1.0, 1.5, 257)
    series: Series = {}
    for way in (Rounding.RNE, Rounding.RTZ, Rounding.CEIL):
        rule = CastRule(way, Overflow.SATURATE, Subnormals.KEEP)
        cast = decode(encode(values, FORMATS["e4m3fn"], rule), FORMATS["e4m3fn"])
        series[str(way)] = list(zip(values.tolist(), (cast - values).tolist(), strict=True))
    words = ("The error of E4M3 casts between 1 and 1.5.", "value", "error of the cast")
    return _drawn(
        "rounding", "Three roundings", words, series, Axis(1.0, 1.5, 0, 1), Axis(-0.14, 0.14, 0, 1), False
    )


def block_scale() -> str:
    """The largest value of a block against what it becomes: rules that clip and rules that never do."""
    fmt = FORMATS["e4m3fn"]
    amax = torch.linspace(1.0, 2.0, 257)
    rule = CastRule(Rounding.RNE, Overflow.SATURATE, Subnormals.KEEP)
    series: Series = {}
    for name in (ScaleRule.FLOOR, ScaleRule.RCEIL):
        scale = exponents_to_scale(scale_exponents(amax, fmt, name))
        kept = decode(encode(amax / scale, fmt, rule), fmt) * scale
        series[str(name)] = list(zip(amax.tolist(), (kept / amax).tolist(), strict=True))
    words = (
        "What is left of the largest value of a block under two rules for its power-of-two scale.",
        "largest magnitude of the block (times any power of two)",
        "share of it that is left",
    )
    return _drawn(
        "block-scale",
        "Rules for block scales",
        words,
        series,
        Axis(1.0, 2.0, 0, 1),
        Axis(0.85, 1.08, 0, 1),
        False,
    )


def accumulators() -> str:
    """Error of long dot products of E4M3 values in published matrix units, over random vectors."""
    generator = torch.Generator().manual_seed(0)
    fmt = FORMATS["e4m3fn"]
    rule = CastRule(Rounding.RNE, Overflow.SATURATE, Subnormals.KEEP)
    lengths = [32 * 2**k for k in range(8)]
    series: Series = {}
    vectors = decode(encode(torch.randn(2, 64, lengths[-1], generator=generator), fmt, rule), fmt)
    for name in ("hopper-e4m3fn", "hopper-e4m3fn-promoted", "hopper-e4m3fn-fp16-sum", "blackwell-e4m3fn"):
        line = []
        for length in lengths:
            a, b = vectors[0, :, :length].contiguous(), vectors[1, :, :length].contiguous()
            sums = emulated_matmul(a, b, PUBLISHED_UNITS[name])
            exact = a.double() @ b.double().T
            size = a.double().abs() @ b.double().abs().T
            line.append((float(length), max(float(((sums - exact).abs() / size).mean()), 1e-10)))
        series[name] = line
    words = (
        "Mean error of dot products over the sum of their products' magnitudes.",
        "products in the sum (log)",
        "mean error, relative (log)",
    )
    every = [value for line in series.values() for _, value in line]
    x = Axis(float(lengths[0]), float(lengths[-1]), 0, 1, logarithmic=True)
    return _drawn("accumulators", "Accumulators", words, series, x, log_axis(every), True)


FIGURES: dict[str, Callable[[], str]] = {
    "rounding": rounding,
    "block-scale": block_scale,
    "accumulators": accumulators,
}


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 with --check where a figure is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    stale = 0
    for name, figure in FIGURES.items():
        path, drawn = FOLDER / f"{name}.svg", figure()
        if check:
            stale |= int(not path.is_file() or path.read_text(encoding="utf-8") != drawn)
        else:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(drawn, encoding="utf-8")
    return stale


if __name__ == "__main__":
    sys.exit(main())
