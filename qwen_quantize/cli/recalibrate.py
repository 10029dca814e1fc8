"""Quantizing a model again as its manifest says, but for a chip that computes otherwise now."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from qwen_quantize.chip_profiles.arithmetic import Arithmetic
from qwen_quantize.chip_profiles.devices import resolve_device
from qwen_quantize.chip_profiles.headroom import overflow_words, rule_with_headroom
from qwen_quantize.cli.console import Speaker
from qwen_quantize.cli.quantize import Validation, run_quantize
from qwen_quantize.cli.regress_answers import Answers, chip_cast, run_scores
from qwen_quantize.cli.regress_sides import Side, arithmetic_of, assumptions_for, side_of_record
from qwen_quantize.cli.session import open_reader
from qwen_quantize.errors import UserError
from qwen_quantize.eval.divergence import quantiles
from qwen_quantize.eval.perplexity import perplexity
from qwen_quantize.eval.regression import truncated_kl
from qwen_quantize.eval.token_scores import TokenScores
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.recipe_file import recipe_of_request
from qwen_quantize.pipeline.texts import EvaluationTokens

# Options of the main command by the recipe's fields; one that holds its default is left out.
_OPTIONS = {
    "dataset": "--calibration-dataset",
    "column": "--calibration-column",
    "statistics": "--from-statistics",
    "samples": "--calibration-samples",
    "length": "--calibration-length",
    "seed": "--seed",
    "expert_policy": "--expert-policy",
    "effort": "--effort",
    "rotate": "--rotate",
    "block_size": "--block-size",
    "scheme": "--scheme",
    "group_size": "--group-size",
    "layout": "--layout",
    "kv_cache": "--kv-cache",
    "max_memory": "--max-memory",
}
_FLAGS = {
    "asymmetric": "--asymmetric",
    "with_claims": "--with-claims",
    "allow_unsupported": "--allow-unsupported",
}
_LISTS = {"ignore": "--ignore", "include": "--include"}


def recipe_for(
    manifest: Mapping[str, Any], where: str, sides: tuple[Side, Side], scheme: Scheme, dataset: str | None
) -> Recipe:
    """The manifest's own request for the chip that the second side names, else for the manifest's.

    dataset: calibrate on this instead. Where the second side's cast overflows under its scale rule, the recipe
    assumes a rule that leaves headroom: whoever serves the model must choose it.
    """
    before, after = sides
    device = after.device or side_of_record(manifest, where, scheme).device
    if device is None:
        raise UserError(f"neither {after.name} nor the manifest of {where} names a chip to recalibrate for")
    recipe = _recipe(manifest, where)
    if dataset is not None:
        recipe = replace(recipe, dataset=dataset, column=None, statistics=None)
    assume = assumptions_for(after, before, device, scheme)
    arithmetic = arithmetic_of(after, before, scheme)
    if overflow_words(arithmetic, scheme) is not None:
        profile = resolve_device(
            device, scheme, with_claims=after.with_claims, allow_unsupported=True
        ).profile
        rule = rule_with_headroom(profile, scheme, arithmetic.activation_cast)
        if rule is not None:
            assume["scale.rule"] = rule
    return replace(
        recipe,
        device=device,
        versions=(),
        assume=tuple(sorted(assume.items())),
        with_claims=after.with_claims,
    )


def _recipe(manifest: Mapping[str, Any], where: str) -> Recipe:
    request = manifest["request"]
    if request.get("rules"):
        raise UserError(
            f"{where} was made from a recipe whose rules differ from linear to linear; quantize again with --recipe "
            f"{where}/qwen_quantize.json and another --device"
        )

    source = manifest["source"].get("path")
    if not isinstance(source, str) or not source or "method" not in request:
        raise UserError(f"the manifest of {where} does not say from which model and how it was made")
    again = {**request, "model_path": source, "device": request.get("device") or "cpu"}
    return recipe_of_request(again, f"the manifest of {where}: request")


def command_for(recipe: Recipe, output: str) -> str:
    """The command line that does what the recipe says."""
    words = ["qwen_quantize", "--model-path", recipe.model_path, "--output-path", output]
    words += ["--device", recipe.device, "--quant-method", recipe.method]
    standard = {field.name: field.default for field in fields(Recipe) if field.default is not MISSING}
    for key, option in _OPTIONS.items():
        value = getattr(recipe, key)
        if value != standard[key]:
            words += [option, str(value)]
    for key, option in _LISTS.items():
        words += [word for item in getattr(recipe, key) for word in (option, item)]
    words += [word for field, value in recipe.assume for word in ("--assume", f"{field}={value}")]
    words += [option for key, option in _FLAGS.items() if getattr(recipe, key)]
    return shlex.join(words)


def check_recalibration(recipe: Recipe, output: Path, scheme: Scheme) -> None:
    """UserError, before anything is measured, where the quantization could not even begin."""
    if output.exists():
        raise UserError(f"--recalibrate {output} exists; name a folder that does not")
    if not Path(recipe.model_path).exists():
        raise UserError(
            f"the model it was made from, {recipe.model_path}, is not here; without it nothing can be quantized again"
        )
    if (
        recipe.dataset is not None
        and Path(recipe.dataset).is_absolute()
        and not Path(recipe.dataset).exists()
    ):
        raise UserError(
            f"the calibration text {recipe.dataset} is not here; name one with --calibration-dataset"
        )
    resolve_device(
        recipe.device, scheme, with_claims=recipe.with_claims, allow_unsupported=recipe.allow_unsupported
    )


def recalibrate(
    recipe: Recipe,
    output: Path,
    sides: tuple[Side, Side],
    scheme: Scheme,
    answers: Answers,
    windows: EvaluationTokens,
    speaker: Speaker,
) -> dict[str, Any]:
    """Quantize again and measure all three on the same text; KL is from the unquantized model, a lower bound.

    `conditions` of the result says what else must change for the figures to hold.
    """
    speaker.say(f"quantizing again for {recipe.device} into {output}")
    run_quantize(
        recipe,
        output,
        Validation(False, None, 0),
        resume=False,
        overwrite=False,
        threads=None,
        dry_run=False,
        as_json=False,
        quiet=True,
    )
    with speaker.progress("regress, unquantized") as progress:
        source = run_scores(open_reader(recipe.model_path), None, windows, progress)
    again = open_reader(str(output))
    served, conditions = _as_served(arithmetic_of(sides[1], sides[0], scheme), recipe, scheme)
    cast = chip_cast(again, served)
    with speaker.progress("regress, recalibrated") as progress:
        scores = run_scores(again, cast, windows, progress)
    rows = [
        _row(name, source, run)
        for name, run in (("before", answers.before), ("after", answers.after), ("recalibrated", scores))
    ]
    before, after, new = (row["perplexity"] for row in rows)
    return {
        "output_path": str(output),
        "rows": rows,
        "recovered_fraction": recovered_fraction(before, after, new),
        "conditions": conditions,
        "unquantized_perplexity": perplexity(-source.log_probability.double()),
    }


def serving_condition(arithmetic: Arithmetic, recipe: Recipe | None, scheme: Scheme) -> str | None:
    """What must change where the model is served before weights can help, with the reason; None if nothing must."""
    words = overflow_words(arithmetic, scheme)
    if words is None:
        return None
    rule = None if recipe is None else dict(recipe.assume).get("scale.rule")
    remedy = (
        "let the cast saturate" if rule is None else f"choose the scale rule {rule} where the model is served"
    )
    return f"{remedy}, which no weights make up for: {words}"


def _as_served(arithmetic: Arithmetic, recipe: Recipe, scheme: Scheme) -> tuple[Arithmetic, list[str]]:
    """The arithmetic that the new model will meet, and what must be done where it is served for that."""
    condition, rule = serving_condition(arithmetic, recipe, scheme), dict(recipe.assume).get("scale.rule")
    if condition is None or rule is None:
        return arithmetic, []
    return replace(arithmetic, activation_scale_rule=ScaleRule(rule)), [condition]


def recovered_fraction(before: float, after: float, again: float) -> float | None:
    """The share of the perplexity added from `before` to `after` that `again` takes back.

    None where nothing was added. Of an infinite loss a finite perplexity takes back all, as the limit has it.
    """
    if after == before or not math.isfinite(before):
        return None
    if math.isinf(after):
        return 1.0 if math.isfinite(again) else 0.0
    return (after - again) / (after - before)


def _row(name: str, source: TokenScores, run: TokenScores) -> dict[str, Any]:
    kl = truncated_kl(source, run).nan_to_num(nan=math.inf)
    (p99,) = quantiles(kl, (0.99,))
    return {
        "name": name,
        "perplexity": perplexity(-run.log_probability.double()),
        "kl_mean": float(kl.mean()),
        "kl_p99": p99,
    }
