"""The options of `qwen_quantize check`. Nothing heavy is imported before the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Json


def check_command(
    folder: Annotated[Path, typer.Argument(help="A quantized model folder, or a .gguf file.")],
    engine: Annotated[
        str | None,
        typer.Option(
            "--engine",
            help="vllm, sglang, transformers, vllm-ascend, llama.cpp or lmdeploy (default: the layout's readers).",
        ),
    ] = None,
    shards: Annotated[
        int, typer.Option("--tp", min=1, max=4096, help="Devices that will share the model.")
    ] = 1,
    device: Annotated[
        str | None, typer.Option("--device", help="Chip that it will be served on; see `chips list`.")
    ] = None,
    all_weights: Annotated[
        bool,
        typer.Option(
            "--all-weights",
            help="Read every weight for NaN codes (default: the first GiB), and hold it against the manifest.",
        ),
    ] = False,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No table, only the exit code.")] = False,
) -> None:
    """Whether an engine will load the folder, tensor by tensor. Exit code 1: there are findings."""
    with guard(as_json):
        from qwen_quantize.cli.check import run_check

        run_check(folder, engine, shards, device, all_weights=all_weights, as_json=as_json, quiet=quiet)
