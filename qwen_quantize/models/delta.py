"""What a `config.json` says about gated delta-net layers, which hybrids have in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.models.config_values import MOST_ELEMENTS, MOST_LAYERS, whole, wrong

MOST_TAPS = 1024
_KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True, slots=True)
class DeltaConfig:
    """Sizes of gated delta-net layers, in elements or heads; `layers` has one flag per decoder layer.

    Each key head serves `value_heads / key_heads` consecutive value heads. `taps`: tokens that the short
    convolution sees, the current one included.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    layers: tuple[bool, ...]

    @property
    def key_size(self) -> int:
        """Elements of all heads' keys, and of all heads' queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of all heads' values."""
        return self.value_heads * self.value_dim

    @property
    def mixed_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


def parse_delta(config: Mapping[str, Any], layers: int) -> DeltaConfig:
    """Raises UserError naming the key. Without `layer_types` every `full_attention_interval`-th layer attends."""
    key_heads = whole(config, "linear_num_key_heads", MOST_ELEMENTS, 16)
    value_heads = whole(config, "linear_num_value_heads", MOST_ELEMENTS, 32)
    if value_heads % key_heads:
        raise wrong(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads ({key_heads})", value_heads
        )
    kinds = config.get("layer_types")
    if kinds is None:
        interval = whole(config, "full_attention_interval", MOST_LAYERS, 4)
        flags = tuple((index + 1) % interval != 0 for index in range(layers))
    else:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise wrong("layer_types", f"a list of {layers} names, one per layer", kinds)
        for kind in kinds:
            if kind not in _KINDS:
                raise wrong("layer_types", f"a list of {' and '.join(map(repr, _KINDS))}", kind)
        flags = tuple(kind == "linear_attention" for kind in kinds)
    return DeltaConfig(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=_size_of_head(config, "linear_key_head_dim", key_heads),
        value_dim=_size_of_head(config, "linear_value_head_dim", value_heads),
        taps=whole(config, "linear_conv_kernel_dim", MOST_TAPS, 4, least=2),
        layers=flags,
    )


def _size_of_head(config: Mapping[str, Any], key: str, heads: int) -> int:
    size = whole(config, key, MOST_ELEMENTS, 128)
    if size * heads > MOST_ELEMENTS:
        raise wrong(key, f"at most {MOST_ELEMENTS // heads} with {heads} heads", size)
    return size
