"""The command line: options and help only. torch is imported inside the commands, so `--help` is instant."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

import qwen_quantize
from qwen_quantize.cli.bench_command import bench_command
from qwen_quantize.cli.check_command import check_command
from qwen_quantize.cli.chips import chips_app
from qwen_quantize.cli.compare_command import compare_command
from qwen_quantize.cli.doctor import doctor_command
from qwen_quantize.cli.eval_command import eval_command
from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.init_ci import init_ci_command
from qwen_quantize.cli.options import (
    AllowUnsupported,
    Assume,
    Asymmetric,
    BlockSize,
    CacheLayoutName,
    CacheMemory,
    CalibrationColumn,
    CalibrationDataset,
    CalibrationLength,
    CalibrationSamples,
    Candidates,
    Collect,
    ContextLength,
    ConvertFrom,
    Device,
    Driver,
    DryRun,
    Effort,
    ExpertPolicy,
    Fast,
    Firmware,
    FromStatistics,
    GroupSize,
    Ignore,
    Importance,
    Include,
    Json,
    KvCache,
    Layout,
    MaxLoss,
    MaxMemory,
    Measured,
    ModelPath,
    OutputPath,
    Overwrite,
    QuantMethod,
    Quiet,
    RecipeFile,
    Requantize,
    Resume,
    Rotate,
    Scheme,
    Seed,
    TargetBits,
    Threads,
    Toolkit,
    Validate,
    ValidationText,
    ValidationTokens,
    Verbose,
    Version,
    WithClaims,
    pairs,
    parse_size,
    refuse_given,
    version_pairs,
    weighed,
)
from qwen_quantize.cli.probe_command import probe_command
from qwen_quantize.cli.regress_command import regress_command
from qwen_quantize.cli.statistics import statistics_app
from qwen_quantize.errors import UserError

app = typer.Typer(
    help="Quantize and calibrate language models for AI chips under each chip's own arithmetic.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(chips_app, name="chips", help="What is known of each chip, and from where.")
app.add_typer(
    statistics_app, name="statistics", help="Statistics that --collect has made: show and merge them."
)
app.command("probe")(probe_command)
app.command("compare")(compare_command)
app.command("init-ci")(init_ci_command)
app.command("check")(check_command)
app.command("doctor")(doctor_command)
app.command("eval")(eval_command)
app.command("regress")(regress_command)
app.command("bench")(bench_command)

EXPERT_POLICIES = ("shrink", "forced", "round")
EFFORTS = ("normal", "high")

_CALIBRATING = (
    "calibration_dataset", "calibration_column", "calibration_samples", "calibration_length", "seed",
)  # fmt: skip
_COLLECTING = (
    *_CALIBRATING, "collect", "model_path", "rotate", "max_memory", "resume", "overwrite", "threads", "as_json",
    "quiet",
)  # fmt: skip

_CONVERTING = (
    "convert_from", "requantize", "scheme", "layout", "device", "output_path", "resume", "overwrite", "threads",
    "as_json", "quiet",
)  # fmt: skip


# Fields of the request whose options have other names; every other field has its option's.
_FIELDS = {
    "quant_method": "method", "calibration_dataset": "dataset", "calibration_column": "column",
    "from_statistics": "statistics", "calibration_samples": "samples", "calibration_length": "length",
    "firmware": "versions", "driver": "versions", "toolkit": "versions",
}  # fmt: skip


def _given_fields(context: typer.Context, measured: bool) -> set[str]:
    """The fields of the request that options on the command line set."""
    from qwen_quantize.pipeline.recipe import Recipe

    known = {field.name for field in fields(Recipe)}
    found = {"device"} if measured else set()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found |= {_FIELDS.get(name, name)} & known
    if "dataset" in found:  # another text, in whatever way the file calibrates
        found |= {"column", "statistics"}
    if "statistics" in found:
        found |= {"dataset", "column"}
    return found


@app.callback()
def main_command(
    context: typer.Context,
    model_path: ModelPath = None,
    output_path: OutputPath = None,
    device: Device = None,
    quant_method: QuantMethod = "ue8m0",
    calibration_dataset: CalibrationDataset = None,
    calibration_column: CalibrationColumn = None,
    calibration_samples: CalibrationSamples = 16,
    calibration_length: CalibrationLength = 512,
    seed: Seed = 0,
    collect: Collect = None,
    from_statistics: FromStatistics = None,
    expert_policy: ExpertPolicy = "shrink",
    effort: Effort = "normal",
    rotate: Rotate = "none",
    ignore: Ignore = None,
    include: Include = None,
    block_size: BlockSize = None,
    scheme: Scheme = None,
    group_size: GroupSize = None,
    asymmetric: Asymmetric = False,
    layout: Layout = None,
    recipe_file: RecipeFile = None,
    target_bits: TargetBits = None,
    max_loss: MaxLoss = None,
    candidates: Candidates = None,
    convert_from: ConvertFrom = None,
    requantize: Requantize = False,
    kv_cache: KvCache = None,
    importance: Importance = None,
    firmware: Firmware = None,
    driver: Driver = None,
    toolkit: Toolkit = None,
    measured: Measured = None,
    assume: Assume = None,
    with_claims: WithClaims = False,
    allow_unsupported: AllowUnsupported = False,
    max_memory: MaxMemory = None,
    validate: Validate = True,
    validation_text: ValidationText = None,
    validation_tokens: ValidationTokens = 8192,
    resume: Resume = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Version = False,
) -> None:
    """Quantize a model for a chip: weights that load in the serving engine, with the proof.

    Without --model-path the embedded model and text are used, so that
    `qwen_quantize --device ascend --quant-method ue8m0` works offline on a fresh install.
    """
    if context.invoked_subcommand is not None:
        return
    if version:
        typer.echo(f"qwen_quantize {qwen_quantize.__version__}")
        return
    if collect is not None:
        with guard(as_json, resumable=True):
            refuse_given(context, "--collect", _COLLECTING, others=True)
            if calibration_column is not None and calibration_dataset is None:
                raise UserError("--calibration-column names a column but there is no --calibration-dataset")
            from qwen_quantize.cli.statistics import run_collect
            from qwen_quantize.pipeline.recipe import Recipe

            run_collect(
                Recipe(
                    model_path=model_path or "",
                    device="",
                    method="",
                    dataset=calibration_dataset,
                    column=calibration_column,
                    samples=calibration_samples,
                    length=calibration_length,
                    seed=seed,
                    max_memory=parse_size(max_memory),
                    rotate=rotate,
                ),
                collect,
                resume=resume,
                overwrite=overwrite,
                threads=threads,
                as_json=as_json,
                quiet=quiet,
            )
        return
    if convert_from is not None:
        with guard(as_json, resumable=True):
            refuse_given(context, "--from", _CONVERTING, others=True)
            from qwen_quantize.cli.convert import ConvertRequest, run_convert

            run_convert(
                ConvertRequest(convert_from, layout, requantize, scheme, device),
                output_path,
                resume=resume,
                overwrite=overwrite,
                threads=threads,
                as_json=as_json,
                quiet=quiet,
            )
        return
    if requantize:
        with guard(as_json):
            raise UserError("--requantize belongs to --from; a quantization run chooses with --quant-method")
    if device is None and measured is None and (recipe_file is None or recipe_file.suffix != ".json"):
        if model_path is None and output_path is None:
            typer.echo(context.get_help())
            raise typer.Exit(0)
        with guard(as_json):
            raise UserError("--device is missing: name the chip, e.g. --device ascend; see `chips list`")
    with guard(as_json, resumable=True):
        for flag, text in (
            ("--model-path", model_path),
            ("--device", device),
            ("--calibration-dataset", calibration_dataset),
            ("--validation-text", validation_text),
        ):
            if text is not None and not text.strip():
                raise UserError(f"{flag} is empty; leave it out or name something")
        if from_statistics is not None:
            refuse_given(context, "--from-statistics", _CALIBRATING, others=False)
        if calibration_column is not None and calibration_dataset is None:
            raise UserError("--calibration-column names a column but there is no --calibration-dataset")
        if expert_policy not in EXPERT_POLICIES:
            raise UserError(
                f"--expert-policy {expert_policy!r} is not one of the policies: {', '.join(EXPERT_POLICIES)}"
            )
        if effort not in EFFORTS:
            raise UserError(f"--effort {effort!r} is not one of: {', '.join(EFFORTS)}")
        from qwen_quantize.calibrators.experts import ExpertPolicy
        from qwen_quantize.calibrators.problem import Effort
        from qwen_quantize.chip_profiles.measured import device_with_layer
        from qwen_quantize.cli.mixed import mixed_request
        from qwen_quantize.cli.quantize import Validation, run_quantize
        from qwen_quantize.pipeline.recipe import Recipe

        if measured is not None:
            device = device_with_layer(device, measured)
        recipe = Recipe(
            model_path=model_path or "",
            device=device or "",
            method=quant_method,
            dataset=calibration_dataset,
            column=calibration_column,
            statistics=None if from_statistics is None else str(from_statistics),
            samples=calibration_samples,
            length=calibration_length,
            seed=seed,
            expert_policy=ExpertPolicy(expert_policy),
            ignore=tuple(ignore or ()),
            include=tuple(include or ()),
            block_size=block_size,
            scheme=scheme,
            group_size=group_size,
            asymmetric=asymmetric,
            layout=layout,
            kv_cache=weighed(kv_cache, importance),
            versions=version_pairs(firmware, driver, toolkit),
            assume=pairs(assume, "--assume"),
            with_claims=with_claims,
            allow_unsupported=allow_unsupported,
            max_memory=parse_size(max_memory),
            effort=Effort(effort),
            rotate=rotate,
        )
        if recipe_file is not None:
            from qwen_quantize.pipeline.recipe_file import with_recipe

            recipe = with_recipe(recipe, recipe_file, _given_fields(context, measured is not None))
        run_quantize(
            recipe,
            output_path,
            Validation(validate, validation_text, validation_tokens),
            resume=resume,
            overwrite=overwrite,
            threads=threads,
            dry_run=dry_run,
            as_json=as_json,
            quiet=quiet,
            mixed=mixed_request(target_bits, max_loss, candidates),
            verbose=verbose,
        )


@app.command("generate")
def generate_command(
    model: Annotated[str, typer.Argument(help="Model folder, GGUF file or hub id.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    kv_cache: KvCache = None,
    cache_memory: CacheMemory = None,
    cache_layout: CacheLayoutName = None,
    context: ContextLength = None,
    fast: Fast = False,
    threads: Threads = None,
) -> None:
    """Continue a text greedily with the bundled engine: a quick look at what a model says."""
    with guard(False):
        from qwen_quantize.cli.cache import CacheRequest
        from qwen_quantize.cli.generate import run_generate

        cache = CacheRequest(parse_size(cache_memory, "--cache-memory"), cache_layout, context)
        run_generate(
            model,
            prompt,
            max_new_tokens,
            chat=chat,
            threads=threads,
            fast=fast,
            kv_cache=kv_cache,
            cache=cache,
        )


@app.command("report")
def report_command(
    output: Annotated[Path, typer.Argument(help="A folder that this program wrote.")],
    as_json: Json = False,
) -> None:
    """Show the stored results of an output folder again, and write its report.html anew."""
    with guard(as_json):
        from qwen_quantize.cli.report import run_report

        run_report(output, as_json=as_json)


def main() -> None:
    """The command line, once everything that it needs is imported."""
    app(prog_name="qwen_quantize")


if __name__ == "__main__":
    main()
