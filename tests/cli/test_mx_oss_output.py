"""--layout mx-oss: experts as gpt-oss stores them, the rest as it was, whatever interrupts the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from qwen_quantize.checkpoint.contract import check_folder
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.cli.main import app
from tests.cli.test_resume import hashes
from tests.stopping import stopped_after
from tests.tiny_models import make_tiny, make_tokenizer

Run = Callable[..., Result]
BASE = "model.layers.0.mlp.experts"


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    make_tiny(
        folder, "qwen3-moe", hidden_size=64, moe_intermediate_size=32, num_hidden_layers=2, num_experts=4
    )
    make_tokenizer(folder)
    return folder


def asked(model: Path, out: Path, *more: object) -> list[str]:
    options = ("--model-path", model, "--output-path", out, "--device", "cpu", "--allow-unsupported", "--layout",
               "mx-oss", "--scheme", "mxfp4", "--no-validate")  # fmt: skip
    return [str(option) for option in (*options, *more)]


def test_experts_alone_are_written_and_read_back(experts: Path, tmp_path: Path, run: Run) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    done = run(*asked(experts, out, "--quant-method", "rtn", "--json"))
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["check"]["findings"] == []
    assert "for gpt-oss alone" in done.stderr
    tensors, plain = load_file(out / "model.safetensors"), load_file(experts / "model.safetensors")
    stacked = [name for name in tensors if ".experts." in name]
    assert sorted({name.rpartition(".")[2] for name in stacked}) == [
        "down_proj_blocks", "down_proj_scales", "gate_up_proj_blocks", "gate_up_proj_scales",
    ]  # fmt: skip
    assert tensors[f"{BASE}.gate_up_proj_blocks"].shape == (4, 64, 2, 16)
    assert tensors[f"{BASE}.down_proj_scales"].shape == (4, 64, 1)
    for name, tensor in plain.items():
        if ".experts." not in name:
            assert torch.equal(tensors[name], tensor), name
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert {"model.layers.1.self_attn.o_proj", "model.layers.0.mlp.gate", "lm_head"} <= set(
        config["modules_to_not_convert"]
    )
    # What the same method makes of the same experts elsewhere.
    done = run("--model-path", experts, "--output-path", other, "--device", "cpu", "--allow-unsupported",
               "--layout", "compressed-tensors", "--scheme", "mxfp4", "--quant-method", "rtn",
               "--no-validate", "--ignore", "re:self_attn", "-q")  # fmt: skip
    assert done.exit_code == 0, done.output
    mine, theirs = LinearReader(open_source(out)), LinearReader(open_source(other))
    for layer in range(2):
        for expert in range(4):
            for part in ("gate_proj", "up_proj", "down_proj"):
                module = f"model.layers.{layer}.mlp.experts.{expert}.{part}"
                assert torch.equal(mine.read(module), theirs.read(module)), module
    refused = run("check", out, "--engine", "vllm")
    assert refused.exit_code == 1
    assert "gpt-oss" in refused.output


@pytest.mark.parametrize("stop_at", [1, 3, 6])
def test_stopped_between_experts_it_goes_on_to_the_same_bytes(
    experts: Path, dataset: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    more = ("--quant-method", "gptq", "--calibration-dataset", dataset, "--calibration-length", 32,
            "--calibration-samples", 4, "-q")  # fmt: skip
    assert run(*asked(experts, tmp_path / "whole", *more)).exit_code == 0
    with stopped_after(stop_at, monkeypatch):
        assert CliRunner().invoke(app, asked(experts, tmp_path / "out", *more)).exit_code == 130
    done = run(*asked(experts, tmp_path / "out", *more, "--resume"))
    assert done.exit_code == 0, done.output
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--quant-method", "rtn", "--include", "o_proj"), "holds routed experts"),
        (("--quant-method", "rtn", "--scheme", "w4a16"), "holds MXFP4"),
    ],
)
def test_what_has_no_place_is_refused(
    experts: Path, tmp_path: Path, run: Run, more: tuple[str, ...], words: str
) -> None:
    done = run(*asked(experts, tmp_path / "out", *more))
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_dense_model_is_refused(model: Path, tmp_path: Path, run: Run) -> None:
    done = run(*asked(model, tmp_path / "out", "--quant-method", "rtn"))
    assert done.exit_code == 2
    assert "this model has none" in done.stderr


def test_conversion_both_ways(experts: Path, tmp_path: Path, run: Run) -> None:
    oss, packed, back = tmp_path / "oss", tmp_path / "packed", tmp_path / "back"
    assert run(*asked(experts, oss, "--quant-method", "rtn", "-q")).exit_code == 0
    for source, layout, out in ((oss, "compressed-tensors", packed), (packed, "mx-oss", back)):
        done = run("--from", source, "--layout", layout, "--output-path", out, "--json")
        assert done.exit_code == 0, done.output
        record = json.loads(done.stdout)
        assert record["exact"]
        assert record["linears"] == 24
        assert record["check"]["findings"] == []
    assert hashes(oss)["model.safetensors"] == hashes(back)["model.safetensors"]


def test_experts_that_the_config_counts_and_no_stack_holds_are_found(
    experts: Path, tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "out"
    assert run(*asked(experts, out, "--quant-method", "rtn", "-q")).exit_code == 0
    assert check_folder(out).findings == ()
    good = load_file(out / "model.safetensors")

    def rules(**changed: torch.Tensor | None) -> set[tuple[str, str]]:
        named = {f"{BASE}.{name}": tensor for name, tensor in changed.items()}
        kept = {name: tensor for name, tensor in {**good, **named}.items() if tensor is not None}
        save_file(kept, out / "model.safetensors", metadata={"format": "pt"})
        return {(one.rule, one.tensor.rpartition(".")[2]) for one in check_folder(out).findings}

    blocks, scales = good[f"{BASE}.down_proj_blocks"], good[f"{BASE}.down_proj_scales"]
    few = rules(down_proj_blocks=blocks[:3].clone(), down_proj_scales=scales[:3].clone())
    assert ("tensor-shape", "down_proj_blocks") in few
    gone = rules(down_proj_blocks=None, down_proj_scales=None)
    assert ("expert-missing", "down_proj_blocks") in gone
