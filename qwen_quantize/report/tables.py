"""What a terminal shows of a run or a comparison: rich tables for people, plain lines for a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from qwen_quantize.report.experts import coverage_words
from qwen_quantize.report.fields import Fields
from qwen_quantize.report.linears import Linear
from qwen_quantize.report.numbers import (
    decibels,
    duration,
    human_bytes,
    human_count,
    percent,
    scientific,
    significant,
)
from qwen_quantize.report.record import Manifest, Measured, read_manifest, read_measured

Fact = tuple[str, str]

_WORST = 5
_NOTES = 8  # a terminal shows the first ones and says how many more the report has


def summary_tables(manifest: Mapping[str, Any], run: Mapping[str, Any]) -> list[Table]:
    """What was made, what it is worth, the worst linears, what was assumed; made for 80 columns.

    run: seconds, stages, peak_memory_bytes, output_path and speeds, each of which may be absent. Raises
    UserError, naming the field, for a value of the wrong type.
    """
    record = read_manifest(manifest)
    tables = [
        _facts_table("What was made", _made(record, Fields(run, "run"))),
        _facts_table("What it costs", _validation(record)),
    ]
    worst = record.worst_first[:_WORST]
    if worst:
        tables.append(_linears_table(f"Worst linears by {record.error_name}", worst))
    caveats = _caveats(record)
    if caveats:
        tables.append(_facts_table("What to know", caveats))
    return tables


def plain_lines(manifest: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """The same facts as `summary_tables`, one `name: value` a line, without colours or padding."""
    record = read_manifest(manifest)
    lines = _lines(_made(record, Fields(run, "run")) + _validation(record))
    for linear in record.worst_first[:_WORST]:
        removed = f", {percent(linear.saving, 1)} removed" if linear.saving is not None else ""
        lines.append(
            f"worst linear: {linear.name}, {record.error_name} {scientific(linear.error)}, "
            f"round to nearest {scientific(linear.baseline_error)}{removed}"
        )
    return lines + _lines(_caveats(record))


def comparison_tables(record: Mapping[str, Any]) -> list[Table]:
    """The record of `eval`: a model measured on a text, perhaps against another."""
    return [_facts_table("Evaluation", _comparison(Fields(record)))]


def comparison_lines(record: Mapping[str, Any]) -> list[str]:
    """The same facts as `comparison_tables`, one a line."""
    return _lines(_comparison(Fields(record)))


def _made(record: Manifest, run: Fields) -> list[Fact]:
    chip = " ".join((record.chip.name, *(f"{name} {value}" for name, value in record.chip.versions)))
    smaller = f", {significant(record.compression)} times smaller" if record.compression else ""
    block = f" in blocks of {_shape(record.block)}" if record.block and not record.region else ""
    scale = f", {record.scale_format} scales" if record.scale_format else ""
    scale += f" {record.region}" if scale and record.region else ""
    facts = [
        ("model", f"{record.model_name}, {record.architecture}, {human_count(record.parameters)} parameters"),
        ("chip", f"{chip} ({record.chip.why})" if record.chip.why else chip),
        ("method", f"{record.method}: {record.weight_format} weights{block}{scale}"),
        ("activations", record.activation_format or "not quantized"),
        ("layout", record.layout),
        ("size", f"{human_bytes(record.source_bytes)} -> {human_bytes(record.output_bytes)}{smaller}"),
        ("tensors", f"{record.quantized:,} quantized, {record.kept:,} kept, {record.dropped:,} dropped"),
    ]
    if record.calibration is None:
        facts.append(("calibration", "none: scales were searched on the weights alone"))
    else:
        data = record.calibration
        facts.append(("calibration", f"{data.tokens:,} tokens of {data.dataset or 'the embedded text'}"))
    if record.experts:
        facts.append(("experts", coverage_words(record.experts)))
    if run.has("output_path"):
        facts.append(("written to", run.text("output_path")))
    return facts + _resources(run)


def _resources(run: Fields) -> list[Fact]:
    facts = []
    seconds = run.number("seconds")
    if seconds is not None:
        stages = run.record("stages")
        parts = ", ".join(f"{name} {duration(stages.number(name) or 0.0)}" for name in stages.values)
        facts.append(("time", duration(seconds) + (f" ({parts})" if parts else "")))
    if run.has("peak_memory_bytes"):
        facts.append(("peak memory", human_bytes(run.integer("peak_memory_bytes"))))
    for key, name in (("prefill_tokens_per_second", "prefill"), ("decode_tokens_per_second", "decode")):
        speed = run.number(key)
        if speed is not None:
            facts.append((name, f"{significant(speed)} tokens/s"))
    return facts


def _validation(record: Manifest) -> list[Fact]:
    if record.validation is None:
        return [("validation", "not measured: nothing is known about the quality of this model")]
    facts = _measured(record.validation)
    only = record.weights_only
    if only is not None:
        facts.append(("weights only", f"perplexity {_perplexity(only)}"))
    return facts


def _measured(measured: Measured) -> list[Fact]:
    facts = [("perplexity", _perplexity(measured))]
    if measured.kl_mean is not None:
        quantiles = (("median", measured.kl_p50), ("p90", measured.kl_p90), ("p99", measured.kl_p99))
        listed = "".join(f", {name} {significant(value)}" for name, value in quantiles if value is not None)
        facts.append(("KL divergence", f"mean {significant(measured.kl_mean)}{listed} (nats)"))
    if measured.top1_agreement is not None:
        facts.append(("same top-1", percent(measured.top1_agreement)))
    if measured.layers:
        last, worst = measured.layers[-1], min(measured.layers, key=lambda it: it.sqnr_db)
        words = f"{decibels(last.sqnr_db, unit=True)} after the last layer"
        if worst.sqnr_db < last.sqnr_db:
            words += f", lowest {decibels(worst.sqnr_db, unit=True)} after layer {worst.layer}"
        facts.append(("hidden states", words))
    if measured.router_agreement is not None:
        words, least = percent(measured.router_agreement), measured.least_agreeing
        if least is not None:
            words += f", lowest {percent(least.router_agreement)} in layer {least.layer}"
        facts.append(("router agreement", words))
    where, plural = f" of {measured.text}" if measured.text else "", "" if measured.windows == 1 else "s"
    facts.append(("measured on", f"{measured.tokens:,} tokens in {measured.windows:,} window{plural}{where}"))
    if measured.verdict:
        facts.append(("verdict", measured.verdict))
    return facts


def _perplexity(measured: Measured) -> str:
    words = significant(measured.perplexity, 4)
    if measured.reference_perplexity is not None:
        words += f", original {significant(measured.reference_perplexity, 4)}"
    if measured.rise is not None:
        words += f": {percent(measured.rise, signed=True)}"
        if measured.rise_standard_error is not None:
            words += f" ± {percent(measured.rise_standard_error)}"
    return words


def _comparison(fields: Fields) -> list[Fact]:
    facts = [("model", fields.text("model"))] if fields.has("model") else []
    if fields.has("model") or fields.has("against"):
        facts.append(("compared with", fields.text("against") or "nothing"))
    if fields.has("chip"):
        rounding = fields.text("activation_rounding")
        facts.append(("chip", fields.text("chip") + (f", activations cast {rounding}" if rounding else "")))
    return facts + _measured(read_measured(fields)) + _resources(fields)


def _caveats(record: Manifest) -> list[Fact]:
    facts = [
        ("set by hand" if it.by_user else "assumed", f"{it.field} = {it.assumed}: {it.why}")
        for it in record.assumptions
    ]
    facts += [("note", note) for note in record.notes[:_NOTES]]
    if len(record.notes) > _NOTES:
        facts.append(("note", f"{len(record.notes) - _NOTES} more stand in the report"))
    solver = record.solver_notes()
    for note, count, first in solver[:_NOTES]:
        where = f"{count} linears, first {first}" if count > 1 else first
        facts.append(("solver", f"{note} ({where})"))
    if len(solver) > _NOTES:
        facts.append(("solver", f"{len(solver) - _NOTES} more notes stand in the report"))
    return facts


def _facts_table(title: str, facts: Iterable[Fact]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.HORIZONTALS,
        show_header=False,
        pad_edge=False,
        expand=True,
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for name, value in facts:
        table.add_row(name, Text(value))  # Text, not str: brackets in a name are no markup
    return table


def _linears_table(title: str, linears: Iterable[Linear]) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.HORIZONTALS,
        pad_edge=False,
        expand=True,
    )
    table.add_column("layer", justify="right")
    table.add_column("linear", overflow="fold", ratio=1)
    for name in ("shape", "error", "nearest", "removed"):
        table.add_column(name, justify="right", no_wrap=True)
    for it in linears:
        table.add_row(
            "-" if it.layer is None else str(it.layer),
            Text(it.place),
            _shape(it.shape),
            scientific(it.error),
            scientific(it.baseline_error),
            percent(it.saving, 1),
        )
    return table


def _lines(facts: Iterable[Fact]) -> list[str]:
    return [f"{name}: {value}" for name, value in facts]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(str(size) for size in shape)
