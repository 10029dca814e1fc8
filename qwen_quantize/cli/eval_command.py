"""The options of `qwen_quantize eval`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import (
    Assume,
    Driver,
    Firmware,
    Importance,
    Json,
    KvCache,
    Measured,
    Quiet,
    Threads,
    Toolkit,
    Verbose,
    pairs,
    refuse_given,
    version_pairs,
    weighed,
)

_TASKS_ONLY = ("limit", "fewshot", "chat", "tasks_folder")
_TEXT_ONLY = ("text", "max_tokens", "length", "attribute")


def eval_command(
    context: typer.Context,
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
        typer.Option(
            "--record",
            help="Keep what the model said of every token in this .safetensors file; with --tasks, its answers in "
            "this .json file.",
        ),
    ] = None,
    attribute: Annotated[
        bool,
        typer.Option(
            "--attribute",
            help="Split the loss among weights, activations, scale rounding and the chip's sums.",
        ),
    ] = False,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="Ask tasks instead of scoring a text: heldout, or names of lm-evaluation-harness, e.g. mmlu,gsm8k. "
            "--against may then name a run that --record kept.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Items of each task.")] = None,
    fewshot: Annotated[int | None, typer.Option("--fewshot", min=0, help="Examples in each prompt.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask tasks in the model's chat template.")] = False,
    tasks_folder: Annotated[
        Path | None, typer.Option("--tasks-folder", help="Folder of your own lm-evaluation-harness tasks.")
    ] = None,
    kv_cache: KvCache = None,
    importance: Importance = None,
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
    """Perplexity of a model and, against a reference, KL, top-1 agreement and error per layer; or answers to tasks."""
    with guard(as_json):
        if tasks is None:
            refuse_given(context, "a text (they need --tasks)", _TASKS_ONLY, others=False)
        else:
            refuse_given(context, "--tasks", _TEXT_ONLY, others=False)
        from qwen_quantize.chip_profiles.measured import device_with_layer
        from qwen_quantize.cli.evaluate import EvalRequest, run_eval

        if measured is not None:
            device = device_with_layer(device, measured)
        request = EvalRequest(
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
            kv_cache=weighed(kv_cache, importance),
        )
        if tasks is None:
            run_eval(request, threads=threads, as_json=as_json, quiet=quiet, verbose=verbose)
        else:
            from qwen_quantize.cli.tasks import TaskOptions, parse_names, run_tasks

            options = TaskOptions(parse_names(tasks), limit, fewshot, chat, tasks_folder)
            run_tasks(request, options, threads=threads, as_json=as_json, quiet=quiet, verbose=verbose)
