"""A folder without its weights: what it will hold, foretold from config.json, is what it does hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_quantize.checkpoint.completeness import check_tensors
from qwen_quantize.checkpoint.planned_source import PlannedSource
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.errors import UserError
from qwen_quantize.models.lookup import require_blueprint
from tests.checkpoint.tiny_deepseek import CONFIG, INDEX, SHARDS, make_tensors, write_folder


def planned(folder: Path) -> PlannedSource:
    source = open_source(folder, allow_missing_weights=True)
    assert isinstance(source, PlannedSource)
    assert source.kind == "planned"
    return source


def write_config(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("gone", [SHARDS, SHARDS[1:]])
@pytest.mark.parametrize("indexed", [True, False])
def test_names_shapes_and_dtypes_are_those_of_the_real_folder(
    tmp_path: Path, gone: tuple[str, ...], indexed: bool
) -> None:
    tensors = make_tensors()
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensors[name].float()
    write_folder(tmp_path, tensors)
    real = open_source(tmp_path, allow_missing_weights=True)
    assert real.kind == "safetensors"
    for shard in gone if indexed else SHARDS:
        (tmp_path / shard).unlink()
    if not indexed:
        (tmp_path / INDEX).unlink()
    source = planned(tmp_path)
    assert set(source.names()) == set(real.names())
    for name in real.names():
        ours, theirs = source.info(name), real.info(name)
        assert (ours.name, ours.dtype, ours.shape, ours.nbytes) == (
            theirs.name, theirs.dtype, theirs.shape, theirs.nbytes,
        )  # fmt: skip
        assert not indexed or ours.file == theirs.file
    assert source.config == real.config
    assert source.missing_files == (gone if indexed else ("model.safetensors",))
    (note,) = source.notes
    assert source.missing_files[0] in note
    linears = LinearReader(source)
    assert check_tensors(source, linears, require_blueprint(source.config)) == ()
    assert linears.companions() == {name for name in tensors if name.endswith("_inv")}
    assert linears.describe("model.layers.1.mlp.experts.0.up_proj").kind is StoredKind.BLOCK_FP8
    assert linears.loss_warning is None


def test_without_the_flag_the_shards_are_missed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.safetensors"):
        open_source(write_config(tmp_path))


def test_data_cannot_be_read(tmp_path: Path) -> None:
    source = planned(write_config(tmp_path))
    with pytest.raises(UserError, match=r"lm_head.weight.*model.safetensors.*download"):
        source.read("lm_head.weight")
    with pytest.raises(UserError, match=r"lm_head.weight.*model.safetensors.*download"):
        source.read_rows("lm_head.weight", 0, 1)
    with pytest.raises(UserError, match="nothing"):
        source.info("nothing")


def test_side_files_and_fingerprint(tmp_path: Path) -> None:
    source = planned(write_config(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert list(source.side_files()) == ["tokenizer.json"]
    assert source.fingerprint() == planned(tmp_path).fingerprint()
    write_config(tmp_path, CONFIG | {"rope_theta": 20000})
    assert source.fingerprint() != planned(tmp_path).fingerprint()


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_plain_models_have_the_dtype_of_the_config(tmp_path: Path, dtype: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    source = planned(write_config(tmp_path, config | {"torch_dtype": dtype}))
    bias = "e_score_correction_bias"
    found = {source.info(name).dtype for name in source.names() if not name.endswith(bias)}
    assert found == {{"float16": "F16", "float32": "F32", "bfloat16": "BF16"}[dtype]}
    assert not any("scale" in name for name in source.names())


def test_kept_modules_stay_plain(tmp_path: Path) -> None:
    kept = ["model.layers.1", "self_attn.o_proj", "model.layers.2.mlp.experts.0.up_proj"]
    settings = CONFIG["quantization_config"] | {"modules_to_not_convert": kept}
    source = planned(write_config(tmp_path, CONFIG | {"quantization_config": settings}))
    plain = {
        name
        for name, _ in require_blueprint(CONFIG).linear_modules().items()
        if source.info(f"{name}.weight").dtype == "BF16"
    }
    assert "model.layers.2.mlp.experts.0.up_proj" in plain
    assert "model.layers.2.mlp.experts.0.gate_proj" not in plain
    assert {name for name in plain if ".layers.2." in name} == {
        "model.layers.2.self_attn.o_proj", "model.layers.2.mlp.experts.0.up_proj",
    }  # fmt: skip
    assert all(name in plain for name in require_blueprint(CONFIG).linear_modules() if ".layers.1." in name)


def write_index(folder: Path, names: list[str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, SHARDS[0])}))


def test_the_index_decides_what_is_there(tmp_path: Path) -> None:
    """No prediction layer, one linear in bfloat16, and two names that no blueprint knows."""
    names = [name for name in make_tensors() if ".layers.3." not in name]
    names.remove("model.layers.1.self_attn.o_proj.weight_scale_inv")
    write_config(tmp_path)
    write_index(tmp_path, [*names, "visual.a", "visual.b"])
    source = planned(tmp_path)
    assert set(source.names()) == set(names)
    assert source.info("model.layers.1.self_attn.o_proj.weight").dtype == "BF16"
    assert source.info("model.layers.1.self_attn.o_proj.weight").file == tmp_path / SHARDS[0]
    assert any("2 of" in note and "'visual.a'" in note for note in source.notes)
    notes = check_tensors(source, LinearReader(source), require_blueprint(source.config))
    assert len(notes) == 1
    assert "layer 3" in notes[0]


def test_a_tensor_that_the_index_lacks_is_found(tmp_path: Path) -> None:
    names = [name for name in make_tensors() if name != "model.layers.2.mlp.experts.3.up_proj.weight"]
    write_config(tmp_path)
    write_index(tmp_path, names)
    source = planned(tmp_path)
    with pytest.raises(UserError, match=r"'model.layers.2.mlp.experts.3.up_proj.weight' is missing"):
        check_tensors(source, LinearReader(source), require_blueprint(source.config))


def test_what_cannot_be_foretold(tmp_path: Path) -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}},
    }
    write_config(tmp_path, CONFIG | {"quantization_config": quantization})
    with pytest.raises(UserError, match=r"compressed-tensors.*download"):
        open_source(tmp_path, allow_missing_weights=True)
    write_config(tmp_path, CONFIG | {"architectures": ["UnheardOf"]})
    with pytest.raises(UserError, match="UnheardOf"):
        open_source(tmp_path, allow_missing_weights=True)


@pytest.mark.parametrize("file", ["../x.safetensors", "a/b.safetensors", ".x", "", "x\0y"])
def test_an_index_of_missing_files_is_still_held_to_plain_names(tmp_path: Path, file: str) -> None:
    write_config(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"c": file}}))
    with pytest.raises(UserError, match="'c'"):
        open_source(tmp_path, allow_missing_weights=True)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "m.gguf", "model-00001-of-00002.safetensors"])
def test_weights_of_another_kind_are_no_missing_weights(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=name):
        open_source(tmp_path, allow_missing_weights=True)


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        open_source(tmp_path, allow_missing_weights=True)


def test_a_broken_shard_is_not_taken_for_a_missing_one(tmp_path: Path) -> None:
    write_folder(tmp_path, make_tensors())
    (tmp_path / SHARDS[0]).write_bytes(b"")
    with pytest.raises(UserError, match=SHARDS[0]):
        open_source(tmp_path, allow_missing_weights=True)


def test_a_tied_head_is_not_expected(tmp_path: Path) -> None:
    source = planned(write_config(tmp_path, CONFIG | {"tie_word_embeddings": True}))
    assert "lm_head.weight" not in source.names()
    assert source.info("model.embed_tokens.weight").shape == tuple(torch.Size((64, 40)))
