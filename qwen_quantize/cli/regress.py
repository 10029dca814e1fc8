"""`qwen_quantize regress`: what changed in a chip's arithmetic, whether it hurts a model, and what to do."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import typer

from qwen_quantize.chip_profiles.behaviour import OUTPUTS, differing, unnamed_changes, version_changes
from qwen_quantize.chip_profiles.difference import (
    EMULATED,
    WITHOUT_EFFECT_ON_DYNAMIC_SCALES,
    Difference,
    difference,
)
from qwen_quantize.cli.console import Speaker
from qwen_quantize.cli.quantize import check_output
from qwen_quantize.cli.recalibrate import (
    check_recalibration,
    command_for,
    recalibrate,
    recipe_for,
    serving_condition,
)
from qwen_quantize.cli.regress_answers import Answers, TextChoice, compare_answers, text_windows
from qwen_quantize.cli.regress_sides import Side, arithmetic_of, read_side
from qwen_quantize.cli.session import (
    main_scheme,
    open_reader,
    peak_memory_bytes,
    read_manifest,
    use_threads,
)
from qwen_quantize.errors import UserError
from qwen_quantize.eval.regression import Limits
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.report.junit import Case, junit_xml
from qwen_quantize.report.regression_tables import regression_lines, regression_tables

_NEW_MODEL = "NEW_MODEL"  # stands for a folder in command lines that are shown


@dataclass(frozen=True, slots=True)
class RegressRequest:
    """The options of `qwen_quantize regress`; margin is a share of the perplexity."""

    model: str
    before: str
    after: str
    text: str | None
    max_tokens: int
    margin: float
    with_claims: bool
    junit: Path | None
    recalibrate: Path | None
    dataset: str | None


def parse_margin(text: str) -> float:
    """`0.5%` -> 0.005."""
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not text.strip().endswith("%") or not 0 < value <= 0.5:
        raise UserError(f"--margin {text!r}: write a percentage above 0% and up to 50%, e.g. --margin 0.5%")
    return value


def run_regress(request: RegressRequest, *, threads: int | None, as_json: bool, quiet: bool) -> None:
    """Exit code 1 where the verdict is `recalibrate`."""
    use_threads(threads)
    begin = time.perf_counter()
    speaker = Speaker(as_json, quiet)
    if request.junit is not None and not request.junit.parent.is_dir():
        raise UserError(f"--junit {request.junit}: there is no folder {request.junit.parent}; make it first")
    reader = open_reader(request.model)
    manifest = read_manifest(request.model)
    scheme = main_scheme(reader)
    assumed = {} if manifest is None else _strings(manifest["request"].get("assume"))
    before = read_side(request.before, scheme, assumed, request.with_claims)
    after = read_side(request.after, scheme, assumed, request.with_claims)
    recipe, why_not = _recipe(request, manifest, (before, after), scheme)
    target = "e4m3fn" if scheme.activation is None else scheme.activation.format.name
    found = _with_outputs(before, after, difference(before.fields, after.fields, target), target)
    notes = _notes(before, after, found, target)
    choice = TextChoice(request.text, request.max_tokens)
    answers = compare_answers(
        reader, (before, after), found, scheme, choice, Limits(margin=request.margin), speaker
    )
    recorded = before.run is not None and after.run is not None
    left_open = [] if recorded else [change.text for change in found.changed if not _emulated(change.field)]
    verdict, conclusive, advice, command = _conclusion(request, found, left_open, answers, recipe)
    if verdict == "recalibrate" and recipe is not None:
        condition = serving_condition(arithmetic_of(after, before, scheme), recipe, scheme)
        advice = advice if condition is None else f"{condition}; then {advice}"
    if why_not and verdict == "recalibrate":
        notes.append(f"how to quantize again cannot be said: {why_not}")
    if recipe is not None and not recipe.calibrates and verdict == "recalibrate":
        notes.append(
            "the model was quantized without calibration text, which cannot make up for a cast; give one with "
            "--calibration-dataset"
        )
    record: dict[str, Any] = {
        "verdict": verdict,
        "conclusive": conclusive,
        "advice": advice,
        "command": command,
        "model": request.model,
        "before": request.before,
        "after": request.after,
        "changed": [asdict(change) for change in found.changed],
        "not_compared": list(found.not_compared),
        "margin": request.margin,
        **_measured(answers),
        "notes": notes,
    }
    if request.recalibrate is not None and verdict == "recalibrate" and recipe is not None:
        if answers is None:
            raise UserError(
                "what changed is not emulated, so quantizing again could not take it into account"
            )
        windows = answers.windows or text_windows(reader, choice, (before, after))[0]
        record["recalibrated"] = recalibrate(
            recipe, request.recalibrate, (before, after), scheme, answers, windows, speaker
        )
    elif request.recalibrate is not None:
        notes.append("recalibration was asked for and is not needed: nothing was written")
    record |= {"seconds": time.perf_counter() - begin, "peak_memory_bytes": peak_memory_bytes()}
    if request.junit is not None:
        name = f"qwen_quantize.regress.{Path(request.model).name}"
        request.junit.write_bytes(junit_xml(name, junit_cases(record), record["seconds"]))
    speaker.show(regression_tables(record), regression_lines(record))
    speaker.result(record)
    if verdict == "recalibrate":
        raise typer.Exit(1)


def _recipe(
    request: RegressRequest, manifest: Mapping[str, Any] | None, sides: tuple[Side, Side], scheme: Scheme
) -> tuple[Recipe | None, str]:
    """How to make the model again, or why that is not known, which is an error only with --recalibrate."""
    if manifest is None:
        why_not = f"{request.model} has no manifest that says how it was made"
        if request.recalibrate is not None:
            raise UserError(f"{why_not}; quantize it anew")
        return None, why_not
    try:
        recipe = recipe_for(manifest, request.model, sides, scheme, request.dataset)
    except UserError as error:
        if request.recalibrate is not None:
            raise
        return None, str(error)
    if request.recalibrate is not None:
        check_recalibration(recipe, request.recalibrate, scheme)
        check_output(request.recalibrate, [request.model, recipe.model_path, recipe.dataset, request.text])
    return recipe, ""


def junit_cases(record: Mapping[str, Any]) -> list[Case]:
    """The arithmetic, which never fails by itself, and each test; at least one fails with `recalibrate`."""
    changed = [change["text"] for change in record["changed"]]
    cases = [Case("arithmetic", None, "\n".join(changed) or "nothing changed")]
    for test in record["tests"]:
        cases.append(Case(test["name"], None if test["passed"] else test["text"], test["text"]))
    if record["verdict"] == "recalibrate" and all(case.failure is None for case in cases):
        cases.append(Case("answers", record["advice"], record["advice"]))
    return cases


def _strings(value: object) -> dict[str, str]:
    return {str(key): str(item) for key, item in value.items()} if isinstance(value, dict) else {}


def _with_outputs(before: Side, after: Side, found: Difference, target: str) -> Difference:
    """With what only the outputs for fixed inputs show, where both sides have them."""
    if before.behaviour is None or after.behaviour is None:
        return found
    unnamed = unnamed_changes(before.behaviour, after.behaviour, found.changed, target)
    return replace(found, changed=(*found.changed, *unnamed))


def _behaviour_notes(before: Side, after: Side, found: Difference, target: str) -> list[str]:
    notes = []
    ours, theirs = before.behaviour, after.behaviour
    if ours is not None and theirs is not None:
        if ours.corpus != theirs.corpus:
            notes.append("the outputs of the two sides are of different inputs, so they were not compared")
        own = (f"fp32->{target}", f"{target}*{target}->")
        others = [name for name in differing(ours, theirs) if not name.startswith(own)]
        if others:
            notes.append(f"changed too, and not used by this model: the outputs of {', '.join(others)}")
    if any(change.field.startswith(OUTPUTS) for change in found.changed):
        versions = version_changes(before.versions, after.versions)
        words = "; ".join(versions) if versions else "none that both sides state"
        notes.append(f"versions that differ: {words}")
    return notes


def _notes(before: Side, after: Side, found: Difference, target: str) -> list[str]:
    notes = _behaviour_notes(before, after, found, target)
    if found.not_compared:
        listed = ", ".join(found.not_compared[:3])
        more = len(found.not_compared) - 3
        listed += f" and {more} more" if more > 0 else ""
        notes.append(f"stated on one side only and taken as equal: {listed}")
    for side in (before, after):
        if side.run is not None and not side.fields:
            notes.append(f"{side.name} was recorded without a chip's arithmetic, so none can be named")
    if before.run is not None and after.run is not None:
        models = (before.run.about.model_fingerprint, after.run.about.model_fingerprint)
        if models[0] != models[1]:
            notes.append("the two runs are of different model files: they differ by more than the chip")
    lost = [
        change.field
        for change in found.changed
        if not _emulated(change.field) and not change.field.startswith(OUTPUTS)
    ]
    if lost and not (before.run is not None and after.run is not None):
        notes.append(
            f"the engine does not emulate {', '.join(lost)}, so its effect on the answers was not computed: level 2 "
            "was not run for it"
        )
    return notes


def _emulated(field: str) -> bool:
    return field in EMULATED or field in WITHOUT_EFFECT_ON_DYNAMIC_SCALES


def _conclusion(
    request: RegressRequest,
    found: Difference,
    left_open: Sequence[str],
    answers: Answers | None,
    recipe: Recipe | None,
) -> tuple[str, bool, str, str | None]:
    """(verdict, whether it is certain, what to do in words, the command line that does it).

    left_open: changes, in words, that the answers do not take into account.
    """
    again = None
    if recipe is not None:
        again = command_for(recipe, str(request.recalibrate or _NEW_MODEL))
    if answers is None:
        if not found.changed:
            return "unchanged", True, "nothing to do: the chip computes as before", None
        if all(change.field in WITHOUT_EFFECT_ON_DYNAMIC_SCALES for change in found.changed):
            return "harmless", True, "nothing to do: this model has no static scales", None
        words = "the effect of what changed cannot be computed here: compare recorded runs, or quantize again"
        return "recalibrate", False, words, again
    judgement = answers.judgement
    if judgement.harmless and left_open:
        words = (
            f"what could be computed is harmless, the effect of what else changed ({'; '.join(left_open)}) could not: "
            "compare recorded runs, or quantize again"
        )
        return "recalibrate", False, words, again
    if judgement.harmless:
        words = f"nothing to do: a loss of {request.margin:.2%} or more is excluded"
        return "harmless", True, words, None
    if judgement.conclusive:
        return "recalibrate", True, "quantize again for the changed chip", again
    words = (
        f"{judgement.tokens:,} tokens are too few to tell: a loss of {request.margin:.2%} is neither shown nor "
        f"excluded, about {judgement.tokens_needed:,} are needed; measure on more text before quantizing again"
    )
    more = ["qwen_quantize", "regress", request.model, "--before", request.before, "--after", request.after]
    more += ["--text", request.text or "TEXT", "--max-tokens", str(judgement.tokens_needed)]
    return "recalibrate", False, words, again if answers.windows is None else shlex.join(more)


def _measured(answers: Answers | None) -> dict[str, Any]:
    if answers is None:
        return {"tests": [], "tokens": 0, "perplexity_before": None, "perplexity_after": None}
    found = asdict(answers.judgement)
    for key in ("harmless", "conclusive"):
        found.pop(key)
    return {
        "tests": found.pop("checks"),
        **found,
        "windows": answers.before.windows,
        "documents": len(answers.before.documents),
        "text": answers.text,
        "text_sha256": answers.text_sha256,
    }
