"""A disk that is full, broken or slow to take bytes costs no finished work and leaves nothing half done."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_quantize.checkpoint import disk
from qwen_quantize.checkpoint.writer import require_free_space
from qwen_quantize.errors import ResumableError, UserError
from tests.checkpoint.test_output_folder import TENSORS, begin, complete, contents, fill, names


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"disk is full.*bytes more") as caught:
        begin(tmp_path / "out")
    assert not isinstance(caught.value, ResumableError)
    assert names(tmp_path) == []


def test_a_full_disk_in_the_middle_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(tmp_path / "whole")
    with begin(tmp_path / "out") as folder:
        fill(folder, "a")
        folder.sync()
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(ResumableError, match=r"disk is full.*200 bytes.*--resume"):
                folder.write("b", TENSORS["b"])
            patch.setattr(os, "fsync", full)
            with pytest.raises(ResumableError, match=r"--resume"):
                folder.add_file("config.json", b"{}")
    with begin(tmp_path / "out", resume=True) as folder:
        assert [folder.is_written(name) for name in "abc"] == [True, False, False]
        fill(folder, "bc")
        folder.add_file("config.json", b"{}")
        folder.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_broken_disk_is_a_resumable_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with begin(tmp_path / "out") as folder:
        monkeypatch.setattr(os, "pwrite", broken)
        with pytest.raises(ResumableError, match=r"Input/output error.*--resume"):
            folder.write("b", TENSORS["b"])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete(tmp_path / "whole")
    whole: Callable[[int, memoryview, int], int] = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: whole(fd, data[:7], offset))
    complete(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_file_system_that_cannot_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    complete(tmp_path / "whole")
    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    complete(tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_free_space_is_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "free_bytes", lambda _: 1000)
    require_free_space(tmp_path / "not" / "yet", 1000)
    with pytest.raises(UserError, match=r"1,001 bytes.*1,000"):
        require_free_space(tmp_path / "not" / "yet", 1001)


def test_free_space_of_a_folder_to_come(tmp_path: Path) -> None:
    require_free_space(tmp_path / "a" / "b", 1)
    with pytest.raises(UserError):
        require_free_space(tmp_path / "a" / "b", 1 << 62)
