"""Experts in gpt-oss's tensors: the bytes, their inverse, and a folder of them evaluated as any other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.checkpoint.mx_oss import interleave, mx_oss_config, pack_experts, separate, unpack_experts
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.tables import E2M1
from qwen_quantize.models.lookup import require_blueprint
from tests.checkpoint.quantized_samples import same, sample
from tests.tiny_models import make_tiny

SCHEME = SCHEMES["mxfp4"]


def small(shape: tuple[int, int], seed: int) -> QuantizedTensor:
    """Random codes under scales that keep a model's numbers in bounds."""
    found = sample(SCHEME, shape, seed)
    scale = torch.ldexp(torch.ones_like(found.scale), (found.scale.log2() % 3 - 7).int())
    return QuantizedTensor(found.codes, scale, None, E2M1, found.granularity, shape)


def test_bytes_and_back() -> None:
    experts = [sample(SCHEME, (6, 64), seed) for seed in range(3)]
    blocks, scales = pack_experts(experts)
    assert tuple(blocks.shape) == (3, 6, 2, 16)
    assert tuple(scales.shape) == (3, 6, 2)
    assert all(same(one, other) for one, other in zip(unpack_experts(blocks, scales), experts, strict=True))
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, 0], codes[0, 1] = 1, 10  # 0.5 and -1
    one = QuantizedTensor(codes, torch.tensor([[0.25]]), None, E2M1, Granularity.group(32), (1, 32))
    blocks, scales = pack_experts([one])
    assert blocks.numpy().tobytes() == bytes([0xA1, *[0] * 15])
    assert scales.tolist() == [[[125]]]
    with pytest.raises(ValueError, match="E2M1 in whole groups"):
        pack_experts([sample(SCHEMES["mxfp8"], (6, 64))])
    with pytest.raises(UserError, match="bytes"):
        unpack_experts(blocks[..., :8], scales)


def test_gate_and_up_take_turns() -> None:
    gate, up = torch.arange(6).view(1, 3, 2), torch.arange(10, 16).view(1, 3, 2)
    fused = interleave(gate, up)
    assert fused[0, :, 0].tolist() == [0, 10, 2, 12, 4, 14]
    assert [part.tolist() for part in separate(fused)] == [gate.tolist(), up.tolist()]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """(a model of experts in plain floats, the same in the tensors of gpt-oss)."""
    plain, fused = tmp_path / "plain", tmp_path / "fused"
    make_tiny(plain, "qwen3-moe", hidden_size=64, moe_intermediate_size=32, num_hidden_layers=1)
    config = json.loads((plain / "config.json").read_text())
    blueprint = require_blueprint(config)
    tensors = load_file(plain / "model.safetensors")
    count = blueprint.num_experts(0)
    base, packed = "model.layers.0.mlp.experts", {}
    solved: dict[str, list[QuantizedTensor]] = {}
    for part, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
        solved[part] = [small(shape, seed) for seed in range(count)]
        for number, one in enumerate(solved[part]):
            tensors[f"{base}.{number}.{part}.weight"] = one.dequantize()
        packed[part] = pack_experts(solved[part])
    save_file(tensors, plain / "model.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for which, name in enumerate(("blocks", "scales")):
        rest[f"{base}.gate_up_proj_{name}"] = interleave(packed["gate_proj"][which], packed["up_proj"][which])
        rest[f"{base}.down_proj_{name}"] = packed["down_proj"][which]
    fused.mkdir()
    save_file(rest, fused / "model.safetensors")
    config["quantization_config"] = mx_oss_config(["model.layers.*.self_attn", "lm_head"])
    (fused / "config.json").write_text(json.dumps(config))
    return plain, fused


def test_the_engine_computes_what_the_experts_hold(folders: tuple[Path, Path]) -> None:
    plain, fused = (open_source(folder) for folder in folders)
    tokens = torch.randint(160, (1, 16), generator=torch.Generator().manual_seed(1))
    expected = load_model(ModelReader(plain)).forward(tokens)
    assert torch.equal(load_model(ModelReader(fused)).forward(tokens), expected)
    linears = LinearReader(fused)
    name = "model.layers.0.mlp.experts.2.up_proj"
    assert torch.equal(linears.read(name), plain.read(f"{name}.weight"))
    assert torch.equal(linears.read_rows(name, 3, 9), plain.read(f"{name}.weight")[3:9])
    assert linears.describe(name).activation is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {"gate_up_proj_blocks": t["gate_up_proj_blocks"][..., :8]}, "blocks of 8 bytes"),
        (lambda t: {"gate_up_proj_blocks": t["gate_up_proj_blocks"][:, :63]}, "63 rows"),
        (lambda t: {"gate_up_proj_scales": t["gate_up_proj_scales"][0]}, "scales U8"),
        (lambda t: {"gate_up_proj_bias": t["gate_up_proj_scales"].float()}, "no place"),
    ],
)
def test_damaged_experts_are_named(folders: tuple[Path, Path], change: object, words: str) -> None:
    assert callable(change)
    file, base = folders[1] / "model.safetensors", "model.layers.0.mlp.experts."
    tensors = load_file(file)
    mine = {name.removeprefix(base): tensor for name, tensor in tensors.items() if name.startswith(base)}
    tensors |= {base + name: tensor.contiguous() for name, tensor in change(mine).items()}
    save_file(tensors, file)
    with pytest.raises(UserError, match=words):
        open_source(folders[1])
