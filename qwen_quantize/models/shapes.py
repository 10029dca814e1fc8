"""Shapes of the linears in a layer's first half, from the last part of their name and the sizes in config.json."""

from __future__ import annotations

from qwen_quantize.models.config import ModelConfig
from qwen_quantize.models.delta import DeltaConfig
from qwen_quantize.models.latent import LatentConfig

Shape = tuple[int, int]


def attention_shape(name: str, config: ModelConfig) -> Shape | None:
    """(out_features, in_features) of a linear of the attention half, None for a name that it does not have."""
    found = None
    if config.delta is not None:
        found = _delta_shape(name, config.delta, config.hidden_size)
    if found is None and config.indexer is not None and config.latent is not None:
        match name:
            case "wk":
                found = config.indexer.head_dim, config.hidden_size
            case "wq_b":
                found = config.indexer.heads * config.indexer.head_dim, config.latent.query_rank or 0
    if found is None:
        found = (
            _grouped_shape(name, config)
            if config.latent is None
            else _latent_shape(name, config.latent, config)
        )
    return found


def _grouped_shape(name: str, config: ModelConfig) -> Shape | None:
    hidden = config.hidden_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    match name:
        case "q_proj":
            return (2 * heads if config.output_gate else heads), hidden
        case "k_proj" | "v_proj":
            return kv, hidden
        case "qkv_proj":
            return heads + 2 * kv, hidden
        case "o_proj":
            return hidden, heads
    return None


def _latent_shape(name: str, latent: LatentConfig, config: ModelConfig) -> Shape | None:
    hidden, heads = config.hidden_size, config.num_heads
    match name:
        case "q_proj":
            return heads * latent.key_dim, hidden
        case "q_a_proj":
            return latent.query_rank or 0, hidden
        case "q_b_proj":
            return heads * latent.key_dim, latent.query_rank or 0
        case "kv_a_proj_with_mqa":
            return latent.key_value_rank + latent.rotary_dim, hidden
        case "kv_b_proj":
            return heads * (latent.position_free_dim + latent.value_dim), latent.key_value_rank
        case "o_proj":
            return hidden, heads * latent.value_dim
    return None


def _delta_shape(name: str, delta: DeltaConfig, hidden: int) -> Shape | None:
    match name:
        case "in_proj_qkvz":
            return delta.mixed_size + delta.value_size, hidden
        case "in_proj_qkv":
            return delta.mixed_size, hidden
        case "in_proj_z":
            return delta.value_size, hidden
        case "out_proj":
            return hidden, delta.value_size
    return None
