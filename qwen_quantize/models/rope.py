"""What a `config.json` says about rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.models.config_values import (
    MOST_POSITIONS,
    Interval,
    choice,
    number,
    shown,
    switch,
    whole,
    wrong,
)

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")

_THETA = Interval(1.0, 1e15)  # float32 holds the slowest angle; a base below 1 would turn faster and faster
_FACTOR = Interval(1e-6, 1e6)
_POSITIVE = Interval(0.0, 1e6, above=True)
_SHARE = Interval(0.0, 1.0, above=True)
_TEMPERATURE = Interval(0.0, 1e3)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: base, variant and the variant's numbers.

    `kind` is one of ROPE_KINDS; fields that a variant does not use are ignored. Formulas: linear scaling
    divides positions; `llama3` is the frequency-dependent rule of the Llama 3.1 release; `yarn` is arXiv
    2309.00071; `longrope` (arXiv 2402.13753) divides each frequency by a factor of its own, a short one up to
    `original_max_position` tokens and a long one for a longer text. `interleaved`: neighbours form the pairs
    that are turned, instead of the two halves of a head.
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
    mscale_all_dim: float = 0.0
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    interleaved: bool = False
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated, the first ones; the others stay as they are."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def softmax_gain(self) -> float:
        """What the DeepSeek families multiply attention scores with where a context was stretched.

        It is the square of YaRN's temperature with the weight `mscale_all_dim`: once for the query, once for
        the key (DeepSeek-V2's published model code).
        """
        if self.kind == "default" or not self.mscale_all_dim:
            return 1.0
        return _temperature(self.factor, self.mscale_all_dim) ** 2


def parse_rope(
    config: Mapping[str, Any],
    max_position: int,
    *,
    interleaved: bool = False,
    names: Mapping[str, str] | None = None,
    by_layer: bool = False,
) -> RopeConfig:
    """The rope settings of either generation of keys; raises UserError for whatever has no meaning.

    interleaved: whether the family turns neighbours. names: the family's other names of rope types. by_layer:
    whether settings may be given for each type of layer; these are then those of full attention.
    """
    scaling = _rope_settings(config, "full_attention" if by_layer else None)
    names = names or {}
    kind = choice(scaling, ("rope_type", "type"), (*ROPE_KINDS, *names), "default")
    kind = names.get(kind, kind)
    theta = number(scaling, "rope_theta", _THETA, number(config, "rope_theta", _THETA, 10000.0))
    # As in transformers, the key beside the rope settings wins over the one inside them.
    original = whole(
        config,
        "original_max_position_embeddings",
        MOST_POSITIONS,
        whole(scaling, "original_max_position_embeddings", MOST_POSITIONS, max_position),
    )
    # Two variants may leave their factor to the two lengths; the others mean nothing without one.
    stretch = max_position / original
    implied = {"default": 1.0, "yarn": stretch, "longrope": stretch}.get(kind)
    factor = number(scaling, "factor", _FACTOR, implied)
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=number(scaling, "low_freq_factor", _POSITIVE, 1.0),
        high_freq_factor=number(scaling, "high_freq_factor", _POSITIVE, 4.0),
        beta_fast=number(scaling, "beta_fast", _POSITIVE, 32.0),
        beta_slow=number(scaling, "beta_slow", _POSITIVE, 1.0),
        attention_factor=_attention_factor(scaling, kind, factor, original),
        mscale_all_dim=number(scaling, "mscale_all_dim", _TEMPERATURE, 0.0),
        truncate=switch(scaling, "truncate", True),
        partial_rotary_factor=number(
            scaling, "partial_rotary_factor", _SHARE, number(config, "partial_rotary_factor", _SHARE, 1.0)
        ),
        interleaved=interleaved,
        short_factors=_factors(scaling, "short_factor") if kind == "longrope" else (),
        long_factors=_factors(scaling, "long_factor") if kind == "longrope" else (),
    )
    _check_rope(rope)
    return rope


def parse_local_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    """The rope settings of layers with a sliding window: Gemma 3's, whose base is `rope_local_base_freq`."""
    settings: dict[str, Any] = {"rope_theta": config.get("rope_local_base_freq")}
    by_layer = config.get("rope_parameters")
    if isinstance(by_layer, Mapping):
        settings["rope_parameters"] = by_layer.get("sliding_attention")
    return parse_rope(settings, max_position)


def check_rotated(rope: RopeConfig, head_dim: int) -> None:
    """Raises UserError where the rotated part of a head is nothing, or no whole number of pairs."""
    rotated = rope.rotary_dim(head_dim)
    if rotated == 0 or rotated % 2:
        raise UserError(
            f"config.json: 'partial_rotary_factor' must rotate an even number of dimensions, at least 2, "
            f"of a head of {head_dim}, found {rope.partial_rotary_factor:g}, which rotates {rotated}"
        )
    for key, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if rope.kind == "longrope" and len(factors) != rotated // 2:
            raise UserError(
                f"config.json: {key!r} must hold {rotated // 2} numbers, one per pair that is rotated, "
                f"found {len(factors)}"
            )


def _factors(scaling: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """LongRoPE's divisors of the frequencies."""
    found = scaling.get(key)
    if not isinstance(found, list):
        raise wrong(key, "a list of numbers where the rope type is longrope", found)
    return tuple(number({key: value}, key, _FACTOR, None) for value in found)


def _rope_settings(config: Mapping[str, Any], layer_type: str | None) -> Mapping[str, Any]:
    # transformers 5 writes `rope_parameters`; earlier files have `rope_theta` and `rope_scaling`.
    found: Mapping[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        settings = config.get(key)
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise wrong(key, "an object of rope settings or null", settings)
        if layer_type is not None and key == "rope_parameters" and settings:
            settings = _for_layer_type(settings, layer_type)
        for name, value in settings.items():
            if isinstance(value, Mapping):
                raise UserError(
                    f"config.json: {key!r} holds settings of its own for {shown(name)}, and rope settings per "
                    f"layer type are not implemented; one object for all layers is allowed, "
                    f"found {shown(value)}"
                )
        found = found or settings
    return found


def _for_layer_type(settings: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    inner = settings.get(layer_type)
    if not isinstance(inner, Mapping):
        raise UserError(
            f"config.json: 'rope_parameters' must hold an object of rope settings for {layer_type!r}, "
            f"found {shown(settings)}"
        )
    return inner


def _check_rope(rope: RopeConfig) -> None:
    """The rules between two settings: each would divide by zero or turn a ramp round."""
    if rope.kind == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise UserError(
            f"config.json: 'low_freq_factor' must be below 'high_freq_factor' ({rope.high_freq_factor:g}), "
            f"found {rope.low_freq_factor:g}"
        )
    if rope.kind == "yarn" and rope.beta_fast < rope.beta_slow:
        raise UserError(
            f"config.json: 'beta_fast' must be at least 'beta_slow' ({rope.beta_slow:g}), "
            f"found {rope.beta_fast:g}"
        )
    if rope.kind == "yarn" and rope.theta == 1:  # YaRN divides by its logarithm
        raise UserError(f"config.json: 'rope_theta' must be above 1 for yarn, found {rope.theta:g}")
    if rope.kind == "longrope" and rope.original_max_position == 1:  # and LongRoPE by this one
        raise UserError(
            "config.json: 'original_max_position_embeddings' must be above 1 for longrope, found 1"
        )


def _temperature(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context stretched by `factor` (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _attention_factor(scaling: Mapping[str, Any], kind: str, factor: float, original: int) -> float:
    """What cos and sin are multiplied with."""
    if kind == "longrope":
        stretched = factor > 1 and original > 1
        implied = math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
        return number(scaling, "attention_factor", _POSITIVE, implied)
    return _yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """What YaRN multiplies cos and sin with."""
    # Zero counts as absent, as in transformers.
    weight = number(scaling, "mscale", _TEMPERATURE, 0.0)
    all_dim = number(scaling, "mscale_all_dim", _TEMPERATURE, 0.0)
    both = weight and all_dim
    implied = (
        _temperature(factor, weight) / _temperature(factor, all_dim) if both else _temperature(factor, 1.0)
    )
    return number(scaling, "attention_factor", _POSITIVE, implied)
