"""C8 in Ascend's layout: written from --kv-cache int8, described, checked, and read from the folder alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

from qwen_quantize.checkpoint.contract import check_folder
from qwen_quantize.checkpoint.kv_channels import channel_kv_plan
from qwen_quantize.checkpoint.kv_side import KV_FILE, read_kv_plan
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.errors import UserError
from qwen_quantize.models.lookup import require_blueprint
from tests.tiny_models import make_tiny, make_tokenizer, words

Run = Callable[..., Result]
DESCRIPTION = "quant_model_description.json"
WEIGHTS = "quant_model_weights.safetensors"
KEYS = "model.layers.1.self_attn.k_proj.kv_cache"


@pytest.fixture
def asked(model: Path, dataset: Path) -> list[object]:
    return ["--model-path", model, "--device", "ascend-910b", "--quant-method", "rtn", "--scheme", "w8a8", "--layout",
            "ascend", "--calibration-dataset", dataset, "--calibration-length", 64, "--calibration-samples", 2,
            "--no-validate", "--json", "-q"]  # fmt: skip


@pytest.fixture
def folder(asked: list[object], tmp_path: Path, run: Run) -> Path:
    done = run(*asked, "--output-path", tmp_path / "out", "--kv-cache", "int8")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["check"]["errors"] == 0
    return tmp_path / "out"


def planned(folder: Path) -> Any:
    source = open_source(folder)
    return channel_kv_plan(source, require_blueprint(source.config))


def change(folder: Path, act: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    act(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_scales_are_described_and_read_back(folder: Path, tmp_path: Path, run: Run) -> None:
    described, tensors = json.loads((folder / DESCRIPTION).read_text()), load_file(folder / WEIGHTS)
    assert (described["kv_cache_type"], described["kv_quant_type"]) == ("C8", "C8")
    assert described["model_quant_type"] == "W8A8_DYNAMIC"
    own = [name for name in tensors if "kv_cache_" in name]
    assert len(own) == 3 * 4
    assert {described[name] for name in own} == {"C8"}
    assert described.keys() >= tensors.keys()
    kv = read_kv_plan(folder)
    assert kv is not None
    for number, layer in enumerate(kv.attention_layers):
        for projection, tensor in (("k_proj", layer.keys), ("v_proj", layer.values)):
            stem = f"model.layers.{number}.self_attn.{projection}.kv_cache"
            scale = tensors[f"{stem}_scale"]
            assert scale.dtype == torch.float32
            assert torch.equal(scale, tensor.parts[0].scale)
            assert len(scale.unique()) > 1
            assert not tensors[f"{stem}_offset"].any()
    # Without our own file the description and the scales alone give the same cache.
    text = tmp_path / "text.txt"
    text.write_text(words(400, seed=5))
    said = []
    for _ in range(2):
        done = run(
            "eval", folder, "--against", "none", "--text", text, "--length", 64, "--max-tokens", 256, "--json"
        )
        assert done.exit_code == 0, done.stderr
        said.append(json.loads(done.stdout))
        (folder / KV_FILE).unlink(missing_ok=True)
    assert said[0]["kv_cache"]["scheme"] == said[1]["kv_cache"]["scheme"] == "int8,window=0,sinks=0"
    assert said[0]["perplexity"] == said[1]["perplexity"]


def test_a_layer_without_scales_stays_wide(folder: Path) -> None:
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith("model.layers.1") and
                                    "kv_cache_" in name])  # fmt: skip
    bits = [layer.keys.parts[0].element.format.bits for layer in planned(folder).attention_layers]
    assert bits == [8, 16, 8]


@pytest.mark.parametrize(
    ("act", "words_"),
    [
        (lambda it: it.update({f"{KEYS}_scale": it[f"{KEYS}_scale"] * 0}), "no positive numbers"),
        (lambda it: it.update({f"{KEYS}_scale": it[f"{KEYS}_scale"][:5].clone()}), r"floats \[64\]"),
        (lambda it: it.update({f"{KEYS}_offset": it[f"{KEYS}_offset"] + 1}), "leaves out"),
        (lambda it: it.pop(f"{KEYS.replace('k_proj', 'v_proj')}_scale"), "is missing"),
        (lambda it: [it.pop(name) for name in list(it) if "kv_cache_" in name], "no layer has"),
    ],
)
def test_spoiled_scales_are_named(folder: Path, act: Any, words_: str) -> None:
    change(folder, act)
    with pytest.raises(UserError, match=words_):
        planned(folder)


def test_what_is_not_c8_is_said(asked: list[object], tmp_path: Path, run: Run) -> None:
    loud = [one for one in asked if one not in ("--json", "-q")]
    for kind, why in (("int8:token", "fixed scales of channels"), ("fp8", "fixed scales of channels")):
        out = tmp_path / kind.replace(":", "-")
        done = run(*loud, "--output-path", out, "--kv-cache", kind)
        assert done.exit_code == 0, done.stderr
        assert why in " ".join(done.output.split())
        assert "kv_cache_type" not in json.loads((out / DESCRIPTION).read_text())
        assert planned(out) is None
        assert [one for one in check_folder(out).findings if one.rule.startswith("kv")] == []


def test_conversions_keep_or_leave_out_the_scales(folder: Path, tmp_path: Path, run: Run) -> None:
    for layout, count in (("ascend", 12), ("compressed-tensors", 0)):
        out = tmp_path / layout
        done = run("--from", folder, "--layout", layout, "--output-path", out, "--json")
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        assert said["check"]["errors"] == 0
        names = [name for file in out.glob("*.safetensors") for name in load_file(file)]
        assert len([name for name in names if "kv_cache_" in name]) == count
        assert any("12 tensors with scales of the key-value cache" in note for note in said["notes"]) == (
            count == 0
        )
    assert json.loads((tmp_path / "ascend" / DESCRIPTION).read_text())["kv_cache_type"] == "C8"


def test_a_source_with_scales_gets_new_ones(
    folder: Path, asked: list[object], tmp_path: Path, run: Run
) -> None:
    asked[1] = folder
    done = run(*asked, "--output-path", tmp_path / "again", "--kv-cache", "int8")
    assert done.exit_code == 0, done.stderr
    assert len([name for name in load_file(tmp_path / "again" / WEIGHTS) if "kv_cache_" in name]) == 12


def test_auto_writes_none_where_keys_may_stay_wide(asked: list[object], tmp_path: Path, run: Run) -> None:
    biased = tmp_path / "biased"
    make_tiny(biased, "qwen2", hidden_size=128, intermediate_size=192)
    make_tokenizer(biased)
    asked[1] = biased
    for kind, count in (("auto", 0), ("int8", 8)):
        out = tmp_path / kind
        done = run(*asked, "--output-path", out, "--kv-cache", kind)
        assert done.exit_code == 0, done.stderr
        assert len([name for name in load_file(out / WEIGHTS) if "kv_cache_" in name]) == count
