"""What a `config.json` says about a decoder, in one frozen record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.errors import UserError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base, variant and the variant's numbers.

    `kind` is `default`, `linear`, `llama3` or `yarn`; fields that a variant does not use are ignored.
    Formulas: linear scaling divides positions; `llama3` is the frequency-dependent rule of the Llama 3.1
    release; `yarn` is arXiv 2309.00071.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder-only model; sizes count elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    max_position: int
    activation: str
    attention_bias: bool
    mlp_bias: bool
    dtype: str  # the dtype that config.json names, e.g. "bfloat16"
    sliding_window: int | None = None
    sliding_layers: tuple[bool, ...] = ()


ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def _positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UserError(f"config.json: {key!r} must be a positive whole number, found {value!r}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"config.json: {key!r} must be a number, found {value!r}")
    return float(value)


def _parse_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    # transformers 5 writes `rope_parameters`; earlier files have `rope_theta` and `rope_scaling`.
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise UserError(f"config.json: the rope settings must be an object, found {scaling!r}")
    theta = _number(scaling, "rope_theta", _number(config, "rope_theta", 10000.0))
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_KINDS:
        raise UserError(
            f"config.json: rope type {kind!r} is not implemented; these are: {', '.join(ROPE_KINDS)}"
        )
    factor = _number(scaling, "factor", 1.0)
    original = scaling.get("original_max_position_embeddings") or config.get(
        "original_max_position_embeddings"
    )
    attention_factor = 1.0
    if kind == "yarn":
        attention_factor = _yarn_attention_factor(scaling, factor)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=int(original or max_position),
        low_freq_factor=_number(scaling, "low_freq_factor", 1.0),
        high_freq_factor=_number(scaling, "high_freq_factor", 4.0),
        beta_fast=_number(scaling, "beta_fast", 32.0),
        beta_slow=_number(scaling, "beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=bool(scaling.get("truncate", True)),
        partial_rotary_factor=_number(
            scaling, "partial_rotary_factor", _number(config, "partial_rotary_factor", 1.0)
        ),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """The temperature that YaRN multiplies cos and sin with (arXiv 2309.00071, section 3.4)."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor", 1.0)

    def mscale(scale: float, weight: float) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    weight, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if weight and all_dim:
        return mscale(factor, float(weight)) / mscale(factor, float(all_dim))
    return mscale(factor, 1.0)


def parse_model_config(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    """Read the fields that the engine needs; raises UserError naming the key that is missing or wrong."""
    hidden = _positive(config, "hidden_size")
    heads = _positive(config, "num_attention_heads")
    layers = _positive(config, "num_hidden_layers")
    max_position = _positive(config, "max_position_embeddings", 2048)
    kv_heads = _positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"config.json: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}) "
            "and there is no head_dim"
        )
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or "silu")
    if activation not in ACTIVATIONS:
        raise UserError(
            f"config.json: hidden_act {activation!r} is not implemented; these are: {', '.join(ACTIVATIONS)}"
        )
    window, sliding = _parse_sliding_window(config, layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_positive(config, "head_dim", hidden // heads),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=_parse_rope(config, max_position),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position=max_position,
        activation=activation,
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."),
        sliding_window=window,
        sliding_layers=sliding,
    )


def _parse_sliding_window(config: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Which layers attend to a window only: `layer_types` where written, else the older two switches."""
    window = config.get("sliding_window")
    if not config.get("use_sliding_window", "use_sliding_window" not in config) or not window:
        return None, (False,) * layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return int(window), tuple(kind == "sliding_attention" for kind in kinds)
    first = int(config.get("max_window_layers") or 0)
    return int(window), tuple(index >= first for index in range(layers))
