"""Calibration for a chip that rounds down and adds narrowly, through the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qwen_quantize.calibrators.block_fp8 import solve_block_fp8
from qwen_quantize.calibrators.methods import METHODS
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Recipe
from tests.tiny_models import make_tiny, make_tokenizer, words

NARROW = ("--assume", "accumulator.fraction_bits=6")
FLOOR = ("--assume", "cast.rounding=floor")
TRUNCATING = ("--assume", "cast.rounding=rtz")


def calibrated(folder: Path, family: str, *assumed: str) -> dict[str, Any]:
    """The manifest of a tiny model, calibrated for `example@1.2` with what is assumed of it."""
    make_tiny(folder / "model", family)
    make_tokenizer(folder / "model")
    text = folder / "calib.jsonl"
    text.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(6)))
    arguments = ["--model-path", folder / "model", "--output-path", folder / "out", "--device", "example@1.2"]
    arguments += ["--calibration-dataset", text, "--calibration-length", "32", "--calibration-samples", "8"]
    done = CliRunner().invoke(app, [str(word) for word in [*arguments, *assumed, "--no-validate", "-q"]])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads((folder / "out" / "qwen_quantize.json").read_text())
    return found


def notes(manifest: dict[str, Any]) -> list[list[str]]:
    return [linear["notes"] for layer in manifest["layers"] for linear in layer["linears"]]


@pytest.mark.parametrize("family", ["qwen3-tied", "deepseek-v3"])
def test_every_linear_says_what_became_of_its_output_gain(family: str, tmp_path: Path) -> None:
    found = notes(calibrated(tmp_path, family, *NARROW, *FLOOR))
    assert all(any("output gain" in note for note in linear) for linear in found)
    if family == "qwen3-tied":  # experts of the other see few tokens
        assert any(any("on unseen tokens" in note for note in linear) for linear in found)


def test_an_fp16_register_is_said_to_overflow(tmp_path: Path) -> None:
    found = notes(calibrated(tmp_path, "qwen3-tied", "--assume", "accumulator.format=fp16"))
    assert all(any("fp16 register overflows" in note for note in linear) for linear in found)


@pytest.mark.parametrize(("assumed", "biased"), [((), False), (FLOOR, True), (TRUNCATING, True)])
def test_what_the_cast_took_is_given_back(
    assumed: tuple[str, ...], biased: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[LayerProblem] = []

    def noting(problem: LayerProblem) -> LayerSolution:
        problems.append(problem)
        return solve_block_fp8(problem)

    monkeypatch.setitem(METHODS, "ue8m0", replace(METHODS["ue8m0"], solve=noting))
    calibrated(tmp_path, "qwen3-tied", *assumed)
    assert problems
    for problem in problems:
        assert problem.gain is not None
        assert bool(problem.maps) == biased
        moved = (problem.towards(problem.weight) - problem.weight).abs().max() / problem.weight.abs().max()
        assert float(moved) > 0
        assert (float(moved) > 0.01) == biased


@pytest.mark.parametrize(
    ("method", "scheme", "sees"),
    [
        ("mxfp4", None, True), ("fp8", None, True), ("gptq", "w8a8", True), ("gptq", "w4a16", False),
        ("w8a8", None, False), ("awq_v2", None, False),
    ],
)  # fmt: skip
def test_which_methods_see_the_cast(method: str, scheme: str | None, sees: bool, tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3-tied")
    recipe = Recipe(
        str(tmp_path), "cpu", method, dataset="text.jsonl", length=64, scheme=scheme, allow_unsupported=True,
        group_size=32 if scheme == "w4a16" or method == "awq_v2" else None,
    )  # fmt: skip
    choice = make_plan(recipe, open_source(tmp_path)).principal
    assert choice.sees_cast() == sees
    assert not choice.sees_bias()
    cut = replace(choice.arithmetic.activation_cast, rounding=Rounding.RTZ)
    truncating = replace(choice, arithmetic=replace(choice.arithmetic, activation_cast=cut))
    assert truncating.sees_bias() == sees


def test_wide_sums_have_no_output_gain(tmp_path: Path) -> None:
    assert not any(
        "gain" in note for linear in notes(calibrated(tmp_path, "qwen3-tied", *FLOOR)) for note in linear
    )
