"""Which layers attend to a sliding window only: one function for each reading of the keys.

Each takes (config, number of layers) and returns (window or None, one flag per layer).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.models.config_values import MOST_LAYERS, MOST_POSITIONS, shown, switch, whole, wrong

Windows = tuple[int | None, tuple[bool, ...]]

LAYER_KINDS = ("full_attention", "sliding_attention")

# What the configurations of Qwen in transformers say where config.json is silent.
_DEFAULT_FULL_LAYERS = 28


def no_windows(_config: Mapping[str, Any], layers: int) -> Windows:
    """Every layer attends to everything, whatever the keys say."""
    return None, (False,) * layers


def windows_after_full_layers(config: Mapping[str, Any], layers: int) -> Windows:
    """Qwen2 and Qwen3: the first `max_window_layers` layers attend to everything."""
    return _switched(config, layers, lambda index, first: index >= first)


def windows_on_alternate_layers(config: Mapping[str, Any], layers: int) -> Windows:
    """Qwen2-MoE, as transformers 5 reads it: every other one of the first `max_window_layers` layers."""
    return _switched(config, layers, lambda index, first: index % 2 == 0 and index < first)


def windows_on_all_layers(config: Mapping[str, Any], layers: int) -> Windows:
    """Qwen3-MoE: all layers or none, by the switch `use_sliding_window`."""
    return _switched(config, layers, lambda _index, _first: True, by_layer=False)


def _switched(
    config: Mapping[str, Any], layers: int, rule: Callable[[int, int], bool], *, by_layer: bool = True
) -> Windows:
    """`layer_types` where written and heeded, else the older two keys and `rule`(layer, max_window_layers).

    Without `use_sliding_window` no layer has a window, whatever `sliding_window` says.
    """
    in_use = switch(config, "use_sliding_window", False)
    window = whole(config, "sliding_window", MOST_POSITIONS, 0, least=0)
    first = whole(config, "max_window_layers", MOST_LAYERS, _DEFAULT_FULL_LAYERS, least=0)
    sliding = _layer_types(config, layers) if by_layer else None
    if sliding is None:
        sliding = tuple(in_use and rule(index, first) for index in range(layers))
    if in_use and not window:
        raise UserError(
            "config.json: 'sliding_window' must be a positive whole number where 'use_sliding_window' is "
            f"true, found {shown(config.get('sliding_window'))}"
        )
    if any(sliding) and not in_use:
        raise UserError(
            "config.json: 'use_sliding_window' must be true where 'layer_types' holds 'sliding_attention', "
            f"found {shown(config.get('use_sliding_window'))}"
        )
    return (window, sliding) if in_use else (None, (False,) * layers)


def windows_where_given(config: Mapping[str, Any], layers: int) -> Windows:
    """Mixtral and Phi-3: every layer has the window that `sliding_window` names; null means none."""
    if config.get("sliding_window") is None:
        return None, (False,) * layers
    return whole(config, "sliding_window", MOST_POSITIONS), (True,) * layers


def windows_of_mistral(config: Mapping[str, Any], layers: int) -> Windows:
    """Mistral: as Mixtral, but without the key the window is 4096; only null means none."""
    return windows_where_given({"sliding_window": 4096, **config}, layers)


def windows_of_gemma2(config: Mapping[str, Any], layers: int) -> Windows:
    """Gemma 2: every other layer has a window, the first one included."""
    return _alternating(config, layers, 2)


def windows_of_gemma3(config: Mapping[str, Any], layers: int) -> Windows:
    """Gemma 3: all but every `sliding_window_pattern`-th layer have a window."""
    return _alternating(config, layers, whole(config, "sliding_window_pattern", MOST_LAYERS, 6))


def _alternating(config: Mapping[str, Any], layers: int, pattern: int) -> Windows:
    window = whole({"sliding_window": 4096, **config}, "sliding_window", MOST_POSITIONS)
    sliding = _layer_types(config, layers)
    if sliding is None:
        sliding = tuple((index + 1) % pattern != 0 for index in range(layers))
    return window, sliding


def _layer_types(config: Mapping[str, Any], layers: int) -> tuple[bool, ...] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise wrong("layer_types", f"a list of {layers} names, one per layer", kinds)
    for kind in kinds:
        if kind not in LAYER_KINDS:
            raise wrong("layer_types", f"a list of {' and '.join(map(repr, LAYER_KINDS))}", kind)
    return tuple(kind == "sliding_attention" for kind in kinds)
