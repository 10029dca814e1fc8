"""Linears found by name: against the module types of real architectures, and against written lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen_quantize.models.by_name import linear_modules_by_name

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "cohere": {},
    "olmo2": {},
    "granite": {},
    "starcoder2": {},
    "falcon": {},
    "stablelm": {},
    "gpt_neox": {},
    "llama4_text": {"num_local_experts": 4, "head_dim": 32, "intermediate_size_mlp": 192},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 32},
    "minimax": {"num_local_experts": 4, "head_dim": 32},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_intermediate_size": 64, "num_hidden_layers": 3},
    "jamba": {},
}
# Linears whose error would choose other experts or other time steps; they stay as they are.
GATES = ("mlp.gate", "router", "mamba.x_proj", "mamba.dt_proj")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_what_is_found_is_what_torch_calls_a_linear(model_type: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**SIZES, **ARCHITECTURES[model_type]})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = next(name for name, part in model.named_modules() if isinstance(part, torch.nn.ModuleList))
    expected = {
        name: (part.out_features, part.in_features)
        for name, part in model.named_modules()
        if isinstance(part, torch.nn.Linear) and name.startswith(layers + ".") and not name.endswith(GATES)
    }
    assert len(expected) >= 7
    assert linear_modules_by_name({name: part.shape for name, part in model.state_dict().items()}) == expected


# Names and shapes as these checkpoints are on disk; at most one expert is written down.
MINIMAX = {
    "model.embed_tokens.weight": (160, 128),
    "model.layers.0.block_sparse_moe.experts.0.w1.weight": (192, 128),
    "model.layers.0.block_sparse_moe.experts.0.w2.weight": (128, 192),
    "model.layers.0.block_sparse_moe.gate.weight": (64, 128),
    "model.layers.0.input_layernorm.weight": (128,),
    "model.layers.0.self_attn.out_proj.weight": (128, 128),
    "model.layers.0.self_attn.output_gate.weight": (128, 128),
    "model.norm.weight": (128,),
    "lm_head.weight": (160, 128),
}
GPT_OSS = {
    "model.layers.0.mlp.experts.down_proj": (4, 192, 128),
    "model.layers.0.mlp.experts.down_proj_bias": (4, 128),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 128, 384),
    "model.layers.0.mlp.router.bias": (64,),
    "model.layers.0.mlp.router.weight": (64, 128),
    "model.layers.0.self_attn.q_proj.weight": (128, 128),
    "model.layers.0.self_attn.sinks": (4,),
}
QWEN35_MOE = {
    "model.language_model.embed_tokens.weight": (160, 64),
    "model.language_model.layers.0.linear_attn.A_log": (64,),
    "model.language_model.layers.0.linear_attn.conv1d.weight": (128, 1, 4),
    "model.language_model.layers.0.linear_attn.in_proj_a.weight": (64, 64),
    "model.language_model.layers.0.linear_attn.in_proj_qkv.weight": (128, 64),
    "model.language_model.layers.0.linear_attn.norm.weight": (16,),
    "model.language_model.layers.0.mlp.experts.down_proj": (4, 64, 32),
    "model.language_model.layers.0.mlp.gate.weight": (64, 64),
    "model.language_model.layers.0.mlp.shared_expert.up_proj.weight": (48, 64),
    "model.language_model.layers.0.mlp.shared_expert_gate.weight": (1, 64),
    "model.visual.blocks.0.attn.qkv.weight": (192, 64),
    "model.visual.merger.linear_fc1.weight": (256, 256),
    "mtp.fc.weight": (64, 128),
    "mtp.layers.0.self_attn.o_proj.weight": (64, 128),
}
DEEPSEEK = {
    "model.layers.0.self_attn.indexer.k_norm.bias": (128,),
    "model.layers.0.self_attn.indexer.weights_proj.weight": (64, 256),
    "model.layers.0.self_attn.indexer.wq_b.weight": (128, 192),
    "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (576, 256),
    "model.layers.3.mlp.experts.255.up_proj.weight": (128, 256),
    "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
    "model.layers.3.mlp.gate.weight": (256, 256),
    "model.layers.61.eh_proj.weight": (256, 512),
    "model.layers.61.embed_tokens.weight": (160, 256),
    "model.layers.61.shared_head.head.weight": (160, 256),
    "model.layers.61.self_attn.o_proj.weight": (256, 128),
}
ODD = {
    "model.layers.0.mlp.up_proj.weight": (100, 128),  # 100 is no multiple of 16
    "model.layers.0.mlp.down_proj.weight": (32, 48),  # both under 64
    "model.layers.0.mlp.gate_proj.weight": (16, 128),
    "model.layers.0.mlp.empty.weight": (0, 128),
    "model.layers.0.self_attn.rotary_emb.inv_freq": (64,),
    "model.layers.0.self_attn.relative_attention_bias.weight": (64, 64),
    "model.mm_projector.0.weight": (128, 128),
    "multi_modal_projector.layers.0.linear.weight": (128, 128),
    "vision_tower.encoder.layers.0.q_proj.weight": (128, 128),
}


@pytest.mark.parametrize(
    ("shapes", "linears"),
    [
        pytest.param(
            MINIMAX,
            [
                "model.layers.0.block_sparse_moe.experts.0.w1",
                "model.layers.0.block_sparse_moe.experts.0.w2",
                "model.layers.0.self_attn.out_proj",
                "model.layers.0.self_attn.output_gate",
            ],
            id="minimax",
        ),
        pytest.param(GPT_OSS, ["model.layers.0.self_attn.q_proj"], id="gpt-oss"),
        pytest.param(
            QWEN35_MOE,
            [
                "model.language_model.layers.0.linear_attn.in_proj_qkv",
                "model.language_model.layers.0.mlp.shared_expert.up_proj",
                "mtp.layers.0.self_attn.o_proj",
            ],
            id="qwen3.5-moe",
        ),
        pytest.param(
            DEEPSEEK,
            [
                "model.layers.0.self_attn.indexer.wq_b",
                "model.layers.0.self_attn.kv_a_proj_with_mqa",
                "model.layers.3.mlp.experts.255.up_proj",
                "model.layers.61.self_attn.o_proj",
            ],
            id="deepseek-v3.2",
        ),
        pytest.param(ODD, ["model.layers.0.mlp.gate_proj"], id="odd sizes and other towers"),
    ],
)
def test_written_lists(shapes: dict[str, tuple[int, ...]], linears: list[str]) -> None:
    assert list(linear_modules_by_name(shapes)) == linears
