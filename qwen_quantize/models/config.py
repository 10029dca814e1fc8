"""What a `config.json` says about a decoder, in one frozen record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.models.config_values import (
    MOST_ELEMENTS,
    MOST_LAYERS,
    MOST_POSITIONS,
    Interval,
    choice,
    number,
    switch,
    whole,
    wrong,
)
from qwen_quantize.models.delta import DeltaConfig
from qwen_quantize.models.indexer import IndexerConfig
from qwen_quantize.models.latent import LatentConfig
from qwen_quantize.models.moe import MoeConfig
from qwen_quantize.models.rope import RopeConfig, check_rotated, parse_local_rope, parse_rope
from qwen_quantize.models.windows import Windows, windows_after_full_layers


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder-only model; sizes count elements.

    With `latent`, `head_dim` is the size of one head's query and key, and every head has a key of its own.
    softmax_scale: what attention scores are multiplied with; None means 1 / sqrt(head_dim).
    next_token_layers: how many layers for multi-token prediction follow the decoder's own.
    local_rope: the rotation of layers with a sliding window where they have one of their own.
    score_cap, logit_cap: bounds of attention scores and of the head's logits, reached softly; None for none.
    output_gate: whether the query projection also yields a gate for what attention mixed.
    delta: layers that are no attention at all. indexer: what picks the tokens that attention sees.
    """

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
    qkv_bias: bool = True
    softmax_scale: float | None = None
    moe: MoeConfig | None = None
    latent: LatentConfig | None = None
    next_token_layers: int = 0
    local_rope: RopeConfig | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    output_gate: bool = False
    delta: DeltaConfig | None = None
    indexer: IndexerConfig | None = None

    def window(self, layer: int) -> int | None:
        """How many positions a query of a layer sees, itself included; None means all of them."""
        return self.sliding_window if self.sliding_layers and self.sliding_layers[layer] else None

    def is_delta(self, layer: int) -> bool:
        """Whether a layer has a gated delta-net instead of attention."""
        return self.delta is not None and self.delta.layers[layer]

    @property
    def rotary_head_dim(self) -> int:
        """The part of a head that rotary embedding is given; all of it without latent attention."""
        return self.head_dim if self.latent is None else self.latent.rotary_dim

    @property
    def value_dim(self) -> int:
        """Elements of one head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim


ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu")
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn")

_EPSILON = Interval(0.0, 1.0)
_POSITIVE = Interval(0.0, 1e6, above=True)

WindowRule = Callable[[Mapping[str, Any], int], Windows]
MoeRule = Callable[[Mapping[str, Any], int], MoeConfig]
LatentRule = Callable[[Mapping[str, Any]], LatentConfig]
DeltaRule = Callable[[Mapping[str, Any], int], DeltaConfig]
IndexerRule = Callable[[Mapping[str, Any], LatentConfig | None], IndexerConfig]


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """How a family reads its config: one function for each part that families write differently.

    defaults: what absent keys mean where that differs from family to family, as in transformers.
    interleaved_rope: whether rotation turns neighbours instead of the two halves of a head; None leaves it to
    the key `rope_interleave`, which is true where it is absent.
    rope_names: other names of rope types. local_rope: whether layers with a window have a rotation of their own.
    activation_keys: where the activation stands, the key that wins first.
    capped_logits: what absent keys mean for the caps on scores and logits; None for a family without caps.
    query_scalar: whether `query_pre_attn_scalar` stands for the head size in the scale of scores.
    nested: the key of the object that holds the text model's config.
    """

    windows: WindowRule = windows_after_full_layers
    moe: MoeRule | None = None
    latent: LatentRule | None = None
    delta: DeltaRule | None = None
    indexer: IndexerRule | None = None
    interleaved_rope: bool | None = False
    rope_names: Mapping[str, str] | None = None
    local_rope: bool = False
    activation_keys: tuple[str, ...] = ("hidden_act", "hidden_activation")
    capped_logits: tuple[float | None, float | None] | None = None
    query_scalar: bool = False
    output_gate: bool = False
    nested: str | None = None
    defaults: Mapping[str, Any] | None = None


def parse_model_config(
    config: Mapping[str, Any], architecture: str, rules: ConfigRules | None = None
) -> ModelConfig:
    """Read the fields that the engine needs; raises UserError naming the key that is missing or wrong.

    A key with the value null counts as absent, and absent keys mean what they mean in transformers.
    """
    rules = rules or ConfigRules()
    config = config if rules.nested is None else _inner(config, rules.nested)
    absent = {key: value for key, value in (rules.defaults or {}).items() if config.get(key) is None}
    config = {**config, **absent}
    layers = whole(config, "num_hidden_layers", MOST_LAYERS)
    max_position = whole(config, "max_position_embeddings", MOST_POSITIONS, 2048)
    latent = None if rules.latent is None else rules.latent(config)
    interleaved = rules.interleaved_rope
    if interleaved is None:
        interleaved = switch(config, "rope_interleave", True)
    rope = parse_rope(
        config, max_position, interleaved=interleaved, names=rules.rope_names, by_layer=rules.local_rope
    )
    hidden = whole(config, "hidden_size", MOST_ELEMENTS)
    heads, kv_heads, head_dim = _parse_heads(config, hidden, rope, latent)
    window, sliding = rules.windows(config, layers)
    extra = whole(config, "num_nextn_predict_layers", MOST_LAYERS, 0, least=0)
    moe = None if rules.moe is None else rules.moe(config, layers + extra)
    # Where every layer has experts, nothing has the size of a dense MLP and the key may be missing.
    dense_size = moe.expert_size if moe is not None and all(moe.sparse_layers) else None
    _check_switches(config, rules)
    score_cap, logit_cap = _parse_caps(config, rules)
    return ModelConfig(
        architecture=architecture,
        vocab_size=whole(config, "vocab_size", MOST_ELEMENTS),
        hidden_size=hidden,
        intermediate_size=whole(config, "intermediate_size", MOST_ELEMENTS, dense_size),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(config, "rms_norm_eps", _EPSILON, 1e-6),
        rope=rope,
        tie_word_embeddings=switch(config, "tie_word_embeddings", False),
        max_position=max_position,
        activation=choice(config, rules.activation_keys, ACTIVATIONS, "silu"),
        attention_bias=switch(config, "attention_bias", False),
        mlp_bias=switch(config, "mlp_bias", False),
        dtype=choice(config, ("dtype", "torch_dtype"), DTYPES, "bfloat16"),
        sliding_window=window,
        sliding_layers=sliding,
        qkv_bias=switch(config, "qkv_bias", True),
        softmax_scale=_softmax_scale(config, rules, latent, rope),
        moe=moe,
        latent=latent,
        next_token_layers=extra,
        local_rope=parse_local_rope(config, max_position) if rules.local_rope else None,
        score_cap=score_cap,
        logit_cap=logit_cap,
        output_gate=rules.output_gate,
        delta=None if rules.delta is None else rules.delta(config, layers),
        indexer=None if rules.indexer is None else rules.indexer(config, latent),
    )


def _inner(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The text model's settings out of a config that also describes other towers."""
    inner = config.get(key)
    if not isinstance(inner, Mapping):
        raise wrong(key, "an object that holds the text model's settings", inner)
    # What both may say, the outer one decides: it is the model that was saved.
    outer = ("tie_word_embeddings", "dtype", "torch_dtype")
    return {**inner, **{name: config[name] for name in outer if config.get(name) is not None}}


def _check_switches(config: Mapping[str, Any], rules: ConfigRules) -> None:
    """Switches that have only one meaning here."""
    if rules.query_scalar and switch(config, "use_bidirectional_attention", False):
        raise wrong("use_bidirectional_attention", "false, for only causal attention is implemented", True)
    if rules.output_gate and not switch(config, "attn_output_gate", True):
        raise wrong("attn_output_gate", "true, for only gated attention is implemented here", False)


def _parse_caps(config: Mapping[str, Any], rules: ConfigRules) -> tuple[float | None, float | None]:
    """(cap of attention scores, cap of logits). Here null means no cap, which an absent key may not."""
    if rules.capped_logits is None:
        return None, None
    caps = []
    for key, default in zip(
        ("attn_logit_softcapping", "final_logit_softcapping"), rules.capped_logits, strict=True
    ):
        given = config.get(key, default)
        caps.append(None if given is None else number({key: given}, key, _POSITIVE, None))
    return caps[0], caps[1]


def _softmax_scale(
    config: Mapping[str, Any], rules: ConfigRules, latent: LatentConfig | None, rope: RopeConfig
) -> float | None:
    if rules.query_scalar:
        return float(number(config, "query_pre_attn_scalar", _POSITIVE, None) ** -0.5)
    return None if latent is None else latent.key_dim**-0.5 * rope.softmax_gain


def _parse_heads(
    config: Mapping[str, Any], hidden: int, rope: RopeConfig, latent: LatentConfig | None
) -> tuple[int, int, int]:
    """(heads, key-value heads, size of a head's query and key)."""
    heads = whole(config, "num_attention_heads", MOST_ELEMENTS)
    if latent is not None:
        if rope.partial_rotary_factor != 1:
            raise UserError(
                "config.json: 'partial_rotary_factor' must be 1 with latent attention, where "
                f"'qk_rope_head_dim' says what is rotated, found {rope.partial_rotary_factor:g}"
            )
        return heads, heads, latent.key_dim
    kv_heads = whole(config, "num_key_value_heads", MOST_ELEMENTS, heads)
    if heads % kv_heads:
        raise UserError(
            f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    if config.get("head_dim") is None and hidden % heads:
        raise UserError(
            f"config.json: hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}) "
            "and there is no head_dim"
        )
    return heads, kv_heads, _parse_head_dim(config, hidden // heads, rope)


def _parse_head_dim(config: Mapping[str, Any], quotient: int, rope: RopeConfig) -> int:
    """The size of a head, which rotation splits into pairs; quotient: hidden_size / num_attention_heads."""
    head_dim = whole(config, "head_dim", MOST_ELEMENTS, quotient)
    if head_dim % 2:
        origin = " (hidden_size / num_attention_heads)" if config.get("head_dim") is None else ""
        raise UserError(
            f"config.json: 'head_dim' must be even, for rotation turns pairs, found {head_dim}{origin}"
        )
    check_rotated(rope, head_dim)
    return head_dim
