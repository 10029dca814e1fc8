"""A tiny DeepSeek-V3 folder in block FP8, with a layer for multi-token prediction, and ways to spoil it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qwen_quantize.checkpoint.next_token import next_token_tensors, repeated_tensors
from qwen_quantize.models.lookup import require_blueprint

BLOCK = (16, 16)
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 40,  # two and a half blocks
    "intermediate_size": 48,
    "kv_lora_rank": 16,
    "max_position_embeddings": 128,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    },
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 8,
    "vocab_size": 64,
}

Tensors = dict[str, Tensor]


def grid(shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scales of a weight."""
    return -(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1])


def make_tensors(config: Mapping[str, Any] = CONFIG) -> Tensors:
    """All tensors of the model: linears as random codes and scales, the rest as bfloat16."""
    blueprint = require_blueprint(config)
    linears = blueprint.linear_modules() | blueprint.next_token_modules()
    shapes: dict[str, tuple[int, ...]] = dict(blueprint.expected_tensors())
    for layer in blueprint.next_token_layers:
        shapes |= next_token_tensors(blueprint, layer) | repeated_tensors(blueprint, layer)
    generator = torch.Generator().manual_seed(3)
    tensors: Tensors = {}
    for module, shape in linears.items():
        codes = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8)
        tensors[f"{module}.weight"] = codes.view(torch.float8_e4m3fn)
        tensors[f"{module}.weight_scale_inv"] = torch.rand(grid(shape), generator=generator) + 0.5
    for name, size in shapes.items():
        if name not in tensors:
            tensors[name] = torch.randn(size, generator=generator).bfloat16()
    return tensors


def write_folder(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> Path:
    """Two shards and an index; the scales stand in another shard than their weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shard_of = {name: SHARDS[name.endswith("_inv") or "norm" in name] for name in tensors}
    for shard in SHARDS:
        part = {name: tensor.contiguous() for name, tensor in tensors.items() if shard_of[name] == shard}
        save_file(part, folder / shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return folder


def write_mutation(
    folder: Path, change: Callable[[Tensors, dict[str, Any]], object], config: Mapping[str, Any] = CONFIG
) -> Path:
    """A good folder with `change` applied to its tensors and its config before they are written."""
    tensors, settings = make_tensors(config), dict(config)
    change(tensors, settings)
    return write_folder(folder, tensors, settings)
