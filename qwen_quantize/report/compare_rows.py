"""From what programs wrote (manifests, results of `eval`, `bench` and quantizing) to the rows of a comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import PurePath
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.report.compare import MeasuredOn, Row, Share
from qwen_quantize.report.fields import Fields
from qwen_quantize.report.record import Manifest, Measured, read_manifest, read_measured


class Kind(Enum):
    """What a JSON document is, by its keys; the value is for people."""

    MANIFEST = "the manifest of an output folder"
    EVAL = "a result of `eval --json`"
    BENCH = "a result of `bench --json`"
    QUANTIZE = "what quantizing printed with --json"


@dataclass(frozen=True, slots=True)
class Document:
    """One JSON document. path: as the user named it; model: the model's resolved place, by which documents meet.

    linear_bytes: for a manifest, what the quantized linears take in the files, None where those are not there.
    """

    path: str
    kind: Kind
    record: Mapping[str, Any]
    model: str
    linear_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a run that `eval --record` kept says of a whole text."""

    path: str
    model: str
    chip: str
    versions: Mapping[str, str]
    measured: MeasuredOn
    perplexity: float


def kind_of(record: Mapping[str, Any], path: str) -> Kind:
    """UserError for a document of any other kind."""
    if all(isinstance(record.get(key), Mapping) for key in ("tool", "chip", "source")):
        return Kind.MANIFEST
    if "decode_tokens_per_second" in record:
        return Kind.BENCH
    if "perplexity" in record and "text_sha256" in record:
        return Kind.EVAL
    if "output_path" in record and "validation" in record:
        return Kind.QUANTIZE
    known = ", ".join(kind.value for kind in Kind)
    raise UserError(f"{path} is none of what can be compared: {known}, or a run that `eval --record` kept")


def rows_of(documents: Sequence[Document], recorded: Sequence[Recorded] = ()) -> list[Row]:
    """A row for every measurement; an output folder whose model was measured apart has no row of its own.

    Size, chip and assumptions come from the manifest of the same model, speed and memory from its `bench` and its
    quantizing. UserError, naming the file, where a value has the wrong type.
    """
    rows: list[Row] = []
    for model in dict.fromkeys([it.model for it in documents] + [it.model for it in recorded]):
        own = [it for it in documents if it.model == model]
        start = _common_facts(model, own)
        evals = [_eval_row(start, it) for it in own if it.kind is Kind.EVAL]
        evals += [_recorded_row(start, it) for it in recorded if it.model == model]
        validation = next((row for it in own if (row := _validation_row(start, it)) is not None), None)
        if len(evals) > 1:
            evals = [replace(row, name=f"{start.name} ({PurePath(row.sources[-1]).stem})") for row in evals]
        rows += evals or [validation or start]
    return _told_apart(rows)


def _common_facts(model: str, documents: Sequence[Document]) -> Row:
    """What holds for all measurements of a model."""
    row = Row(PurePath(model).name or model, (), model=model)
    for it in documents:
        if it.kind is Kind.MANIFEST:
            row = _manifest_facts(row, it)
    for it in documents:
        fields = Fields(it.record, it.path)
        if it.kind is Kind.BENCH:
            row = replace(
                row,
                sources=(*row.sources, it.path),
                run_memory_bytes=_integer(fields, "peak_memory_bytes"),
                prefill_tokens_per_second=fields.number("prefill_tokens_per_second"),
                decode_tokens_per_second=fields.number("decode_tokens_per_second"),
            )
        elif it.kind is Kind.QUANTIZE:
            row = replace(
                row,
                sources=(*row.sources, it.path),
                chip=row.chip or fields.text("chip"),
                method=row.method or fields.text("method"),
                layout=row.layout or fields.text("layout"),
                output_bytes=row.output_bytes or _integer(fields, "output_bytes"),
                quantize_memory_bytes=_integer(fields, "peak_memory_bytes"),
            )
    return row


def _manifest_facts(row: Row, document: Document) -> Row:
    manifest, fields = _manifest(document), Fields(document.record, document.path)
    weights = sum(math.prod(linear.shape) for linear in manifest.linears if linear.shape)
    stored = document.linear_bytes
    return replace(
        row,
        sources=(*row.sources, document.path),
        chip=manifest.chip.name,
        versions=_versions(dict(manifest.chip.versions)),
        method=manifest.method,
        scheme=fields.record("scheme").text("name"),
        layout=manifest.layout,
        source_fingerprint=manifest.source_fingerprint,
        linear_bytes=stored,
        output_bytes=manifest.output_bytes or None,
        bits_per_weight=None if stored is None or not weights else 8 * stored / weights,
        assumptions=tuple(f"{it.field} = {it.assumed}" for it in manifest.assumptions),
    )


def _manifest(document: Document) -> Manifest:
    try:
        return read_manifest(document.record)
    except UserError as error:
        raise UserError(f"{document.path}: {error}") from None


def _validation_row(start: Row, document: Document) -> Row | None:
    """From the validation inside a manifest; None for any other document, and for an unvalidated folder."""
    if document.kind is not Kind.MANIFEST:
        return None
    validation = _manifest(document).validation
    return None if validation is None else _with_accuracy(start, validation)


def _eval_row(start: Row, document: Document) -> Row:
    fields = Fields(document.record, document.path)
    row = _with_accuracy(start, read_measured(fields))
    emulated, rounding = fields.text("chip"), fields.text("activation_rounding")
    if emulated and not emulated.startswith(f"{start.chip} (from the model's manifest"):
        row = replace(row, chip=f"{emulated}, casts {rounding}" if rounding else emulated, versions="")
    parts = fields.record("attribution")
    return replace(
        row,
        sources=(*row.sources, document.path),
        attribution=tuple(
            Share(it.text("part").replace("_", " "), it.number("nats"), it.number("standard_error"))
            for it in [*parts.records("parts"), *parts.records("interactions")]
        ),
    )


def _recorded_row(start: Row, run: Recorded) -> Row:
    """Only the perplexity: what the unquantized model says of each token is not in the file."""
    return replace(
        start,
        sources=(*start.sources, run.path),
        chip=run.chip or start.chip,
        versions=_versions(run.versions) or start.versions,
        measured=run.measured,
        perplexity=run.perplexity,
    )


def _with_accuracy(row: Row, found: Measured) -> Row:
    return replace(
        row,
        measured=MeasuredOn(found.text_sha256, found.tokens, found.windows, found.window_tokens, found.text),
        perplexity=found.perplexity,
        reference_perplexity=found.reference_perplexity,
        rise=found.rise,
        rise_standard_error=found.rise_standard_error,
        kl_mean=found.kl_mean,
        kl_p99=found.kl_p99,
        top1_agreement=found.top1_agreement,
    )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(versions.items()))


def _integer(fields: Fields, key: str) -> int | None:
    return fields.integer(key) if fields.has(key) else None


def _told_apart(rows: Sequence[Row]) -> list[Row]:
    """Rows of one name get as much of their model's path as tells them apart, at last a number."""
    found: list[Row] = []
    for row in rows:
        name, parts = row.name, PurePath(row.model).parts
        twins = [it for it in rows if it is not row and it.name == name]
        for depth in range(2, len(parts) + 1):
            if not any(PurePath(it.model).parts[-depth:] == parts[-depth:] for it in twins):
                name = str(PurePath(*parts[-depth:])) if twins else name
                break
        names = {it.name for it in found}
        count = 2
        while name in names:
            name, count = f"{row.name} #{count}", count + 1
        found.append(replace(row, name=name))
    return found
