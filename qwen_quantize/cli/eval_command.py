"""The options of `qwen_quantize eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import (
    Assume,
    Driver,
    Firmware,
    Json,
    KvCache,
    Measured,
    Quiet,
    Threads,
    Toolkit,
    Verbose,
    pairs,
    version_pairs,
)


def eval_command(
    model: Annotated[str, typer.Argument(help="Model folder, GGUF file or hub id.")],
    against: Annotated[
        str | None,
        typer.Option(
            "--against", help="Reference model (default: the source in the model's manifest; or none)."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Chip whose arithmetic is emulated (default: the manifest's)."),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", help="Text, jsonl or dataset (default: a shipped novel).")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=32, help="Tokens to score.")] = 20480,
    length: Annotated[
        int | None, typer.Option("--length", min=16, help="Tokens per window (default: 2048).")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave activations in full precision.")
    ] = False,
    record: Annotated[
        str | None,
        typer.Option("--record", help="Keep what the model said of every token in this .safetensors file."),
    ] = None,
    attribute: Annotated[
        bool,
        typer.Option(
            "--attribute",
            help="Split the loss among weights, activations, scale rounding and the chip's sums.",
        ),
    ] = False,
    kv_cache: KvCache = None,
    firmware: Firmware = None,
    driver: Driver = None,
    toolkit: Toolkit = None,
    measured: Measured = None,
    assume: Assume = None,
    with_claims: Annotated[bool, typer.Option("--with-claims", help="Use trade-press claims.")] = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Perplexity of a model and, against a reference, KL, top-1 agreement and error per layer."""
    with guard(as_json):
        from qwen_quantize.chip_profiles.measured import device_with_layer
        from qwen_quantize.cli.evaluate import EvalRequest, run_eval

        if measured is not None:
            device = device_with_layer(device, measured)
        run_eval(
            EvalRequest(
                model=model,
                against=against,
                device=device,
                text=text,
                max_tokens=max_tokens,
                length=length,
                weights_only=weights_only,
                versions=version_pairs(firmware, driver, toolkit),
                assume=pairs(assume, "--assume"),
                with_claims=with_claims,
                record=record,
                attribute=attribute,
                kv_cache=kv_cache,
            ),
            threads=threads,
            as_json=as_json,
            quiet=quiet,
            verbose=verbose,
        )
