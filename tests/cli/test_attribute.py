"""`eval` under a narrow accumulator, and `eval --attribute`, through the command line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from qwen_quantize.cli.main import app
from tests.tiny_models import words

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def made(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a quantized model, a text)."""
    folder = tmp_path_factory.mktemp("made")
    text = folder / "text.txt"
    text.write_text(words(400, 3))
    arguments = ["--model-path", tiny_source, "--device", "h20", "--output-path", folder / "out"]
    result = CliRunner().invoke(
        app, [*map(str, arguments), "--no-validate", "--allow-unsupported", "--quiet", "--threads", "1"]
    )
    assert result.exit_code == 0, result.output
    return folder / "out", text


@pytest.fixture
def evaluate(made: tuple[Path, Path], run: Run) -> Callable[..., dict[str, Any]]:
    def call(*more: str) -> dict[str, Any]:
        model, text = made
        result = run(
            "eval", model, "--text", text, "--length", 32, "--max-tokens", 256, "--json", "--quiet", *more
        )
        assert result.exit_code == 0, result.output
        record: dict[str, Any] = json.loads(result.stdout)
        return record

    return call


def test_a_narrow_accumulator_counts(evaluate: Callable[..., dict[str, Any]]) -> None:
    plain = evaluate()
    assert evaluate("--assume", "accumulator.fraction_bits=exact")["kl_mean"] == plain["kl_mean"]
    assert evaluate("--assume", "accumulator.fraction_bits=23")["kl_mean"] == plain["kl_mean"]
    narrow = evaluate("--assume", "accumulator.fraction_bits=13")
    narrower = evaluate("--assume", "accumulator.fraction_bits=5")
    assert narrow["kl_mean"] != plain["kl_mean"]
    assert narrower["kl_mean"] > 1.5 * plain["kl_mean"]
    alone = evaluate(
        "--assume", "accumulator.fraction_bits=5", "--assume", "accumulator.promotion_interval=never"
    )
    assert alone["kl_mean"] > narrower["kl_mean"]


def test_attribution(evaluate: Callable[..., dict[str, Any]]) -> None:
    record = evaluate("--attribute", "--assume", "accumulator.fraction_bits=5")
    found = record["attribution"]
    assert [row["part"] for row in found["parts"]] == [
        "weights",
        "activations",
        "scale_rounding",
        "accumulator",
    ]
    assert found["everything_off_is_the_reference"] is True
    for measure in ("nats", "kl_mean"):
        rows = [*found["parts"], *found["interactions"]]
        assert math.fsum(row[measure] for row in rows) == pytest.approx(found["total"][measure], abs=1e-12)
    assert found["total"]["nats"] == pytest.approx(math.log1p(record["rise"]), abs=1e-12)
    assert found["total"]["kl_mean"] == pytest.approx(record["kl_mean"], rel=1e-9)
    assert all(row["standard_error"] > 0 for row in found["parts"])
    assert found["interactions"][0]["part"] == "weights x activations"
    only = evaluate("--attribute", "--weights-only")["attribution"]
    assert [row["part"] for row in only["parts"]] == ["weights"]
    assert only["total"]["nats"] == found["parts"][0]["nats"]
    assert len(evaluate("--attribute")["attribution"]["parts"]) == 3


def test_attribution_in_words(made: tuple[Path, Path], run: Run) -> None:
    model, text = made
    options = ("--text", text, "--length", 32, "--max-tokens", 128, "--attribute")
    result = run("eval", model, *options)
    assert result.exit_code == 0
    assert "loss from scale rounding: " in result.output
    assert "everything off: the reference, bit for bit" in result.output
    refused = run("eval", model, *options, "--against", "none")
    assert refused.exit_code == 2
    assert "--against" in refused.output


def test_validation_of_a_calibrated_run_is_what_eval_says(
    tiny_source: Path, tmp_path: Path, run: Run
) -> None:
    """The H100's 13-bit sums count while calibrating, when the result is validated, and in eval."""
    data, text = tmp_path / "calib.jsonl", tmp_path / "text.txt"
    data.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(4)))
    text.write_text(words(1200, 3))
    options = ["--calibration-dataset", data, "--calibration-length", 32, "--calibration-samples", 4]
    options += ["--validation-text", text, "--validation-tokens", 256, "--device", "h100"]
    made = run("--model-path", tiny_source, "--output-path", tmp_path / "out", *options, "--json", "-q")
    assert made.exit_code == 0, made.output
    record = json.loads(made.stdout)
    assumed = {row["field"]: row["assumed"] for row in record["assumptions"]}
    assert assumed["accumulator.promotion_interval"] == "128"
    measured = ("eval", tmp_path / "out", "--text", text, "--max-tokens", 256, "--json", "-q")
    same = json.loads(run(*measured, "--length", record["validation"]["window_tokens"] + 1).stdout)
    assert same["kl_mean"] == record["validation"]["kl_mean"]
    exact = json.loads(run(*measured, "--assume", "accumulator.fraction_bits=exact").stdout)
    assert exact["kl_mean"] != same["kl_mean"]
