"""Every value of a config.json is read, or refused in one sentence; real configs read as they always did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.checkpoint.layouts import BlockFp8Config, parse_quantization_config
from qwen_quantize.engine.rotary import inverse_frequencies
from qwen_quantize.errors import UserError
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.models.lookup import require_blueprint
from qwen_quantize.models.rope import RopeConfig

LLAMA31: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "max_position_embeddings": 32768,
    "max_window_layers": 70,
    "model_type": "qwen2",
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
QWEN25_YARN = {**QWEN25, "rope_scaling": YARN}
QWEN3_YARN = {
    **QWEN3,
    "max_position_embeddings": 131072,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
}
YARN_TEMPERATURE = 1.1386294361119891  # 0.1 ln 4 + 1

QWEN25_RECORD = {
    "architecture": "Qwen2ForCausalLM",
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_layers": 80,
    "num_heads": 64,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "max_position": 32768,
    "sliding_layers": (False,) * 80,
}
QWEN3_RECORD = {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_layers": 28,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": True,
    "sliding_layers": (False,) * 28,
}
YARN_ROPE = RopeConfig(
    theta=1000000.0,
    kind="yarn",
    factor=4.0,
    original_max_position=32768,
    attention_factor=YARN_TEMPERATURE,
)


def record(rope: RopeConfig, **fields: Any) -> ModelConfig:
    plain = {"activation": "silu", "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16"}
    return ModelConfig(rope=rope, **{**plain, **fields})


REAL: dict[str, tuple[dict[str, Any], ModelConfig]] = {
    "Llama-3.1-8B": (
        LLAMA31,
        record(
            RopeConfig(theta=500000.0, kind="llama3", factor=8.0, original_max_position=8192),
            architecture="LlamaForCausalLM",
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            rms_norm_eps=1e-05,
            tie_word_embeddings=False,
            max_position=131072,
            sliding_layers=(False,) * 32,
        ),
    ),
    "Qwen2.5-72B": (
        QWEN25,
        record(RopeConfig(theta=1000000.0, original_max_position=32768), **QWEN25_RECORD),
    ),
    "Qwen3-0.6B": (
        QWEN3,
        record(RopeConfig(theta=1000000.0, original_max_position=40960), max_position=40960, **QWEN3_RECORD),
    ),
    "SmolLM2-135M": (
        SMOLLM2,
        record(
            RopeConfig(theta=100000.0, original_max_position=8192),
            architecture="LlamaForCausalLM",
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            rms_norm_eps=1e-05,
            tie_word_embeddings=True,
            max_position=8192,
            sliding_layers=(False,) * 30,
        ),
    ),
    "Qwen2.5-72B with yarn": (QWEN25_YARN, record(YARN_ROPE, **QWEN25_RECORD)),
    "Qwen3-0.6B with yarn": (QWEN3_YARN, record(YARN_ROPE, max_position=131072, **QWEN3_RECORD)),
}


def parse(config: dict[str, Any]) -> ModelConfig:
    return require_blueprint(config).config


@pytest.mark.parametrize("name", REAL)
def test_real_configs(name: str) -> None:
    config, expected = REAL[name]
    assert parse(config) == expected


@pytest.mark.parametrize("name", REAL)
def test_null_counts_as_absent(name: str) -> None:
    config, _ = REAL[name]
    for key in config:
        without = {other: value for other, value in config.items() if other != key}
        assert outcome({**config, key: None}) == outcome(without)


def outcome(config: dict[str, Any]) -> ModelConfig | str:
    try:
        parse_quantization_config(config)
        return parse(config)
    except UserError as error:
        return str(error)


HUGE = 10**400
WRONG: list[tuple[dict[str, Any], str, str]] = [
    # (change, key that the message names, value that it shows)
    *(({"sliding_window": v}, "sliding_window", repr(v)) for v in (-1, "4096", [4096], True, 1.5, HUGE)),
    *(({"max_window_layers": v}, "max_window_layers", repr(v)) for v in ("3", -1, True, 2.0)),
    *(({"num_hidden_layers": v}, "num_hidden_layers", str(v)) for v in (10_001, 0, "2", HUGE)),
    *(
        ({key: v}, key, str(v))
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "head_dim")
        for v in (10**7 + 1, 0, -1, 1.0, "64")
    ),
    ({"max_position_embeddings": 10**10}, "max_position_embeddings", "10000000000"),
    ({"num_key_value_heads": 5}, "num_key_value_heads", "5"),
    ({"head_dim": 127}, "head_dim", "127"),
    ({"head_dim": None, "hidden_size": 48}, "head_dim", "3 (hidden_size / num_attention_heads)"),
    *(({"rms_norm_eps": v}, "rms_norm_eps", str(v)) for v in (-1e-6, 2, "1e-6", float("nan"), HUGE)),
    *(
        ({key: v}, key, repr(v))
        for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
        for v in ("false", 0, 1, [], {})
    ),
    *(({"rope_theta": v}, "rope_theta", str(v)) for v in (0, -1.0, 0.5, 1e300, "1e6", float("inf"), HUGE)),
    *(
        ({"partial_rotary_factor": v}, "partial_rotary_factor", f"found {v:g}")
        for v in (0.0, -0.5, 1.5, 0.001, 3 / 128)
    ),
    ({"rope_scaling": []}, "rope_scaling", "[]"),
    ({"rope_parameters": "yarn"}, "rope_parameters", "'yarn'"),
    ({"rope_scaling": {"type": ["yarn"]}}, "type", "['yarn']"),
    ({"rope_scaling": {"rope_type": ""}}, "rope_type", "''"),
    ({"rope_scaling": {"rope_type": "linear"}}, "factor", "no such key"),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters",
        "per layer type are not implemented",
    ),
    *(({"hidden_act": v}, "hidden_act", repr(v)) for v in ("", [], 5, "relu6")),
    *(({"torch_dtype": v}, "torch_dtype", repr(v)) for v in (16, "int8", {})),
    *(({"architectures": v}, "architectures", repr(v)) for v in ("Qwen3ForCausalLM", [], [1], [""], [{}])),
    ({"architectures": ["Qwen3ForCausalLM", 2]}, "architectures", "2"),
    ({"layer_types": "full_attention"}, "layer_types", "'full_attention'"),
    ({"layer_types": ["full_attention"]}, "layer_types", "28 names"),
    ({"layer_types": ["full_attention"] * 27 + ["chunked_attention"]}, "layer_types", "'chunked_attention'"),
    ({"layer_types": [["full_attention"]] * 28}, "layer_types", "['full_attention']"),
    ({"layer_types": ["sliding_attention"] * 28}, "use_sliding_window", "found False"),
    ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window", "found 0"),
]
WRONG_YARN: list[tuple[dict[str, Any], str, str]] = [
    *(
        ({"original_max_position_embeddings": v}, "original_max_position_embeddings", repr(v))
        for v in ("32768", 0, -1, True, 1.5, HUGE)
    ),
    *(
        ({key: v}, key, repr(v))
        for key in ("factor", "attention_factor", "beta_fast", "beta_slow")
        for v in ("1", 0, -1.0, True, [], HUGE)
    ),
    *(({key: v}, key, repr(v)) for key in ("mscale", "mscale_all_dim") for v in ("1", -1.0, True, HUGE)),
    ({"rope_theta": 1}, "rope_theta", "found 1"),
    ({"beta_fast": 0.5}, "beta_fast", "found 0.5"),
    ({"truncate": "false"}, "truncate", "'false'"),
]
WRONG_LLAMA3: list[tuple[dict[str, Any], str, str]] = [
    *(({"low_freq_factor": v}, "low_freq_factor", f"found {v}") for v in (0, -1, 4, 5)),
    *(({"high_freq_factor": v}, "high_freq_factor", str(v)) for v in (0, 1, 0.5)),
    ({"factor": None}, "factor", "no such key"),
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


@pytest.mark.parametrize(("change", "key", "value"), WRONG)
def test_wrong_values(change: dict[str, Any], key: str, value: str) -> None:
    check_refused({**QWEN3, **change}, key, value)


@pytest.mark.parametrize(("change", "key", "value"), WRONG_YARN)
def test_wrong_yarn_values(change: dict[str, Any], key: str, value: str) -> None:
    check_refused({**QWEN3_YARN, "rope_scaling": {**QWEN3_YARN["rope_scaling"], **change}}, key, value)


@pytest.mark.parametrize(("change", "key", "value"), WRONG_LLAMA3)
def test_wrong_llama3_values(change: dict[str, Any], key: str, value: str) -> None:
    check_refused({**LLAMA31, "rope_scaling": {**LLAMA31["rope_scaling"], **change}}, key, value)


def test_a_number_that_python_does_not_print() -> None:
    with pytest.raises(UserError, match=r"'hidden_size' must be .* more than 4300 digits"):
        parse({**QWEN3, "hidden_size": 10**5000})


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 26},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": None},
        {"use_sliding_window": None, "sliding_window": 512, "max_window_layers": 26},
        {
            "use_sliding_window": True,
            "sliding_window": 512,
            "layer_types": ["full_attention", "sliding_attention"] * 14,
        },
    ],
)
def test_windows_as_in_transformers(change: dict[str, Any]) -> None:
    from transformers import Qwen3Config

    given_ = {key: value for key, value in {**QWEN3, **change}.items() if value is not None}
    oracle = Qwen3Config(
        **{key: given_[key] for key in given_ if key not in ("architectures", "torch_dtype")}
    )
    found = parse({**QWEN3, **change})
    assert found.sliding_window == oracle.sliding_window
    assert found.sliding_layers == tuple(kind == "sliding_attention" for kind in oracle.layer_types)


def test_yarn_without_factor_takes_the_ratio_of_the_lengths() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 32768}
    assert parse({**QWEN3_YARN, "rope_scaling": scaling}).rope == YARN_ROPE


BLOCK_FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}


def test_block_fp8_settings_of_real_checkpoints() -> None:
    qwen3 = {**BLOCK_FP8, "modules_to_not_convert": ["lm_head", "model.norm"]}
    assert parse_quantization_config({"quantization_config": qwen3}) == BlockFp8Config(
        (128, 128), False, ("lm_head", "model.norm")
    )
    deepseek = {**BLOCK_FP8, "scale_fmt": "ue8m0", "modules_to_not_convert": None}
    assert parse_quantization_config({"quantization_config": deepseek}) == BlockFp8Config(
        (128, 128), True, ()
    )
    assert parse_quantization_config({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("modules_to_not_convert", v) for v in ("lm_head", [1], [""], {"lm_head": 1}, True, [["a"]])),
        ("ignored_layers", 3),
        *(("weight_block_size", v) for v in ([128], [128, HUGE], [True, 1], [0, 1], "128", None, [1.0, 1])),
        *(("quant_method", v) for v in ("gptq", None, ["fp8"])),
        *(("fmt", v) for v in ("e5m2", ["e4m3"])),
        *(("scale_fmt", v) for v in ("e8m0", True)),
        *(("activation_scheme", v) for v in ("static", {})),
    ],
)
def test_wrong_quantization_settings(key: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        parse_quantization_config({"quantization_config": {**BLOCK_FP8, key: value}})
    assert key in str(caught.value)
    assert repr(value)[:70] in str(caught.value)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-4, 300)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -(10**4000), "default", "yarn", "linear", "llama3", "sliding_attention"])
)
ROPE_KEYS = [
    "rope_type", "type", "factor", "rope_theta", "original_max_position_embeddings", "attention_factor",
    "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor",
    "partial_rotary_factor",
]  # fmt: skip
OTHER_KEYS = [
    "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "layer_types", "dtype",
    "hidden_activation", "quantization_config", "head_dim", "sliding_window", "use_sliding_window",
]  # fmt: skip
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=6) | st.sampled_from([*ROPE_KEYS, *BLOCK_FP8]), inner, max_size=5)
    ),
    max_leaves=8,
)


def accept_or_refuse(config: dict[str, Any]) -> None:
    """Either a record whose rotary frequencies are sound, or a UserError of one line; nothing else is raised."""
    found = outcome(config)
    if isinstance(found, str):
        assert found.startswith("config.json")
        assert "\n" not in found
    elif found.rotary_head_dim <= 4096:
        frequencies = inverse_frequencies(found.rope, found.rotary_head_dim)
        assert torch.isfinite(frequencies).all()
        assert (frequencies > 0).all()


CONFIGS = [config for config, _ in REAL.values()]


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_value_for_any_key(data: st.DataObject) -> None:
    config = data.draw(st.sampled_from(CONFIGS))
    key = data.draw(st.sampled_from([*config, *OTHER_KEYS]))
    accept_or_refuse({**config, key: data.draw(ANYTHING)})


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([LLAMA31, QWEN25_YARN, QWEN3_YARN]),
    st.dictionaries(st.sampled_from(ROPE_KEYS), SCALARS, min_size=1, max_size=3),
)
def test_any_rope_settings(config: dict[str, Any], change: dict[str, Any]) -> None:
    accept_or_refuse({**config, "rope_scaling": {**config["rope_scaling"], **change}})


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*BLOCK_FP8, "scale_fmt", "modules_to_not_convert", "ignored_layers"]), ANYTHING)
def test_any_quantization_settings(key: str, value: object) -> None:
    accept_or_refuse({**QWEN3, "quantization_config": {**BLOCK_FP8, key: value}})
