"""`--rotate` from the command line: what is written, measured, collected, resumed and refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.load import ModelReader
from tests.cli.test_resume import hashes
from tests.pipeline.test_methods import invoke, options_in, run
from tests.tiny_models import make_tiny, make_tokenizer

METHOD = ("--quant-method", "gptq", "--scheme", "mxfp4", "--device", "cpu", "--allow-unsupported")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_tiny(tmp_path / "model", "qwen3-tied")
    make_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def test_a_rotated_result(model: Path, tmp_path: Path) -> None:
    """Rotated alike from text and from statistics, run again from its manifest, and measured against the original."""
    common = ["--model-path", model, *METHOD, *options_in(tmp_path)]
    text = common[common.index("--calibration-dataset") : common.index("--calibration-dataset") + 6]
    found = run(*common, "--rotate", "r1r2:32", "--output-path", tmp_path / "out")
    assert any("residual stream and values rotated in runs of 32" in note for note in found["notes"])
    assert any("the head, which was the embedding" in note for note in found["notes"])
    # The reference turns with the model, or its hidden states would be as far away as those of another.
    assert found["validation"]["layers"][-1]["sqnr_db"] > 5
    manifest = json.loads((tmp_path / "out" / "qwen_quantize.json").read_text())
    assert manifest["request"]["rotate"] == "r1r2:32"
    assert manifest["source"]["fingerprint"] == open_source(model).fingerprint()
    written = ModelReader(open_source(tmp_path / "out"))
    assert not written.blueprint.config.tie_word_embeddings
    again = ["--recipe", tmp_path / "out" / "qwen_quantize.json", "--output-path", tmp_path / "again"]
    run(*again, "--no-validate")
    assert hashes(tmp_path / "again")["model.safetensors"] == hashes(tmp_path / "out")["model.safetensors"]
    run("--collect", tmp_path / "stats", "--model-path", model, "--rotate", "r1r2:32", *text)
    statistics = ["--model-path", model, *METHOD, "--from-statistics", tmp_path / "stats", "--no-validate"]
    run(*statistics, "--rotate", "r1r2:32", "--output-path", tmp_path / "compiled")
    other = invoke(*statistics, "--rotate", "r2", "--output-path", tmp_path / "other")
    assert other.exit_code == 2
    assert "with the same --rotate" in " ".join(other.output.split())
    assert not (tmp_path / "other").exists()


def test_without_data_by_pieces(model: Path, tmp_path: Path) -> None:
    common = options_in(tmp_path)
    words = common[common.index("--validation-text") :]
    found = run(
        "--model-path", model, "--quant-method", "ue8m0", "--rotate", "r1r2", "--output-path", tmp_path / "out", *words
    )  # fmt: skip
    assert found["validation"]["kl_mean"] < 0.05


def test_an_attribution_is_refused(model: Path, tmp_path: Path) -> None:
    text = options_in(tmp_path)
    run(
        "--model-path",
        model,
        *METHOD,
        *text,
        "--rotate",
        "r2",
        "--output-path",
        tmp_path / "out",
        "--no-validate",
    )
    held_out = text[text.index("--validation-text") + 1]
    result = invoke("eval", tmp_path / "out", "--text", held_out, "--max-tokens", "64", "--attribute")
    assert result.exit_code == 2
    assert "quantize without --rotate" in " ".join(result.output.split())


def test_a_wrong_value_is_refused(tmp_path: Path) -> None:
    result = invoke("--device", "cpu", "--rotate", "r3", "--output-path", tmp_path / "out")
    assert result.exit_code == 2
    assert "none of none, r2 and r1r2" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
