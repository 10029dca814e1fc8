"""The main command: plan, quantize, read back, measure, report, publish."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen_quantize.checkpoint.source import CheckpointSource, open_source
from qwen_quantize.cli.check import check_written
from qwen_quantize.cli.console import Speaker, canonical_json
from qwen_quantize.cli.dry_run import dry_run_record, group_lines, group_tables
from qwen_quantize.cli.evaluate import measure
from qwen_quantize.cli.mixed import choose, mixed_lines, prediction_line
from qwen_quantize.cli.session import (
    REPORT_NAME,
    chip_compute,
    peak_memory_bytes,
    read_text,
    use_threads,
)
from qwen_quantize.embedded import calibration_text_path, embedded_by_name
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.eval.compare import HEAD_BATCH_BYTES
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.pipeline.allocator import keep_freed_memory
from qwen_quantize.pipeline.choices import LinearChoice
from qwen_quantize.pipeline.choosable import MixedRequest
from qwen_quantize.pipeline.kv_cache import kv_context, kv_lines, kv_record
from qwen_quantize.pipeline.kv_write import write_kv_cache
from qwen_quantize.pipeline.manifest import MANIFEST_NAME, build_manifest
from qwen_quantize.pipeline.memory import validation_memory
from qwen_quantize.pipeline.mixed import MixedChoice
from qwen_quantize.pipeline.plan import Plan, make_plan
from qwen_quantize.pipeline.recipe import Output, Recipe
from qwen_quantize.pipeline.rotated_source import Rotating
from qwen_quantize.pipeline.run import StagedRun, quantize
from qwen_quantize.pipeline.statistics_folder import read_statistics
from qwen_quantize.pipeline.summary import tensor_groups
from qwen_quantize.pipeline.texts import EvaluationTokens, load_documents
from qwen_quantize.report.numbers import duration, human_bytes
from qwen_quantize.report.page import render_page
from qwen_quantize.report.tables import plain_lines, summary_tables

_VALIDATION_WINDOW = 512  # shorter than eval's: more windows for an error bar from the same few tokens


@dataclass(frozen=True, slots=True)
class Validation:
    """Whether and on what the written folder is measured before it is published."""

    wanted: bool
    text: str | None
    tokens: int


def with_defaults(recipe: Recipe, output_path: Path | None) -> tuple[Recipe, Path]:
    """An embedded model and its text where no other is named; a folder under `out/` where none is given."""
    recipe = with_text(recipe)
    if output_path is None:
        name = Path(recipe.model_path).resolve().name.removesuffix(".gguf")
        device = Path(recipe.device).name.removesuffix(".toml").replace("@", "-")
        output_path = Path("out") / f"{name}-{device}-{recipe.method}"
    return recipe, output_path


def with_text(recipe: Recipe) -> Recipe:
    """An embedded model where no other is named, and its text for it where the recipe has nothing to calibrate on."""
    shipped = embedded_by_name(recipe.model_path or "embedded:dense")
    if shipped is None:
        return recipe
    dataset = recipe.dataset if recipe.calibrates else str(calibration_text_path())
    return replace(recipe, model_path=str(shipped), dataset=dataset)


def run_quantize(
    recipe: Recipe,
    output_path: Path | None,
    validation: Validation,
    *,
    resume: bool,
    overwrite: bool,
    threads: int | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    mixed: MixedRequest | None = None,
    verbose: bool = False,
) -> None:
    use_threads(threads)
    if recipe.max_memory is None:
        keep_freed_memory()
    begin = time.perf_counter()
    speaker = Speaker(as_json, quiet, verbose)
    recipe, target = with_defaults(recipe, output_path)
    if not recipe.device:
        raise UserError("--device is missing: name the chip, e.g. --device ascend; see `chips list`")
    check_output(target, [recipe.model_path, recipe.dataset, recipe.statistics, validation.text])
    rotating = Rotating.parse(recipe.rotate)
    original = open_source(recipe.model_path, allow_missing_weights=dry_run)
    source = rotating.source(original)
    if recipe.statistics is not None:
        read_statistics(recipe.statistics).require_model(source)
    choice: MixedChoice | None = None
    if mixed is not None:
        if dry_run:
            raise UserError(
                "--dry-run reads no weights, which --target-bits and --max-loss weigh; leave one of them out"
            )
        choice = choose(recipe, mixed, source, target, speaker)
        recipe = choice.recipe
        for line in mixed_lines(choice.record):
            speaker.say(line)
    plan = with_validation(make_plan(recipe, source), validation)
    if choice is not None:
        plan = replace(plan, peak_memory_bytes=max(plan.peak_memory_bytes, choice.peak_memory_bytes))
    for line in plan_lines(plan):
        speaker.say(line)
    if dry_run:
        if recipe.dataset is not None:
            load_documents(recipe.dataset, column=recipe.column)
        _say_plan(plan, source, target, speaker)
        return
    reader = ModelReader(source) if plan.blueprint is not None else None
    # Everything that can be wrong with the texts is found before the first weight is read.
    windows, text = None, ""
    if validation.wanted and reader is not None:
        windows, text = _validation_windows(reader, validation)
    with speaker.progress("quantize") as progress:
        staged = quantize(plan, source, reader, Output(target, resume, overwrite), progress)
    quantized = time.perf_counter()
    try:
        record = None
        kv_plan = None
        if plan.kv_scheme is not None:
            with speaker.progress("key-value cache") as progress:
                kv_plan = write_kv_cache(staged, progress)
            for line in kv_lines(kv_plan, kv_context(plan.blueprint)):
                speaker.say(line)
        if windows is not None and reader is not None:
            record = {"text": text, **_validate(staged, original, windows, speaker, kv_plan)}
        chosen = None if choice is None else choice.record
        kv = None if kv_plan is None else kv_record(kv_plan, kv_context(plan.blueprint))
        manifest = build_manifest(plan, staged.journal, staged.calibration, original, record, chosen, kv)
        manifest["check"] = check_written(staged.folder.staging, speaker)
        staged.folder.add_file(MANIFEST_NAME, canonical_json(manifest))
        staged.folder.add_file(REPORT_NAME, render_page(manifest).encode())
        staged.folder.finish()
    except BaseException:
        staged.folder.close()  # every weight is written: --resume goes on with the validation
        raise
    end = time.perf_counter()
    run = {
        "seconds": end - begin,
        "stages": {"quantize": quantized - begin, "validate": end - quantized},
        "peak_memory_bytes": peak_memory_bytes(),
        "output_path": str(target),
    }
    speaker.show(summary_tables(manifest, run), plain_lines(manifest, run))
    if choice is not None and record is not None and choice.record["predicted_rise"] is not None:
        speaker.say(prediction_line(choice.record, record))
    speaker.say(f"report: {target / REPORT_NAME}")
    if record is not None:  # a time is not reproducible, so the manifest has none
        record = {**record, "seconds": end - quantized}
    speaker.result(
        {
            "chip": manifest["chip"]["name"],
            "method": manifest["method"],
            "layout": manifest["layout"],
            "output_bytes": manifest["output_bytes"],
            "assumptions": manifest["assumptions"],
            "notes": manifest["notes"],
            "check": manifest["check"],
            "kv_cache": manifest["kv_cache"],
            "validation": record,
            **({} if choice is None else {"mixed_precision": choice.record}),
            **run,
        }
    )


def with_validation(plan: Plan, validation: Validation) -> Plan:
    """The plan with the memory of the validation counted; UserError if that is above the ceiling."""
    if not validation.wanted or plan.blueprint is None:
        return plan
    needed = validation_memory(
        plan.blueprint,
        validation.tokens,
        HEAD_BATCH_BYTES,
        prepared=any(choice.arithmetic.accumulator.narrow for choice in plan.distinct_choices),
        cached=plan.kv_scheme is not None,
    )
    ceiling = plan.recipe.max_memory
    if ceiling is not None and needed > ceiling:
        raise UserError(
            f"--max-memory {ceiling} bytes is too little to validate {validation.tokens} tokens, which needs about "
            f"{needed} bytes; give fewer --validation-tokens, or --no-validate"
        )
    return replace(plan, peak_memory_bytes=max(plan.peak_memory_bytes, needed))


def _validation_windows(reader: ModelReader, validation: Validation) -> tuple[EvaluationTokens, str]:
    length = min(_VALIDATION_WINDOW, reader.blueprint.config.max_position)
    return read_text(validation.text, reader, length, validation.tokens)


def _validate(
    staged: StagedRun,
    original: CheckpointSource,
    windows: EvaluationTokens,
    speaker: Speaker,
    kv_plan: KvPlan | None = None,
) -> dict[str, Any]:
    """The engine reads the written bytes back and is compared with the unquantized source."""
    written = ModelReader(open_source(staged.folder.staging))
    chip = chip_compute(written, *(choice.arithmetic for choice in staged.plan.distinct_choices))
    with speaker.progress("validate") as progress:
        reference = ModelReader(original)
        rotating = Rotating.parse(staged.plan.recipe.rotate)
        return measure(written, reference, chip, windows, progress, kv_plan=kv_plan, rotating=rotating)


def check_output(target: Path, inputs: Sequence[str | None], option: str = "--output-path") -> None:
    """UserError for a target that is a file, or whose replacement would delete or disturb an input."""
    if target.exists() and not target.is_dir():
        raise UserError(f"{option} {target} is a file; name a folder")
    place = target.resolve()
    for name in inputs:
        if name is None or not Path(name).exists():
            continue
        given = Path(name).resolve()
        if given == place or place in given.parents:
            raise UserError(f"{option} {target} holds the input {name}; choose another folder")
        if given.is_dir() and given in place.parents:
            raise UserError(f"{option} {target} lies inside the input {name}; choose another folder")


def _say_plan(plan: Plan, source: CheckpointSource, target: Path, speaker: Speaker) -> None:
    groups = tensor_groups(plan, source)
    record = dry_run_record(plan, source, target, groups)
    speaker.show(group_tables(groups), group_lines(groups))
    # A plan is often made on another machine than the run, so too small a disk is said and not refused here.
    lacking = "" if record["fits"] else ", too little: the run itself would refuse to start"
    speaker.say(
        f"disk: {human_bytes(plan.disk_bytes)} needed, {human_bytes(record['free_bytes'])} free{lacking}; "
        f"time: about {duration(record['seconds'])} on this machine"
    )
    speaker.result(record)


def _model_line(plan: Plan) -> str:
    if plan.blueprint is None:
        return f"{plan.architecture}, by tensor names"
    config = plan.blueprint.config
    text = f"{config.architecture}, {config.num_layers} layers, hidden {config.hidden_size}"
    experts = max(plan.blueprint.num_experts(layer) for layer in range(config.num_layers))
    return f"{text}, {experts} routed experts" if experts else text


def scheme_line(scheme: Scheme) -> str:
    """What becomes of weights and activations, in words."""
    weight, activation = scheme.weight, scheme.activation
    zero = "" if weight.symmetric else " and a zero point"
    text = f"{weight.format.name} weights, a {weight.scale_format.name} scale{zero} {weight.granularity.describe()}"
    if activation is None:
        return f"{text}; activations stay"
    when = "found at run time" if scheme.dynamic else "fixed"
    return (
        f"{text}; {activation.format.name} activations, {activation.scale_format.name} scales "
        f"{activation.granularity.describe()}, {when}"
    )


def _share_of(plan: Plan, choice: LinearChoice) -> str:
    """For how many linears a choice is, where there are several."""
    if len(plan.distinct_choices) == 1:
        return ""
    return f", {sum(one is choice for one in plan.choices.values())} linears"


def plan_lines(plan: Plan) -> list[str]:
    """What will be done, in a few readable lines."""
    profile = plan.resolution.profile
    actions = [tensor.action.value for tensor in plan.tensors]
    lines = [
        f"model:  {_model_line(plan)}",
        f"chip:   {profile.name}"
        + (f" ({plan.resolution.alias_explanation})" if plan.resolution.alias_explanation else ""),
        *(
            f"method: {one.method.name}: {scheme_line(one.scheme)}, layout {plan.layout.name}{_share_of(plan, one)}"
            for one in plan.distinct_choices
        ),
        f"tensors: {actions.count('quantize')} quantized, {actions.count('keep')} kept, "
        f"{actions.count('drop')} dropped; output {human_bytes(plan.output_bytes)}, "
        f"peak memory about {human_bytes(plan.peak_memory_bytes)}",
    ]
    recipe = plan.recipe
    if recipe.statistics is not None:
        lines.append(f"calibration: from the statistics in {recipe.statistics}, without a forward pass")
    elif recipe.dataset is None:
        lines.append("calibration: none; scales are searched on the weights alone")
    else:
        lines.append(f"calibration: {recipe.samples} windows of {recipe.length} tokens from {recipe.dataset}")
    lines += [f"note: {note}" for note in plan.notes]
    lines += [
        f"assumed: {assumption.field} = {assumption.assumed} ({assumption.why})"
        for assumption in plan.assumptions
    ]
    return lines
