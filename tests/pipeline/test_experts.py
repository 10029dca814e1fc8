"""Calibration of mixtures of experts, half a layer at a time, against the same computed at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.engine.load import ModelReader, load_model
from tests.cli.test_resume import hashes
from tests.stopping import stopped_after
from tests.tiny_models import make_tiny, make_tokenizer, words

FAMILIES = ["deepseek-v3", "deepseek-v2-lite", "mixtral", "qwen2-moe", "qwen3-moe"]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    return options_in(tmp_path)


def options_in(folder: Path) -> list[str]:
    """What all runs here have, with texts that are put into the folder."""
    calibration, held_out = folder / "calib.jsonl", folder / "held-out.txt"
    calibration.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(6)))
    held_out.write_text(words(800, seed=50))
    return [
        "--calibration-dataset", str(calibration), "--calibration-length", "32", "--calibration-samples", "8",
        "--validation-text", str(held_out), "--validation-tokens", "512", "--device", "example@1.2",
    ]  # fmt: skip


def make(folder: Path, family: str, **overrides: Any) -> Path:
    make_tiny(folder, family, **overrides)
    make_tokenizer(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_calibrated(family: str, tmp_path: Path, texts: list[str]) -> None:
    model, out = make(tmp_path / "model", family), tmp_path / "out"
    record = run("--model-path", model, "--output-path", out, *texts)
    assert record["validation"]["kl_mean"] < 0.05
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    blueprint = ModelReader(open_source(model)).blueprint
    names = {linear["name"] for layer in manifest["layers"] for linear in layer["linears"]}
    assert names == set(blueprint.linear_modules())
    for layer in manifest["layers"]:
        coverage = layer["experts"]
        assert len(coverage) == blueprint.num_experts(layer["layer"])
        if coverage:
            moe = blueprint.config.moe
            assert moe is not None
            assert sum(expert["tokens"] for expert in coverage) == 8 * 32 * moe.experts_per_token
        for linear in layer["linears"]:
            assert linear["error"] <= linear["baseline_error"]
    state = load_file(out / "model.safetensors")
    for name, tensor in state.items():
        if name.endswith("_scale_inv"):
            assert bool((tensor > 0).all())
            assert bool(tensor.isfinite().all())


def test_the_next_layer_sees_the_quantized_one(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states that the last layer reads are those of the written model, chip's casts included."""
    from qwen_quantize.cli.session import ChipQuestion, chip_compute, chip_of
    from qwen_quantize.engine.model import run_layer
    from qwen_quantize.pipeline.hidden import HiddenStates

    model, out = make(tmp_path / "model", "deepseek-v3"), tmp_path / "out"
    kept: dict[int, torch.Tensor] = {}
    remove = HiddenStates.remove

    def keeping(self: HiddenStates, step: int) -> None:
        if self.is_complete(step):
            kept[step] = self.read(step, 0, self.shape[0])
        remove(self, step)

    monkeypatch.setattr(HiddenStates, "remove", keeping)
    run("--model-path", model, "--output-path", out, "--no-validate", *texts)
    reader = ModelReader(open_source(out))
    arithmetic, _ = chip_of(ChipQuestion("example", (("firmware", "1.2"),)), None)
    written = load_model(reader, chip_compute(reader, arithmetic))
    hidden = kept[0]
    for index in range(2):
        hidden = run_layer(hidden, written.layers[index], index, written.blueprint, written.rotary)
        torch.testing.assert_close(hidden, kept[2 * index + 2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", ["shrink", "forced", "round"])
def test_starved_experts(policy: str, tmp_path: Path, texts: list[str]) -> None:
    """An expert that the router never picks is written with finite scales and listed with its policy."""
    model, out = make(tmp_path / "model", "mixtral"), tmp_path / "out"
    state = load_file(model / "model.safetensors")
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    state[gate] = state[gate].clone()
    state[gate][2] = 0
    state[gate][3] = -state[gate][[0, 1, 4, 5]].sum(dim=0) * 30  # rarely among the best
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    run("--model-path", model, "--output-path", out, "--expert-policy", policy, *texts)
    coverage = json.loads((out / "qwen_quantize.json").read_text())["layers"][0]["experts"]
    assert all(expert["tokens"] < expert["needed"] for expert in coverage)  # 256 tokens in all, 256 needed
    assert {expert["policy"] for expert in coverage} == {policy}
    written = load_file(out / "model.safetensors")
    scale = written["model.layers.0.block_sparse_moe.experts.2.w1.weight_scale_inv"]
    assert bool((scale > 0).all())
    assert bool(scale.isfinite().all())


def test_policies_differ_only_for_experts(tmp_path: Path, texts: list[str]) -> None:
    model = make(tmp_path / "model", "qwen3-moe")
    states = {}
    for policy in ("shrink", "forced", "round"):
        out = tmp_path / policy
        run("--model-path", model, "--output-path", out, "--expert-policy", policy, "--no-validate", *texts)
        states[policy] = load_file(out / "model.safetensors")
    names = [name for name in states["shrink"] if ".layers.0." in name]
    differing = {name for name in names if not torch.equal(states["shrink"][name], states["forced"][name])}
    assert differing
    assert all(".experts." in name for name in differing)


def test_unknown_policy_is_refused(tmp_path: Path) -> None:
    result = invoke("--device", "example@1.2", "--output-path", tmp_path / "out", "--expert-policy", "some")
    assert result.exit_code == 2
    assert "shrink, forced, round" in result.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], dict[str, str]]:
    """(a command without its output, what it writes when nobody stops it)."""
    folder = tmp_path_factory.mktemp("whole")
    command: list[object] = ["--model-path", make(folder / "model", "deepseek-v3"), *options_in(folder)]
    run(*command, "--output-path", folder / "out")
    return command, hashes(folder / "out")


@pytest.mark.parametrize("stop_after", [2, 7, 12, 20])
def test_interrupted_among_experts_resumes_to_the_same_bytes(
    stop_after: int,
    whole: tuple[list[object], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, expected = whole
    with stopped_after(stop_after, monkeypatch):
        assert invoke(*command, "--output-path", tmp_path / "out").exit_code == 130
    run(*command, "--output-path", tmp_path / "out", "--resume")
    assert hashes(tmp_path / "out") == expected


def test_quantized_without_data_by_tensor_names(tmp_path: Path) -> None:
    """An architecture without a blueprint is converted, and its calibration refused."""
    model, out = (
        make(tmp_path / "model", "qwen3-moe", hidden_size=128, moe_intermediate_size=64),
        tmp_path / "out",
    )
    config = json.loads((model / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (model / "config.json").write_text(json.dumps(config))
    record = run("--model-path", model, "--output-path", out, "--device", "example@1.2")
    assert record["validation"] is None
    assert any("tensor names" in note for note in record["notes"])
    state = load_file(out / "model.safetensors")
    assert state["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert state["model.layers.1.mlp.gate.weight"].dtype == torch.float32
    kept = json.loads((out / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.gate" in kept
    refused = invoke(
        "--model-path", model, "--output-path", tmp_path / "no", "--device", "example@1.2",
        "--calibration-dataset", tmp_path / "calib.jsonl",
    )  # fmt: skip
    assert refused.exit_code == 2
    assert "NobodysForCausalLM" in refused.stderr


def test_stacked_experts_are_kept_without_data(tmp_path: Path, texts: list[str]) -> None:
    """A checkpoint that holds all experts of a layer in one tensor: converted around them, calibration refused."""
    model, out = (
        make(tmp_path / "model", "qwen3-moe", hidden_size=128, moe_intermediate_size=64),
        tmp_path / "out",
    )
    state = load_file(model / "model.safetensors")
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        experts = [name for name in state if name.startswith(prefix)]
        state[f"{prefix}down_proj"] = torch.stack([state[n] for n in experts if "down_proj" in n])
        state[f"{prefix}gate_up_proj"] = torch.stack([state[n] for n in experts if "gate_proj" in n])
        for name in experts:
            del state[name]
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    command = ["--model-path", model, "--device", "example@1.2", "--no-validate"]
    run(*command, "--output-path", out)
    written = load_file(out / "model.safetensors")
    assert torch.equal(
        written["model.layers.1.mlp.experts.down_proj"], state["model.layers.1.mlp.experts.down_proj"]
    )
    assert written["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    refused = invoke("--model-path", model, "--output-path", tmp_path / "no", *texts)
    assert refused.exit_code == 2
    assert "mlp.experts." in refused.stderr
