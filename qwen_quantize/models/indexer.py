"""What a `config.json` says about the indexer of DeepSeek-V3.2, which picks the tokens that attention sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.models.config_values import MOST_ELEMENTS, MOST_POSITIONS, whole, wrong
from qwen_quantize.models.latent import LatentConfig


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    """heads, and elements of one head's query and of the key that all heads share; tokens seen per query."""

    heads: int
    head_dim: int
    top_k: int


def parse_indexer(config: Mapping[str, Any], latent: LatentConfig | None) -> IndexerConfig:
    """Raises UserError naming the key. The first `rotary_dim` elements of a head carry the position."""
    head_dim = whole(config, "index_head_dim", MOST_ELEMENTS, 128)
    heads = whole(config, "index_n_heads", MOST_ELEMENTS, 64)
    if latent is None or latent.query_rank is None:
        raise wrong("q_lora_rank", "a number, for the indexer reads the latent of the queries", None)
    if head_dim < latent.rotary_dim:
        raise wrong("index_head_dim", f"at least qk_rope_head_dim ({latent.rotary_dim})", head_dim)
    if heads * head_dim > MOST_ELEMENTS:
        raise wrong("index_n_heads", f"at most {MOST_ELEMENTS // head_dim} with heads of {head_dim}", heads)
    return IndexerConfig(heads, head_dim, whole(config, "index_topk", MOST_POSITIONS, 2048))
