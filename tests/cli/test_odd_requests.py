"""Requests that are legal to type and dangerous or senseless to carry out, and what was forgotten before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

from tests.tiny_models import make_tiny, make_tokenizer, words

Run = Callable[..., Result]


def refused(result: Result, *fragments: str) -> None:
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    for fragment in fragments:
        assert fragment in lines[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.txt"
    path.write_text(words(1500, seed=5))
    return path


@pytest.mark.parametrize("where", ["model", ".", "model/out"])
def test_output_never_replaces_its_input(where: str, model: Path, tmp_path: Path, run: Run) -> None:
    before = contents(model)
    result = run(
        "--model-path", model, "--output-path", tmp_path / where, "--device", "example@1.2", "--overwrite"
    )
    refused(result, "--output-path", "choose another folder")
    assert contents(model) == before


def test_output_never_swallows_the_dataset(model: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    out.mkdir()
    data = out / "calib.jsonl"
    data.write_text(f'{{"text": "{words(300)}"}}\n')
    result = run(
        "--model-path", model, "--output-path", out, "--device", "example@1.2", "--calibration-dataset", data,
        "--overwrite",
    )  # fmt: skip
    refused(result, "calib.jsonl")
    assert data.exists()


def test_firmware_in_the_device_name_is_remembered(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    made = run(
        "--model-path", model, "--output-path", out, "--device", "example@1.3", "--validation-text", text,
        "--validation-tokens", 1024,
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    assert manifest["chip"]["activation_cast"]["rounding"] == "rtz"
    assert manifest["chip"]["versions"]["firmware"] == "1.3"
    result = run("eval", out, "--text", text, "--max-tokens", 1024, "--json")
    record = json.loads(result.stdout)
    assert record["activation_rounding"] == "rtz"
    assert record["kl_mean"] == manifest["validation"]["kl_mean"]


def test_a_profile_file_is_remembered(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    import importlib.resources

    shipped = importlib.resources.files("qwen_quantize.chip_profiles") / "example.toml"
    profile = tmp_path / "mychip.toml"
    profile.write_text(shipped.read_text().replace('name = "example"', 'name = "mychip"', 1))
    out = tmp_path / "out"
    made = run("--model-path", model, "--output-path", out, "--device", f"{profile}@1.3", "--no-validate")
    assert made.exit_code == 0, made.output
    result = run("eval", out, "--text", text, "--max-tokens", 1024, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["activation_rounding"] == "rtz"


def test_memory_ceiling_counts_the_validation(tmp_path: Path, dataset: Path) -> None:
    model = tmp_path / "model"
    make_tiny(model, "qwen3-tied", vocab_size=60000, seed=3)
    make_tokenizer(model)

    def command(ceiling: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                sys.executable, "-m", "qwen_quantize", "--model-path", str(model), "--output-path",
                str(tmp_path / "out"), "--device", "example@1.2", "--calibration-dataset", str(dataset),
                "--calibration-length", "32", "--validation-text", str(dataset), "--validation-tokens", "1024",
                "--max-memory", ceiling, "--json",
            ],
            capture_output=True, text=True,
        )  # fmt: skip

    small = command("560MB")
    assert small.returncode == 2
    assert "--no-validate" in small.stderr
    large = command("1000MB")
    assert large.returncode == 0, large.stderr
    record = json.loads(large.stdout)
    assert record["peak_memory_bytes"] <= 1000e6
    assert record["validation"]["seconds"] > 0


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})


def quantized(model: Path, out: Path, run: Run) -> Path:
    result = run("--model-path", model, "--output-path", out, "--device", "example@1.2", "--no-validate")
    assert result.exit_code == 0, result.output
    return out


def test_quantized_sources_are_read_through_their_scales(model: Path, tmp_path: Path, run: Run) -> None:
    """Quantizing what is block FP8 already, on the same grid, changes no code and no scale."""
    first = quantized(model, tmp_path / "first", run)
    second = quantized(first, tmp_path / "second", run)
    before, after = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert before.keys() == after.keys()
    name = "model.layers.0.mlp.up_proj.weight"
    expected = before[name].float() * before[name + "_scale_inv"].repeat_interleave(64, 0).repeat_interleave(
        64, 1
    )
    found = after[name].float() * after[name + "_scale_inv"].repeat_interleave(64, 0).repeat_interleave(64, 1)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("fault", ["scale missing", "scale of another shape", "e5m2", "int8"])
def test_sources_without_a_meaning_are_refused(fault: str, model: Path, tmp_path: Path, run: Run) -> None:
    source = quantized(model, tmp_path / "source", run)
    name = "model.layers.1.mlp.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        match fault:
            case "scale missing":
                del tensors[name + "_scale_inv"]
            case "scale of another shape":
                tensors[name + "_scale_inv"] = torch.ones(5, 5)
            case "e5m2":
                tensors[name] = tensors[name].view(torch.float8_e5m2)
            case "int8":
                tensors[name] = tensors[name].view(torch.int8)

    rewrite(source, change)
    for arguments in (["--dry-run"], []):
        result = run(
            "--model-path", source, "--output-path", tmp_path / "out", "--device", "example@1.2", *arguments
        )
        refused(result, name)
    assert not (tmp_path / "out").exists()


def test_tokenizer_of_another_model(model: Path, dataset: Path, tmp_path: Path, run: Run) -> None:
    make_tokenizer(model, 5000)
    dataset.write_text(f'{{"text": "{words(300, vocab_size=5000)}"}}\n')
    result = run(
        "--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2",
        "--calibration-dataset", dataset, "--calibration-length", 32, "--no-validate",
    )  # fmt: skip
    refused(result, "160 tokens")
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (["--validation-text", "missing.txt"], "missing.txt"),
        (["--calibration-column", "text"], "--calibration-column"),
        (["--model-path", ""], "--model-path is empty"),
        (["--validation-text", " "], "--validation-text is empty"),
        (["--validation-text", "w1 " * 400], "File name too long"),
    ],
)
def test_refused_before_any_weight_is_written(
    options: list[str], fragment: str, model: Path, tmp_path: Path, run: Run
) -> None:
    result = run(
        "--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2", *options
    )
    refused(result, fragment)
    assert not list(tmp_path.glob(".out*"))


def test_windows_longer_than_the_context(model: Path, dataset: Path, tmp_path: Path, run: Run) -> None:
    result = run(
        "--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2",
        "--calibration-dataset", dataset, "--calibration-length", 1000,
    )  # fmt: skip
    refused(result, "1000", "128")
    refused(run("eval", model, "--text", dataset, "--length", 1000), "1000", "128")
    refused(run("generate", model, "w1 w2", "--max-new-tokens", 1000), "1000", "128")


def test_a_lost_reference_is_said(model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    out = quantized(model, tmp_path / "out", run)
    model.rename(tmp_path / "moved")
    refused(run("eval", out, "--text", text), "--against")
    assert run("eval", out, "--text", text, "--against", "none").exit_code == 0
    assert (
        run("eval", out, "--text", text, "--against", tmp_path / "moved", "--max-tokens", 512).exit_code == 0
    )


@pytest.mark.parametrize("content", ["{", "{}", '{"chip": 5}', "[1]"])
def test_a_damaged_manifest_is_said(content: str, model: Path, text: Path, tmp_path: Path, run: Run) -> None:
    out = quantized(model, tmp_path / "out", run)
    (out / "qwen_quantize.json").write_text(content)
    refused(run("eval", out, "--text", text), "qwen_quantize.json")
    refused(run("report", out), "qwen_quantize.json")


def test_notes_on_the_calibration_text_are_shown(
    model: Path, dataset: Path, tmp_path: Path, run: Run
) -> None:
    result = run(
        "--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2", "--no-validate",
        "--calibration-dataset", dataset, "--calibration-length", 32, "--calibration-samples", 500, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert any("calibration text" in note for note in json.loads(result.stdout)["notes"])


def test_report_and_bench_and_generate_run(model: Path, tmp_path: Path, run: Run) -> None:
    out = quantized(model, tmp_path / "out", run)
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    assert run("report", out).exit_code == 0
    assert (out / "report.html").read_bytes() == page
    result = run("bench", out, "--prompt-tokens", 16, "--new-tokens", 4, "--json")
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    for key in (
        "prefill_tokens_per_second", "decode_tokens_per_second", "peak_memory_bytes", "bandwidth_bound_fraction",
    ):  # fmt: skip
        assert record[key] > 0
    said = run("generate", out, "w1 w2 w3", "--max-new-tokens", 5)
    assert said.exit_code == 0
    assert said.stdout.strip()
