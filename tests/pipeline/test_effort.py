"""High effort from the command line: never worse on any linear of the embedded models, refused where it is idle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.embedded import calibration_text_path, embedded_model_path, embedded_moe_path
from qwen_quantize.engine.load import ModelReader
from tests.cli.test_resume import hashes
from tests.tiny_models import make_tiny, make_tokenizer, words

CHIP = ("--device", "cpu", "--allow-unsupported", "--no-validate")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def linears(out: Path) -> dict[str, dict[str, Any]]:
    """By name, routed experts included."""
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    return {linear["name"]: linear for layer in manifest["layers"] for linear in layer["linears"]}


@pytest.fixture
def tiny(tmp_path: Path) -> list[object]:
    make_tiny(tmp_path / "model", "qwen3", hidden_size=64, intermediate_size=128)
    make_tokenizer(tmp_path / "model")
    text = tmp_path / "calib.jsonl"
    text.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(6)))
    return [
        "--model-path", tmp_path / "model", "--calibration-dataset", text, "--calibration-length", "32",
        "--calibration-samples", "8", *CHIP,
    ]  # fmt: skip


@pytest.mark.parametrize("method", ["gptq", "awq_v2"])
def test_high_effort_repeats_itself_and_differs_from_normal(
    method: str, tmp_path: Path, tiny: list[object]
) -> None:
    for name, effort in (("normal", "normal"), ("high", "high"), ("again", "high")):
        result = invoke(*tiny, "--quant-method", method, "--effort", effort, "--output-path", tmp_path / name)
        assert result.exit_code == 0, result.output
    assert hashes(tmp_path / "high") == hashes(tmp_path / "again")
    normal, high = linears(tmp_path / "normal"), linears(tmp_path / "high")
    assert any(high[name]["sha256"] != normal[name]["sha256"] for name in normal)
    request = json.loads((tmp_path / "high" / "qwen_quantize.json").read_text())["request"]
    assert request["effort"] == "high"


@pytest.mark.slow
@pytest.mark.parametrize("model", [embedded_model_path, embedded_moe_path], ids=["dense", "moe"])
def test_no_linear_of_an_embedded_model_is_worse(model: Any, tmp_path: Path) -> None:
    """From collected statistics, so that both efforts have the same inputs everywhere."""
    collected = invoke(
        "--collect", tmp_path / "stats", "--model-path", model(), "--calibration-dataset",
        calibration_text_path(), "--calibration-samples", "4",
    )  # fmt: skip
    assert collected.exit_code == 0, collected.output
    for effort in ("normal", "high"):
        result = invoke(
            "--model-path", model(), "--from-statistics", tmp_path / "stats", "--quant-method", "gptq",
            "--group-size", "32", "--effort", effort, "--output-path", tmp_path / effort, *CHIP,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
    normal, high = linears(tmp_path / "normal"), linears(tmp_path / "high")
    # Layers for multi-token prediction come behind the others and see no text.
    unseen = f"model.layers.{ModelReader(open_source(model())).blueprint.num_layers}."
    for name, linear in high.items():
        if name.startswith(unseen):
            assert linear["sha256"] == normal[name]["sha256"]
        else:
            assert linear["error"] < normal[name]["error"]


def test_where_high_effort_would_change_nothing_it_is_refused(tmp_path: Path, tiny: list[object]) -> None:
    for method in ("rtn", "awq", "ue8m0"):
        result = invoke(
            *tiny, "--quant-method", method, "--effort", "high", "--output-path", tmp_path / "out"
        )
        assert result.exit_code == 2
        assert "gptq" in result.stderr
    without = [*tiny[:2], *CHIP, "--quant-method", "w4a8", "--effort", "high"]
    result = invoke(*without, "--output-path", tmp_path / "out")
    assert result.exit_code == 2
    assert "--calibration-dataset" in result.stderr
    assert not (tmp_path / "out").exists()


def test_unknown_effort_is_refused(tmp_path: Path) -> None:
    result = invoke("--device", "example@1.2", "--output-path", tmp_path / "out", "--effort", "some")
    assert result.exit_code == 2
    assert "normal, high" in result.stderr
