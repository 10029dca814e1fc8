"""A GGUF reads as the model it was made from, and as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qwen_quantize.checkpoint.gguf_config import llama3_factors
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.errors import UserError
from tests.checkpoint.tiny_gguf import make_model, write_gguf

Kind = gguf.GGMLQuantizationType
ARCHS = ("llama", "qwen2", "qwen3")


def transformers_state(path: Path) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    return state


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tied", [False, True])
def test_float32_comes_back_as_it_was(tmp_path: Path, arch: str, tied: bool) -> None:
    model = make_model(arch, tied=tied)
    source = open_source(write_gguf(tmp_path / "m.gguf", model))
    state = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    assert source.kind == "gguf"
    assert set(source.names()) == set(state)
    for name, expected in state.items():
        assert torch.equal(source.read(name), expected), name
        info = source.info(name)
        assert (info.dtype, info.shape, info.nbytes) == ("F32", tuple(expected.shape), expected.numel() * 4)
        assert torch.equal(source.read_rows(name, 1, 3), expected[1:3]), name
    assert source.config["tie_word_embeddings"] is tied


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0], ids=lambda k: k.name
)
def test_every_tensor_equals_transformers(tmp_path: Path, arch: str, kind: Kind) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model(arch), kind)
    source = open_source(path)
    state = transformers_state(path)
    assert set(source.names()) == set(state)
    for name, expected in state.items():
        assert torch.equal(source.read(name), expected), name


def test_biased_llama(tmp_path: Path) -> None:
    model = make_model("llama", attention_bias=True, mlp_bias=True)
    source = open_source(write_gguf(tmp_path / "m.gguf", model))
    for name, expected in model.state_dict().items():
        assert torch.equal(source.read(name), expected), name
    assert (source.config["attention_bias"], source.config["mlp_bias"]) == (True, True)


@pytest.mark.parametrize("arch", ARCHS)
def test_config_makes_the_same_model(tmp_path: Path, arch: str) -> None:
    model = make_model(arch)
    path = write_gguf(tmp_path / "m.gguf", model)
    config = open_source(path).config
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = AutoConfig.from_pretrained(tmp_path)
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    for key in (
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
        "bos_token_id", "eos_token_id", "rope_parameters", "hidden_act",
    ):  # fmt: skip
        assert getattr(ours, key) == getattr(theirs, key) == getattr(model.config, key), key
    assert (
        ours.rms_norm_eps == model.config.rms_norm_eps
    )  # transformers keeps float32's 9.999999974752427e-07
    assert config["architectures"] == [type(model).__name__]
    assert ours.dtype == torch.bfloat16
    tokens = torch.arange(20)[None]
    built = type(model)(ours).float()
    built.load_state_dict(model.state_dict())
    assert torch.equal(built(tokens).logits, model(tokens).logits)


def test_one_block_by_hand(tmp_path: Path) -> None:
    """Q4_0: byte j holds element j low and j + 16 high, value (q - 8) * d."""
    model = make_model("llama")
    path = write_gguf(tmp_path / "m.gguf", model, Kind.Q4_0)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.1.ffn_down.weight"]
    block = stored.data[5, :18].tobytes()
    d = np.frombuffer(block[:2], "<f2")[0].astype(np.float32)
    expected = [((byte & 15) - 8) * d for byte in block[2:]] + [((byte >> 4) - 8) * d for byte in block[2:]]
    found = open_source(path).read("model.layers.1.mlp.down_proj.weight")[5, :32]
    assert found.tolist() == [float(value) for value in expected]


def test_rows_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("qwen2"), Kind.Q8_0)
    whole = open_source(path)
    expected = {name: whole.read(name) for name in whole.names()}
    monkeypatch.setattr("qwen_quantize.checkpoint.gguf._CHUNK_BYTES", 100)
    for name, tensor in expected.items():
        assert torch.equal(whole.read(name), tensor)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: dict[str, object], expected: dict[str, Any] | None) -> None:
    keys = {f"qwen2.{key}": value for key, value in keys.items()}
    source = open_source(write_gguf(tmp_path / "m.gguf", make_model("qwen2"), keys=keys))
    assert source.config.get("rope_scaling") == expected


def test_llama3_rope_comes_from_its_factor_table(tmp_path: Path) -> None:
    """transformers' own frequencies under the llama3 rule are the plain ones divided by the table."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    model = make_model("llama", rope_parameters=rope, head_dim=64)
    plain = 500000.0 ** (-np.arange(0, 64, 2) / 64)
    table = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    np.testing.assert_allclose(table, llama3_factors(500000.0, 64, 8.0, 8192), rtol=1e-5)
    path = write_gguf(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": table})
    source = open_source(path)
    assert source.config["rope_scaling"] | {"rope_theta": 500000.0} == rope
    assert "rope_freqs.weight" not in source.names()
    path = write_gguf(tmp_path / "odd.gguf", model, extra={"rope_freqs.weight": table[::-1].copy()})
    with pytest.raises(UserError, match="rope_freqs"):
        open_source(path)


def test_fingerprint(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("qwen2"))
    first = open_source(path).fingerprint()
    assert open_source(path).fingerprint() == first
    other = write_gguf(tmp_path / "n.gguf", make_model("qwen2"), keys={"general.name": "other"})
    assert open_source(other).fingerprint() != first


@pytest.mark.parametrize("arch", ["qwen2moe", "gemma", "deepseek2"])
def test_an_architecture_that_cannot_be_read(tmp_path: Path, arch: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", arch)
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UserError, match=rf"{arch}.*llama, qwen2, qwen3"):
        open_source(tmp_path / "m.gguf")


def test_a_tensor_that_no_model_has(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", make_model("qwen2"), extra={"blk.0.strange.weight": np.zeros(4, np.float32)}
    )
    with pytest.raises(UserError, match=r"blk\.0\.strange\.weight"):
        open_source(path)
