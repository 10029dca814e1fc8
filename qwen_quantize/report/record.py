"""The manifest and the validation record as frozen, checked records: all that the report knows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from qwen_quantize.report.fields import Fields
from qwen_quantize.report.linears import Linear, read_linear


@dataclass(frozen=True, slots=True)
class StreamInput:
    """What calibration saw at one input of a layer."""

    stream: str
    tokens: int
    amax: float | None
    rms: float | None
    outlier_ratio: float | None

    @property
    def crest(self) -> float | None:
        """amax / rms over all features; None for an input that was always zero."""
        if self.amax is None or not self.rms or not math.isfinite(self.rms):
            return None
        return self.amax / self.rms


@dataclass(frozen=True, slots=True)
class Expert:
    """How calibration reached one routed expert; policy: what its linears were calibrated on."""

    layer: int
    expert: int
    tokens: int
    needed: int
    policy: str

    @property
    def starved(self) -> bool:
        return self.tokens < self.needed


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """experts: empty for a dense layer, without calibration, and in older manifests."""

    layer: int
    linears: tuple[Linear, ...]
    streams: tuple[StreamInput, ...]
    experts: tuple[Expert, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerFidelity:
    """Hidden states after a layer against the reference's; sqnr_db is infinite where they are equal.

    router_agreement: the share of the reference's experts that are chosen too; None without routed experts.
    """

    layer: int
    sqnr_db: float
    cosine: float | None
    router_agreement: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """A model measured on a text; what needs a reference is None without one."""

    text: str
    text_sha256: str
    tokens: int
    windows: int
    window_tokens: int
    perplexity: float | None
    reference_perplexity: float | None
    rise: float | None
    rise_standard_error: float | None
    kl_mean: float | None
    kl_p50: float | None
    kl_p90: float | None
    kl_p99: float | None
    kl_max: float | None
    top1_agreement: float | None
    layers: tuple[LayerFidelity, ...]
    kl_edges: tuple[float, ...]
    kl_counts: tuple[int, ...]
    router_agreement: float | None = None

    @property
    def least_agreeing(self) -> LayerFidelity | None:
        """The layer whose router changes its choice most; the first of several."""
        routed = [layer for layer in self.layers if layer.router_agreement is not None]
        return min(routed, key=lambda it: it.router_agreement or 0.0) if routed else None

    @property
    def verdict(self) -> str:
        """What the rise means beside its own standard error, in one sentence; empty when unknown."""
        rise, error = self.rise, self.rise_standard_error
        if rise is None or error is None:
            return ""
        if rise == 0 and error == 0:
            return "Every token costs the same as before."
        if abs(rise) <= 2 * error:
            return "The change is within two standard errors: on this text it cannot be told from zero."
        way = "rise" if rise > 0 else "fall"
        return f"The {way} is more than two standard errors, so chance alone is an unlikely cause."


@dataclass(frozen=True, slots=True)
class Assumption:
    field: str
    assumed: str
    why: str

    @property
    def by_user(self) -> bool:
        return self.why.startswith("set by the user")


@dataclass(frozen=True, slots=True)
class Calibration:
    dataset: str
    windows: int
    length: int
    tokens: int
    sha256: str
    note: str


@dataclass(frozen=True, slots=True)
class Chip:
    name: str
    vendor: str
    asked: str
    why: str
    versions: tuple[tuple[str, str], ...]
    fingerprint: str
    arithmetic: tuple[tuple[str, str], ...]  # (field, value); fields as the assumptions name them


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything that `qwen_quantize.json` says and the report shows."""

    tool: str
    source_path: str
    source_kind: str
    architecture: str
    source_fingerprint: str
    parameters: int
    chip: Chip
    method: str
    layout: str
    block: tuple[int, ...]
    weight_format: str
    activation_format: str
    scale_format: str
    region: str  # the weights that share a scale, in words
    calibration: Calibration | None
    assumptions: tuple[Assumption, ...]
    notes: tuple[str, ...]
    quantized: int
    kept: int
    dropped: int
    output_bytes: int
    source_bytes: int
    layers: tuple[LayerRecord, ...]
    head: tuple[Linear, ...]
    validation: Measured | None
    weights_only: Measured | None

    @property
    def model_name(self) -> str:
        return PurePath(self.source_path).name or "embedded model"

    @property
    def compression(self) -> float | None:
        return self.source_bytes / self.output_bytes if self.output_bytes else None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(linear for layer in self.layers for linear in layer.linears) + self.head

    @property
    def experts(self) -> tuple[Expert, ...]:
        return tuple(expert for layer in self.layers for expert in layer.experts)

    @property
    def worst_first(self) -> list[Linear]:
        """By error, then by name; a linear without an error comes last."""
        return sorted(self.linears, key=lambda it: (-(it.error if it.error is not None else -1.0), it.name))

    @property
    def error_name(self) -> str:
        """What `error` measures: without calibration data it is the weights' own."""
        return "output error" if self.calibration else "weight error"

    def solver_notes(self) -> list[tuple[str, int, str]]:
        """(note, how many linears say so, the first of them), in order of appearance."""
        found: dict[str, list[str]] = {}
        for linear in self.linears:
            for note in linear.notes:
                found.setdefault(note, []).append(linear.name)
        return [(note, len(names), names[0]) for note, names in found.items()]


def read_manifest(manifest: Mapping[str, Any]) -> Manifest:
    """Absent parts become None or empty; a value of the wrong type is a UserError that names its field."""
    top = Fields(manifest)
    tool, source, scheme, tensors = (top.record(k) for k in ("tool", "source", "scheme", "tensors"))
    validation = top.record("validation")
    return Manifest(
        tool=f"{tool.text('name')} {tool.text('version')}".strip(),
        source_path=source.text("path"),
        source_kind=source.text("kind"),
        architecture=source.text("architecture"),
        source_fingerprint=source.text("fingerprint"),
        parameters=source.integer("parameters", 0),
        chip=_chip(top.record("chip")),
        method=top.text("method"),
        layout=top.text("layout"),
        block=top.integers("block"),
        weight_format=scheme.text("weight"),
        activation_format=scheme.text("activation"),
        scale_format=scheme.text("scale"),
        region=scheme.text("region"),
        calibration=_calibration(top.record("calibration")) if top.has("calibration") else None,
        assumptions=tuple(
            Assumption(one.text("field"), one.text("assumed"), one.text("why"))
            for one in top.records("assumptions")
        ),
        notes=top.texts("notes"),
        quantized=tensors.integer("quantized", 0),
        kept=tensors.integer("kept", 0),
        dropped=tensors.integer("dropped", 0),
        output_bytes=top.integer("output_bytes", 0),
        source_bytes=top.integer("source_bytes", 0),
        layers=tuple(_layer(one) for one in top.records("layers")),
        head=tuple(read_linear(one, None) for one in top.records("head")),
        validation=read_measured(validation) if top.has("validation") else None,
        weights_only=read_measured(validation.record("weights_only"))
        if validation.has("weights_only")
        else None,
    )


def read_measured(fields: Fields) -> Measured:
    """The record of `eval`, or of the validation inside a manifest."""
    return Measured(
        text=fields.text("text"),
        text_sha256=fields.text("text_sha256"),
        tokens=fields.integer("tokens", 0),
        windows=fields.integer("windows", 0),
        window_tokens=fields.integer("window_tokens", 0),
        perplexity=fields.number("perplexity"),
        reference_perplexity=fields.number("reference_perplexity"),
        rise=fields.number("rise"),
        rise_standard_error=fields.number("rise_standard_error"),
        kl_mean=fields.number("kl_mean"),
        kl_p50=fields.number("kl_p50"),
        kl_p90=fields.number("kl_p90"),
        kl_p99=fields.number("kl_p99"),
        kl_max=fields.number("kl_max"),
        top1_agreement=fields.number("top1_agreement"),
        layers=tuple(_fidelity(one) for one in fields.records("layers")),
        kl_edges=fields.numbers("kl_edges"),
        kl_counts=fields.integers("kl_counts"),
        router_agreement=fields.number("router_agreement"),
    )


def _chip(chip: Fields) -> Chip:
    # Older manifests list only the cast, the rule and the accumulator; the names are the assumptions' own.
    arithmetic = chip.pairs("arithmetic") or (
        *((f"cast.{name}", value) for name, value in chip.pairs("activation_cast")),
        ("scale.rule", chip.text("activation_scale_rule")),
        ("accumulator.format", chip.text("accumulator")),
    )
    return Chip(
        chip.text("name"),
        chip.text("vendor"),
        chip.text("asked"),
        chip.text("why"),
        chip.pairs("versions"),
        chip.text("fingerprint"),
        tuple((name, value) for name, value in arithmetic if value),
    )


def _calibration(fields: Fields) -> Calibration:
    return Calibration(
        fields.text("dataset"),
        fields.integer("windows", 0),
        fields.integer("length", 0),
        fields.integer("tokens", 0),
        fields.text("sha256"),
        fields.text("note"),
    )


def _layer(fields: Fields) -> LayerRecord:
    layer = fields.integer("layer")
    return LayerRecord(
        layer,
        tuple(read_linear(one, layer) for one in fields.records("linears")),
        tuple(
            StreamInput(
                one.text("stream"),
                one.integer("tokens", 0),
                one.number("amax"),
                one.number("rms"),
                one.number("outlier_ratio"),
            )
            for one in fields.records("streams")
        ),
        tuple(
            Expert(
                layer,
                one.integer("expert"),
                one.integer("tokens"),
                one.integer("needed", 0),
                one.text("policy"),
            )
            for one in fields.records("experts")
        ),
    )


def _fidelity(fields: Fields) -> LayerFidelity:
    sqnr = fields.number("sqnr_db")
    return LayerFidelity(
        fields.integer("layer"),
        math.inf if sqnr is None else sqnr,
        fields.number("cosine"),
        fields.number("router_agreement"),
    )
