"""The record of written tensors is whole or says less, never more, and never ends a run with a traceback."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_quantize.checkpoint.disk import replacing
from qwen_quantize.errors import ResumableError
from tests.checkpoint.test_full_disk import full
from tests.checkpoint.test_output_folder import begin, complete, contents, fill


def interrupted_run(target: Path) -> Path:
    """A run that wrote a, b and c and was killed; the path of its record."""
    with begin(target) as folder:
        fill(folder)
        folder.add_file("config.json", b"{}")
        folder.sync()
        return folder.staging / ".written.jsonl"


def resume(target: Path) -> list[str]:
    """Write what a resumed run finds unwritten and publish; the names of those tensors."""
    with begin(target, resume=True) as folder:
        unwritten = [name for name in "abc" if not folder.is_written(name)]
        fill(folder, "".join(unwritten))
        folder.add_file("config.json", b"{}")
        folder.finish()
    return unwritten


def lose(record: Path) -> None:
    record.unlink()


def overwrite_with(data: bytes) -> Callable[[Path], None]:
    def damage(record: Path) -> None:
        record.write_bytes(data)

    return damage


@pytest.mark.parametrize(
    ("damage", "unwritten"),
    [
        (lose, "abc"),
        (overwrite_with(b""), "abc"),
        (overwrite_with(b"\0" * 40), "abc"),
        (overwrite_with(b'{"tensor": "a"}\n\0\0\0\n{"tensor": "c"}\n'), "b"),
        (overwrite_with(b'{"tensor": "a"}\n{"tens\xff": "b"}\n{"tensor": 3}\n'), "bc"),
        (overwrite_with(b'{"tensor": "a"}\n{"shard": "b"}\n["tensor", "c"]\n'), "bc"),
        (overwrite_with(b'{"tensor": "a", "file": "b"}\n\n{"tensor": "c"}\n'), "ab"),
        (overwrite_with(b"[" * 100_000 + b'\n{"tensor": "b"}\n'), "ac"),
        (overwrite_with(b'{"tensor": "a"}\n{"tensor": "b"}'), "bc"),  # whole JSON, but torn before its end
    ],
)
def test_what_a_record_does_not_say_is_not_written(
    damage: Callable[[Path], None], unwritten: str, tmp_path: Path
) -> None:
    complete(tmp_path / "whole")
    damage(interrupted_run(tmp_path / "out"))
    begin(tmp_path / "out", resume=True).close()  # repairs the record, and is killed again
    assert resume(tmp_path / "out") == list(unwritten)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_record_cut_at_any_byte(tmp_path: Path) -> None:
    record = interrupted_run(tmp_path / "out")
    whole = record.read_bytes()
    for end in range(len(whole) + 1):
        record.write_bytes(whole[:end])
        lines = whole[:end].count(b"\n")
        with begin(tmp_path / "out", resume=True) as folder:
            assert [folder.is_written(name) for name in "abc"] == [lines > 0, lines > 1, lines > 2]
        assert record.read_bytes() == whole[: whole.rfind(b"\n", 0, end) + 1]


def test_a_whole_record_is_not_written_again(tmp_path: Path) -> None:
    record = interrupted_run(tmp_path / "out")
    inode = record.stat().st_ino
    begin(tmp_path / "out", resume=True).close()
    assert record.stat().st_ino == inode


def test_a_full_disk_while_the_record_is_repaired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = interrupted_run(tmp_path / "out")
    torn = record.read_bytes()[:-1]
    record.write_bytes(torn)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(ResumableError, match=r"disk is full: .*written\.jsonl.*--resume"):
            begin(tmp_path / "out", resume=True)
    assert record.read_bytes() == torn
    assert resume(tmp_path / "out") == []


@pytest.mark.parametrize("name", [".written.jsonl", "model-00001-of-00002.safetensors"])
def test_a_staging_folder_that_cannot_be_read(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Path.open

    def broken(self: Path, mode: str = "r", **options: Any) -> Any:
        if self.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return whole(self, mode, **options)

    interrupted_run(tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", broken)
        with pytest.raises(ResumableError, match=rf"{name} cannot be read: Input/output error.*--resume"):
            begin(tmp_path / "out", resume=True)
    assert resume(tmp_path / "out") == []


def test_replacing_is_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    with replacing(path) as file:
        file.write(b"old")
    with pytest.raises(TypeError), replacing(path) as file:
        file.writelines([b"half of the n", None])  # type: ignore[list-item]
    for owner, call in ((os, "fsync"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, call, full)
            with pytest.raises(OSError, match="No space"), replacing(path) as file:
                file.write(b"new")
    assert contents(tmp_path) == {"file": b"old"}
