"""Small sound model folders of every layout, written by this program or by hand, for tests that spoil copies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from qwen_quantize.cli.main import app
from tests.tiny_models import make_tiny, make_tokenizer

DESCRIPTION = "quant_model_description.json"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
# Name -> family and options of the command line.
WRITTEN: dict[str, tuple[str, tuple[str, ...]]] = {
    "block": ("qwen3", ("--quant-method", "ue8m0")),
    "pack": ("qwen3", ("--quant-method", "rtn", "--scheme", "w4a16", "--group-size", "32")),
    "pack-zero": ("qwen3", ("--quant-method", "rtn", "--group-size", "32", "--asymmetric")),
    "int8": ("qwen3-tied", ("--quant-method", "rtn", "--scheme", "w8a8")),
    "fp8": ("qwen3", ("--quant-method", "rtn", "--scheme", "fp8")),
    "mxfp8": ("qwen3", ("--quant-method", "rtn", "--scheme", "mxfp8")),
    "mxfp4": ("qwen3", ("--quant-method", "rtn", "--scheme", "mxfp4")),
    "nvfp4": ("qwen3", ("--quant-method", "rtn", "--scheme", "nvfp4")),
    "awq": ("qwen3", ("--quant-method", "rtn", "--group-size", "128", "--layout", "awq")),
    "gptq": ("qwen3", ("--quant-method", "rtn", "--group-size", "32", "--layout", "gptq")),
    "hif8": ("qwen3", ("--quant-method", "rtn", "--scheme", "hif8")),
    "pack-experts": ("qwen3-moe", ("--quant-method", "rtn", "--group-size", "32")),
}


def make_source(folder: Path, family: str) -> Path:
    experts = {"moe_intermediate_size": 64, "num_experts": 4} if "moe" in family else {}
    make_tiny(folder, family, **SIZES, **experts)
    make_tokenizer(folder)
    return folder


def quantized(source: Path | str, out: Path, options: tuple[str, ...]) -> Path:
    arguments = ("--model-path", source, "--output-path", out, "--device", "cpu", "--allow-unsupported")
    result = CliRunner().invoke(app, [*map(str, arguments), *options, "--no-validate", "--quiet"])
    assert result.exit_code == 0, result.output
    return out


def sharded(good: Path, out: Path) -> Path:
    """The folder in two shards and an index."""
    out.mkdir()
    for file in good.iterdir():
        if file.name != "model.safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(good / "model.safetensors")
    names = sorted(tensors)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, half in zip(files, halves, strict=True):
        save_file({name: tensors[name] for name in half}, out / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, half in zip(files, halves, strict=True) for name in half},
    }
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def ascend_tensors(source: Path, kinds: Mapping[str, str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description by msModelSlim's names; kinds: the last part of a linear's name -> its type."""
    plain = load_file(source / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    description: dict[str, Any] = {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0}
    generator = torch.Generator().manual_seed(0)
    for name, value in plain.items():
        module = name.removesuffix(".weight")
        kind = kinds.get(module.rpartition(".")[2]) if name.endswith(".weight") else None
        if kind is None:
            tensors[name], description[name] = value.bfloat16(), "FLOAT"
            continue
        rows, columns = value.shape
        parts = _ascend_parts(kind, rows, columns, module, generator)
        tensors |= parts
        description |= dict.fromkeys(parts, kind)
    return tensors, description


def _ascend_parts(
    kind: str, rows: int, columns: int, module: str, generator: torch.Generator
) -> dict[str, Tensor]:
    def codes(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)

    scale = torch.rand((rows, 1), generator=generator) + 0.01
    zero = torch.zeros((rows, 1))
    found: dict[str, Tensor]
    match kind:
        case "W8A8":
            found = {
                "weight": codes(rows, columns),
                "input_scale": torch.tensor([0.02]),
                "input_offset": torch.tensor([3.0]),
                "quant_bias": torch.zeros(rows, dtype=torch.int32),
                "deq_scale": scale.reshape(-1) * 0.02,
            }
        case "W8A8_DYNAMIC":
            found = {"weight": codes(rows, columns), "weight_scale": scale, "weight_offset": zero}
        case "W4A8_DYNAMIC":
            shares = 16 if module.endswith(("down_proj", "o_proj")) else 1
            found = {
                "weight": codes(rows // 2, columns),
                "weight_scale": scale,
                "weight_offset": zero,
                "scale_bias": torch.ones((rows, shares)),
            }
        case _:
            packed = 2 if kind != "W8A8_MXFP8" else 1
            bytes_ = torch.randint(1, 0x70, (rows, columns // packed), generator=generator).to(torch.uint8)
            found = {
                "weight": bytes_.view(torch.float8_e4m3fn) if packed == 1 else bytes_,
                "weight_scale": torch.full((rows, columns // 32), 120, dtype=torch.uint8),
            }
    return {f"{module}.{suffix}": tensor for suffix, tensor in found.items()}


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


def write_ascend(source: Path, out: Path, kinds: Mapping[str, str], **settings: Any) -> Path:
    out.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json" and "index" not in file.name:
            (out / file.name).write_bytes(file.read_bytes())
    config = json.loads((out / "config.json").read_text())
    config["dtype"] = "bfloat16"
    (out / "config.json").write_text(json.dumps(config))
    tensors, description = ascend_tensors(source, kinds)
    save_file(tensors, out / "quant_model_weights.safetensors")
    (out / DESCRIPTION).write_text(json.dumps({**description, **settings}))
    return out


def write_mx_oss(source: Path, out: Path) -> Path:
    """Experts stacked as gpt-oss has them, under an architecture that has no blueprint."""
    out.mkdir()
    for file in source.iterdir():
        if file.suffix == ".json":
            (out / file.name).write_bytes(file.read_bytes())
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "dtype": "bfloat16",
        "vocab_size": 160,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
        },
    }
    (out / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    experts = "model.layers.0.mlp.experts."
    tensors = {
        "model.embed_tokens.weight": torch.randn((160, 64), generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(64).bfloat16(),
        "lm_head.weight": torch.randn((160, 64), generator=generator).bfloat16(),
        "model.layers.0.self_attn.q_proj.weight": torch.randn((64, 64), generator=generator).bfloat16(),
    }
    for stack, rows, columns in (("gate_up_proj", 128, 64), ("down_proj", 64, 64)):
        shape = (4, rows, columns // 32, 16)
        tensors[f"{experts}{stack}_blocks"] = torch.randint(0, 256, shape, generator=generator).to(
            torch.uint8
        )
        tensors[f"{experts}{stack}_scales"] = torch.full(shape[:3], 120, dtype=torch.uint8)
        tensors[f"{experts}{stack}_bias"] = torch.zeros((4, rows)).bfloat16()
    save_file(tensors, out / "model.safetensors")
    return out


def make_good_folders(root: Path) -> dict[str, Path]:
    """Every sound folder by name; those of WRITTEN are this program's own, the others are made by hand."""
    sources = {
        family: make_source(root / f"source-{family}", family)
        for family in ("qwen3", "qwen3-tied", "qwen3-moe")
    }
    found = {
        name: quantized(sources[family], root / name, options) for name, (family, options) in WRITTEN.items()
    }
    found["latent"] = quantized("embedded:moe", root / "latent", ("--quant-method", "rtn", "--scheme", "fp8"))
    found["plain"] = sources["qwen3"]
    found["shards"] = sharded(found["block"], root / "shards")
    dynamic = dict.fromkeys((*_ATTENTION, *_MLP), "W8A8_DYNAMIC")
    static = {**dynamic, **dict.fromkeys(_ATTENTION, "W8A8")}
    found["ascend"] = write_ascend(sources["qwen3"], root / "ascend", static)
    found["ascend-mx"] = write_ascend(
        sources["qwen3"],
        root / "ascend-mx",
        {**dict.fromkeys(_ATTENTION, "W8A8_MXFP8"), **dict.fromkeys(_MLP, "W4A8_MXFP")},
        model_quant_type="W8A8_MXFP8",
        group_size=32,
    )
    found["ascend-dense4"] = write_ascend(
        sources["qwen3"],
        root / "ascend-dense4",
        dict.fromkeys((*_ATTENTION, *_MLP), "W4A8_DYNAMIC"),
        model_quant_type="W4A8_DYNAMIC",
    )
    found["mx-oss"] = write_mx_oss(sources["qwen3"], root / "mx-oss")
    return found
