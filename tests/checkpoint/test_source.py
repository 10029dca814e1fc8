"""Opening a model: what is read, what is refused, and what is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint.source import CheckpointSource, open_source
from qwen_quantize.errors import UserError

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}
FIRST = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.ones(2, 2, dtype=torch.bfloat16),
}
SECOND = {"c": torch.arange(6, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 3)}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    folder = tmp_path / "single"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(FIRST, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(FIRST, folder / "model-00001-of-00002.safetensors")
    save_file(SECOND, folder / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(FIRST, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(SECOND, "model-00002-of-00002.safetensors")
    # A total that is wrong on purpose: nothing may rely on it.
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": -1}, "weight_map": weight_map}))
    return folder


def refused(path: Path | str, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        open_source(path, allow_download=False)
    for word in words:
        assert word in str(caught.value)


def same(source: CheckpointSource, tensors: dict[str, torch.Tensor]) -> None:
    assert sorted(source.names()) == sorted(tensors)
    for name, expected in tensors.items():
        found = source.read(name)
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        assert found.data_ptr() % 64 == 0
        assert source.info(name).shape == tuple(expected.shape)


def test_one_file_is_read(single: Path) -> None:
    source = open_source(single)
    assert (source.kind, source.config, source.path) == ("safetensors", CONFIG, single)
    same(source, FIRST)


def test_shards_are_read(sharded: Path) -> None:
    source = open_source(str(sharded))
    same(source, FIRST | SECOND)
    assert source.info("c").file == sharded / "model-00002-of-00002.safetensors"


def test_a_read_is_a_fresh_copy(single: Path) -> None:
    source = open_source(single)
    source.read("a").zero_()
    assert torch.equal(source.read("a"), FIRST["a"])


def test_rows(single: Path) -> None:
    source = open_source(single)
    assert torch.equal(source.read_rows("a", 1, 3), FIRST["a"][1:3])
    assert source.read_rows("a", 2, 2).shape == (0, 4)
    for start, stop in ((-1, 2), (0, 4), (2, 1)):
        with pytest.raises(ValueError, match="'a'"):
            source.read_rows("a", start, stop)


def test_all_dtypes_come_back_bit_by_bit(tmp_path: Path) -> None:
    codes = torch.arange(64, dtype=torch.uint8)
    tensors = {
        str(dtype): codes.view(dtype).clone()
        for dtype in (
            torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz,
            torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.float64,
            torch.uint16, torch.complex64,
        )
    }  # fmt: skip
    tensors["packed"] = codes.view(torch.float4_e2m1fn_x2).reshape(8, 8).clone()
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    for name, expected in tensors.items():
        assert torch.equal(source.read(name).view(torch.uint8), expected.view(torch.uint8))
    assert source.info("packed").shape == (8, 16)  # logical: two elements in a byte
    assert torch.equal(source.read_rows("packed", 2, 4).view(torch.uint8), codes.reshape(8, 8)[2:4])


def test_a_scalar_and_an_empty_tensor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    source = open_source(tmp_path)
    assert source.read("scalar").item() == 2.5
    assert source.read("empty").shape == (0, 3)


def test_an_unknown_tensor(single: Path) -> None:
    source = open_source(single)
    for call in (source.info, source.read):
        with pytest.raises(UserError, match="nothing"):
            call("nothing")


def test_a_file_cut_after_opening(single: Path) -> None:
    source = open_source(single)
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cut since it was opened"):
        source.read("a"), source.read("b")


def test_fingerprint_tells_checkpoints_apart(single: Path, sharded: Path) -> None:
    first = open_source(single).fingerprint()
    assert first == open_source(single).fingerprint()
    assert first != open_source(sharded).fingerprint()
    (single / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 5}))
    assert first != open_source(single).fingerprint()


def test_side_files(single: Path) -> None:
    wanted = ["tokenizer.json", "tokenizer_config.json", "merges.txt", "chat_template.jinja", "LICENSE",
              "generation_config.json", "preprocessor_config.json", "tokenizer.model"]  # fmt: skip
    for name in [*wanted, "README.md", "modeling_evil.py", ".hidden.json", "pytorch_model.bin"]:
        (single / name).write_text("{}")
    assert sorted(open_source(single).side_files()) == sorted(wanted)


def change_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps(change(index) or index))


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "a\\b.safetensors", "", ".x", "x\0y",
     "C:x.safetensors", 7, None, ["x"]],
)  # fmt: skip
def test_an_index_that_leaves_the_folder(sharded: Path, file: object) -> None:
    save_file(SECOND, sharded.parent / "outside.safetensors")
    change_index(sharded, lambda index: index["weight_map"].update(c=file))
    refused(sharded, INDEX, "'c'")


def test_an_index_with_a_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    refused(sharded, "model-00002-of-00002.safetensors is missing", "'c'")


def test_an_index_with_a_tensor_that_its_shard_lacks(sharded: Path) -> None:
    change_index(sharded, lambda index: index["weight_map"].update(d="model-00002-of-00002.safetensors"))
    refused(sharded, "'d'", "model-00002-of-00002.safetensors")


def test_an_index_that_names_the_wrong_shard(sharded: Path) -> None:
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    change_index(sharded, lambda index: index["weight_map"].update(c=first, a=second))
    refused(sharded, INDEX, "which does not hold it")


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save_file(SECOND | {"a": FIRST["a"]}, sharded / "model-00002-of-00002.safetensors")
    refused(sharded, "'a'", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    "index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"weight_map": 3}']
)
def test_an_index_that_is_none(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    refused(sharded, INDEX)


def test_both_one_file_and_an_index(sharded: Path) -> None:
    save_file(FIRST, sharded / "model.safetensors")
    refused(sharded, "model.safetensors", INDEX, "remove")


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    refused(sharded, INDEX, "model-00001-of-00002.safetensors")


def test_a_broken_shard_is_named(sharded: Path) -> None:
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    refused(sharded, str(path), "'c'", "truncated")


def test_links_out_of_the_folder(single: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (single / "model.safetensors").rename(elsewhere)
    (single / "model.safetensors").symlink_to(elsewhere)
    refused(single, "model.safetensors", "leaves the folder")


def test_a_side_file_that_links_out(single: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (single / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="leaves the folder"):
        open_source(single).side_files()


def test_a_loop_of_links(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to("model.safetensors")
    refused(single, "model.safetensors")


def test_the_hub_cache_links_into_its_blobs(single: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):
        (single / name).rename(blobs / str(number))
        (snapshot / name).symlink_to(f"../../blobs/{number}")
    same(open_source(snapshot), FIRST)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"])
def test_pickles_are_never_loaded(single: Path, name: str) -> None:
    (single / "model.safetensors").rename(single / name)
    refused(single, name, "never loaded", "save_pretrained")


def test_a_folder_without_weights(single: Path) -> None:
    (single / "model.safetensors").unlink()
    refused(single, str(single), "model.safetensors")


def test_a_folder_without_config(single: Path) -> None:
    (single / "config.json").unlink()
    refused(single, str(single), "config.json")


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"a": 1, "a": 2}', "\xff", "{" * 100_000])
def test_a_config_that_is_none(single: Path, text: str) -> None:
    (single / "config.json").write_bytes(text.encode("latin-1"))
    refused(single, "config.json")


def test_a_config_of_unreasonable_size(single: Path) -> None:
    (single / "config.json").write_bytes(b'{"a": "' + b"x" * 16_000_001 + b'"}')
    refused(single, "config.json", "larger than")


def test_a_config_may_hold_infinity(single: Path) -> None:
    (single / "config.json").write_text('{"limits": [0.0, Infinity, -Infinity]}')
    assert open_source(single).config == {"limits": [0.0, float("inf"), float("-inf")]}


def test_no_such_folder_names_near_ones(single: Path) -> None:
    refused(single.parent / "sinlge", "sinlge", "did you mean", "single")
    refused(single.parent / "zzz" / "qqq", "no folder")


def test_a_file_that_is_no_model(single: Path) -> None:
    refused(single / "model.safetensors", str(single))
    refused(single / "config.json", "config.json")


def test_a_hub_id_is_downloaded_without_code(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(hub_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(hub_id=hub_id, patterns=allow_patterns, ignored=ignore_patterns)
        return str(single)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    same(open_source("org/name"), FIRST)
    assert asked["hub_id"] == "org/name"
    assert "*.safetensors" in asked["patterns"]
    for file in ("modeling_evil.py", "pytorch_model.bin", "model.pt"):
        assert not any(fnmatch(file, pattern) for pattern in asked["patterns"])
    assert any(fnmatch("original/model.safetensors", pattern) for pattern in asked["ignored"])


def test_an_unreachable_hub_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach the network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(UserError, match=r"no local folder 'org/name'.*could not be reached.*cannot reach"):
        open_source("org/name")


@pytest.mark.parametrize(
    "text", ["./org/name", "org/name/more", "name", "../x", "org/..", "/org/name", "-org/name"]
)
def test_what_is_no_hub_id_never_goes_to_the_network(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(*_: object, **__: object) -> str:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    with pytest.raises(UserError, match="no folder"):
        open_source(text)


def test_a_plan_downloads_no_weights(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot(_hub_id: str, **options: Any) -> str:
        asked.update(options)
        return str(single)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    open_source("org/model-7b", allow_missing_weights=True)
    assert "*.safetensors" not in asked["allow_patterns"]
    assert "*.json" in asked["allow_patterns"]
