"""Every calibrated method against plain rounding, on its own objective, on every linear of the embedded models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from qwen_quantize.calibrators.methods import METHODS
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.embedded import calibration_text_path, embedded_model_path, embedded_moe_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.pipeline.records import why_no_better

CALIBRATED = [name for name in METHODS if name != "rtn"]


def test_a_linear_that_is_no_better_says_why() -> None:
    assert why_no_better(0.1, 0.2) == ()
    assert all("plain rounding" in why_no_better(*errors)[0] for errors in ((0.2, 0.2), (0.0, 0.0)))
    assert why_no_better(0.2, 0.2) != why_no_better(0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("model", [embedded_model_path, embedded_moe_path], ids=["dense", "moe"])
@pytest.mark.parametrize("method", CALIBRATED)
def test_every_linear_errs_less_than_plain_rounding_or_says_why(
    method: str, model: Any, tmp_path: Path
) -> None:
    done = CliRunner().invoke(
        app,
        [
            *("--model-path", str(model()), "--output-path", str(tmp_path / "out"), "--quant-method", method),
            *("--calibration-dataset", str(calibration_text_path()), "--calibration-samples", "4"),
            *("--device", "cpu", "--allow-unsupported", "--no-validate"),
        ],
    )
    assert done.exit_code == 0, done.output
    layers = json.loads((tmp_path / "out" / "qwen_quantize.json").read_text())["layers"]
    linears = [linear for layer in layers for linear in layer["linears"]]
    assert len({linear["name"] for linear in linears}) == len(linears) > 0
    # A layer for multi-token prediction comes behind the others and sees no text.
    unseen = f"model.layers.{ModelReader(open_source(model())).blueprint.num_layers}."
    seen = [linear for linear in linears if not linear["name"].startswith(unseen)]
    for linear in linears:
        assert linear["error"] <= linear["baseline_error"], linear
        explained = any("no better than plain rounding" in note for note in linear["notes"])
        assert explained != (linear["error"] < linear["baseline_error"]), linear
    assert all(linear["error"] < linear["baseline_error"] for linear in seen)
    moves = [move for layer in layers for move in layer["moves"]]
    assert all(move["error"] < move["error_without"] for move in moves)
