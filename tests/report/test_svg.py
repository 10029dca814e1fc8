"""Axes and ticks, and coordinates of small drawings worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.report.linears import Linear
from qwen_quantize.report.plots import (
    ErrorPoint,
    error_axes,
    hidden_state_sqnr,
    input_outliers,
    kl_histogram,
    linear_errors,
    scale_exponents,
    worst_by_layer,
)
from qwen_quantize.report.record import LayerFidelity, LayerRecord, Measured, StreamInput
from qwen_quantize.report.svg import (
    Axis,
    Shape,
    coordinate,
    element,
    legend_height,
    linear_axis,
    linear_ticks,
    log_axis,
    log_ticks,
    tick_label,
)


def measured(edges: tuple[float, ...], counts: tuple[int, ...], p99: float) -> Measured:
    return Measured(
        text="", text_sha256="", tokens=sum(counts), windows=1, window_tokens=1, perplexity=2.0,
        reference_perplexity=2.0, rise=0.0, rise_standard_error=None, kl_mean=0.1, kl_p50=0.1, kl_p90=1.0,
        kl_p99=p99, kl_max=9.0, top1_agreement=1.0, layers=(), kl_edges=edges, kl_counts=counts,
    )  # fmt: skip


def linear(layer: int, error: float | None, exponents: dict[int, int], name: str = "mlp.up_proj") -> Linear:
    return Linear(
        layer, f"model.layers.{layer}.{name}", name, (1, 1), error, error, 30.0, 0, 0, 0, exponents, "", ()
    )


def test_axes_map_ends_and_middle() -> None:
    assert [Axis(0, 10, 50, 150).at(v) for v in (0, 5, 10, 11, -1)] == [50, 100, 150, 150, 50]
    log = Axis(1e-4, 1.0, 200, 0, logarithmic=True)
    assert [log.at(v) for v in (1e-4, 1e-2, 1.0, 0.0)] == pytest.approx([200, 100, 0, 200])


def test_linear_ticks() -> None:
    assert linear_ticks(0, 29.5, 6) == [0, 5, 10, 15, 20, 25]
    assert linear_ticks(28.1, 30.9, 4) == [29, 30]
    assert linear_ticks(-0.5, 0.5, 5, smallest_step=1) == [0]
    assert linear_ticks(-0.5, 59.5, 6, smallest_step=1) == [0, 10, 20, 30, 40, 50]


def test_log_ticks() -> None:
    assert log_ticks(1e-9, 1.0, 5) == pytest.approx([1e-9, 1e-7, 1e-5, 1e-3, 1e-1])
    assert log_ticks(2e-4, 5e-3, 6) == pytest.approx([2e-4, 5e-4, 1e-3, 2e-3, 5e-3])


@settings(deadline=None)  # time says nothing on a shared machine
@given(st.lists(st.floats(1e-320, 1.7e308), min_size=1, max_size=5))
def test_log_axes_hold_every_positive_value(values: list[float]) -> None:
    axis = log_axis(values).resized(0, 100)
    assert all(0 <= axis.at(value) <= 100 for value in values)
    assert 0 < len(axis.ticks(5)) <= 5


@settings(deadline=None)  # time says nothing on a shared machine
@given(st.lists(st.floats(-1.7e308, 1.7e308), min_size=1, max_size=5))
def test_linear_axes_hold_every_value(values: list[float]) -> None:
    axis = linear_axis(values).resized(0, 100)
    assert all(0 <= axis.at(value) <= 100 for value in values)
    assert 0 < len(axis.ticks(5)) <= 5


def test_labels_and_coordinates_are_short() -> None:
    assert [tick_label(v) for v in (0.0, 0.5, 1e-4, 2e-4, 0.001, 30.0)] == [
        "0",
        "0.5",
        "1e-4",
        "2e-4",
        "0.001",
        "30",
    ]
    assert [coordinate(v) for v in (1.0, 1.04, -0.01, 0.15)] == ["1", "1", "0", "0.1"]


def test_elements_escape_words_and_attributes() -> None:
    assert (
        element("text", "<b>&", class_='"x', x=1.25) == '<text class="&#34;x" x="1.2">&lt;b&gt;&amp;</text>'
    )


def test_a_legend_wraps_where_it_is_too_long() -> None:
    entries = [(Shape.DOT, "ten letter"), (Shape.RING, "ten letter")]
    assert (legend_height(entries, 400), legend_height(entries, 150), legend_height([], 150)) == (18, 36, 0)


def test_sqnr_of_three_layers() -> None:
    drawing = hidden_state_sqnr(
        [LayerFidelity(n, db, 1.0) for n, db in enumerate((30.0, 20.0, 10.0))], 340, "k"
    )
    assert drawing is not None
    # x: -0.5..2.5 over 52..328, so 98, 190, 282; y: 8.4..31.6 over 220..28, so the middle is 124
    assert '<polyline class="line s0" points="98,41.2 190,124 282,206.8"/>' in drawing
    assert "layer 1: 20.00 dB" in drawing
    assert "exact" not in drawing


def test_exact_layers_are_drawn_at_the_top() -> None:
    layers = [LayerFidelity(0, float("inf"), 1.0), LayerFidelity(1, 20.0, 1.0)]
    drawing = hidden_state_sqnr(layers, 600, "k")
    assert drawing is not None
    assert "exact (infinite)" in drawing
    assert "layer 0: exact, cosine" in drawing
    assert hidden_state_sqnr(layers[:1], 600, "k") is None
    assert hidden_state_sqnr([], 600, "k") is None


def test_kl_bars_and_marks() -> None:
    drawing = kl_histogram(measured((0.01, 0.1, 1.0, 10.0), (0, 1, 3), 10.0), 340, "k")
    assert drawing is not None
    # The empty first bin is cut off: 0.1..10 over 52..328, so 1.0 is at 190; 75 % of 0..81 over 220..62
    assert '<rect class="bar" x="190.5" y="73.7" width="137" height="146.3">' in drawing
    assert '<line class="quantile q1" x1="190" x2="190" y1="32" y2="220"/>' in drawing
    # p99 is at the right edge: its label goes to the left of its line
    assert '<text class="strong over" x="324" y="54" text-anchor="end">p99 10.0</text>' in drawing


@pytest.mark.parametrize(
    ("edges", "counts"),
    [((), ()), ((0.1, 1.0), (0,)), ((0.1, 1.0), (1, 1)), ((1.0, 0.1), (1,)), ((0.0, 1.0), (1,))],
)
def test_a_histogram_that_is_none(edges: tuple[float, ...], counts: tuple[int, ...]) -> None:
    assert kl_histogram(measured(edges, counts, 1.0), 340, "k") is None


def test_exponent_cells() -> None:
    layers = [
        LayerRecord(0, (linear(0, 0.1, {-9: 3, -8: 1}),), ()),
        LayerRecord(1, (linear(1, 0.1, {-9: 5}),), ()),
    ]
    drawing = scale_exponents(layers, 340, "k")
    assert drawing is not None
    assert "layer 0, exponent -9: 75.0% of 4 blocks" in drawing
    assert drawing.count('class="cell h5"') == 3  # 75 %, 100 % and the legend's
    assert drawing.count('class="cell h4"') == 2  # 25 % and the legend's
    # two rows of 60 over 46..166; columns of at most 60 around x = 121
    assert '<rect class="cell h5" x="91.5" y="106" width="59" height="59.5">' in drawing
    assert scale_exponents([LayerRecord(0, (), ())], 340, "k") is None


def test_a_wide_range_of_exponents_shares_rows() -> None:
    layers = [LayerRecord(0, (linear(0, 0.1, dict.fromkeys(range(-127, 128), 1)),), ())]
    drawing = scale_exponents(layers, 340, "k")
    assert drawing is not None
    assert drawing.count("<title>layer") == 37  # 255 exponents, seven a row
    assert "exponent -127 to -121: 2.7% of 255 blocks" in drawing


def test_error_panel() -> None:
    series = {"a": [ErrorPoint(0, 0.001, 0.1), ErrorPoint(1, 0.0, None)]}
    axes = error_axes(series)
    assert axes is not None
    drawing = linear_errors("a", series["a"], axes, "error", "k")
    # y: 0.001..0.1 over 164..44; the zero lies on the axis; x: -0.5..1.5 over 52..288
    assert '<polyline class="line s0" points="111,164 229,164"/>' in drawing
    assert '<circle class="mark s1 hollow" cx="111" cy="44" r="3">' in drawing
    assert "layer 1: 0<" in drawing
    assert error_axes({"a": [ErrorPoint(0, 0.0, 0.0)]}) is None
    assert error_axes({}) is None


def test_the_worst_expert_stands_for_its_layer() -> None:
    linears = [linear(0, error, {}, "mlp.experts.*.up_proj") for error in (0.1, 0.3, 0.2, None)]
    assert worst_by_layer(linears) == {"mlp.experts.*.up_proj": [ErrorPoint(0, 0.3, 0.3)]}


def test_outliers() -> None:
    streams = (StreamInput("mlp_input", 5, 20.0, 2.0, None), StreamInput("mlp_hidden", 5, 0.0, 0.0, None))
    drawing = input_outliers([LayerRecord(0, (), streams)], 340, "k")
    assert drawing is not None
    assert "mlp_input, layer 0: 10.0" in drawing
    assert "hidden" not in drawing  # an input that was always zero has no ratio
    assert input_outliers([LayerRecord(0, (), ())], 340, "k") is None
