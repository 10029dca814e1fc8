"""What a resumed run starts from survives full disks, kills and damage, or says what to do."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_quantize.checkpoint import disk
from qwen_quantize.errors import ResumableError, UserError
from qwen_quantize.pipeline import hidden
from qwen_quantize.pipeline.hidden import HiddenStates
from qwen_quantize.pipeline.journal import Journal

STATES = torch.arange(4 * 3 * 2, dtype=torch.float32).reshape(4, 3, 2)
IDENTITY: dict[str, Any] = {
    "request": {"seed": 0, "dataset": None, "ignore": ("head",), "method": "plain"},
    "source": "f" * 64,
    "number of threads": 2,
}


def failing(number: int) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def states_in(folder: Path) -> HiddenStates:
    return HiddenStates(folder / "work", *STATES.shape)


def store(states: HiddenStates, layer: int) -> None:
    writer = states.begin(layer)
    writer.append(STATES[:3])
    writer.append(STATES[3:])
    writer.finish()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_states_come_back_by_ranges(tmp_path: Path) -> None:
    states = states_in(tmp_path)
    writer = states.begin(1)
    writer.append(STATES[:3])
    assert not states.is_complete(1)
    writer.append(STATES.transpose(1, 2).contiguous().transpose(1, 2)[3:])  # not contiguous
    assert files(tmp_path) == ["hidden-00001.tmp"]
    writer.finish()
    assert states.is_complete(1)
    assert torch.equal(states.read(1, 0, 4), STATES)
    assert torch.equal(states.read(1, 1, 3), STATES[1:3])
    assert states.path(1).read_bytes() == STATES.numpy().tobytes()
    states.remove(1)
    states.remove(1)
    assert not states.is_complete(1)


def test_short_writes_of_states_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[[int, memoryview, int], int] = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:7], offset))
    store(states_in(tmp_path), 0)
    assert torch.equal(states_in(tmp_path).read(0, 0, 4), STATES)


@pytest.mark.parametrize(
    ("number", "way_out"),
    [(errno.ENOSPC, "make room and run again"), (errno.EIO, "repair that and run again")],
)
@pytest.mark.parametrize(
    ("owner", "call"), [(Path, "open"), (Path, "mkdir"), (os, "pwrite"), (os, "fsync"), (Path, "replace")]
)
def test_a_disk_that_fails_while_states_are_written(
    owner: object, call: str, number: int, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_in(tmp_path)
    if call != "mkdir":
        store(states, 0)
    before = files(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, failing(number))
        with pytest.raises(ResumableError, match=rf"hidden-00001\.tmp.*{way_out} with --resume"):
            store(states, 1)
    assert files(tmp_path) == before
    store(states, 1)
    assert torch.equal(states.read(1, 0, 4), STATES)


def test_a_failed_second_write_removes_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = states_in(tmp_path).begin(0)
    writer.append(STATES[:3])
    monkeypatch.setattr(os, "pwrite", failing(errno.EDQUOT))
    monkeypatch.setattr(shutil, "disk_usage", failing(errno.EIO))
    with pytest.raises(ResumableError, match=r"needs 24 bytes more and unknown"):
        writer.append(STATES[3:])
    assert files(tmp_path) == []


def test_a_temporary_file_that_stays_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = states_in(tmp_path).begin(0)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    monkeypatch.setattr(Path, "unlink", failing(errno.EIO))
    with pytest.raises(ResumableError, match="disk is full"):
        writer.append(STATES)


def test_states_that_cannot_be_read_or_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_in(tmp_path)
    store(states, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing(errno.EIO))
        with pytest.raises(ResumableError, match=r"hidden-00000\.f32 cannot be read.*--resume"):
            states.read(0, 0, 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", failing(errno.EIO))
        with pytest.raises(ResumableError, match=r"hidden-00000\.f32 cannot be read.*--resume"):
            states.is_complete(0)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing(errno.EIO))
        with pytest.raises(ResumableError, match=r"hidden-00000\.f32 cannot be removed.*--resume"):
            states.remove(0)


def test_states_that_are_too_short(tmp_path: Path) -> None:
    states = states_in(tmp_path)
    store(states, 0)
    os.truncate(states.path(0), 90)
    assert not states.is_complete(0)
    with pytest.raises(UserError, match=r"hidden-00000\.f32 is shorter.*--overwrite"):
        states.read(0, 0, 4)


def test_states_are_durable_before_anyone_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file before its name, the name before `finish` returns."""
    seen: list[str] = []
    sync, folder_sync, replace = os.fsync, disk.sync_folder, Path.replace

    def synced(file: int) -> None:
        seen.append("fsync")
        sync(file)

    def replaced(self: Path, target: Path) -> Path:
        seen.append("replace")
        return replace(self, target)

    def folder_synced(folder: Path) -> None:
        seen.append(f"folder {folder.name}")
        folder_sync(folder)

    writer = states_in(tmp_path).begin(0)
    writer.append(STATES)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(hidden, "sync_folder", folder_synced)
    writer.finish()
    assert seen == ["fsync", "replace", "folder work", "fsync"]


def journal_of_three(path: Path) -> bytes:
    journal = Journal(path, IDENTITY, False)
    for layer in range(3):
        journal.finish(f"layers.{layer}.mlp", {"linears": [layer], "streams": []})
    return path.read_bytes()


def test_a_journal_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = journal_of_three(path)
    inode = path.stat().st_ino
    journal = Journal(path, IDENTITY, True)
    assert list(journal.units) == [f"layers.{layer}.mlp" for layer in range(3)]
    assert journal.units["layers.1.mlp"] == {"unit": "layers.1.mlp", "linears": [1], "streams": []}
    assert path.read_bytes() == whole
    assert path.stat().st_ino == inode, "a whole journal is not written again"
    assert len(Journal(path, IDENTITY, False).units) == 0
    assert len(Journal(path, IDENTITY, True).units) == 0


def test_a_journal_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = journal_of_three(path)
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        journal = Journal(path, IDENTITY, True)
        finished = max(whole[:end].count(b"\n") - 1, 0)
        assert len(journal.units) == finished
        for layer in range(finished, 3):
            journal.finish(f"layers.{layer}.mlp", {"linears": [layer], "streams": []})
        assert path.read_bytes() == whole
    assert files(tmp_path) == ["journal.jsonl"]


def test_a_lost_journal_starts_again(tmp_path: Path) -> None:
    assert len(Journal(tmp_path / "journal.jsonl", IDENTITY, True).units) == 0
    assert files(tmp_path) == ["journal.jsonl"]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\0\0\0", b"\xff\xfe", b"[]", b"1", b"{}", b'{"unit": 1}', b'{"unit": true}',
     b'{"unit": ""}', b'{"unit": null}', b'{"run": []}', b"[" * 100_000],
)  # fmt: skip
def test_a_damaged_line(number: int, damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    lines = journal_of_three(path).splitlines()
    lines[number - 1] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(UserError, match=rf"line {number} of .*journal\.jsonl.*--overwrite") as caught:
        Journal(path, IDENTITY, True)
    assert not isinstance(caught.value, ResumableError)
    assert path.read_bytes() == b"\n".join(lines) + b"\n"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"request": IDENTITY["request"] | {"seed": 7}}, "another request (seed 0, now 7);"),
        (
            {"request": IDENTITY["request"] | {"method": "other", "dataset": "a.txt", "ignore": ()}},
            'another request (dataset none, now a.txt; ignore ["head"], now []; method plain, now other);',
        ),
        ({"source": "e" * 64}, "another source;"),
        ({"number of threads": 4}, "another number of threads (2, now 4);"),
        ({"request": "digest"}, "another request;"),
        (
            {"source": "e" * 64, "number of threads": 4},
            "another number of threads (2, now 4) and another source;",
        ),
        ({"kernels": "native"}, "another kernels (none, now native);"),
    ],
)
def test_another_run_is_named(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    whole = journal_of_three(path)
    path.write_bytes(whole + b'{"torn')
    with pytest.raises(UserError) as caught:
        Journal(path, IDENTITY | change, True)
    assert sentence in str(caught.value)
    assert path.read_bytes() == whole + b'{"torn', "a refused journal stays as it was"


@pytest.mark.parametrize(("owner", "call"), [(Path, "open"), (os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_while_a_journal_begins_or_is_repaired(
    owner: object, call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, failing(number))
        with pytest.raises(ResumableError, match=r"journal\.jsonl.*--resume"):
            Journal(path, IDENTITY, False)
    assert files(tmp_path) == []
    torn = journal_of_three(path)[:-1]
    path.write_bytes(torn)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, failing(number))
        with pytest.raises(ResumableError, match=r"journal\.jsonl.*--resume"):
            Journal(path, IDENTITY, True)
    assert path.read_bytes() == torn
    assert files(tmp_path) == ["journal.jsonl"]
    assert len(Journal(path, IDENTITY, True).units) == 2


@pytest.mark.parametrize(("owner", "call"), [(Path, "open"), (os, "fsync")])
def test_a_disk_that_fails_while_a_layer_is_finished(
    owner: object, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "journal.jsonl"
    journal = Journal(path, IDENTITY, False)
    with monkeypatch.context() as patch:
        patch.setattr(owner, call, failing(errno.ENOSPC))
        with pytest.raises(ResumableError, match=r"disk is full: .*journal\.jsonl.*make room.*--resume"):
            journal.finish("layers.0.mlp", {})
    assert not journal.units
    journal = Journal(path, IDENTITY, True)
    journal.finish("layers.0.mlp", {})
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_journal_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal.jsonl"
    journal_of_three(path)
    monkeypatch.setattr(Path, "read_bytes", failing(errno.EIO))
    with pytest.raises(ResumableError, match=r"journal\.jsonl cannot be read.*--resume"):
        Journal(path, IDENTITY, True)


def test_states_are_gathered_and_added_to_by_token(tmp_path: Path) -> None:
    states = states_in(tmp_path)
    store(states, 2)
    flat = STATES.reshape(12, 2)
    tokens = torch.tensor([0, 1, 2, 5, 9, 10])
    assert torch.equal(states.gather(2, tokens), flat[tokens])
    assert states.gather(2, torch.tensor([], dtype=torch.int64)).shape == (0, 2)
    writer = states.begin(3)
    writer.append(STATES)
    values = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    writer.add(tokens, values)
    writer.add(tokens[3:], values[3:])
    writer.finish()
    expected = flat.clone()
    expected[tokens] += values
    expected[tokens[3:]] += values[3:]
    assert torch.equal(states.read(3, 0, 4).reshape(12, 2), expected)
    with pytest.raises(UserError, match="shorter than it must be"):
        states.gather(2, torch.tensor([11, 12]))
    with pytest.raises(ValueError, match="appended"):
        states.begin(4).add(tokens, values)
