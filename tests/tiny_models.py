"""Tiny random models in Hugging Face folders, made by transformers, which is the oracle of these tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

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
            elif parameter.dim() == 2:
                parameter.mul_(3)
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
