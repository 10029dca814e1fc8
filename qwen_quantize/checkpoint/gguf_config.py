"""From a GGUF header to the `config.json` and the tensor names of the Hugging Face model it came from."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwen_quantize.checkpoint.gguf_header import GgufHeader, Value
from qwen_quantize.errors import UserError

_Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """What a GGUF architecture is called elsewhere.

    permuted: llama.cpp rotates neighbouring pairs and its converter reorders the rows of q and k for that;
    the `qwen` graphs rotate halves, as Hugging Face does, and keep the rows.
    """

    architecture: str
    model_type: str
    permuted: bool


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", permuted=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2", permuted=False),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", permuted=False),
}

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # a table for the runtime, no parameter of the model

_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_]+)\.(weight|bias)")


def hugging_face_name(header: GgufHeader, name: str) -> str:
    """The name of a tensor in the Hugging Face model; UserError for one that these models do not have."""
    match = _NAME.fullmatch(name)
    if match is not None:
        layer, part, suffix = match.groups()
        known = _TOP if layer is None else _LAYER
        if part in known:
            prefix = "" if layer is None else f"model.layers.{layer}."
            return f"{prefix}{known[part]}.{suffix}"
    raise UserError(
        f"{header.file}: tensor {name!r} is unknown for the architecture "
        f"{header.values.get('general.architecture')!r}; convert the model from its safetensors"
    )


_GGUF_TOP = {theirs: ours for ours, theirs in _TOP.items()}
_GGUF_LAYER = {theirs: ours for ours, theirs in _LAYER.items()}
_HUGGING_FACE_NAME = re.compile(r"(?:model\.layers\.(0|[1-9][0-9]{0,5})\.)?([A-Za-z0-9_.]+)\.(weight|bias)")


def gguf_name(name: str) -> str | None:
    """The GGUF name of a tensor of the Hugging Face model, None where it has none: inverse of `hugging_face_name`."""
    match = _HUGGING_FACE_NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, suffix = match.groups()
    known = _GGUF_TOP if layer is None else _GGUF_LAYER
    if part not in known:
        return None
    return f"{'' if layer is None else f'blk.{layer}.'}{known[part]}.{suffix}"


def architecture_of(header: GgufHeader) -> tuple[str, GgufArchitecture]:
    """The key prefix and the record; UserError for an architecture that cannot be read."""
    name = header.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise UserError(
            f"{header.file}: GGUF architecture {name!r:.80} cannot be read; {', '.join(ARCHITECTURES)} can, "
            "and others as a folder of safetensors"
        )
    return name, ARCHITECTURES[name]


def build_config(header: GgufHeader, rope_factors: _Floats | None) -> dict[str, Any]:
    """The object of `config.json`. rope_factors: the table of `rope_freqs.weight` where the file has one."""
    prefix, record = architecture_of(header)
    fields = _Fields(header, prefix)
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UserError(
            f"{header.file}: {rotated} of {head_dim} dimensions of a head are rotated; only whole heads "
            "can be read"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise UserError(f"{header.file} has no tensor 'token_embd.weight', so it is not a whole model")
    config: dict[str, Any] = {
        "architectures": [record.architecture],
        "model_type": record.model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": embedding.shape[0],
    }
    scaling = _rope_scaling(fields, rope_factors, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if record.model_type != "qwen2":  # whose q, k and v always have a bias, and no key for it
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if record.model_type == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    for key, name in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        token = header.values.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token, int) and 0 <= token < embedding.shape[0]:
            config[name] = token
    return config


class _Fields:
    """Typed look-up of one architecture's keys; UserError names the key that is missing or wrong."""

    def __init__(self, header: GgufHeader, prefix: str) -> None:
        self.header = header
        self.prefix = prefix

    def get(self, name: str) -> Value | None:
        return self.header.values.get(f"{self.prefix}.{name}")

    def fail(self, name: str, wanted: str) -> UserError:
        return UserError(
            f"{self.header.file}: key '{self.prefix}.{name}' must be {wanted}, found {self.get(name)!r:.80}"
        )

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]  # some converters write one number per layer
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
            raise self.fail(name, "a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(name, "a number")
        # GGUF stores float32: the shortest decimal of it is the 1e-05 that the model's author wrote.
        return float(str(np.float32(value)))


def _rope_scaling(
    fields: _Fields, factors: _Floats | None, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    kind = fields.get("rope.scaling.type")
    if factors is not None:
        if kind not in (None, "none"):
            raise fields.fail("rope.scaling.type", "absent beside a table of rope factors")
        return _llama3_scaling(fields, factors, config)
    if kind is None or kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.fail("rope.scaling.type", "'none', 'linear' or 'yarn'")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": fields.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length")
        if fields.get("rope.scaling.attn_factor") is not None:
            scaling["attention_factor"] = fields.number("rope.scaling.attn_factor")
    return scaling


def llama3_factors(theta: float, head_dim: int, factor: float, original: int) -> _Floats:
    """[head_dim / 2] divisors of the rotary frequencies under Llama 3.1's rule with bounds 1 and 4."""
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = np.clip((original / wavelength - 1) / (4 - 1), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth))


def _llama3_scaling(fields: _Fields, factors: _Floats, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings behind a factor table, which GGUF stores in their place; accepted if they reproduce it."""
    factor, original = float(factors.max()), 8192
    expected = llama3_factors(config["rope_theta"], config["head_dim"], factor, original)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        raise UserError(
            f"{fields.header.file}: the rope factors in {ROPE_FACTORS!r} follow no rule that config.json can "
            "state; convert the model from its safetensors"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
