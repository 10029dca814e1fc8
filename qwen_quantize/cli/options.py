"""The options of the commands: their names, types and help, and how values of several parts are read."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qwen_quantize.errors import UserError

# What several commands have.
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, words on stderr.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no tables.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="A line for every step, instead of a bar.")]
Assume = Annotated[
    list[str] | None,
    typer.Option("--assume", help="Set what the profile does not state, e.g. cast.rounding=rtz. Repeatable."),
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads (default: torch's).")]


class KvImportance(StrEnum):
    OUTPUT = "output"
    GRADIENT = "gradient"


def weighed(kv_cache: str | None, importance: KvImportance | None) -> str | None:
    """The words of a cache with those of `--importance`; UserError where there are no widths to weigh."""
    from qwen_quantize.formats.kv_scheme import KvKind, parse_kv_scheme

    if importance is None:
        return kv_cache
    if kv_cache is None or parse_kv_scheme(kv_cache).kind is not KvKind.MIXED:
        raise UserError(
            "--importance weighs the channels of --kv-cache mixed; name that too, or leave it out"
        )
    return f"{kv_cache},importance=gradient" if importance is KvImportance.GRADIENT else kv_cache


KvCache = Annotated[
    str | None,
    typer.Option(
        "--kv-cache",
        help="Key-value cache: fp16, bf16, fp8[:head|:token], int8[:token], int4[:32|:64|:128], mixed[:BITS] or auto; "
        "window=N, sinks=N and keys=pre-rope may follow after commas.",
    ),
]
Importance = Annotated[
    KvImportance | None,
    typer.Option(
        "--importance", help="What --kv-cache mixed weighs errors by: the layer's output, or the gradient."
    ),
]
CacheMemory = Annotated[
    str | None,
    typer.Option(
        "--cache-memory",
        help="Ceiling of the key-value cache in memory, e.g. 2GiB: older tokens beyond it go to a temporary file.",
    ),
]
CacheLayoutName = Annotated[
    str | None,
    typer.Option(
        "--cache-layout",
        help="Keys of a float32 cache: head-major, or interleaved to cache lines (default: what the chip's profile "
        "prefers, else the fastest).",
    ),
]
ContextLength = Annotated[
    int | None,
    typer.Option("--context", min=1, help="Tokens to allow, where the model's own context is shorter."),
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

# What only the main command has.
ModelPath = Annotated[
    str | None,
    typer.Option(
        "--model-path", help="Model folder, GGUF file, hub id, or embedded:moe (default: embedded:dense)."
    ),
]
OutputPath = Annotated[
    Path | None, typer.Option("--output-path", help="Folder to make; complete or absent afterwards.")
]
Device = Annotated[
    str | None, typer.Option("--device", help="Chip, family alias or profile file; see `chips list`.")
]
QuantMethod = Annotated[str, typer.Option("--quant-method", help="Quantization method.")]
CalibrationDataset = Annotated[
    str | None,
    typer.Option("--calibration-dataset", help="jsonl, txt, parquet, a folder of these, or a datasets name."),
]
CalibrationColumn = Annotated[
    str | None, typer.Option("--calibration-column", help="Column of the text in the dataset.")
]
CalibrationSamples = Annotated[
    int, typer.Option("--calibration-samples", min=1, help="Windows of calibration text.")
]
CalibrationLength = Annotated[
    int, typer.Option("--calibration-length", min=16, help="Tokens per calibration window.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the choice of calibration windows.")]
Collect = Annotated[
    Path | None,
    typer.Option(
        "--collect",
        help="Only collect statistics of the model on the text, for any chip, into this folder.",
    ),
]
FromStatistics = Annotated[
    Path | None,
    typer.Option(
        "--from-statistics", help="Calibrate from a folder that --collect made, without a forward pass."
    ),
]
ExpertPolicy = Annotated[
    str,
    typer.Option(
        "--expert-policy",
        help="Experts with too few tokens: shrink (toward all tokens), forced (all tokens), round.",
    ),
]
Effort = Annotated[
    str,
    typer.Option(
        "--effort",
        help="normal, or high: scales and codes found together, for several times the solver's time.",
    ),
]
Rotate = Annotated[
    str,
    typer.Option(
        "--rotate",
        help="Turn features first, the function unchanged: none, r2 (each head's values), r1r2 (the residual stream "
        "too), or these in runs, e.g. r1r2:32.",
    ),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", help="Keep these linears in high precision (glob or re:...). Repeatable."),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", help="Quantize these linears all the same. Repeatable."),
]
BlockSize = Annotated[
    int | None, typer.Option("--block-size", help="Weight block: 128, 64 or 32 (default: by shape).")
]
Scheme = Annotated[
    str | None,
    typer.Option("--scheme", help="For rtn and gptq: w4a16, w8a8, fp8, mxfp4 ... (default: w4a16)."),
]
GroupSize = Annotated[
    int | None,
    typer.Option("--group-size", help="Weights per scale of 4-bit integers; 0: an output channel."),
]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="4-bit integers with zero points (w4a16).")]
Layout = Annotated[
    str | None, typer.Option("--layout", help="How it is stored (default: by method); see the docs.")
]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        help="TOML of rules by linear, or the qwen_quantize.json of a result to run again; options override it.",
    ),
]
TargetBits = Annotated[
    float | None,
    typer.Option(
        "--target-bits",
        help="Choose schemes by linear so that a weight takes this many bits, scales included.",
    ),
]
MaxLoss = Annotated[
    str | None,
    typer.Option(
        "--max-loss", help="Fewest bits whose predicted rise of perplexity is at most this, e.g. 0.5%."
    ),
]
Candidates = Annotated[
    str | None,
    typer.Option(
        "--candidates",
        help="Schemes to choose from, e.g. w4a16:32,w4a16:128,w8a16,16 (16: kept; default: by method).",
    ),
]
ConvertFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        help="Convert this quantized folder or GGUF to --layout, code by code, without a new solution.",
    ),
]
Requantize = Annotated[
    bool,
    typer.Option(
        "--requantize", help="With --from: quantize again what has no exact form, and state the loss."
    ),
]
WithClaims = Annotated[
    bool, typer.Option("--with-claims", help="Lay unverified trade-press claims over the profiles.")
]
AllowUnsupported = Annotated[
    bool,
    typer.Option("--allow-unsupported", help="Go on although the chip cannot run the result natively."),
]
MaxMemory = Annotated[str | None, typer.Option("--max-memory", help="Ceiling of resident memory, e.g. 8GiB.")]
Validate = Annotated[
    bool, typer.Option("--validate/--no-validate", help="Read the result back and measure it.")
]
ValidationText = Annotated[
    str | None, typer.Option("--validation-text", help="Text to validate on (default: a shipped novel).")
]
ValidationTokens = Annotated[int, typer.Option("--validation-tokens", min=64, help="Tokens to validate on.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a killed run stopped.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace the output folder and any unfinished run.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")]
Version = Annotated[bool, typer.Option("--version", help="Print the version and stop.")]


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


def parse_size(text: str | None, flag: str = "--max-memory") -> int | None:
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
        raise UserError(f"{flag} {text!r} is not a size such as 8GiB or 1500MB") from None


def refuse_given(context: typer.Context, flag: str, names: tuple[str, ...], *, others: bool) -> None:
    """UserError for an option given beside `flag` that is one of `names`, or, with `others`, none of them."""
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and (name in names) != others:
            raise UserError(f"{parameter.opts[0]} says nothing beside {flag}; leave one of them out")
