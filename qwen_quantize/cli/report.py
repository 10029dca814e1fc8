"""`qwen_quantize report`: the stored results of an output folder."""

from __future__ import annotations

from pathlib import Path

from qwen_quantize.cli.console import Speaker
from qwen_quantize.cli.session import REPORT_NAME, read_manifest
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.manifest import MANIFEST_NAME
from qwen_quantize.report.page import render_page
from qwen_quantize.report.tables import plain_lines, summary_tables


def run_report(output: Path, *, as_json: bool) -> None:
    speaker = Speaker(as_json, quiet=False)
    manifest = read_manifest(str(output))
    if manifest is None:
        raise UserError(f"{output} holds no readable {MANIFEST_NAME}; name a folder that this program wrote")
    page = output / REPORT_NAME
    temporary = output / f".{REPORT_NAME}.tmp"
    temporary.write_text(render_page(manifest), encoding="utf-8")
    temporary.replace(page)
    run = {"output_path": str(output)}
    speaker.show(summary_tables(manifest, run), plain_lines(manifest, run))
    speaker.say(f"report: {page}")
    speaker.result(manifest)
