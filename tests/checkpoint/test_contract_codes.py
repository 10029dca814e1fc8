"""`check` with all weights: a changed code names its linear, whatever the layout; one scale of fused FP8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.checkpoint.contract import Served, check_folder
from qwen_quantize.checkpoint.finding import Severity
from tests.checkpoint.good_folders import make_source, quantized

ALL = Served(weights_limit=None)
UP = "model.layers.0.mlp.up_proj"
EXPERT = "model.layers.0.mlp.experts.2.up_proj"
RTN = ("--quant-method", "rtn")
CASES: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "block FP8": ("qwen3", ("--quant-method", "ue8m0"), f"{UP}.weight", UP),
    "packed with zero points": (
        "qwen3",
        (*RTN, "--group-size", "32", "--asymmetric"),
        f"{UP}.weight_packed",
        UP,
    ),
    "awq": ("qwen3", (*RTN, "--group-size", "32", "--layout", "awq"), f"{UP}.qweight", UP),
    "gptq": ("qwen3", (*RTN, "--group-size", "32", "--layout", "gptq"), f"{UP}.qweight", UP),
    "nvfp4": ("qwen3", (*RTN, "--scheme", "nvfp4"), f"{UP}.weight_packed", UP),
    "hif8": ("qwen3", (*RTN, "--scheme", "hif8"), f"{UP}.weight", UP),
    "ascend": ("qwen3", (*RTN, "--scheme", "w8a8", "--layout", "ascend"), f"{UP}.weight", UP),
    "experts": (
        "qwen3-moe",
        (*RTN, "--scheme", "mxfp4", "--layout", "mx-oss"),
        f"{EXPERT.partition('.2.')[0]}.gate_up_proj_blocks",
        EXPERT,
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {family: make_source(root / family, family) for family in ("qwen3", "qwen3-moe")}


@pytest.mark.parametrize("case", CASES)
def test_a_changed_code_names_its_linear(sources: dict[str, Path], tmp_path: Path, case: str) -> None:
    family, options, name, module = CASES[case]
    out = quantized(sources[family], tmp_path / "out", options)
    assert [one for one in check_folder(out, ALL).findings if one.engine is None] == []
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    octets = tensors[name].view(torch.uint8)
    # Of the experts the third one's first odd row, which is up's.
    place = (2, 1, 0, 0) if octets.dim() == 4 else (0, 0)
    octets[place] ^= 1
    save_file(tensors, file, metadata={"format": "pt"})
    assert [one for one in check_folder(out).findings if one.engine is None] == []
    found = [one for one in check_folder(out, ALL).findings if one.engine is None]
    assert [(one.tensor, one.rule, one.severity) for one in found] == [
        (module, "codes-changed", Severity.ERROR)
    ]


def test_a_folder_without_hashes_gives_nothing(sources: dict[str, Path], tmp_path: Path) -> None:
    out = quantized(sources["qwen3"], tmp_path / "out", ("--quant-method", "ue8m0"))
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    for linear in manifest["layers"][0]["linears"]:
        linear["sha256"] = 7
    (out / "qwen_quantize.json").write_text(json.dumps(manifest))
    assert check_folder(out, ALL).findings == ()
    (out / "qwen_quantize.json").unlink()
    assert check_folder(out, ALL).findings == ()


def test_fp8_of_one_scale_shares_it_in_fused_linears(sources: dict[str, Path], tmp_path: Path) -> None:
    out = quantized(sources["qwen3"], tmp_path / "out", (*RTN, "--scheme", "fp8"))
    (out / "qwen_quantize.json").unlink()
    config = json.loads((out / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["weights"]["strategy"] = "tensor"
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(out / "model.safetensors")
    for name in tensors:
        if name.endswith("weight_scale"):
            tensors[name] = torch.tensor([0.5])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    assert [one.rule for one in check_folder(out).findings if one.engine is None] == []
    tensors["model.layers.0.self_attn.v_proj.weight_scale"] = torch.tensor([0.25])
    tensors["model.layers.0.mlp.down_proj.weight_scale"] = torch.tensor([0.25])  # fused with nothing
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (found,) = (one for one in check_folder(out).findings if one.engine is None)
    assert (found.rule, found.severity) == ("fused-scale", Severity.WARNING)
    assert found.tensor == "model.layers.0.self_attn.v_proj.weight_scale"
    assert "the larger" in found.message
