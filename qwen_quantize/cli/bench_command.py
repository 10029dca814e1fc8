"""The options of `qwen_quantize bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import (
    CacheLayoutName,
    CacheMemory,
    ContextLength,
    Fast,
    Json,
    KvCache,
    Quiet,
    Threads,
    parse_size,
)


def bench_command(
    model: Annotated[str | None, typer.Argument(help="Model (default: the embedded one).")] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 64,
    kv_cache: KvCache = None,
    cache_memory: CacheMemory = None,
    cache_layout: CacheLayoutName = None,
    context: ContextLength = None,
    load: Annotated[
        str, typer.Option("--load", help="Loads to run: A (batch 16), B (long context), C (chat); e.g. A,C.")
    ] = "",
    scale: Annotated[float, typer.Option("--scale", min=1e-4, help="Makes the loads' sizes smaller.")] = 1.0,
    fast: Fast = False,
    head: Annotated[str, typer.Option("--head", help="The output head: stored, or int8.")] = "stored",
    device: Annotated[str, typer.Option("--device", help="A device of torch: cpu, cuda, npu, ...")] = "cpu",
    model_of: Annotated[
        str | None, typer.Option("--model-of", help="Also print the bound by this chip's profile.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page of the results here.")] = None,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Speed and memory of the bundled engine on this machine."""
    with guard(as_json):
        from qwen_quantize.cli.bench import BenchRequest, run_bench
        from qwen_quantize.cli.cache import CacheRequest

        loads = tuple(name for name in load.split(",") if name)
        request = BenchRequest(
            prompt_tokens,
            new_tokens,
            loads,
            scale,
            fast,
            head,
            device,
            model_of,
            html,
            kv_cache,
            CacheRequest(parse_size(cache_memory, "--cache-memory"), cache_layout, context),
        )
        run_bench(model, request, threads=threads, as_json=as_json, quiet=quiet)
