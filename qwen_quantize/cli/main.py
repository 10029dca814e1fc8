"""The command line: options and help only. torch is imported inside the commands, so `--help` is instant."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import qwen_quantize
from qwen_quantize.cli.check_command import check_command
from qwen_quantize.cli.chips import chips_app
from qwen_quantize.cli.compare_command import compare_command
from qwen_quantize.cli.doctor import doctor_command
from qwen_quantize.cli.guard import guard
from qwen_quantize.cli.init_ci import init_ci_command
from qwen_quantize.cli.probe_command import probe_command
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

EXPERT_POLICIES = ("shrink", "forced", "round")
EFFORTS = ("normal", "high")

_CALIBRATING = (
    "calibration_dataset", "calibration_column", "calibration_samples", "calibration_length", "seed",
)  # fmt: skip
_COLLECTING = (
    *_CALIBRATING, "collect", "model_path", "max_memory", "resume", "overwrite", "threads", "as_json", "quiet",
)  # fmt: skip

_CONVERTING = (
    "convert_from", "requantize", "scheme", "layout", "output_path", "resume", "overwrite", "threads", "as_json",
    "quiet",
)  # fmt: skip

_TASKS_ONLY = ("limit", "fewshot", "chat", "tasks_folder")
_TEXT_ONLY = ("text", "max_tokens", "length", "attribute")

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, words on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="A line for every step, instead of a bar.")]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", help="Set what the profile does not state, e.g. cast.rounding=rtz. Repeatable."),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads (default: torch's).")]
KvCache = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        help="Key-value cache: fp16, bf16, fp8[:head|:token], int8[:token], int4[:32|:64|:128], mixed[:BITS] or auto; "
        "window=N and sinks=N may follow after commas.",
    ),
]
Fast = Annotated[
    bool,
    typer.Option("--fast", help="Packed linears although inputs are cast: the casts stay, sums are float32."),
]
Firmware = Annotated[str | None, typer.Option("--firmware", help="Firmware version of the chip.")]
Driver = Annotated[str | None, typer.Option("--driver", help="Driver version of the chip.")]
Toolkit = Annotated[str | None, typer.Option("--toolkit", help="Toolkit version (CANN, MUSA, ...).")]
Measured = Annotated[
    Path | None,
    typer.Option("--measured", help="Lay what `probe --output` measured over the chip's profile."),
]


def pairs(options: list[str] | None, flag: str) -> tuple[tuple[str, str], ...]:
    """`key=value` options as sorted pairs; a UserError names what is not one."""
    found: dict[str, str] = {}
    for option in options or []:
        key, sign, value = option.partition("=")
        if not sign or not key or not value:
            raise UserError(f"{flag} {option!r}: write it as key=value, e.g. {flag} cast.rounding=rtz")
        if key in found and found[key] != value:
            raise UserError(f"{flag} sets {key!r} twice, to {found[key]!r} and {value!r}")
        found[key] = value
    return tuple(sorted(found.items()))


def version_pairs(
    firmware: str | None, driver: str | None, toolkit: str | None
) -> tuple[tuple[str, str], ...]:
    named = {"driver": driver, "firmware": firmware, "toolkit": toolkit}
    return tuple((name, value) for name, value in named.items() if value is not None)


def parse_size(text: str | None) -> int | None:
    """`8GiB`, `1500MB` or plain bytes."""
    if text is None:
        return None
    units = {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    units |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "B": 1, "": 1}
    stripped = text.strip().upper()
    digits = stripped.rstrip("ABCDEFGHIKMTZ ")
    unit = stripped[len(digits) :].strip()
    try:
        return int(float(digits) * units[unit])
    except (KeyError, ValueError, OverflowError):
        raise UserError(f"--max-memory {text!r} is not a size such as 8GiB or 1500MB") from None


def _refuse_given(context: typer.Context, flag: str, names: tuple[str, ...], *, others: bool) -> None:
    """UserError for an option given beside `flag` that is one of `names`, or, with `others`, none of them."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and (name in names) != others:
            raise UserError(f"{parameter.opts[0]} says nothing beside {flag}; leave one of them out")


_FIELDS = {
    "quant_method": "method", "calibration_dataset": "dataset", "calibration_column": "column",
    "from_statistics": "statistics", "calibration_samples": "samples", "calibration_length": "length",
    "firmware": "versions", "driver": "versions", "toolkit": "versions",
}  # fmt: skip
_SAME = (
    "model_path", "device", "seed", "expert_policy", "ignore", "include", "block_size", "scheme", "group_size",
    "asymmetric", "layout", "assume", "with_claims", "allow_unsupported", "max_memory",
)  # fmt: skip


def _given_fields(context: typer.Context, measured: bool) -> set[str]:
    """The fields of the request that options on the command line set."""
    found = {"device"} if measured else set()
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found.add(_FIELDS.get(name, name if name in _SAME else ""))
    if "dataset" in found:  # another text, in whatever way the file calibrates
        found |= {"column", "statistics"}
    if "statistics" in found:
        found |= {"dataset", "column"}
    return found - {""}


@app.callback()
def main_command(
    context: typer.Context,
    model_path: Annotated[
        str | None,
        typer.Option(
            "--model-path", help="Model folder, GGUF file, hub id, or embedded:moe (default: embedded:dense)."
        ),
    ] = None,
    output_path: Annotated[
        Path | None, typer.Option("--output-path", help="Folder to make; complete or absent afterwards.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Chip, family alias or profile file; see `chips list`.")
    ] = None,
    quant_method: Annotated[str, typer.Option("--quant-method", help="Quantization method.")] = "ue8m0",
    calibration_dataset: Annotated[
        str | None,
        typer.Option(
            "--calibration-dataset", help="jsonl, txt, parquet, a folder of these, or a datasets name."
        ),
    ] = None,
    calibration_column: Annotated[
        str | None, typer.Option("--calibration-column", help="Column of the text in the dataset.")
    ] = None,
    calibration_samples: Annotated[
        int, typer.Option("--calibration-samples", min=1, help="Windows of calibration text.")
    ] = 16,
    calibration_length: Annotated[
        int, typer.Option("--calibration-length", min=16, help="Tokens per calibration window.")
    ] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the choice of calibration windows.")] = 0,
    collect: Annotated[
        Path | None,
        typer.Option(
            "--collect",
            help="Only collect statistics of the model on the text, for any chip, into this folder.",
        ),
    ] = None,
    from_statistics: Annotated[
        Path | None,
        typer.Option(
            "--from-statistics", help="Calibrate from a folder that --collect made, without a forward pass."
        ),
    ] = None,
    expert_policy: Annotated[
        str,
        typer.Option(
            "--expert-policy",
            help="Experts with too few tokens: shrink (toward all tokens), forced (all tokens), round.",
        ),
    ] = "shrink",
    effort: Annotated[
        str,
        typer.Option(
            "--effort",
            help="normal, or high: scales and codes found together, for several times the solver's time.",
        ),
    ] = "normal",
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="Keep these linears in high precision (glob or re:...). Repeatable."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", help="Quantize these linears all the same. Repeatable."),
    ] = None,
    block_size: Annotated[
        int | None, typer.Option("--block-size", help="Weight block: 128, 64 or 32 (default: by shape).")
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option("--scheme", help="For rtn and gptq: w4a16, w8a8, fp8, mxfp4 ... (default: w4a16)."),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option("--group-size", help="Weights per scale of 4-bit integers; 0: an output channel."),
    ] = None,
    asymmetric: Annotated[
        bool, typer.Option("--asymmetric", help="4-bit integers with zero points (w4a16).")
    ] = False,
    layout: Annotated[
        str | None, typer.Option("--layout", help="How it is stored (default: by method); see the docs.")
    ] = None,
    recipe_file: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            help="TOML of rules by linear, or the qwen_quantize.json of a result to run again; options override it.",
        ),
    ] = None,
    target_bits: Annotated[
        float | None,
        typer.Option(
            "--target-bits",
            help="Choose schemes by linear so that a weight takes this many bits, scales included.",
        ),
    ] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(
            "--max-loss", help="Fewest bits whose predicted rise of perplexity is at most this, e.g. 0.5%."
        ),
    ] = None,
    candidates: Annotated[
        str | None,
        typer.Option(
            "--candidates",
            help="Schemes to choose from, e.g. w4a16:32,w4a16:128,w8a16,16 (16: kept; default: by method).",
        ),
    ] = None,
    convert_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="Convert this quantized folder or GGUF to --layout, code by code, without a new solution.",
        ),
    ] = None,
    requantize: Annotated[
        bool,
        typer.Option(
            "--requantize", help="With --from: quantize again what has no exact form, and state the loss."
        ),
    ] = False,
    kv_cache: KvCache = None,
    firmware: Firmware = None,
    driver: Driver = None,
    toolkit: Toolkit = None,
    measured: Measured = None,
    assume: Assume = None,
    with_claims: Annotated[
        bool, typer.Option("--with-claims", help="Lay unverified trade-press claims over the profiles.")
    ] = False,
    allow_unsupported: Annotated[
        bool,
        typer.Option("--allow-unsupported", help="Go on although the chip cannot run the result natively."),
    ] = False,
    max_memory: Annotated[
        str | None, typer.Option("--max-memory", help="Ceiling of resident memory, e.g. 8GiB.")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate/--no-validate", help="Read the result back and measure it.")
    ] = True,
    validation_text: Annotated[
        str | None, typer.Option("--validation-text", help="Text to validate on (default: a shipped novel).")
    ] = None,
    validation_tokens: Annotated[
        int, typer.Option("--validation-tokens", min=64, help="Tokens to validate on.")
    ] = 8192,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where a killed run stopped.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the output folder and any unfinished run.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    threads: Threads = None,
    as_json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
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
            _refuse_given(context, "--collect", _COLLECTING, others=True)
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
            _refuse_given(context, "--from", _CONVERTING, others=True)
            from qwen_quantize.cli.convert import ConvertRequest, run_convert

            run_convert(
                ConvertRequest(convert_from, layout, requantize, scheme),
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
            _refuse_given(context, "--from-statistics", _CALIBRATING, others=False)
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
            kv_cache=kv_cache,
            versions=version_pairs(firmware, driver, toolkit),
            assume=pairs(assume, "--assume"),
            with_claims=with_claims,
            allow_unsupported=allow_unsupported,
            max_memory=parse_size(max_memory),
            effort=Effort(effort),
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


@app.command("eval")
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
            _refuse_given(context, "a text (they need --tasks)", _TASKS_ONLY, others=False)
        else:
            _refuse_given(context, "--tasks", _TEXT_ONLY, others=False)
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
            kv_cache=kv_cache,
        )
        if tasks is None:
            run_eval(request, threads=threads, as_json=as_json, quiet=quiet, verbose=verbose)
        else:
            from qwen_quantize.cli.tasks import TaskOptions, parse_names, run_tasks

            options = TaskOptions(parse_names(tasks), limit, fewshot, chat, tasks_folder)
            run_tasks(request, options, threads=threads, as_json=as_json, quiet=quiet, verbose=verbose)


@app.command("regress")
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


@app.command("bench")
def bench_command(
    model: Annotated[str | None, typer.Argument(help="Model (default: the embedded one).")] = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 128,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 64,
    kv_cache: KvCache = None,
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

        loads = tuple(name for name in load.split(",") if name)
        request = BenchRequest(
            prompt_tokens, new_tokens, loads, scale, fast, head, device, model_of, html, kv_cache
        )
        run_bench(model, request, threads=threads, as_json=as_json, quiet=quiet)


@app.command("generate")
def generate_command(
    model: Annotated[str, typer.Argument(help="Model folder, GGUF file or hub id.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    kv_cache: KvCache = None,
    fast: Fast = False,
    threads: Threads = None,
) -> None:
    """Continue a text greedily with the bundled engine: a quick look at what a model says."""
    with guard(False):
        from qwen_quantize.cli.generate import run_generate

        run_generate(model, prompt, max_new_tokens, chat=chat, threads=threads, fast=fast, kv_cache=kv_cache)


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
    """Entry point of `qwen_quantize`."""
    app(prog_name="qwen_quantize")


if __name__ == "__main__":
    main()
