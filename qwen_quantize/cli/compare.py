"""`qwen_quantize compare`: several results side by side, in the terminal and as one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from qwen_quantize.checkpoint.json_file import RECORD_BYTES, read_object
from qwen_quantize.checkpoint.safetensors_header import read_header
from qwen_quantize.cli.console import Speaker
from qwen_quantize.cli.session import read_manifest
from qwen_quantize.errors import UserError
from qwen_quantize.eval.perplexity import perplexity
from qwen_quantize.eval.recording import read_run
from qwen_quantize.pipeline.manifest import MANIFEST_NAME
from qwen_quantize.report.compare import (
    MeasuredOn,
    Order,
    compare,
    compare_lines,
    compare_tables,
    comparison_record,
    notes,
)
from qwen_quantize.report.compare_page import render_comparison
from qwen_quantize.report.compare_rows import Document, Kind, Recorded, kind_of, rows_of
from qwen_quantize.report.record import read_manifest as checked_manifest


def run_compare(runs: Sequence[Path], by: str, html: Path | None, *, as_json: bool) -> None:
    """UserError for what is no result, and for a page that would replace one of them."""
    try:
        order = Order(by)
    except ValueError:
        raise UserError(f"--by {by!r} is none of {', '.join(it.value for it in Order)}") from None
    if html is not None:
        _check_page(html, runs)
    documents, recorded = _read(runs)
    found = compare(rows_of(documents, recorded), order)
    speaker = Speaker(as_json, quiet=False)
    speaker.show(compare_tables(found, speaker.console.width), compare_lines(found))
    for note in notes(found):
        speaker.say(note)
    record = comparison_record(found)
    if html is not None:
        temporary = html.with_name(f".{html.name}.tmp")
        temporary.write_text(render_comparison(found), encoding="utf-8")
        temporary.replace(html)
        speaker.say(f"page: {html}")
        record["html"] = str(html)
    speaker.result(record)
    if not found.comparable and order in (Order.KL, Order.PERPLEXITY):
        raise typer.Exit(1)


def _check_page(html: Path, runs: Sequence[Path]) -> None:
    if html.is_dir() or html.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html {html}: name a file that ends in .html")
    if not html.parent.is_dir():
        raise UserError(f"--html {html}: there is no folder {html.parent}; make it first")
    if any(run.resolve() == html.resolve() for run in runs):
        raise UserError(f"--html {html} is one of the results; name another file")


def _read(runs: Sequence[Path]) -> tuple[list[Document], list[Recorded]]:
    """(documents, recorded runs). A folder that a result of `eval` or `bench` is of comes with it, if it is here."""
    documents: list[Document] = []
    recorded: list[Recorded] = []
    wanted: list[str] = []
    for run in dict.fromkeys(runs):
        if run.is_dir():
            documents.append(_folder(run))
        elif run.suffix == ".safetensors":
            recorded.append(_recorded(run))
            wanted.append(recorded[-1].model)
        elif not run.exists():
            raise UserError(f"{run} is not there; name an output folder or a file with a result")
        elif run.name == MANIFEST_NAME:
            documents.append(_folder(run.parent))
        else:
            record = read_object(run, RECORD_BYTES)
            kind = kind_of(record, str(run))
            key = "output_path" if kind is Kind.QUANTIZE else "model"
            model = (
                str(Path(str(record.get(key))).resolve()) if kind is not Kind.MANIFEST else str(run.resolve())
            )
            documents.append(Document(str(run), kind, record, model))
            wanted.append(model)
    known = {it.model for it in documents if it.kind is Kind.MANIFEST}
    for model in dict.fromkeys(wanted):
        if model not in known and (Path(model) / MANIFEST_NAME).is_file():
            documents.append(_folder(Path(model)))
    return documents, recorded


def _folder(folder: Path) -> Document:
    manifest = read_manifest(str(folder))
    if manifest is None:
        raise UserError(f"{folder} holds no {MANIFEST_NAME}; name a folder that this program wrote")
    return Document(
        str(folder), Kind.MANIFEST, manifest, str(folder.resolve()), linear_bytes(folder, manifest)
    )


def linear_bytes(folder: Path, manifest: Mapping[str, Any]) -> int | None:
    """What the quantized linears take in the folder's safetensors files, scales included; None where any is missing."""
    names = {linear.name for linear in checked_manifest(manifest).linears}
    seen: set[str] = set()
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        for name, stored in read_header(file).tensors.items():
            linear = name.rpartition(".")[0]
            if linear in names:
                seen.add(linear)
                total += stored.info.nbytes
    return total if names and seen == names else None


def _recorded(path: Path) -> Recorded:
    run = read_run(path)
    scores, about = run.scores, run.about
    measured = MeasuredOn(about.text_sha256, scores.tokens, scores.windows, scores.window_tokens, about.text)
    return Recorded(
        str(path),
        str(Path(about.model).resolve()),
        about.chip or "",
        about.versions,
        measured,
        perplexity(-scores.log_probability.double()),
    )
