"""Whatever bytes stand in config, index, description and headers: findings or a UserError, never a traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from qwen_quantize.checkpoint.contract import CheckReport, check_folder
from qwen_quantize.errors import UserError
from tests.checkpoint.good_folders import DESCRIPTION

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODULE = "model.layers.0.self_attn.q_proj"
QUIET = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
CONFIGS: dict[str, dict[str, Any]] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [16, 16],
        "fmt": "e4m3",
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True},
    "gptq": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "sym": True,
        "desc_act": False,
        "dynamic": {},
    },
    "ints": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "strategy": "group",
                    "group_size": 16,
                    "symmetric": True,
                },
            }
        },
    },
}
PARTS = {
    "fp8": {"weight": torch.ones(32, 32).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 2)},
    "awq": {
        "qweight": torch.zeros(32, 4, dtype=torch.int32),
        "qzeros": torch.zeros(2, 4, dtype=torch.int32),
        "scales": torch.ones(2, 32).half(),
    },
    "gptq": {
        "qweight": torch.zeros(4, 32, dtype=torch.int32),
        "qzeros": torch.zeros(2, 4, dtype=torch.int32),
        "scales": torch.ones(2, 32).half(),
        "g_idx": torch.arange(32, dtype=torch.int32) // 16,
    },
    "ints": {
        "weight_packed": torch.zeros(32, 4, dtype=torch.int32),
        "weight_scale": torch.ones(32, 2),
        "weight_shape": torch.tensor([32, 32]),
    },
}


@pytest.fixture(params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """One quantized linear, an index and a description beside it."""
    parts = {f"{MODULE}.{suffix}": tensor for suffix, tensor in PARTS[request.param].items()}
    save_file(parts, tmp_path / SINGLE)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "head_dim": 16,
        "quantization_config": CONFIGS[request.param],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(parts, SINGLE)}))
    return tmp_path


def checked(folder: Path) -> CheckReport | None:
    try:
        report = check_folder(folder)
    except UserError:
        return None
    json.dumps(report.record())
    return report


@QUIET
@given(data=st.data())
def test_bytes_that_change(folder: Path, data: st.DataObject) -> None:
    originals = {file: file.read_bytes() for file in folder.iterdir()}
    file = data.draw(st.sampled_from(sorted(originals)))
    raw = bytearray(originals[file])
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, min(len(raw), 900) - 1))
        raw[place] = data.draw(st.integers(0, 255))
    file.write_bytes(bytes(raw))
    try:
        checked(folder)
    finally:
        for name, content in originals.items():
            name.write_bytes(content)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 1 << 40) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += _places(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            found += _places(inner, (*path, number))
    return found


@QUIET
@given(data=st.data())
def test_values_that_change(folder: Path, data: st.DataObject) -> None:
    file = folder / data.draw(st.sampled_from(["config.json", INDEX]))
    original = file.read_text()
    content = json.loads(original)
    *path, last = data.draw(st.sampled_from(_places(content)))
    inner = content
    for step in path:
        inner = inner[step]
    inner[last] = data.draw(_VALUES)
    file.write_text(json.dumps(content))
    try:
        checked(folder)
    finally:
        file.write_text(original)


@QUIET
@given(
    entries=st.dictionaries(
        st.sampled_from(
            [
                *(f"{MODULE}.{end}" for end in ("weight", "deq_scale", "weight_scale_inv")),
                "group_size",
                "model_quant_type",
                "kv_cache_type",
            ]
        ),
        _VALUES,
    )
)
def test_descriptions_of_any_kind(folder: Path, entries: dict[str, Any]) -> None:
    (folder / DESCRIPTION).write_text(json.dumps(entries))
    try:
        assert checked(folder) is not None
    finally:
        (folder / DESCRIPTION).unlink()
