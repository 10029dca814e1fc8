"""Tiny GGUF files made from tiny transformers models, with a tokenizer trained on a few sentences."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog; it's the year 2024, isn't it?",
    "你好，世界。今天天气很好，我们去公园吧！",
    "def f(x):\n    return x ** 2 + 12345  # square\n\n\n\tif a != b:\n\t\tpass",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "  spaces   and\r\n\r\nlines \n ",
    "é ñ Ünïcödé 🤗 don't WE'LL I'M 1,000,000",
    "keep <think>together</think>",
]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"

_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
# Our names of a layer's parts, in the words of ggml's gguf.md.
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@cache
def tokenizer() -> Tokenizer:
    """Byte-level BPE as SmolLM2 has it: digits apart, three control tokens and one plain added token."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=[*SPECIAL, "<think>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator(TEXTS * 3, trainer)
    trained.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return trained


def make_model(arch: str, *, tied: bool = False, **changes: object) -> torch.nn.Module:
    """A random model; the head size is 128 for qwen3, which transformers assumes for a GGUF of it."""
    torch.manual_seed(7)
    sizes: dict[str, object] = {
        "vocab_size": tokenizer().get_vocab_size(),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
        "head_dim": 128 if arch == "qwen3" else 16,
    }
    if arch == "qwen2":
        del sizes["head_dim"]
    config = _CONFIGS[arch](**(sizes | changes))
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms and biases too: ones and zeros would hide a swap
        torch.nn.init.normal_(parameter)
    return model


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama.cpp's converter: the two halves of a head become pairs."""
    split = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _gguf_name(name: str) -> str:
    name = name.removeprefix("model.")
    if name.startswith("layers."):
        _, layer, rest = name.split(".", 2)
        part, suffix = rest.rsplit(".", 1)
        return f"blk.{layer}.{_PARTS[part]}.{suffix}"
    return {"embed_tokens.weight": "token_embd", "norm.weight": "output_norm", "lm_head.weight": "output"}[
        name
    ] + ".weight"


def write_gguf(
    path: Path,
    model: torch.nn.Module,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    pre: str = "smollm",
    keys: dict[str, object] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    trained: Tokenizer | None = None,
) -> Path:
    """Write `model` as a GGUF; matrices as `kind`, vectors as F32. keys: further keys, str, float or int."""
    config = model.config
    arch = config.model_type
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch != "qwen2":
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
    _add_tokenizer(writer, trained or tokenizer(), pre)
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.numpy()
        if arch == "llama" and ".q_proj." in name:
            data = _permute(data, config.num_attention_heads)
        if arch == "llama" and ".k_proj." in name:
            data = _permute(data, config.num_key_value_heads)
        stored = kind if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_gguf_name(name), gguf.quants.quantize(data, stored), raw_dtype=stored)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter, trained: Tokenizer, pre: str) -> None:
    model = json.loads(trained.to_str())["model"]
    tokens = [trained.id_to_token(number) for number in range(trained.get_vocab_size())]
    kinds = dict.fromkeys(SPECIAL, gguf.TokenType.CONTROL) | {"<think>": gguf.TokenType.USER_DEFINED}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([kinds.get(token, gguf.TokenType.NORMAL) for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
