"""Configs, blueprints and the choice of linears."""

from __future__ import annotations

from typing import Any

import pytest

from qwen_quantize.errors import UserError
from qwen_quantize.models.lookup import FAMILIES, find_blueprint, require_blueprint
from qwen_quantize.pipeline.selection import Candidates, candidates_of, select_linears

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
}
# Sizes of sparse layers and latents under every family's keys.
SPARSE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def candidates(config: dict[str, Any] = CONFIG) -> Candidates:
    return candidates_of(require_blueprint(config), ())


def test_default_selection_is_the_fields_custom() -> None:
    selection = select_linears(candidates(), (), ())
    assert len(selection.quantized) == 14
    assert selection.kept == ("lm_head",)


def test_ignore_by_glob_name_and_expression() -> None:
    assert len(select_linears(candidates(), ("model.layers.0.*",), ()).quantized) == 7
    assert len(select_linears(candidates(), ("down_proj",), ()).quantized) == 12
    assert len(select_linears(candidates(), (r"re:\.1\.mlp\.(gate|up)_proj$",), ()).quantized) == 12


def test_include_wins_over_ignore() -> None:
    selection = select_linears(candidates(), ("down_proj",), ("model.layers.1.mlp.down_proj", "lm_head"))
    assert "model.layers.1.mlp.down_proj" in selection.quantized
    assert "lm_head" in selection.quantized
    assert selection.kept == ("model.layers.0.mlp.down_proj",)
    assert selection.notes


@pytest.mark.parametrize(
    ("ignore", "include", "said"),
    [
        (("nothing",), (), "matches no linear"),
        ((), ("nothing",), "matches no linear"),
        ((), ("embed_tokens",), "embedding"),
        (("re:(",), (), "regular expression"),
        (("k_proj",), (), "together"),
        (("model.layers.1.mlp.up_proj",), (), "gate_proj"),
    ],
)
def test_patterns_that_cannot_be_meant(ignore: tuple[str, ...], include: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said):
        select_linears(candidates(), ignore, include)


def test_a_tied_head_cannot_be_quantized() -> None:
    with pytest.raises(UserError, match="tied"):
        select_linears(candidates({**CONFIG, "tie_word_embeddings": True}), (), ("lm_head",))


def test_expected_tensors_follow_the_config() -> None:
    tensors = require_blueprint(CONFIG).expected_tensors()
    assert tensors["model.layers.1.self_attn.q_proj.weight"] == (128, 64)
    assert tensors["model.layers.0.self_attn.k_norm.weight"] == (32,)
    assert "lm_head.weight" in tensors
    biased = require_blueprint({**CONFIG, "architectures": ["Qwen2ForCausalLM"]}).expected_tensors()
    assert biased["model.layers.0.self_attn.v_proj.bias"] == (64,)
    assert "model.layers.0.self_attn.o_proj.bias" not in biased


def test_every_family_is_found_by_each_of_its_architectures() -> None:
    for family in FAMILIES:
        for architecture in family.architectures:
            config = {**CONFIG, **SPARSE}
            # Families that also see keep the text model's settings in an object of their own.
            found = find_blueprint({**config, "text_config": config, "architectures": [architecture]})
            assert found is not None
            assert found.family is family


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": -4}, "-4"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"architectures": []}, "architectures"),
        ({"architectures": ["Qwen3ForCausalLN"]}, "nearest: Qwen3ForCausalLM"),
    ],
)
def test_configs_that_are_wrong(change: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        require_blueprint({**CONFIG, **change})
