"""The main command end to end on a tiny model: what is written, and that engines read it as we do."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import Result

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.load import ModelReader, load_model
from tests.tiny_models import make_tiny, make_tokenizer, words

Run = Callable[..., Result]


@pytest.fixture
def options(dataset: Path, tmp_path: Path) -> list[str]:
    text = tmp_path / "held-out.txt"
    text.write_text(words(2000, seed=77))
    return [
        "--device", "example@1.2", "--calibration-dataset", str(dataset), "--calibration-length", "32",
        "--calibration-samples", "16", "--validation-text", str(text), "--validation-tokens", "1024",
    ]  # fmt: skip


@pytest.fixture
def square_model(tmp_path: Path) -> Path:
    """Every linear a multiple of 128 in both dimensions."""
    folder = tmp_path / "square"
    make_tiny(folder, "qwen3", hidden_size=256, head_dim=64, intermediate_size=384, seed=12)
    make_tokenizer(folder)
    return folder


def logits_of_transformers(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    with torch.inference_mode():
        return model(tokens).logits.float()


def test_end_to_end_through_the_command_line(square_model: Path, options: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "qwen_quantize", "--model-path", str(square_model)]
    done = subprocess.run(
        [*command, "--output-path", str(out), *options, "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    for key in ("chip", "method", "layout", "output_path", "seconds", "peak_memory_bytes", "output_bytes"):
        assert record[key]
    assert isinstance(record["assumptions"], list)
    validation = record["validation"]
    assert validation["tokens"] > 900
    assert 0 < validation["kl_mean"] < 0.05
    assert validation["kl_mean"] <= validation["kl_p99"]
    assert validation["top1_agreement"] > 0.7
    assert validation["perplexity"] == pytest.approx(validation["reference_perplexity"], rel=0.05)
    written = {file.name for file in out.iterdir()}
    assert written == {
        "config.json", "generation_config.json", "model.safetensors", "qwen_quantize.json", "report.html",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert not list(tmp_path.glob(".out*"))
    assert record["output_bytes"] == sum(t.nbytes for t in load_file(out / "model.safetensors").values())


def test_bytes_follow_the_deepseek_layout(
    square_model: Path, options: list[str], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    assert run("--model-path", square_model, "--output-path", out, *options, "--no-validate").exit_code == 0
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"] == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    tensors = load_file(out / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("weight_scale_inv")}
    assert len(scales) == 14
    for name, scale in scales.items():
        weight = tensors[name.removesuffix("_scale_inv")]
        assert weight.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.float32
        assert list(scale.shape) == [-(-size // 128) for size in weight.shape]
        bits = scale.view(torch.int32)
        assert bool(((bits & 0x7FFFFF) == 0).all()), "not a power of two"
        assert bool(((bits >> 23) < 255).all())
        assert bool(((weight.view(torch.uint8) & 0x7F) != 0x7F).all()), "a NaN code was written"
    assert tensors["lm_head.weight"].dtype == torch.float32
    assert "model.layers.0.self_attn.q_norm.weight" in tensors


def test_transformers_reads_what_the_engine_reads(
    square_model: Path, options: list[str], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    assert run("--model-path", square_model, "--output-path", out, *options, "--no-validate").exit_code == 0
    tokens = torch.randint(1, 160, (2, 40), generator=torch.Generator().manual_seed(1))
    theirs = logits_of_transformers(out, tokens)
    ours = load_model(ModelReader(open_source(out))).forward(tokens)
    original = load_model(ModelReader(open_source(square_model))).forward(tokens)
    distance = (ours - theirs).norm() / theirs.norm()
    assert distance < 4e-3, "more than rounding the weights to bf16 explains"
    assert distance < 0.3 * (ours - original).norm() / original.norm(), "quantization itself must be visible"


@pytest.mark.parametrize("block", [64, 32])
def test_odd_shapes_take_blocks_that_transformers_reads(
    block: int, options: list[str], tmp_path: Path, run: Run
) -> None:
    model, out = tmp_path / "odd", tmp_path / "out"
    hidden = {64: 192, 32: 96}[block]
    make_tiny(model, "llama", hidden_size=hidden, intermediate_size=2 * hidden, num_attention_heads=3,
              num_key_value_heads=3, seed=9)  # fmt: skip
    make_tokenizer(model)
    result = run("--model-path", model, "--output-path", out, *options, "--no-validate")
    assert result.exit_code == 0, result.output
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["weight_block_size"] == [block, block]
    tokens = torch.randint(1, 160, (1, 30), generator=torch.Generator().manual_seed(1))
    theirs = logits_of_transformers(out, tokens)
    ours = load_model(ModelReader(open_source(out))).forward(tokens)
    assert (ours - theirs).norm() / theirs.norm() < 4e-3


def test_partial_blocks_are_written_and_read_when_asked_for(
    model: Path, options: list[str], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    result = run("--model-path", model, "--output-path", out, *options, "--block-size", 128)
    assert result.exit_code == 0, result.output
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"]]
    partial = {linear["name"].rsplit(".", 1)[-1]: linear["partial_blocks"] for linear in linears}
    assert partial["gate_proj"] == 1  # [192, 128]: one full and one partial block
    assert manifest["validation"]["kl_mean"] < 0.05
    scale = load_file(out / "model.safetensors")["model.layers.0.mlp.down_proj.weight_scale_inv"]
    assert list(scale.shape) == [1, 2]


def test_same_request_same_bytes(model: Path, options: list[str], tmp_path: Path, run: Run) -> None:
    for name in ("a", "b"):
        assert run("--model-path", model, "--output-path", tmp_path / name, *options).exit_code == 0
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "b").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_eval_repeats_the_validation(model: Path, options: list[str], tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    assert run("--model-path", model, "--output-path", out, *options).exit_code == 0
    validation = json.loads((out / "qwen_quantize.json").read_text())["validation"]
    result = run("eval", out, "--text", tmp_path / "held-out.txt", "--max-tokens", 1024, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    for key in ("tokens", "perplexity", "reference_perplexity", "kl_mean", "kl_p99", "top1_agreement"):
        assert record[key] == validation[key]
    assert record["seconds"] > 0
    assert record["activation_rounding"] == "rne"
    truncated = run(
        "eval",
        out,
        "--text",
        tmp_path / "held-out.txt",
        "--max-tokens",
        1024,
        "--device",
        "example@1.3",
        "--json",
    )
    assert json.loads(truncated.stdout)["activation_rounding"] == "rtz"
    assert json.loads(truncated.stdout)["kl_mean"] > 1.2 * record["kl_mean"]


def test_calibration_beats_plain_rounding_on_every_linear(
    model: Path, options: list[str], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    assert run("--model-path", model, "--output-path", out, *options, "--no-validate").exit_code == 0
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"]]
    assert len(linears) == 21
    assert all(linear["error"] <= linear["baseline_error"] for linear in linears)
    assert sum(linear["error"] < 0.9 * linear["baseline_error"] for linear in linears) > 15
    streams = [stream for layer in manifest["layers"] for stream in layer["streams"]]
    assert all(stream["tokens"] == manifest["calibration"]["tokens"] for stream in streams)


def test_zero_weights_get_scale_one(model: Path, options: list[str], tmp_path: Path, run: Run) -> None:
    from safetensors.torch import save_file

    name = "model.layers.0.mlp.down_proj.weight"
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            tensors[name].zero_()
            save_file(tensors, shard, metadata={"format": "pt"})
    out = tmp_path / "out"
    assert run("--model-path", model, "--output-path", out, *options, "--no-validate").exit_code == 0
    tensors = load_file(out / "model.safetensors")
    assert bool((tensors[name].view(torch.uint8) == 0).all())
    assert bool((tensors[name + "_scale_inv"] == 1).all())
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    (linear,) = [l for l in manifest["layers"][0]["linears"] if l["name"].endswith("down_proj")]  # noqa: E741
    assert linear["zero_blocks"] == tensors[name + "_scale_inv"].numel()
    assert any("all-zero" in note for note in linear["notes"])


def test_golden_hash_of_a_data_free_run(model: Path, tmp_path: Path, run: Run) -> None:
    """Rounding and scale search alone are exact, so these bytes are the same on every machine."""
    out = tmp_path / "out"
    command = ["--model-path", model, "--output-path", out, "--device", "example@1.2", "--no-validate"]
    assert run(*command).exit_code == 0
    tensors = load_file(out / "model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].view(torch.uint8).numpy().tobytes())
    assert digest.hexdigest() == "55a7b6eda26f0a98bb7e1a3160755f5ef3b339e545483b6cfa071c1dcf7af9f9"


def test_ignored_layers_stay_and_are_listed(
    model: Path, options: list[str], tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    result = run(
        "--model-path", model, "--output-path", out, *options, "--no-validate", "--ignore", "model.layers.1.*"
    )
    assert result.exit_code == 0, result.output
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.1.mlp.up_proj.weight"].dtype == torch.float32
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.up_proj" in kept
    tokens = torch.randint(1, 160, (1, 30), generator=torch.Generator().manual_seed(1))
    ours = load_model(ModelReader(open_source(out))).forward(tokens)
    assert (ours - logits_of_transformers(out, tokens)).norm() / ours.norm() < 4e-3


def test_memory_ceiling_is_kept(tmp_path: Path, dataset: Path) -> None:
    """A fresh process under --max-memory stays below it, with more calibration tokens than would fit."""
    model = tmp_path / "model"
    make_tiny(model, "qwen3", hidden_size=512, intermediate_size=1024, num_hidden_layers=2, seed=3)
    make_tokenizer(model)
    dataset.write_text("".join(f'{{"text": "{words(900, seed)}"}}\n' for seed in range(40)))
    done = subprocess.run(
        [
            sys.executable, "-m", "qwen_quantize", "--model-path", str(model), "--output-path",
            str(tmp_path / "out"), "--device", "example@1.2", "--calibration-dataset", str(dataset),
            "--calibration-samples", "96", "--calibration-length", "128", "--max-memory", "600MB",
            "--no-validate", "--json",
        ],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_memory_bytes"] <= 600e6


def test_dry_run_writes_nothing(model: Path, options: list[str], tmp_path: Path, run: Run) -> None:
    before = sorted(tmp_path.iterdir())
    result = run("--model-path", model, "--output-path", tmp_path / "out", *options, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert {"peak_memory_bytes", "disk_bytes", "output_bytes", "seconds", "tensors"} <= set(plan)
    assert {tensor["action"] for tensor in plan["tensors"]} == {"quantize", "keep"}
    assert sorted(tmp_path.iterdir()) == before


def test_help_is_instant_and_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from qwen_quantize.cli.main import app; "
        "result = CliRunner().invoke(app, ['--help']); assert '--device' in result.output; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
