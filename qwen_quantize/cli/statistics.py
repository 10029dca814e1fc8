"""Statistics that are collected once and compiled for many chips: made, merged and shown."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.options import Json, Quiet

if TYPE_CHECKING:
    from qwen_quantize.pipeline.recipe import Recipe
    from qwen_quantize.pipeline.statistics_folder import StatisticsFolder

statistics_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def run_collect(
    recipe: Recipe,
    target: Path,
    *,
    resume: bool,
    overwrite: bool,
    threads: int | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run the text through the unquantized model and write what its inputs are like."""
    from qwen_quantize.checkpoint.source import open_source
    from qwen_quantize.cli.console import Speaker
    from qwen_quantize.cli.quantize import check_output, with_text
    from qwen_quantize.cli.session import peak_memory_bytes, use_threads
    from qwen_quantize.engine.load import ModelReader
    from qwen_quantize.errors import UserError
    from qwen_quantize.pipeline.collect import collect
    from qwen_quantize.pipeline.recipe import Output
    from qwen_quantize.pipeline.rotated_source import Rotating

    use_threads(threads)
    begin = time.perf_counter()
    speaker = Speaker(as_json, quiet)
    recipe = with_text(recipe)
    if recipe.dataset is None:
        raise UserError("--collect needs text: give --calibration-dataset")
    check_output(target, [recipe.model_path, recipe.dataset], "--collect")
    reader = ModelReader(Rotating.parse(recipe.rotate).source(open_source(recipe.model_path)))
    with speaker.progress("collect") as progress:
        found = collect(recipe, reader, Output(target, resume, overwrite), progress)
    record = statistics_record(found)
    _say(record, speaker)
    run = {"seconds": time.perf_counter() - begin, "peak_memory_bytes": peak_memory_bytes()}
    speaker.result({**record, **run})


@statistics_app.command("show")
def show_command(
    folder: Annotated[Path, typer.Argument(help="A folder that --collect or merge made.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and check its SHA-256.")] = False,
    as_json: Json = False,
) -> None:
    """Tokens of each layer, how many visited its experts, and the size."""
    with guard(as_json):
        from qwen_quantize.cli.console import Speaker
        from qwen_quantize.pipeline.statistics_folder import read_statistics

        found = read_statistics(folder)
        if verify:
            found.verify()
        speaker = Speaker(as_json, quiet=False)
        record = statistics_record(found)
        _say(record, speaker)
        speaker.result(record)


@statistics_app.command("merge")
def merge_command(
    first: Annotated[Path, typer.Argument(help="A folder of statistics.")],
    second: Annotated[Path, typer.Argument(help="Another of the same model, of another text.")],
    output: Annotated[Path, typer.Option("--output", help="Folder to make; complete or absent afterwards.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder of statistics.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The statistics of two texts together, as if all had been collected at once."""
    with guard(as_json):
        from qwen_quantize.cli.console import Speaker
        from qwen_quantize.cli.quantize import check_output
        from qwen_quantize.pipeline.merge_folders import merge_folders
        from qwen_quantize.pipeline.recipe import Output

        speaker = Speaker(as_json, quiet)
        check_output(output, [str(first), str(second)], "--output")
        with speaker.progress("merge") as progress:
            found = merge_folders((first, second), Output(output, overwrite=overwrite), progress)
        record = statistics_record(found)
        _say(record, speaker)
        speaker.result(record)


def statistics_record(found: StatisticsFolder) -> dict[str, Any]:
    """What there is to say of a folder of statistics, as JSON can hold it; bytes: of its unit files."""
    manifest = found.manifest
    experts = [count for layer in manifest.layers for count in layer["experts"]]
    return {
        "output_path": str(found.path),
        "model": manifest.path,
        "architecture": manifest.architecture,
        "sha256": found.sha256,
        "data": manifest.record()["data"],
        "tokens": sum(one.tokens for one in manifest.data),
        "bytes": found.nbytes,
        "layers": [dict(layer) for layer in manifest.layers],
        "experts_without_tokens": sum(count == 0 for count in experts),
    }


def _say(record: dict[str, Any], speaker: Any) -> None:
    from qwen_quantize.report.numbers import human_bytes

    speaker.say(f"model:  {record['model']} ({record['architecture']})")
    for one in record["data"]:
        speaker.say(
            f"text:   {one['windows']} windows of {one['length']} tokens from {one['dataset']}"
            + (f"; {one['note']}" if one["note"] else "")
        )
    speaker.say(f"size:   {human_bytes(record['bytes'])} in {record['output_path']}")
    for layer in record["layers"]:
        counts = layer["experts"]
        visits = ""
        if counts:
            middle = sorted(counts)[len(counts) // 2]
            visits = f"; {len(counts)} experts saw {min(counts):,} to {max(counts):,}, half of them at least {middle:,}"
        speaker.say(f"layer {layer['layer']}: {layer['tokens']:,} tokens{visits}")
