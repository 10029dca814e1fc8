"""Configs of mixtures of experts and of latent attention: read as published, or refused in one sentence."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.models.latent import LatentConfig
from qwen_quantize.models.lookup import require_blueprint
from qwen_quantize.models.moe import MoeConfig, Router
from tests.models.real_configs import (
    DEEPSEEK_R1,
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    MIXTRAL,
    QWEN3_MOE,
    QWEN15_MOE,
    SPARSE_MODELS,
)


@pytest.mark.parametrize("name", SPARSE_MODELS)
def test_as_many_parameters_as_the_published_files(name: str) -> None:
    config, parameters = SPARSE_MODELS[name]
    found = require_blueprint(config).expected_tensors()
    assert sum(map(math.prod, found.values())) == parameters


def test_deepseek_r1_as_published() -> None:
    blueprint = require_blueprint(DEEPSEEK_R1)
    config = blueprint.config
    assert config.moe == MoeConfig(
        num_experts=256,
        experts_per_token=8,
        expert_size=2048,
        sparse_layers=(False,) * 3 + (True,) * 59,
        router=Router.SIGMOID,
        normalise=True,
        scale=2.5,
        groups=8,
        groups_per_token=4,
        shared_size=2048,
    )
    assert config.latent == LatentConfig(1536, 512, 128, 64, 128)
    assert (config.head_dim, config.value_dim, config.rotary_head_dim) == (192, 128, 64)
    assert config.num_kv_heads == 128
    assert config.rope.interleaved
    assert config.rope.attention_factor == 1.0
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert blueprint.num_layers == 61
    assert blueprint.next_token_layers == (61,)
    modules = blueprint.next_token_modules()
    assert len(modules) == 5 + 3 + 3 * 256
    assert modules["model.layers.61.mlp.experts.255.down_proj"] == (7168, 2048)
    assert not any(name.startswith("model.layers.61.") for name in blueprint.expected_tensors())


def test_the_other_families_as_published() -> None:
    lite = require_blueprint(DEEPSEEK_V2_LITE).config
    assert lite.latent == LatentConfig(None, 512, 128, 64, 128)
    assert lite.moe == MoeConfig(64, 6, 1408, (False,) + (True,) * 26, normalise=False, shared_size=2816)
    big = require_blueprint(DEEPSEEK_V2).config.moe
    assert big is not None
    assert (big.groups, big.groups_per_token, big.scale, big.router) == (8, 3, 16.0, Router.SOFTMAX)
    assert require_blueprint(QWEN15_MOE).config.moe == MoeConfig(
        60, 4, 1408, (True,) * 24, normalise=False, shared_size=5632
    )
    assert require_blueprint(QWEN3_MOE).config.moe == MoeConfig(128, 8, 768, (True,) * 48)
    assert require_blueprint(MIXTRAL).config.moe == MoeConfig(8, 2, 14336, (True,) * 32)


def test_tensors_of_the_size_of_r1_are_listed_in_no_time() -> None:
    begin = time.process_time()
    blueprint = require_blueprint(DEEPSEEK_R1)
    modules = blueprint.linear_modules()
    tensors = blueprint.expected_tensors()
    assert time.process_time() - begin < 1
    assert len(modules) == 61 * 5 + 3 * 3 + 58 * 3 * 257
    # Two norms and two more on latents per layer, router and bias per sparse one; embedding, norm and head.
    assert len(tensors) == len(modules) + 61 * 4 + 58 * 2 + 3


def test_streams_of_a_sparse_layer_with_latent_attention() -> None:
    blueprint = require_blueprint(DEEPSEEK_R1)
    attention = blueprint.streams(5, Half.ATTENTION)
    assert {stream: [site.path for site in sites] for stream, sites in attention.items()} == {
        Stream.ATTENTION_INPUT: ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"],
        Stream.QUERY_LATENT: ["self_attn.q_b_proj"],
        Stream.KEY_VALUE_LATENT: ["self_attn.kv_b_proj"],
        Stream.ATTENTION_OUTPUT: ["self_attn.o_proj"],
    }
    assert list(blueprint.streams(5, Half.MLP)) == [Stream.SHARED_INPUT, Stream.SHARED_HIDDEN]
    assert list(blueprint.streams(2, Half.MLP)) == [Stream.MLP_INPUT, Stream.MLP_HIDDEN]
    assert list(blueprint.expert_streams(5)) == [Stream.EXPERT_INPUT, Stream.EXPERT_HIDDEN]
    assert blueprint.expert_streams(2) == {}
    assert (blueprint.num_experts(2), blueprint.num_experts(3)) == (0, 256)
    down = blueprint.expert_sites(5)[2]
    assert blueprint.module_name(5, down, 7) == "model.layers.5.mlp.experts.7.down_proj"
    assert blueprint.linear_shape(down, 5) == (7168, 2048)
    with pytest.raises(ValueError, match="dense"):
        blueprint.linear_shape(down, 2)
    assert set(blueprint.layer_tensors(5, Half.MLP)) == {
        "post_attention_layernorm.weight",
        "mlp.gate.weight",
        "mlp.gate.e_score_correction_bias",
    }
    lite = require_blueprint(DEEPSEEK_V2_LITE).streams(0, Half.ATTENTION)
    assert [site.path for site in lite[Stream.ATTENTION_INPUT]] == [
        "self_attn.q_proj",
        "self_attn.kv_a_proj_with_mqa",
    ]


def test_sparse_layers_by_step_list_and_frequency() -> None:
    def sparse(config: dict[str, Any], **change: Any) -> list[int]:
        blueprint = require_blueprint({**config, **change})
        return [layer for layer in range(blueprint.num_layers) if blueprint.num_experts(layer)]

    assert sparse(QWEN3_MOE, num_hidden_layers=7, decoder_sparse_step=2) == [1, 3, 5]
    assert sparse(QWEN3_MOE, num_hidden_layers=5, mlp_only_layers=[0, 3]) == [1, 2, 4]
    assert sparse(DEEPSEEK_V2_LITE, num_hidden_layers=8, moe_layer_freq=3) == [3, 6]
    assert sparse(DEEPSEEK_R1, num_hidden_layers=5) == [3, 4]


def test_no_shared_expert_without_a_number_of_them() -> None:
    blueprint = require_blueprint({**DEEPSEEK_V2_LITE, "n_shared_experts": None})
    assert blueprint.sites(5, Half.MLP) == ()
    assert not any("shared" in name for name in blueprint.expected_tensors())


@pytest.mark.parametrize("config", [QWEN15_MOE, QWEN3_MOE, MIXTRAL], ids=lambda config: config["model_type"])
def test_windows_as_in_transformers(config: dict[str, Any]) -> None:
    from transformers import AutoConfig

    change = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 9}
    given_ = {key: value for key, value in {**config, **change}.items() if key != "architectures"}
    oracle = AutoConfig.for_model(given_.pop("model_type"), **given_)
    found = require_blueprint({**config, **change}).config
    assert found.sliding_window == oracle.sliding_window == 512
    kinds = getattr(oracle, "layer_types", None) or ["sliding_attention"] * found.num_layers
    assert found.sliding_layers == tuple(kind == "sliding_attention" for kind in kinds)
    if config is not MIXTRAL:
        off = require_blueprint({**config, **change, "use_sliding_window": False}).config
        assert off.sliding_window is None
        assert not any(off.sliding_layers)


HUGE = 10**400
NOT_A_COUNT = (0, -1, 1.5, "8", True, [], HUGE)
WRONG: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    # (config, change, key that the message names, value that it shows)
    *((MIXTRAL, {"num_local_experts": v}, "num_local_experts", str(v)) for v in NOT_A_COUNT),
    *((QWEN3_MOE, {"num_experts": v}, "num_experts", str(v)) for v in NOT_A_COUNT),
    *((DEEPSEEK_R1, {"n_routed_experts": v}, "n_routed_experts", str(v)) for v in NOT_A_COUNT),
    *((QWEN3_MOE, {"num_experts_per_tok": v}, "num_experts_per_tok", str(v)) for v in (*NOT_A_COUNT, 129)),
    *((QWEN3_MOE, {"moe_intermediate_size": v}, "moe_intermediate_size", str(v)) for v in NOT_A_COUNT),
    *((QWEN3_MOE, {"decoder_sparse_step": v}, "decoder_sparse_step", str(v)) for v in NOT_A_COUNT),
    *((QWEN3_MOE, {"mlp_only_layers": v}, "mlp_only_layers", str(v)) for v in (3, "3", {}, True)),
    *((QWEN3_MOE, {"mlp_only_layers": [v]}, "mlp_only_layers", str(v)) for v in (48, -1, True, "0", [0])),
    *(
        (QWEN15_MOE, {"shared_expert_intermediate_size": v}, "shared_expert_intermediate_size", str(v))
        for v in NOT_A_COUNT
    ),
    *((QWEN15_MOE, {"norm_topk_prob": v}, "norm_topk_prob", str(v)) for v in ("true", 1, [])),
    *((QWEN15_MOE, {"qkv_bias": v}, "qkv_bias", str(v)) for v in ("true", 1, [])),
    *((MIXTRAL, {"sliding_window": v}, "sliding_window", str(v)) for v in (0, -1, "4096", True, HUGE)),
    *(
        (DEEPSEEK_R1, {key: v}, key, str(v))
        for key in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        for v in (*NOT_A_COUNT, 10**7 + 1)
    ),
    (DEEPSEEK_R1, {"qk_rope_head_dim": 63}, "qk_rope_head_dim", "63"),
    (DEEPSEEK_R1, {"kv_lora_rank": None}, "kv_lora_rank", "no such key"),
    (DEEPSEEK_R1, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "0.5"),
    *((DEEPSEEK_R1, {"rope_interleave": v}, "rope_interleave", repr(v)) for v in ("true", 1)),
    *((DEEPSEEK_R1, {"n_group": v}, "n_group", str(v)) for v in (*NOT_A_COUNT, 3, 256)),
    *((DEEPSEEK_R1, {"topk_group": v}, "topk_group", str(v)) for v in (*NOT_A_COUNT, 9)),
    (DEEPSEEK_R1, {"n_group": 128, "topk_group": 3}, "num_experts_per_tok", "found 8"),
    (DEEPSEEK_V2, {"n_group": None}, "n_group", "no such key"),
    (DEEPSEEK_V2, {"topk_group": None}, "topk_group", "no such key"),
    *((DEEPSEEK_R1, {"n_shared_experts": v}, "n_shared_experts", str(v)) for v in (-1, "1", True, 5000)),
    *((DEEPSEEK_R1, {"moe_layer_freq": v}, "moe_layer_freq", str(v)) for v in NOT_A_COUNT),
    *((DEEPSEEK_R1, {"first_k_dense_replace": v}, "first_k_dense_replace", str(v)) for v in (-1, "3", True)),
    *(
        (DEEPSEEK_R1, {"routed_scaling_factor": v}, "routed_scaling_factor", str(v))
        for v in (0, -1.0, "2.5", True, float("nan"), float("inf"), HUGE)
    ),
    *(
        (DEEPSEEK_R1, {"num_nextn_predict_layers": v}, "num_nextn_predict_layers", str(v))
        for v in (-1, "1", True, 10_001)
    ),
    *((DEEPSEEK_R1, {"scoring_func": v}, "scoring_func", repr(v)) for v in ("softmax", 1, ["sigmoid"])),
    *((DEEPSEEK_R1, {"topk_method": v}, "topk_method", repr(v)) for v in ("greedy", 1)),
    *((DEEPSEEK_V2, {"topk_method": v}, "topk_method", repr(v)) for v in ("noaux_tc", {})),
    (DEEPSEEK_V2, {"scoring_func": "sigmoid"}, "scoring_func", "'sigmoid'"),
    (DEEPSEEK_V2, {"norm_topk_prob": True}, "norm_topk_prob", "True"),
    (QWEN3_MOE, {"num_hidden_layers": 10_000, "num_experts": 1000}, "1000 experts", "10000000"),
]


@pytest.mark.parametrize(("config", "change", "key", "value"), WRONG)
def test_wrong_values(config: dict[str, Any], change: dict[str, Any], key: str, value: str) -> None:
    with pytest.raises(UserError) as caught:
        require_blueprint({**config, **change})
    message = str(caught.value)
    assert message.startswith("config.json")
    assert key in message
    assert value[:70] in message
    assert len(message) < 400
    assert "\n" not in message


def test_the_rank_of_queries_must_be_written() -> None:
    without = {key: value for key, value in DEEPSEEK_V2_LITE.items() if key != "q_lora_rank"}
    with pytest.raises(UserError, match=r"'q_lora_rank' must be .*, or null, found no such key"):
        require_blueprint(without)


def test_transformers_5_writes_the_experts_of_qwen3_under_another_key() -> None:
    renamed = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    assert require_blueprint({**renamed, "num_local_experts": 128}) == require_blueprint(QWEN3_MOE)


KEYS = sorted({key for config, _ in SPARSE_MODELS.values() for key in config} - {"architectures"})
VALUES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-4, 300)
    | st.floats()
    | st.text(max_size=8)
    | st.lists(st.integers(-2, 60), max_size=4)
    | st.sampled_from([HUGE, "greedy", "noaux_tc", "softmax", {}])
)


def blueprint_or_message(config: dict[str, Any]) -> Blueprint | str:
    try:
        return require_blueprint(config)
    except UserError as error:
        return str(error)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([config for config, _ in SPARSE_MODELS.values()]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3),
)
def test_any_values(config: dict[str, Any], change: dict[str, Any]) -> None:
    """A blueprint whose routing is possible, or a UserError of one line; nothing else is raised."""
    found = blueprint_or_message({**config, **change})
    if isinstance(found, str):
        assert found.startswith("config.json")
        assert "\n" not in found
        return
    moe = found.config.moe
    assert moe is not None
    assert len(moe.sparse_layers) == found.num_layers + len(found.next_token_layers)
    assert moe.num_experts % moe.groups == 0
    assert moe.experts_per_token <= moe.groups_per_token * (moe.num_experts // moe.groups)
    assert found.config.rotary_head_dim % 2 == 0
    last = found.num_layers - 1
    for half in Half:
        for site in found.sites(last, half):
            assert min(found.linear_shape(site, last)) > 0
