"""--kv-cache through the command line: what is stored, what is read back, and what huge key biases do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

from qwen_quantize.checkpoint.kv_side import KV_FILE, read_kv_plan
from tests.tiny_models import make_tiny, make_tokenizer, words

Run = Callable[..., Result]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.txt"
    path.write_text(words(1500, seed=77))
    return path


def options(dataset: Path, text: Path) -> list[str]:
    return [
        "--device", "example@1.2", "--calibration-dataset", str(dataset), "--calibration-length", "64",
        "--calibration-samples", "4", "--validation-text", str(text), "--validation-tokens", "512", "--json", "-q",
    ]  # fmt: skip


def test_fp8_scales_stand_in_the_checkpoint(
    model: Path, dataset: Path, text: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    done = run("--model-path", model, "--output-path", out, *options(dataset, text), "--quant-method", "rtn",
               "--scheme", "w4a16", "--group-size", 32, "--kv-cache", "fp8")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["kv_cache"]["scheme"] == "fp8,window=0,sinks=0"
    assert record["kv_cache"]["bits"] == 8
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["num_bits"] == 8
    assert config["kv_cache_scheme"]["strategy"] == "tensor"
    weights = load_file(out / "model.safetensors")
    for layer in range(3):
        for side in "kv":
            name = f"model.layers.{layer}.self_attn.{side}_scale"
            scale = weights[name]
            assert scale.shape == (1,)
            assert 0 < float(scale) < 10
            assert float(scale) != 1
    again = run(
        "eval", out, "--against", "none", "--text", text, "--max-tokens", 512, "--length", 64, "--json"
    )
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["kv_cache"]["scheme"] == "fp8,window=0,sinks=0"


def test_mixed_is_stored_and_generates(
    model: Path, dataset: Path, text: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    done = run("--model-path", model, "--output-path", out, *options(dataset, text), "--quant-method", "ue8m0",
               "--kv-cache", "mixed:7,window=16,sinks=2")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    kv = json.loads(done.stdout)["kv_cache"]
    assert 6.0 < kv["bits"] <= 7
    assert any("1.2 GB becomes 0.57 GB" in note for note in kv["notes"])
    assert (out / KV_FILE).is_file()
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    assert manifest["kv_cache"] == kv
    assert manifest["request"]["kv_cache"] == "mixed:7,window=16,sinks=2"
    said = run("generate", out, "w3 w4 w5", "--max-new-tokens", 5)
    assert said.exit_code == 0, said.stderr
    speed = run(
        "bench", out, "--prompt-tokens", 40, "--new-tokens", 4, "--json", "-q", "--kv-cache", "int4:32"
    )
    assert speed.exit_code == 0, speed.stderr
    assert json.loads(speed.stdout)["kv_cache"]["scheme"] == "int4:32,window=128,sinks=4"


def test_importance_travels_with_the_scheme(model: Path, dataset: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    asked = ["--model-path", model, "--output-path", out, "--device", "example@1.2", "--calibration-dataset", dataset,
             "--calibration-length", 64, "--calibration-samples", 2, "--no-validate", "--quant-method", "rtn",
             "--importance", "gradient", "--json", "-q"]  # fmt: skip
    done = run(*asked, "--kv-cache", "int4")
    assert done.exit_code == 2
    assert "--importance" in done.stderr
    assert not out.exists()
    done = run(*asked, "--kv-cache", "mixed:6,window=8")
    assert done.exit_code == 0, done.stderr
    words_ = "mixed:6,importance=gradient,window=8,sinks=4"
    assert json.loads(done.stdout)["kv_cache"]["scheme"] == words_
    kept = read_kv_plan(out)
    assert kept is not None
    assert kept.scheme.gradient
    assert kept.scheme.name == words_


def test_the_plan_prints_the_arithmetic(model: Path, dataset: Path, tmp_path: Path, run: Run) -> None:
    asked = ["--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2", "--dry-run"]
    done = run(
        *asked, "--calibration-dataset", dataset, "--calibration-length", 64, "--kv-cache", "mixed:7.6"
    )
    assert done.exit_code == 0, done.stderr
    said = " ".join((done.stdout + done.stderr).split())
    assert "mixed:7.6 is what 30.0 % of the channels in FP16" in said
    assert "1.2 GB becomes 0.57 GB" in said
    done = run(*asked, "--kv-cache", "int4")
    assert "4.62 bits of a value with scales" in " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("words_", "says"),
    [("int3", "not one of the schemes"), ("int4:48", "32, 64 or 128"), ("mixed:5", "--calibration-dataset")],
)
def test_refusals_come_before_any_work(model: Path, tmp_path: Path, run: Run, words_: str, says: str) -> None:
    done = run("--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2",
               "--kv-cache", words_)  # fmt: skip
    assert done.exit_code == 2
    assert says in done.stderr
    assert not (tmp_path / "out").exists()


def test_huge_key_biases_keep_their_perplexity_under_auto(tmp_path: Path, text: Path, run: Run) -> None:
    """A bias that swamps what tokens say: one scale for a token's keys leaves nothing of it, `auto` notices."""
    folder = tmp_path / "biased"
    make_tiny(folder, "qwen2", head_dim=16, seed=9)
    make_tokenizer(folder)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("k_proj.bias"):
            tensor[::5] = 400.0
        if name.endswith("q_proj.weight"):
            tensor.view(4, 16, -1)[:, [0, 5, 10, 15, 8, 13, 2, 7]] *= 0.01
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def perplexity(*more: object) -> tuple[float, str]:
        done = run("eval", folder, "--text", text, "--max-tokens", 1024, "--length", 64, "--json", *more)
        assert done.exit_code == 0, done.stderr
        return float(json.loads(done.stdout)["perplexity"]), done.stderr

    exact, _ = perplexity()
    careless, said = perplexity("--kv-cache", "int8:token")
    assert "large biases" in said
    wide, said = perplexity("--kv-cache", "auto")
    assert "stay in 16 bits" in said
    assert abs(wide / exact - 1) < 0.01
    assert abs(careless / exact - 1) > 5 * abs(wide / exact - 1)
    assert torch.isfinite(torch.tensor(careless))
