"""The options of `probe`; torch is imported only when it runs, so that `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Json, Quiet, Threads


def probe_command(
    on: Annotated[
        str,
        typer.Option("--on", help="cpu, cuda:0, npu:0, mlu:0, musa:0, gcu:0, or emulated:CHIP[@VERSION]."),
    ] = "cpu",
    output: Annotated[
        Path | None, typer.Option("--output", help="Write the measured facts to this .toml file.")
    ] = None,
    fingerprint: Annotated[
        Path | None,
        typer.Option("--fingerprint", help="Write the fingerprint for regress to this .json file."),
    ] = None,
    chip: Annotated[
        str | None, typer.Option("--chip", help="The chip that the device is; its profile gets the facts.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer products and a smaller corpus.")] = False,
    with_claims: Annotated[bool, typer.Option("--with-claims", help="Use trade-press claims.")] = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find out how a device rounds, saturates and adds up, through ordinary torch calls."""
    with guard(as_json):
        from qwen_quantize.cli.probe import ProbeRequest, run_probe

        run_probe(
            ProbeRequest(on, output, fingerprint, chip, quick, with_claims),
            threads=threads,
            as_json=as_json,
            quiet=quiet,
        )
