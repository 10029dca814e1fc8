"""Tensors written by rows: in any order, from several threads, past the page cache, while others are made durable."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from qwen_quantize.checkpoint import direct_io
from qwen_quantize.checkpoint.direct_io import ALIGNMENT, PlacedFile, aligned_bytes, read_range
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.writer import OutputFolder, OutputTensor, plan_shards
from qwen_quantize.errors import ResumableError
from tests.checkpoint.test_output_folder import TENSORS, begin, complete, contents, fill

LARGE = torch.arange(3000 * 1001, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(3000, 1001)
PLAN = plan_shards([OutputTensor("large", "BF16", (3000, 1001)), OutputTensor("small", "F32", (7,))])


def large_folder(target: Path, *, resume: bool = False) -> OutputFolder:
    return OutputFolder(target, PLAN, resume=resume, overwrite=False)


def test_rows_in_any_order(tmp_path: Path) -> None:
    complete(tmp_path / "whole")
    with begin(tmp_path / "out") as folder:
        fill(folder, "bc")
        for start, stop in ((7, 10), (0, 3), (2, 5), (2, 5), (4, 4)):
            folder.write_rows("a", start, TENSORS["a"][start:stop])
            assert not folder.is_written("a")
        with pytest.raises(ValueError, match="'a'"):
            folder.finish()
        folder.write_rows("a", 5, TENSORS["a"][5:7])
        assert folder.is_written("a")
        folder.write_rows("a", 1, TENSORS["a"][1:2])  # again, after it was whole
        folder.add_file("config.json", b"{}")
        folder.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_the_record_has_each_tensor_once(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        for start in range(10):
            folder.write_rows("a", start, TENSORS["a"][start : start + 1])
            folder.sync()
        folder.write_rows("a", 0, TENSORS["a"][:4])
        folder.sync()
        assert (folder.staging / ".written.jsonl").read_bytes() == b'{"tensor": "a"}\n'


@pytest.mark.parametrize(
    ("name", "start", "tensor", "message"),
    [
        ("x", 0, TENSORS["a"], "'x' is not in the plan"),
        ("a", 0, TENSORS["a"].double(), "F32.*float64"),
        ("a", 0, TENSORS["a"][:, :9], r"\[10, 10\].*\[10, 9\]"),
        ("a", 0, torch.tensor(1.0), r"came as torch.float32 \[\]"),
        ("a", 8, TENSORS["a"][:3], r"rows \[8, 11\) lie outside"),
        ("a", -1, TENSORS["a"][:3], r"rows \[-1, 2\) lie outside"),
    ],
)
def test_rows_that_were_not_planned(
    tmp_path: Path, name: str, start: int, tensor: torch.Tensor, message: str
) -> None:
    with begin(tmp_path / "out") as folder, pytest.raises(ValueError, match=message):
        folder.write_rows(name, start, tensor)


def test_an_interrupted_tensor_is_not_written(tmp_path: Path) -> None:
    complete(tmp_path / "whole")
    with begin(tmp_path / "out") as folder:
        fill(folder, "b")
        folder.write_rows("a", 0, TENSORS["a"][:9])
        folder.sync()
    with begin(tmp_path / "out", resume=True) as folder:
        assert [folder.is_written(name) for name in "ab"] == [False, True]
        folder.write_rows("a", 9, TENSORS["a"][9:])  # what came before the kill counts for nothing
        assert not folder.is_written("a")
        folder.write_rows("a", 0, TENSORS["a"][:9])
        fill(folder, "c")
        folder.add_file("config.json", b"{}")
        folder.finish()
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("prepared", [True, False])
def test_large_rows_from_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool, prepared: bool
) -> None:
    """Pieces whose ends share blocks of the disk with their neighbours, while the folder is made durable."""
    if not direct:
        monkeypatch.setattr(direct_io, "_DIRECT", 0)
    with large_folder(tmp_path / "out") as folder:
        folder.write("small", torch.ones(7))

        def write(start: int) -> None:
            stop = min(start + 700, 3000)
            rows = LARGE[start:stop]
            if prepared:
                rows = folder.row_buffer("large", start, stop).copy_(rows)
            folder.write_rows("large", start, rows)
            folder.sync()

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(write, range(0, 3000, 700)))
        assert folder.is_written("large")
        assert torch.equal(folder.read("large").view(torch.int16), LARGE.view(torch.int16))
        folder.add_file("config.json", b"{}")
        folder.finish()
    found = open_source(tmp_path / "out").read("large")
    assert torch.equal(found.view(torch.int16), LARGE.view(torch.int16))


def test_direct_writes_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly all bytes of a piece from `row_buffer` go past the page cache, where the disk allows it."""
    path = tmp_path / "file"
    path.write_bytes(b"")
    file = PlacedFile(path)
    allowed = file._direct >= 0
    file.close()
    if not allowed:
        pytest.skip("this file system knows no direct transfers")
    written: dict[bool, int] = {True: 0, False: 0}
    whole: Callable[[int, memoryview, int], int] = os.pwrite
    with large_folder(tmp_path / "out") as folder:
        placed = folder._file("model.safetensors")

        def counting(descriptor: int, data: memoryview, offset: int) -> int:
            written[descriptor == placed._direct] += len(data)
            return whole(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", counting)
        folder.write_rows("large", 5, folder.row_buffer("large", 5, 2000).copy_(LARGE[5:2000]))
    assert written[False] < 2 * ALIGNMENT
    assert sum(written.values()) == 1995 * 1001 * 2


def test_a_disk_that_refuses_direct_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[[int, memoryview, int], int] = os.pwrite
    with large_folder(tmp_path / "out") as folder:
        placed = folder._file("model.safetensors")

        def refusing(descriptor: int, data: memoryview, offset: int) -> int:
            if descriptor == placed._direct:
                raise OSError(errno.EINVAL, "no")
            return whole(descriptor, data, offset)

        monkeypatch.setattr(os, "pwrite", refusing)
        folder.write_rows("large", 0, folder.row_buffer("large", 0, 3000).copy_(LARGE))
        assert torch.equal(folder.read("large").view(torch.int16), LARGE.view(torch.int16))


def test_a_full_disk_while_rows_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with large_folder(tmp_path / "out") as folder:
        room = folder.row_buffer("large", 0, 3000).copy_(LARGE)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(ResumableError, match=r"disk is full.*--resume"):
                folder.write_rows("large", 0, room)
        assert not folder.is_written("large")
        folder.write_rows("large", 0, room)
        assert folder.is_written("large")


def test_a_sync_covers_what_came_before_it_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor that is written while a sync is under way is made durable by the next one."""
    whole: Callable[[int], None] = os.fsync
    with begin(tmp_path / "out") as folder:
        fill(folder, "a")
        started, go_on = threading.Event(), threading.Event()

        def slow(descriptor: int) -> None:
            started.set()
            go_on.wait(10)
            whole(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", slow)
            syncing = threading.Thread(target=folder.sync)
            syncing.start()
            assert started.wait(10)
            fill(folder, "b")  # not held up
            go_on.set()
            syncing.join()
        record = folder.staging / ".written.jsonl"
        assert record.read_bytes() == b'{"tensor": "a"}\n'
        folder.sync()
        assert record.read_bytes() == b'{"tensor": "a"}\n{"tensor": "b"}\n'


def test_a_failed_sync_forgets_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with begin(tmp_path / "out") as folder:
        fill(folder, "ab")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(ResumableError):
                folder.sync()
        folder.sync()
        assert len((folder.staging / ".written.jsonl").read_bytes().splitlines()) == 2


def test_reading_back(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as folder:
        with pytest.raises(ValueError, match="'b' is not written yet"):
            folder.read("b")
        fill(folder)
        for name, tensor in TENSORS.items():
            assert torch.equal(folder.read(name).view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("way", ["direct", "ordinary", "cached", "refused"])
def test_ranges_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "ordinary":
        monkeypatch.setattr(direct_io, "_DIRECT", 0)
    elif way != "cached":  # otherwise what was just written is still there
        monkeypatch.setattr(direct_io, "_is_cached", lambda *_: False)
    if way == "refused":
        monkeypatch.setattr(direct_io, "_read_directly", lambda *_: None)
    content = torch.randint(0, 256, (3 << 20,), dtype=torch.uint8)[: (3 << 20) - 5]
    (tmp_path / "file").write_bytes(content.numpy().tobytes())
    size = len(content)
    for begin_, nbytes in (
        (0, size),
        (1, size - 1),
        (4096, 1 << 20),
        (4095, (1 << 20) + 3),
        (size - 9, 9),
        (7, 0),
    ):
        data, found = read_range(tmp_path / "file", begin_, nbytes)
        assert found == nbytes
        assert torch.equal(data, content[begin_ : begin_ + nbytes])
    data, found = read_range(tmp_path / "file", 100, size)  # more than there is
    assert found == size - 100
    assert torch.equal(data[:found], content[100:])


def test_what_is_cached_is_read_from_the_cache(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 << 20))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        assert direct_io._is_cached(file.fileno(), 1 << 20)
        forgets = False
        for _ in range(20):  # the system forgets when it likes: other processors may hold pages a while
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if not direct_io._is_cached(file.fileno(), 1 << 20):
                read_range(path, 0, 4 << 20)
                if not direct_io._is_cached(file.fileno(), 3 << 20):  # and does not go there when it was not
                    return
                forgets = True
            time.sleep(0.05)
        if not forgets:
            pytest.skip("this file system keeps what it is told to forget")
        pytest.fail("a range that was not cached is cached after it was read, every time")


def test_aligned_bytes() -> None:
    for phase in (0, 1, 2048, ALIGNMENT - 1):
        room = aligned_bytes(100, phase)
        assert room.data_ptr() % ALIGNMENT == phase
        assert len(room) == 100
