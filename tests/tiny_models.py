"""Tiny random models in Hugging Face folders, made by transformers, which is the oracle of these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-2,  # so large that using it for the norms on latents would show
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Ids inside the tiny vocabulary, where a family's own are beyond it.
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DELTA: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SHARED: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama-linear-rope": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    },
    "llama-yarn": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2-sliding": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3-biased": {"model_type": "qwen3", "head_dim": 16, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    "mixtral-sliding": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "sliding_window": 7,
    },
    "qwen2-moe": {"model_type": "qwen2_moe", **QWEN_EXPERTS, "shared_expert_intermediate_size": 80},
    "qwen2-moe-normalised": {
        "model_type": "qwen2_moe",
        **QWEN_EXPERTS,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
        "qkv_bias": False,
    },
    "qwen2-moe-sparse-step": {
        "model_type": "qwen2_moe",
        **QWEN_EXPERTS,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 80,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 3,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", **QWEN_EXPERTS, "head_dim": 32, "norm_topk_prob": True},
    "qwen3-moe-plain": {
        "model_type": "qwen3_moe",
        **QWEN_EXPERTS,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **LATENT, **DEEPSEEK_EXPERTS, "q_lora_rank": 40},
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        **LATENT,
        **DEEPSEEK_EXPERTS,
        "q_lora_rank": None,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 3.5,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek-v2-grouped": {
        "model_type": "deepseek_v2",
        **LATENT,
        **DEEPSEEK_EXPERTS,
        "q_lora_rank": 40,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        **DEEPSEEK_EXPERTS,
        "q_lora_rank": 40,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "num_hidden_layers": 3,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek-v3-plain": {
        "model_type": "deepseek_v3",
        **LATENT,
        **DEEPSEEK_EXPERTS,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "rope_interleave": False,
        "attention_bias": True,
        "v_head_dim": 32,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    },
    "mistral": {"model_type": "mistral", "sliding_window": 9},
    "mistral-null-window": {"model_type": "mistral", "sliding_window": None, "head_dim": 24},
    "phi3": {"model_type": "phi3", **IDS},
    "phi3-longrope": {
        "model_type": "phi3",
        "sliding_window": 11,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.75,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
            "long_factor": [1.2, 2.0, 3.0, 5.0, 8.0, 13.0],
        },
        **IDS,
    },
    "glm": {"model_type": "glm", "head_dim": 24, **IDS},
    "glm4": {"model_type": "glm4", "head_dim": 16, "attention_bias": False, **IDS},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "tie_word_embeddings": True,
        **IDS,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 7,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "tie_word_embeddings": True,
        **IDS,
    },
    "qwen3-next": {"model_type": "qwen3_next", "num_hidden_layers": 4, "head_dim": 32, **DELTA, **SHARED},
    "qwen3.5": {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "head_dim": 32,
        **DELTA,
    },
    "qwen3.5-moe": {
        "model_type": "qwen3_5_moe_text",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 32,
        **DELTA,
        **SHARED,
    },
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "index_topk": 10,
        "index_n_heads": 8,
        "index_head_dim": 16,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
    },
}

BASE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def make_tiny(folder: Path, family: str, seed: int = 0, **overrides: Any) -> Any:
    """Save a random model of a family into `folder` and return transformers' model (float32, eval)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**BASE, **FAMILIES[family], **overrides}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases start at 1 and 0, which would hide a mistake with them.
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() >= 2:  # experts are held in one tensor of three dimensions
                # Routers are sharper, so that inputs and not the correction bias decide.
                parameter.mul_(10 if name.endswith("mlp.gate.weight") else 3)
            elif name.endswith("A_log"):
                parameter.sub_(3)  # or delta-net layers would forget each token at once
            elif name.endswith("dt_bias"):
                parameter.add_(torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    return model


def make_tokenizer(folder: Path, vocab_size: int = 160) -> None:
    """A word-level tokenizer whose ids fit a tiny vocabulary: `w0` .. and the end-of-text token 0."""
    vocab = {"<eos>": 0, **{f"w{i}": i for i in range(1, vocab_size)}}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": 0,
                "content": "<eos>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<eos>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"})
    )


def words(count: int, seed: int = 0, vocab_size: int = 160) -> str:
    """Random text of that tokenizer: `count` words."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab_size, (count,), generator=generator)
    return " ".join(f"w{int(i)}" for i in ids)
