"""One self-contained HTML page of a manifest: no network, no script, equal bytes for equal manifests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from qwen_quantize.report import expert_plots, plots
from qwen_quantize.report.experts import summarize_experts
from qwen_quantize.report.linears import Linear
from qwen_quantize.report.record import Manifest, read_manifest
from qwen_quantize.report.template import NARROW as _NARROW
from qwen_quantize.report.template import WIDE as _WIDE
from qwen_quantize.report.template import rendered

_WORST = 10
_MOST_STARVED = 40
_MOST_NOTES = 40
_MOST_LINEARS = 2000  # in the page's full table: a model with many experts has tens of thousands


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot in its two widths, or the sentence that stands in its place."""

    heading: str
    caption: str
    drawings: tuple[Markup, ...]
    absence: str


@dataclass(frozen=True, slots=True)
class Saving:
    """All linears of one kind together; `mean_saving` is the mean of each one's share."""

    kind: str
    count: int
    mean_error: float
    worst_error: float
    mean_saving: float | None


def render_page(manifest: Mapping[str, Any]) -> str:
    """The report of one `qwen_quantize.json`; every string in it is escaped.

    Absent parts (no validation, no calibration) become a sentence. Raises UserError, naming the field, where
    a value has the wrong type.
    """
    record = read_manifest(manifest)
    worst = record.worst_first
    listed = {linear.name for linear in worst[:_MOST_LINEARS]}
    return rendered(
        "page.html",
        m=record,
        v=record.validation,
        fidelity=(_sqnr_figure(record), _kl_figure(record)),
        numbers_figures=(_exponents_figure(record), _outliers_figure(record)),
        panels=_error_panels(record),
        experts=summarize_experts(record),
        expert_figures=_expert_figures(record),
        most_starved=_MOST_STARVED,
        most_notes=_MOST_NOTES,
        has_experts=any("*" in linear.kind for linear in record.linears),
        savings=kind_savings(record.linears),
        worst=worst[:_WORST],
        listed=[linear for linear in record.linears if linear.name in listed],
        solver_notes=record.solver_notes(),
        assumed={assumption.field: assumption for assumption in record.assumptions},
    )


def kind_savings(linears: tuple[Linear, ...]) -> list[Saving]:
    """One line per kind of linear, in order of appearance; linears without an error are left out."""
    kinds: dict[str, list[Linear]] = {}
    for linear in linears:
        if linear.error is not None:
            kinds.setdefault(linear.kind, []).append(linear)
    found = []
    for kind, members in kinds.items():
        errors = [linear.error for linear in members if linear.error is not None]
        shares = [linear.saving for linear in members if linear.saving is not None]
        mean = sum(shares) / len(shares) if shares else None
        found.append(Saving(kind, len(members), sum(errors) / len(errors), max(errors), mean))
    return found


def _figure(heading: str, caption: str, absence: str, wide: Markup | None, narrow: Markup | None) -> Figure:
    if wide is None or narrow is None:
        return Figure(heading, "", (), absence)
    return Figure(heading, caption, (wide, narrow), "")


def _sqnr_figure(record: Manifest) -> Figure:
    layers = record.validation.layers if record.validation else ()
    return _figure(
        "How the error builds up through the model",
        "Signal to quantization noise of the hidden states, quantized model against the original. Each "
        "layer adds its error to what arrives: a sudden drop points at the layer that causes it.",
        "After every layer the hidden states equal the original's exactly."
        if layers
        else "Not measured: hidden states were not compared with the original model.",
        plots.hidden_state_sqnr(layers, _WIDE, "sqnr-wide"),
        plots.hidden_state_sqnr(layers, _NARROW, "sqnr-narrow"),
    )


def _kl_figure(record: Manifest) -> Figure:
    measured = record.validation
    below = (
        " The first bar also holds all that is smaller." if measured and sum(measured.kl_counts[:1]) else ""
    )
    return _figure(
        "How far predictions move, token by token",
        f"Kullback-Leibler divergence of each predicted distribution from the original's.{below}",
        "Not measured: predictions were not compared with the original model.",
        plots.kl_histogram(measured, _WIDE, "kl-wide") if measured else None,
        plots.kl_histogram(measured, _NARROW, "kl-narrow") if measured else None,
    )


def _exponents_figure(record: Manifest) -> Figure:
    return _figure(
        "Scale exponents of the weights",
        "Weights that lie together share one scale. A tall column means that the weights of a layer differ much "
        "in size from one such region to the next.",
        "No linear in a layer was quantized with power-of-two scales.",
        plots.scale_exponents(record.layers, _WIDE, "exponents-wide"),
        plots.scale_exponents(record.layers, _NARROW, "exponents-narrow"),
    )


def _outliers_figure(record: Manifest) -> Figure:
    return _figure(
        "Input outliers",
        "Largest absolute input that calibration saw, over the root mean square of all inputs. High values "
        "are what makes activations hard to quantize.",
        "The calibration saw no input other than zero."
        if record.calibration
        else "Not measured: the model was quantized without calibration data.",
        plots.input_outliers(record.layers, _WIDE, "outliers-wide"),
        plots.input_outliers(record.layers, _NARROW, "outliers-narrow"),
    )


def _expert_figures(record: Manifest) -> tuple[Figure, ...]:
    """Empty for a model without routed experts, or about whose experts nothing is known."""
    experts, layers = record.experts, record.validation.layers if record.validation else ()
    tokens = _tokens_figure(record)
    agreement = _figure(
        "Do routers still choose the same experts?",
        "Of the experts that the original sends a token to, the share that the quantized model picks too. Where "
        "it falls, tokens visit other experts than the model was trained for.",
        "Not measured: the choices of the routers were not compared with the original model.",
        expert_plots.router_agreement(layers, _WIDE, "routers-wide"),
        expert_plots.router_agreement(layers, _NARROW, "routers-narrow"),
    )
    return (tokens, agreement) if experts or agreement.drawings else ()


def _tokens_figure(record: Manifest) -> Figure:
    experts = record.experts
    marks = (
        "A mark is an expert, in the order of their numbers."
        if expert_plots.drawn_one_by_one(experts)
        else "A line spans a layer's experts from fewest to most tokens, its box the middle half of them."
    )
    unreached = any(it.tokens == 0 for it in experts)
    return _figure(
        "How many tokens calibrate each expert",
        f"{marks} Below the dashed line an expert is starved: too few tokens for a calibration of its own."
        f"{' On the bottom axis there is none at all.' if unreached else ''}",
        "Not measured: calibration did not count the tokens of each expert."
        if record.calibration
        else "Not measured: the model was quantized without calibration data.",
        expert_plots.tokens_per_expert(experts, _WIDE, "experts-wide"),
        expert_plots.tokens_per_expert(experts, _NARROW, "experts-narrow"),
    )


def _error_panels(record: Manifest) -> list[Markup]:
    series = plots.worst_by_layer(record.linears)
    axes = plots.error_axes(series)
    if axes is None:
        return []
    label = f"relative squared {record.error_name} (log)"
    return [
        plots.linear_errors(kind, line, axes, label, f"linear-{index}")
        for index, (kind, line) in enumerate(series.items())
    ]
