"""Configs of more families: published files read as transformers reads them, damaged ones refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.engine.rotary import LayerRotary
from qwen_quantize.errors import UserError
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.models.lookup import require_blueprint
from tests.models.published_configs import (
    DEEPSEEK_V32,
    GEMMA2_2B,
    GEMMA3_1B,
    GLM49B,
    MISTRAL7B,
    PHI3_128K,
    PUBLISHED,
    QWEN3_NEXT_80B,
    QWEN35,
)

# What several families have in common and each gets from one of them.
REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def parse(config: dict[str, Any]) -> ModelConfig:
    return require_blueprint(config).config


def outcome(config: dict[str, Any]) -> ModelConfig | str:
    try:
        return parse(config)
    except UserError as error:
        return str(error)


def oracle(model_type: str, config: dict[str, Any]) -> Any:
    """transformers' reading of a config."""
    from transformers import AutoConfig

    # Copied deeply enough: transformers writes into the rope settings that it is given.
    given = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in ("architectures", "model_type", "torch_dtype")
    }
    return AutoConfig.for_model(model_type, **given)


def check_against(found: ModelConfig, expected: Any) -> None:
    same = {
        "vocab_size": found.vocab_size,
        "hidden_size": found.hidden_size,
        "intermediate_size": found.intermediate_size,
        "num_hidden_layers": found.num_layers,
        "num_attention_heads": found.num_heads,
        "num_key_value_heads": found.num_kv_heads,
        "rms_norm_eps": found.rms_norm_eps,
        "max_position_embeddings": found.max_position,
        "tie_word_embeddings": found.tie_word_embeddings,
    }
    assert {key: getattr(expected, key) for key in same} == same
    activation = getattr(expected, "hidden_activation", None) or expected.hidden_act
    assert found.activation == activation
    if found.latent is None and hasattr(expected, "head_dim"):
        assert found.head_dim == expected.head_dim
    if hasattr(expected, "attention_bias") and expected.model_type != "phi3":
        assert found.attention_bias == expected.attention_bias
    rope = expected.rope_parameters
    by_layer = [(found.rope, rope.get("full_attention", rope))]
    if found.local_rope is not None:
        by_layer.append((found.local_rope, rope["sliding_attention"]))
    for ours, theirs in by_layer:
        assert (ours.theta, ours.kind) == (theirs["rope_theta"], theirs["rope_type"])
        if theirs.get("factor") is not None:
            assert ours.factor == theirs["factor"]
        if found.latent is None:
            assert ours.partial_rotary_factor == theirs.get("partial_rotary_factor", 1.0)
    kinds = getattr(expected, "layer_types", None)
    if found.delta is not None:
        assert found.delta.layers == tuple(kind == "linear_attention" for kind in kinds)
    elif kinds is not None and found.latent is None:
        assert found.sliding_layers == tuple(kind == "sliding_attention" for kind in kinds)
    window = getattr(expected, "sliding_window", None)
    assert found.sliding_window == window
    if hasattr(expected, "query_pre_attn_scalar"):
        assert found.softmax_scale == expected.query_pre_attn_scalar**-0.5
        assert found.logit_cap == expected.final_logit_softcapping
    if found.moe is not None and hasattr(expected, "norm_topk_prob"):
        assert found.moe.normalise == expected.norm_topk_prob


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_configs_read_as_in_transformers(model_type: str) -> None:
    check_against(parse(PUBLISHED[model_type]), oracle(model_type, PUBLISHED[model_type]))


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_every_absent_key_means_what_it_means_in_transformers(model_type: str) -> None:
    config = PUBLISHED[model_type]
    for key in config:
        if key in ("architectures", "model_type", "torch_dtype", "head_dim"):
            continue
        without = {name: value for name, value in config.items() if name != key}
        found = outcome(without)
        if isinstance(found, str):
            assert repr(key) in found
            # These sizes have no defaults here.
            assert key in REQUIRED or "n_group" in config or "num_experts" in config
            continue
        if key.startswith(("num_experts", "first_k")) or "moe" in key or "expert" in key:
            continue  # what check_against does not look at
        if key == "intermediate_size":
            continue  # of a dense MLP, which none of these layers has
        check_against(found, oracle(model_type, without))


def test_gemma_caps() -> None:
    """Here null is no cap at all, while an absent key is a number: so transformers reads both."""
    found = parse(GEMMA2_2B)
    assert (found.score_cap, found.logit_cap) == (50.0, 30.0)
    without = {key: value for key, value in GEMMA2_2B.items() if "softcapping" not in key}
    assert (parse(without).score_cap, parse(without).logit_cap) == (50.0, 30.0)
    null = parse({**GEMMA2_2B, "attn_logit_softcapping": None, "final_logit_softcapping": None})
    assert (null.score_cap, null.logit_cap) == (None, None)
    assert parse({**GEMMA3_1B, "final_logit_softcapping": 20}).logit_cap == 20.0


def test_mistral_without_a_window() -> None:
    found = parse({**MISTRAL7B, "sliding_window": None})
    assert (found.sliding_window, found.sliding_layers) == (None, (False,) * 32)


def test_phi3_128k_is_longrope() -> None:
    rope = parse(PHI3_128K).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("longrope", 32.0, 4096)
    assert rope.attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)
    assert rope.long_factors[1] == 2.3
    for name in ("su", "yarn"):  # earlier names of the same thing
        assert parse({**PHI3_128K, "rope_scaling": {**PHI3_128K["rope_scaling"], "type": name}}).rope == rope


def test_qwen35_reads_the_text_model_inside() -> None:
    blueprint = require_blueprint(QWEN35)
    found = blueprint.config
    assert (found.hidden_size, found.num_layers, found.dtype) == (1024, 24, "bfloat16")
    assert found.tie_word_embeddings
    assert found.rope.theta == 1e7
    assert found.rope.rotary_dim(256) == 64
    shapes = blueprint.expected_tensors()
    assert shapes["model.language_model.layers.0.linear_attn.in_proj_qkv.weight"] == (6144, 1024)
    assert shapes["model.language_model.layers.0.linear_attn.in_proj_a.weight"] == (16, 1024)
    assert shapes["model.language_model.layers.3.self_attn.q_proj.weight"] == (4096, 1024)
    assert "model.language_model.layers.3.linear_attn.A_log" not in shapes
    assert not any("in_proj_a" in module for module in blueprint.linear_modules())


def test_deepseek_v32_has_an_indexer_in_the_next_token_layer_too() -> None:
    blueprint = require_blueprint(DEEPSEEK_V32)
    assert blueprint.next_token_layers == (61,)
    modules = blueprint.next_token_modules()
    assert modules["model.layers.61.self_attn.indexer.wq_b"] == (64 * 128, 1536)
    assert modules["model.layers.61.self_attn.indexer.wk"] == (128, 7168)
    assert blueprint.layer_tensors(0)["self_attn.indexer.weights_proj.weight"] == (64, 7168)


def test_stacked_experts_have_no_blueprint() -> None:
    config = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    with pytest.raises(UserError, match="is not supported"):
        require_blueprint(config)


HUGE = 10**400
WRONG: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    # (config, change, key that the message names, value that it shows)
    *((MISTRAL7B, {"sliding_window": v}, "sliding_window", repr(v)) for v in (0, -1, "4096", True, HUGE)),
    *((GEMMA2_2B, {"sliding_window": v}, "sliding_window", str(v)) for v in (0, "4096", HUGE)),
    (GEMMA2_2B, {"sliding_window": None}, "sliding_window", "no such key"),
    *(
        (GEMMA2_2B, {key: v}, key, str(v))
        for key in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
        for v in (0, -1.0, "50", True, float("nan"), HUGE)
    ),
    *(
        (GEMMA2_2B, {"use_bidirectional_attention": v}, "use_bidirectional_attention", str(v))
        for v in (True, 1)
    ),
    (GEMMA2_2B, {"layer_types": ["full_attention"]}, "layer_types", "26 names"),
    (GEMMA2_2B, {"hidden_activation": "relu6"}, "hidden_activation", "'relu6'"),
    *(
        (GEMMA3_1B, {"sliding_window_pattern": v}, "sliding_window_pattern", str(v))
        for v in (0, -1, "6", 1.5)
    ),
    *((GEMMA3_1B, {"rope_local_base_freq": v}, "rope_theta", str(v)) for v in (0, -1, "1e4")),
    (GEMMA3_1B, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters", "'full_attention'"),
    (GEMMA3_1B, {"rope_parameters": {"full_attention": 3}}, "rope_parameters", "3"),
    (
        GEMMA3_1B,
        {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
        "factor",
        "no such key",
    ),
    *((GLM49B, {"partial_rotary_factor": v}, "partial_rotary_factor", f"{v:g}") for v in (0, 1.5, 3 / 128)),
    (PHI3_128K, {"original_max_position_embeddings": 1}, "original_max_position_embeddings", "found 1"),
    *(
        (QWEN3_NEXT_80B, {"linear_num_value_heads": v}, "linear_num_value_heads", str(v))
        for v in (24, 0, "32")
    ),
    *(
        (QWEN3_NEXT_80B, {"linear_conv_kernel_dim": v}, "linear_conv_kernel_dim", str(v))
        for v in (1, 0, HUGE)
    ),
    *((QWEN3_NEXT_80B, {"linear_key_head_dim": v}, "linear_key_head_dim", str(v)) for v in (0, 10**7, "1")),
    (QWEN3_NEXT_80B, {"full_attention_interval": 0}, "full_attention_interval", "0"),
    (QWEN3_NEXT_80B, {"layer_types": ["sliding_attention"] * 48}, "layer_types", "'sliding_attention'"),
    (QWEN3_NEXT_80B, {"attn_output_gate": False}, "attn_output_gate", "False"),
    *((QWEN35, {"text_config": v}, "text_config", str(v)) for v in (3, [], "text")),
    (QWEN35, {"text_config": None}, "text_config", "no such key"),
    *((DEEPSEEK_V32, {"index_head_dim": v}, "index_head_dim", str(v)) for v in (0, 32, "128", HUGE)),
    *((DEEPSEEK_V32, {"index_topk": v}, "index_topk", str(v)) for v in (0, -1, True)),
    (DEEPSEEK_V32, {"index_n_heads": 10**6}, "index_n_heads", "1000000"),
    (DEEPSEEK_V32, {"q_lora_rank": None}, "q_lora_rank", "no such key"),
    (DEEPSEEK_V32, {"mlp_layer_types": ["dense"]}, "mlp_layer_types", "['dense']"),
    (DEEPSEEK_V32, {"mlp_layer_types": ["moe"] * 61}, "mlp_layer_types", "'moe'"),
]
WRONG_FACTORS: list[tuple[str, Any, str]] = [
    *((key, v, str(v)) for key in ("short_factor", "long_factor") for v in (3, "1", {})),
    *((key, None, "no such key") for key in ("short_factor", "long_factor")),
    *((key, [1.0] * 47, "found 47") for key in ("short_factor", "long_factor")),
    *((key, [1.0] * 47 + [v], str(v)) for key in ("short_factor", "long_factor") for v in (0, -1, "1", HUGE)),
]


def check_refused(config: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(config)
    message = str(caught.value)
    assert message.startswith("config.json")
    assert key in message
    assert value[:70] in message  # long values are cut
    assert len(message) < 400
    assert "\n" not in message


@pytest.mark.parametrize(("config", "change", "key", "value"), WRONG)
def test_wrong_values(config: dict[str, Any], change: dict[str, Any], key: str, value: str) -> None:
    check_refused({**config, **change}, key, value)


@pytest.mark.parametrize(("key", "factors", "value"), WRONG_FACTORS)
def test_wrong_longrope_factors(key: str, factors: object, value: str) -> None:
    check_refused({**PHI3_128K, "rope_scaling": {**PHI3_128K["rope_scaling"], key: factors}}, key, value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-4, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([HUGE, "longrope", "linear_attention", "full_attention", "linear", "dense"])
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["full_attention", "sliding_attention", "rope_type", "factor", "long_factor"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
KEYS = [
    "layer_types",
    "mlp_layer_types",
    "rope_parameters",
    "attn_output_gate",
    "use_bidirectional_attention",
]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_value_for_any_key(data: st.DataObject) -> None:
    """Either a record whose rotation is sound, or a UserError of one line; nothing else is raised."""
    config = data.draw(st.sampled_from([*PUBLISHED.values(), QWEN35["text_config"]]))
    if "architectures" not in config:
        config = {**config, "architectures": ["Qwen3_5ForCausalLM"]}
    key = data.draw(st.sampled_from([*config, *KEYS]))
    changed = {**config, key: data.draw(ANYTHING)}
    found = outcome(changed)
    if isinstance(found, str):
        assert found.startswith("config.json")
        assert "\n" not in found
        return
    if found.head_dim <= 4096 and found.num_layers < 100:
        rotary = LayerRotary(found)
        for layer in range(found.num_layers):
            for turned in rotary.slice(layer, 0, 3):
                assert torch.isfinite(turned).all()
