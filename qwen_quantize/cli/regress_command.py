"""The options of `qwen_quantize regress`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Json, Quiet, Threads


def regress_command(
    model: Annotated[str, typer.Argument(help="A quantized model folder.")],
    before: Annotated[
        str,
        typer.Option(
            "--before",
            help="The arithmetic as it was: CHIP@VERSION, a profile or fingerprint file, an output folder, "
            "or a run recorded by eval --record.",
        ),
    ],
    after: Annotated[str, typer.Option("--after", help="The arithmetic as it is now, named likewise.")],
    text: Annotated[
        str | None, typer.Option("--text", help="Text, jsonl or dataset (default: a shipped novel).")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=32, help="Tokens to score.")] = 51200,
    margin: Annotated[
        str, typer.Option("--margin", help="Loss of perplexity that still counts as harmless.")
    ] = "0.5%",
    with_claims: Annotated[bool, typer.Option("--with-claims", help="Use trade-press claims.")] = False,
    junit: Annotated[
        Path | None, typer.Option("--junit", help="Write the checks as JUnit XML to this file.")
    ] = None,
    recalibrate: Annotated[
        Path | None,
        typer.Option(
            "--recalibrate", help="Where it hurts, quantize again for --after into this new folder."
        ),
    ] = None,
    calibration_dataset: Annotated[
        str | None,
        typer.Option("--calibration-dataset", help="Text to recalibrate on (default: the manifest's)."),
    ] = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """What changed in a chip's arithmetic, whether it hurts this model, and what to do. Exit code 1: it does."""
    with guard(as_json):
        from qwen_quantize.cli.regress import RegressRequest, parse_margin, run_regress

        run_regress(
            RegressRequest(
                model=model,
                before=before,
                after=after,
                text=text,
                max_tokens=max_tokens,
                margin=parse_margin(margin),
                with_claims=with_claims,
                junit=junit,
                recalibrate=recalibrate,
                dataset=calibration_dataset,
            ),
            threads=threads,
            as_json=as_json,
            quiet=quiet,
        )
