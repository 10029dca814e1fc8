"""The options of `compare`; torch is imported only when it runs, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Json


def compare_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Output folders, files with what eval, bench or quantizing printed with --json, and runs "
            "recorded by eval --record."
        ),
    ],
    by: Annotated[
        str, typer.Option("--by", help="What matters: kl, size, speed or perplexity; the best comes first.")
    ] = "kl",
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the comparison with its plot as one page.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Results side by side. Exit code 1 where accuracy decides and was not measured alike."""
    with guard(as_json):
        from qwen_quantize.cli.compare import run_compare

        run_compare(runs, by, html, as_json=as_json)
