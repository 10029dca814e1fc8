"""An output folder is complete or absent, survives kills, and belongs to one run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.staging import StagingFolder
from qwen_quantize.checkpoint.writer import OutputFolder, OutputTensor, plan_shards
from qwen_quantize.errors import UserError

TENSORS = {
    "a": torch.arange(100, dtype=torch.float32).reshape(10, 10),
    "b": torch.arange(200, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(2, 100),
    "c": torch.full((7,), 3, dtype=torch.int64),
}
PLAN = plan_shards(
    [
        OutputTensor("a", "F32", (10, 10)),
        OutputTensor("b", "F8_E4M3", (2, 100)),
        OutputTensor("c", "I64", (7,)),
    ],
    500,
)


def begin(target: Path, *, resume: bool = False, overwrite: bool = False) -> OutputFolder:
    return OutputFolder(target, PLAN, resume=resume, overwrite=overwrite)


def fill(folder: OutputFolder, names: str = "abc") -> None:
    for name in names:
        folder.write(name, TENSORS[name])


def complete(target: Path, *, resume: bool = False, overwrite: bool = False) -> Path:
    with begin(target, resume=resume, overwrite=overwrite) as folder:
        fill(folder)
        folder.add_file("config.json", b"{}")
        return folder.finish()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_finished_folder(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    assert complete(target) == target
    assert names(target.parent) == ["out"]
    assert names(target) == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]  # fmt: skip
    source = open_source(target)
    for name, tensor in TENSORS.items():
        assert torch.equal(source.read(name).view(torch.uint8), tensor.view(torch.uint8))
    for shard in target.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                assert torch.equal(file.get_tensor(name).view(torch.uint8), TENSORS[name].view(torch.uint8))


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    state = model.state_dict()
    plan = plan_shards([OutputTensor(name, "F32", tuple(t.shape)) for name, t in state.items()], 4096)
    assert len(plan) > 1
    with OutputFolder(tmp_path / "out", plan, resume=False, overwrite=False) as folder:
        for name, tensor in state.items():
            folder.write(name, tensor)
        folder.add_file("config.json", json.dumps(config.to_dict()).encode())
        folder.finish()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())


def test_staging_reads_as_a_model_before_it_is_published(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        fill(folder)
        folder.add_file("config.json", b"{}")
        folder.sync()
        folder.write_index()
        assert set(open_source(folder.staging).names()) == set(TENSORS)
        assert not (tmp_path / "out").exists()


def test_order_and_layout_of_the_tensors_do_not_matter(tmp_path: Path) -> None:
    complete(tmp_path / "one")
    with begin(tmp_path / "two") as folder:
        fill(folder, "cbabc")
        folder.write("a", TENSORS["a"].t().contiguous().t())  # not contiguous
        folder.add_file("config.json", b"{}")
        folder.finish()
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("x", TENSORS["a"]),
        ("a", TENSORS["a"].double()),
        ("a", TENSORS["a"].reshape(100)),
        ("b", TENSORS["b"].view(torch.uint8)),
    ],
)
def test_a_tensor_that_was_not_planned(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    with begin(tmp_path / "out") as folder, pytest.raises(ValueError, match=repr(name)):
        folder.write(name, tensor)


def test_an_incomplete_folder_is_not_published(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        fill(folder, "ac")
        with pytest.raises(ValueError, match="'b'"):
            folder.finish()
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_ends_in_the_same_bytes(tmp_path: Path) -> None:
    complete(tmp_path / "whole")
    with begin(tmp_path / "out") as folder:
        assert not folder.resumed
        fill(folder, "a")
        folder.add_file("config.json", b"{}")
        (folder.staging / "journal.jsonl").write_text("layer 0\n")
        folder.sync()
        fill(folder, "b")  # not synced: a killed run must not count it
    with begin(tmp_path / "out", resume=True) as folder:
        assert folder.resumed
        assert (folder.staging / "journal.jsonl").read_text() == "layer 0\n"
        assert [folder.is_written(name) for name in "abc"] == [True, False, False]
        (folder.staging / "work").mkdir()
        (folder.staging / "work" / "hidden").write_bytes(b"x" * 1000)
        fill(folder, "bc")
        folder.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert names(tmp_path) == ["out", "whole"]


def test_a_kill_while_publishing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run killed at the last moment leaves behind resumes to the same bytes."""
    complete(tmp_path / "whole")
    with begin(tmp_path / "out") as folder:
        fill(folder)
        folder.add_file("config.json", b"{}")
        (folder.staging / "journal.jsonl").write_text("layer 0\n")
        with monkeypatch.context() as patch:
            patch.setattr(StagingFolder, "publish", interrupted)
            with pytest.raises(KeyboardInterrupt):
                folder.finish()
    with begin(tmp_path / "out", resume=True) as folder:
        assert not (folder.staging / "journal.jsonl").exists()
        fill(folder)
        folder.add_file("config.json", b"{}")
        folder.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_record_outlives_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with begin(tmp_path / "out") as folder:
        fill(folder)
        (folder.staging / "work").mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", interrupted)
            with pytest.raises(KeyboardInterrupt):
                folder.finish()
    with begin(tmp_path / "out", resume=True) as folder:
        assert all(folder.is_written(name) for name in TENSORS)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_resuming_nothing_is_a_fresh_start(tmp_path: Path) -> None:
    with begin(tmp_path / "out", resume=True) as folder:
        assert not folder.resumed
        fill(folder)
        folder.finish()
    assert (tmp_path / "out").exists()


def test_a_torn_record_is_cut_off(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        fill(folder, "ab")
        folder.sync()
        record = folder.staging / ".written.jsonl"
    record.write_bytes(record.read_bytes()[:-3])
    with begin(tmp_path / "out", resume=True) as folder:
        assert [folder.is_written(name) for name in "ab"] == [True, False]
        fill(folder, "bc")
        folder.finish()


def test_a_shard_half_created_is_created_again(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        shard = folder.staging / "model-00002-of-00002.safetensors"
    shard.rename(shard.with_name(shard.name + ".tmp"))
    with begin(tmp_path / "out", resume=True) as folder:
        fill(folder)
        folder.finish()
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_a_lost_shard_with_written_tensors(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        fill(folder)
        folder.sync()
        (folder.staging / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="--overwrite"):
        begin(tmp_path / "out", resume=True)


def test_another_plan_does_not_resume(tmp_path: Path) -> None:
    begin(tmp_path / "out").close()
    other = plan_shards([OutputTensor("z", "F32", (1,)), OutputTensor("y", "F32", (1,))], 1)
    with pytest.raises(UserError, match=r"model-00001-of-00002.*otherwise"):
        OutputFolder(tmp_path / "out", other, resume=True, overwrite=False)


def test_a_staging_folder_asks_for_resume_or_overwrite(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        (folder.staging / "old").write_text("x")
    with pytest.raises(UserError, match=r"--resume.*--overwrite"):
        begin(tmp_path / "out")
    with begin(tmp_path / "out", overwrite=True) as folder:
        assert not folder.resumed
        assert not (folder.staging / "old").exists()


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    folder = begin(tmp_path / "out")
    fill(folder)
    folder.discard()
    folder.close()
    assert names(tmp_path) == []


def test_an_existing_target(tmp_path: Path) -> None:
    target = complete(tmp_path / "out")
    before = contents(target)
    with pytest.raises(UserError, match=r"not empty.*--overwrite"):
        begin(target)
    with pytest.raises(UserError, match="not empty"):
        begin(target, resume=True)
    assert contents(target) == before
    assert names(tmp_path) == ["out"]


def test_an_empty_target_is_used(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    complete(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").exists()


def test_overwrite_keeps_the_old_folder_until_the_new_one_is_whole(tmp_path: Path) -> None:
    target = complete(tmp_path / "out")
    (target / "old.txt").write_text("x")
    before = contents(target)
    with begin(target, overwrite=True) as folder:
        fill(folder)
        assert contents(target) == before
        folder.add_file("config.json", b'{"new": 1}')
        folder.finish()
    assert (target / "config.json").read_bytes() == b'{"new": 1}'
    assert not (target / "old.txt").exists()
    assert names(tmp_path) == ["out"]


def test_overwrite_spares_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("x")
    with pytest.raises(UserError, match="no model folder"):
        begin(tmp_path / "home", overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="is a file"):
        begin(tmp_path / "file", overwrite=True)
    assert names(tmp_path) == ["file", "home"]


def test_a_kill_between_the_two_renames_is_undone(tmp_path: Path) -> None:
    target = complete(tmp_path / "out")
    before = contents(target)
    target.rename(tmp_path / ".out.replaced")
    begin(target, overwrite=True).discard()
    assert contents(target) == before
    complete(tmp_path / ".out.replaced")  # a kill after them: the leftover goes
    begin(target, overwrite=True).discard()
    assert names(tmp_path) == ["out"]


def test_a_link_as_target_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    complete(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "config.json").exists()


def test_two_runs_on_one_output(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        for resume, overwrite in ((False, False), (True, False), (False, True), (True, True)):
            with pytest.raises(UserError, match="another run"):
                begin(tmp_path / "out", resume=resume, overwrite=overwrite)
        fill(folder)
        folder.finish()
    assert names(tmp_path) == ["out"]


def test_a_killed_process_releases_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path\n"
        "from qwen_quantize.checkpoint.staging import StagingFolder\n"
        "StagingFolder(Path(sys.argv[1]), resume=False, overwrite=False)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert killed.returncode == -9
    complete(tmp_path / "out", resume=True)
    assert names(tmp_path) == ["out"]


def test_shards_have_their_size_from_the_start(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        assert {shard.file: (folder.staging / shard.file).stat().st_size for shard in PLAN} == {
            shard.file: shard.nbytes for shard in PLAN
        }


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "a/b", "a\\b", "", ".", "..", ".hidden", "x\0", "x\n", "\ud800", "y" * 256, "x.tmp",
     "model-00001-of-00002.safetensors", "model.safetensors.index.json"],
)  # fmt: skip
def test_a_side_file_with_a_bad_name(tmp_path: Path, name: str) -> None:
    with begin(tmp_path / "out") as folder, pytest.raises(UserError, match="name"):
        folder.add_file(name, b"")


def test_side_files_come_from_bytes_or_paths(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"old")
    with begin(tmp_path / "out") as folder:
        fill(folder)
        folder.add_file("tokenizer.json", tmp_path / "tokenizer.json")
        folder.add_file("report.html", b"first")
        folder.add_file("report.html", b"second")
        folder.finish()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == b"old"
    assert (tmp_path / "out" / "report.html").read_bytes() == b"second"
