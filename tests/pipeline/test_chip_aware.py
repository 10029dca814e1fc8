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
from qwen_quantize.cli.main import app
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


@pytest.mark.parametrize(("assumed", "given_back"), [((), False), (FLOOR, True), (TRUNCATING, True)])
def test_only_what_a_biased_cast_took_is_given_back(
    assumed: tuple[str, ...], given_back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[LayerProblem] = []

    def noting(problem: LayerProblem) -> LayerSolution:
        problems.append(problem)
        return solve_block_fp8(problem)

    monkeypatch.setitem(METHODS, "ue8m0", replace(METHODS["ue8m0"], solve=noting))
    calibrated(tmp_path, "qwen3-tied", *assumed)
    assert problems
    for problem in problems:
        assert (problem.gain is not None) == bool(problem.maps) == given_back
        moved = (problem.towards(problem.weight) - problem.weight).abs().max() / problem.weight.abs().max()
        assert (float(moved) > 0.01) == given_back


def test_wide_sums_have_no_output_gain(tmp_path: Path) -> None:
    assert not any(
        "gain" in note for linear in notes(calibrated(tmp_path, "qwen3-tied", *FLOOR)) for note in linear
    )
