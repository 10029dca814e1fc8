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

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's dimensions are rotated, the first ones; the others stay as they are."""
        return int(head_dim * self.partial_rotary_factor)


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
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn")
LAYER_KINDS = ("full_attention", "sliding_attention")

# Far above every model that exists; they stop a damaged file before it sizes an allocation or a loop.
MOST_LAYERS = 10_000
MOST_ELEMENTS = 10_000_000
MOST_POSITIONS = 1_000_000_000

# What Qwen2Config and Qwen3Config of transformers say where config.json is silent.
DEFAULT_FULL_LAYERS = 28


@dataclass(frozen=True, slots=True)
class _Interval:
    """Allowed numbers: low..high, without `low` itself where `above` is set."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        # Compared, never converted: JSON may hold whole numbers that no float can hold. NaN is outside.
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"a number above {self.low:g} and at most {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"


_THETA = _Interval(1.0, 1e15)  # float32 holds the slowest angle; a base below 1 would turn faster and faster
_FACTOR = _Interval(1e-6, 1e6)
_POSITIVE = _Interval(0.0, 1e6, above=True)
_SHARE = _Interval(0.0, 1.0, above=True)
_EPSILON = _Interval(0.0, 1.0)
_TEMPERATURE = _Interval(0.0, 1e3)


def shown(value: object) -> str:
    """A value of a JSON file for an error message: one line of at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of more than 4300 digits
        return "a whole number of more than 4300 digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _fail(key: str, allowed: str, value: object) -> UserError:
    found = "no such key" if value is None else shown(value)
    return UserError(f"config.json: {key!r} must be {allowed}, found {found}")


def _whole(
    config: Mapping[str, Any], key: str, most: int, default: int | None = None, *, least: int = 1
) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        kind = "positive whole number" if least == 1 else f"whole number from {least}"
        raise _fail(key, f"a {kind} up to {most}", value)
    return value


def _number(config: Mapping[str, Any], key: str, allowed: _Interval, default: float | None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
        raise _fail(key, str(allowed), value)
    return float(value)


def _switch(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):  # the string "false" would count as true
        raise _fail(key, "true or false", value)
    return value


def _choice(config: Mapping[str, Any], keys: tuple[str, ...], choices: tuple[str, ...], default: str) -> str:
    """The first of `keys` that is set; older names of a key come last. A prefix `torch.` is dropped."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or value.removeprefix("torch.") not in choices:
            raise UserError(
                f"config.json: {key!r} is {shown(value)}, which is not implemented; "
                f"these are: {', '.join(choices)}"
            )
        return value.removeprefix("torch.")
    return default


def _rope_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes `rope_parameters`; earlier files have `rope_theta` and `rope_scaling`.
    found: Mapping[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        settings = config.get(key)
        if settings is None:
            continue
        if not isinstance(settings, Mapping):
            raise _fail(key, "an object of rope settings or null", settings)
        for name, value in settings.items():
            if isinstance(value, Mapping):
                raise UserError(
                    f"config.json: {key!r} holds settings of its own for {shown(name)}, and rope settings per "
                    f"layer type are not implemented; one object for all layers is allowed, "
                    f"found {shown(value)}"
                )
        found = found or settings
    return found


def _parse_rope(config: Mapping[str, Any], max_position: int) -> RopeConfig:
    scaling = _rope_settings(config)
    kind = _choice(scaling, ("rope_type", "type"), ROPE_KINDS, "default")
    theta = _number(scaling, "rope_theta", _THETA, _number(config, "rope_theta", _THETA, 10000.0))
    # As in transformers, the key beside the rope settings wins over the one inside them.
    original = _whole(
        config,
        "original_max_position_embeddings",
        MOST_POSITIONS,
        _whole(scaling, "original_max_position_embeddings", MOST_POSITIONS, max_position),
    )
    # YaRN may leave its factor to the two lengths; the other variants mean nothing without one.
    implied = {"default": 1.0, "yarn": max_position / original}.get(kind)
    factor = _number(scaling, "factor", _FACTOR, implied)
    rope = RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position=original,
        low_freq_factor=_number(scaling, "low_freq_factor", _POSITIVE, 1.0),
        high_freq_factor=_number(scaling, "high_freq_factor", _POSITIVE, 4.0),
        beta_fast=_number(scaling, "beta_fast", _POSITIVE, 32.0),
        beta_slow=_number(scaling, "beta_slow", _POSITIVE, 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        truncate=_switch(scaling, "truncate", True),
        partial_rotary_factor=_number(
            scaling, "partial_rotary_factor", _SHARE, _number(config, "partial_rotary_factor", _SHARE, 1.0)
        ),
    )
    _check_rope(rope)
    return rope


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


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """The temperature that YaRN multiplies cos and sin with (arXiv 2309.00071, section 3.4)."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    # Zero counts as absent, as in transformers.
    weight = _number(scaling, "mscale", _TEMPERATURE, 0.0)
    all_dim = _number(scaling, "mscale_all_dim", _TEMPERATURE, 0.0)
    implied = mscale(weight) / mscale(all_dim) if weight and all_dim else mscale(1.0)
    return _number(scaling, "attention_factor", _POSITIVE, implied)


def parse_model_config(config: Mapping[str, Any], architecture: str) -> ModelConfig:
    """Read the fields that the engine needs; raises UserError naming the key that is missing or wrong.

    A key with the value null counts as absent, and absent keys mean what they mean in transformers.
    """
    hidden = _whole(config, "hidden_size", MOST_ELEMENTS)
    heads = _whole(config, "num_attention_heads", MOST_ELEMENTS)
    layers = _whole(config, "num_hidden_layers", MOST_LAYERS)
    max_position = _whole(config, "max_position_embeddings", MOST_POSITIONS, 2048)
    kv_heads = _whole(config, "num_key_value_heads", MOST_ELEMENTS, heads)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"config.json: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}) "
            "and there is no head_dim"
        )
    rope = _parse_rope(config, max_position)
    window, sliding = _parse_sliding_window(config, layers)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_whole(config, "vocab_size", MOST_ELEMENTS),
        hidden_size=hidden,
        intermediate_size=_whole(config, "intermediate_size", MOST_ELEMENTS),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_parse_head_dim(config, hidden // heads, rope),
        rms_norm_eps=_number(config, "rms_norm_eps", _EPSILON, 1e-6),
        rope=rope,
        tie_word_embeddings=_switch(config, "tie_word_embeddings", False),
        max_position=max_position,
        activation=_choice(config, ("hidden_act", "hidden_activation"), ACTIVATIONS, "silu"),
        attention_bias=_switch(config, "attention_bias", False),
        mlp_bias=_switch(config, "mlp_bias", False),
        dtype=_choice(config, ("dtype", "torch_dtype"), DTYPES, "bfloat16"),
        sliding_window=window,
        sliding_layers=sliding,
    )


def _parse_head_dim(config: Mapping[str, Any], quotient: int, rope: RopeConfig) -> int:
    """The size of a head, which rotation splits into pairs; quotient: hidden_size / num_attention_heads."""
    head_dim = _whole(config, "head_dim", MOST_ELEMENTS, quotient)
    if head_dim % 2:
        origin = " (hidden_size / num_attention_heads)" if config.get("head_dim") is None else ""
        raise UserError(
            f"config.json: 'head_dim' must be even, for rotation turns pairs, found {head_dim}{origin}"
        )
    rotated = rope.rotary_dim(head_dim)
    if rotated == 0 or rotated % 2:
        raise UserError(
            f"config.json: 'partial_rotary_factor' must rotate an even number of dimensions, at least 2, "
            f"of a head of {head_dim}, found {rope.partial_rotary_factor:g}, which rotates {rotated}"
        )
    return head_dim


def _parse_sliding_window(config: Mapping[str, Any], layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Which layers attend to a window only: `layer_types` where written, else the older two switches.

    Without `use_sliding_window` no layer does, whatever `sliding_window` says: so the three families read it.
    """
    in_use = _switch(config, "use_sliding_window", False)
    window = _whole(config, "sliding_window", MOST_POSITIONS, 0, least=0)
    first = _whole(config, "max_window_layers", MOST_LAYERS, DEFAULT_FULL_LAYERS, least=0)
    kinds = config.get("layer_types")
    if kinds is None:
        sliding = tuple(in_use and index >= first for index in range(layers))
    else:
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise _fail("layer_types", f"a list of {layers} names, one per layer", kinds)
        for kind in kinds:
            if kind not in LAYER_KINDS:
                raise _fail("layer_types", f"a list of {' and '.join(map(repr, LAYER_KINDS))}", kind)
        sliding = tuple(kind == "sliding_attention" for kind in kinds)
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
