"""`qwen_quantize check`: a folder held against the contract of the engines that will load it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from qwen_quantize.checkpoint.contract import CheckReport, Served, check_folder
from qwen_quantize.checkpoint.contract_weights import DEFAULT_LIMIT
from qwen_quantize.checkpoint.finding import Finding
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.console import Speaker
from qwen_quantize.errors import UserError
from qwen_quantize.report.numbers import human_bytes

_SHOWN = 50  # findings in a table; --json has all


def run_check(
    folder: Path,
    engine: str | None,
    shards: int,
    device: str | None,
    *,
    all_weights: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the findings; exit code 1 where there is one."""
    chip = family = None
    if device is not None:
        profile = load_profile(device)
        chip, family = profile.name, profile.chip.family
    limit = None if all_weights else DEFAULT_LIMIT
    report = check_folder(folder, Served(engine, shards, chip, family, limit))
    speaker = Speaker(as_json, quiet)
    shown = report.findings[:_SHOWN]
    speaker.show([_table(shown)] if shown else [], [_line(finding) for finding in shown])
    if len(report.findings) > _SHOWN:
        speaker.say(f"and {len(report.findings) - _SHOWN} more; --json prints them all")
    speaker.say(summary(report))
    speaker.result(report.record())
    if report.findings:
        raise typer.Exit(1)


def summary(report: CheckReport) -> str:
    """One sentence: what was checked, for whom, and what was found."""
    readers = (
        ", ".join(f"{engine.name} {engine.tested}" for engine in report.engines) or "no engine in particular"
    )
    unread = ""
    if report.weight_bytes_read < report.weight_bytes:
        unread = (
            f"; of {human_bytes(report.weight_bytes)} of codes {human_bytes(report.weight_bytes_read)} were read "
            "(--all-weights reads all)"
        )
    warnings = len(report.findings) - report.errors
    found = f"{report.errors} errors, {warnings} warnings" if report.findings else "nothing to object to"
    return f"check: {report.tensors} tensors in layout {report.layout}, for {readers}: {found}{unread}"


def check_written(folder: Path, speaker: Speaker) -> dict[str, Any]:
    """Check a folder that was just written, for the readers of its layout; what is found is said, not raised."""
    try:
        report = check_folder(folder)
    except UserError as error:  # the weights are written: a check that cannot be made does not undo them
        speaker.say(f"check: not made: {error}")
        return {"findings": [], "not_made": str(error)}
    for finding in report.findings[:_SHOWN]:
        speaker.say(f"check: {_line(finding)}")
    speaker.say(summary(report))
    return report.record()


def _line(finding: Finding) -> str:
    engine = f" [{finding.engine}]" if finding.engine else ""
    return (
        f"{finding.severity.value}{engine} {finding.rule}: {finding.tensor}: {finding.message}; to mend it: "
        f"{finding.remedy}"
    )


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table("", "rule", "tensor or file", "what happens", "how to mend it")
    for finding in findings:
        engine = f" ({finding.engine})" if finding.engine else ""
        colour = "red" if finding.severity.value == "error" else "yellow"
        cells = (finding.rule + engine, finding.tensor, finding.message, finding.remedy)
        # Text, so that brackets of shapes are not taken for markup.
        table.add_row(Text(finding.severity.value, style=colour), *(Text(cell) for cell in cells))
    return table
