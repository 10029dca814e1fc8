"""`--from` through the command line: another layout, the same numbers, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import Result

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader

Run = Callable[..., Result]


@pytest.fixture
def quantized(model: Path, tmp_path: Path, run: Run) -> Path:
    out = tmp_path / "quantized"
    done = run(
        "--model-path", model, "--output-path", out, "--device", "cpu", "--quant-method", "rtn",
        "--group-size", 32, "--layout", "gptq", "--no-validate",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    return out


def test_to_awq_and_what_is_said(quantized: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "awq"
    done = run("--from", quantized, "--layout", "awq", "--output-path", out, "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert (record["layout"], record["exact"], record["requantized"]) == ("awq", True, 0)
    assert record["linears"] == 21
    assert record["converted_from"]["layout"] == "gptq"
    before, after = LinearReader(open_source(quantized)), LinearReader(open_source(out))
    for layer in range(3):
        module = f"model.layers.{layer}.mlp.down_proj"
        assert torch.equal(before.read(module), after.read(module))
    names = {file.name for file in out.iterdir()}
    assert {"qwen_quantize.json", "report.html", "tokenizer.json", "config.json"} <= names
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    assert manifest["source"] == json.loads((quantized / "qwen_quantize.json").read_text())["source"]
    assert run("report", out).exit_code == 0


def test_requests_that_do_not_go_together(quantized: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    full = ("--from", quantized, "--layout", "awq", "--output-path", out)
    for arguments, words in (
        (full[:4], "name it with --output-path"),
        ((*full[:2], *full[4:]), "name it with --layout"),
        ((*full, "--device", "cpu"), "--device says nothing beside --from"),
        ((*full, "--scheme", "w4a16"), "unless --requantize is given"),
        (("--requantize", "--device", "cpu"), "--requantize belongs to --from"),
        (("--from", quantized, "--layout", "deepseek-fp8", "--output-path", out), "have no exact form"),
        (("--from", quantized, "--layout", "awq", "--output-path", quantized), "holds the input"),
    ):
        done = run(*arguments)
        assert done.exit_code == 2, words
        assert words in " ".join(done.output.split())
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))


def test_a_stated_loss(quantized: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    done = run(
        "--from", quantized, "--layout", "deepseek-fp8", "--output-path", out, "--requantize", "--json"
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert (record["exact"], record["requantized"]) == (False, 21)
    assert 0 < record["largest_relative_squared_error"] < 1e-2
    stated = json.loads((out / "qwen_quantize.json").read_text())["conversion"]["relative_squared_errors"]
    assert max(stated.values()) == record["largest_relative_squared_error"]
    assert len(stated) == 21


def test_a_cache_comes_along(model: Path, dataset: Path, tmp_path: Path, run: Run) -> None:
    out, other, back = tmp_path / "out", tmp_path / "other", tmp_path / "back"
    done = run(
        "--model-path", model, "--output-path", out, "--device", "cpu", "--quant-method", "rtn", "--group-size", 32,
        "--kv-cache", "fp8", "--calibration-dataset", dataset, "--calibration-samples", 2, "--calibration-length", 64,
        "--no-validate", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    for source, layout, target in ((out, "ascend", other), (out, "compressed-tensors", back)):
        said = json.loads(run("--from", source, "--layout", layout, "--output-path", target, "--json").stdout)
        assert said["check"]["errors"] == 0
        assert said["check"]["layout"] == layout
        manifest = json.loads((target / "qwen_quantize.json").read_text())
        assert manifest["check"] == said["check"]
        cache = "kv_cache.qwen_quantize"
        assert (target / cache).read_bytes() == (out / cache).read_bytes()
        dropped = [note for note in said["notes"] if "scales of the key-value cache" in note]
        assert [("6 tensors" in note) for note in dropped] == [True] * (layout == "ascend")
    assert not any(name.endswith("k_scale") for name in load_file(other / "quant_model_weights.safetensors"))
    configs = [json.loads((folder / "config.json").read_text()) for folder in (out, back)]
    assert configs[0]["quantization_config"]["kv_cache_scheme"] is not None
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_static_sums_have_no_exact_form(model: Path, dataset: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    run(
        "--model-path", model, "--output-path", out, "--device", "ascend-910b", "--quant-method", "w8a8",
        "--scheme", "w8a8_static", "--layout", "ascend", "--calibration-dataset", dataset,
        "--calibration-samples", 2, "--calibration-length", 64, "--no-validate", "--json",
    )  # fmt: skip
    options = ("--from", out, "--layout", "compressed-tensors", "--output-path", tmp_path / "new")
    refused = run(*options)
    assert refused.exit_code == 2
    assert "deq_scale" in refused.stderr
    assert not (tmp_path / "new").exists()


def test_tiles_of_a_named_chip_and_back(quantized: Path, tmp_path: Path, run: Run) -> None:
    out, back = tmp_path / "tiles", tmp_path / "back"
    asked = ("--from", quantized, "--layout", "tiles", "--output-path", out)
    refused = run(*asked)
    assert refused.exit_code == 2
    assert "name it with --device" in refused.stderr
    refused = run(*asked, "--device", "nvidia-h100")
    assert refused.exit_code == 2
    assert "no public document says" in " ".join(refused.stderr.split())
    done = run(*asked, "--device", "ascend-910b", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["layout"], said["exact"], said["linears"]) == ("tiles", True, 21)
    name = "model.layers.0.mlp.up_proj.weight"
    assert load_file(out / "model.safetensors")[name].shape == (3, 8, 16, 8)
    done = run("--from", out, "--layout", "gptq", "--output-path", back, "--json")
    assert done.exit_code == 0, done.output
    before, after = (load_file(folder / "model.safetensors") for folder in (quantized, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
