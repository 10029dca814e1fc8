"""What a `config.json` says about multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.models.config_values import MOST_ELEMENTS, whole, wrong


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of multi-head latent attention, in elements per token or head.

    Queries come from a latent of `query_rank`, or straight from the hidden state where that is None; keys and
    values come from one latent of `key_value_rank`. Of a head's key, `position_free_dim` elements come from
    the latent and `rotary_dim` carry the position and are shared by all heads. `norm_eps`: the families give
    the norms on latents none of their own, so it is not `rms_norm_eps` but their norm's default.
    """

    query_rank: int | None
    key_value_rank: int
    position_free_dim: int
    rotary_dim: int
    value_dim: int
    norm_eps: float = 1e-6

    @property
    def key_dim(self) -> int:
        """Elements of one head's query, and of its key."""
        return self.position_free_dim + self.rotary_dim


def parse_latent(config: Mapping[str, Any]) -> LatentConfig:
    """Raises UserError naming the key; `q_lora_rank` must be written, for null says that there is none."""
    if "q_lora_rank" not in config:
        raise wrong("q_lora_rank", f"a positive whole number up to {MOST_ELEMENTS}, or null", None)
    given = config["q_lora_rank"] is not None
    rotary = whole(config, "qk_rope_head_dim", MOST_ELEMENTS)
    if rotary % 2:
        raise wrong("qk_rope_head_dim", "even, for rotation turns pairs", rotary)
    return LatentConfig(
        query_rank=whole(config, "q_lora_rank", MOST_ELEMENTS) if given else None,
        key_value_rank=whole(config, "kv_lora_rank", MOST_ELEMENTS),
        position_free_dim=whole(config, "qk_nope_head_dim", MOST_ELEMENTS),
        rotary_dim=rotary,
        value_dim=whole(config, "v_head_dim", MOST_ELEMENTS),
    )
