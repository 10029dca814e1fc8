"""A folder of DeepSeek-R1's size opens and is checked in seconds. Its data is a hole in each file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from qwen_quantize.checkpoint.completeness import check_tensors
from qwen_quantize.checkpoint.planned_source import PlannedSource
from qwen_quantize.checkpoint.shards import OutputTensor, index_bytes, plan_shards
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.models.lookup import require_blueprint
from tests.checkpoint.tiny_deepseek import CONFIG

# The sizes of the published config.json.
R1: dict[str, Any] = CONFIG | {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": CONFIG["quantization_config"] | {"weight_block_size": [128, 128]},
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


def planned(folder: Path) -> PlannedSource:
    (folder / "config.json").write_text(json.dumps(R1))
    source = open_source(folder, allow_missing_weights=True)
    assert isinstance(source, PlannedSource)
    return source


@pytest.mark.slow
def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    began = time.monotonic()
    source = planned(tmp_path)
    assert check_tensors(source, LinearReader(source), require_blueprint(source.config)) == ()
    assert time.monotonic() - began < 10
    assert len(source.names()) > 90_000
    # What is published has about 688 GB.
    assert 687e9 < sum(source.info(name).nbytes for name in source.names()) < 690e9


@pytest.mark.slow
def test_163_shards_open_in_seconds(tmp_path: Path) -> None:
    source = planned(tmp_path)
    outputs = [
        OutputTensor(name, source.info(name).dtype, source.info(name).shape) for name in source.names()
    ]
    shards = plan_shards(outputs, 4_290_000_000)
    for shard in shards:
        with (tmp_path / shard.file).open("wb") as file:
            file.write(shard.header)
            os.truncate(file.fileno(), shard.nbytes)
    (tmp_path / "model.safetensors.index.json").write_bytes(index_bytes(shards))
    assert len(shards) >= 160
    began = time.monotonic()
    real = open_source(tmp_path, allow_missing_weights=True)
    opened = time.monotonic() - began
    linears = LinearReader(real)
    blueprint = require_blueprint(real.config)
    assert check_tensors(real, linears, blueprint) == ()
    checked = time.monotonic() - began - opened
    assert opened < 20
    assert checked < 10
    assert len(linears.companions()) == len(blueprint.linear_modules() | blueprint.next_token_modules())
    assert not linears.read_rows("model.layers.60.mlp.experts.255.down_proj", 128, 256).any()
