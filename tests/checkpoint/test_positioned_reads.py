"""Reading stored bytes into memory of the caller's: exact, bounded, from several threads, without leaks."""

from __future__ import annotations

import gc
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint import positioned_reads
from qwen_quantize.checkpoint.positioned_reads import PositionedReads
from qwen_quantize.checkpoint.safetensors_folder import SafetensorsFolder
from qwen_quantize.errors import UserError

VALUES = torch.arange(600, dtype=torch.int16).reshape(20, 30)
BYTES = VALUES.view(torch.uint8).reshape(-1)


@pytest.fixture
def folder(tmp_path: Path) -> SafetensorsFolder:
    (tmp_path / "config.json").write_text(json.dumps({}))
    save_file({"a": VALUES, "b": torch.ones(7), "empty": torch.zeros(0, 3)}, tmp_path / "model.safetensors")
    return SafetensorsFolder(tmp_path)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def test_any_piece_lands_in_the_buffer(folder: SafetensorsFolder) -> None:
    buffer = torch.full((1300,), 77, dtype=torch.uint8)
    for skip, length in ((0, 1200), (0, 0), (1, 13), (1199, 1), (1200, 0), (500, 64)):
        folder.read_into("a", skip, buffer[3 : 3 + length])
        assert torch.equal(buffer[3 : 3 + length], BYTES[skip : skip + length])
        assert (buffer[:3] == 77).all()
        assert (buffer[3 + length :] == 77).all()
        buffer.fill_(77)
    folder.read_into("empty", 0, buffer[:0])


def test_a_buffer_of_several_dimensions(folder: SafetensorsFolder) -> None:
    buffer = torch.empty(20, 60, dtype=torch.uint8)
    folder.read_into("a", 0, buffer)
    assert torch.equal(buffer.view(torch.int16), VALUES)


@pytest.mark.parametrize(("skip", "length"), [(-1, 1), (0, 1201), (1200, 1), (1300, 0)])
def test_bytes_outside_the_tensor(folder: SafetensorsFolder, skip: int, length: int) -> None:
    with pytest.raises(ValueError, match="'a' of 1200 bytes"):
        folder.read_into("a", skip, torch.empty(length, dtype=torch.uint8))


@pytest.mark.parametrize("buffer", [torch.empty(4), torch.empty(4, 4, dtype=torch.uint8).t()[:, :2]])
def test_a_buffer_that_cannot_be_filled(folder: SafetensorsFolder, buffer: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="contiguous uint8"):
        folder.read_into("a", 0, buffer)


def test_a_file_cut_after_opening(folder: SafetensorsFolder) -> None:
    path = folder.path / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size - 30)
    # The narrower dtype stands last in the file.
    folder.read_into("b", 0, torch.empty(28, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"model\.safetensors: tensor 'a' ends after 1170 of its 1200 bytes"):
        folder.read_into("a", 0, torch.empty(1200, dtype=torch.uint8))


def test_a_file_gone_after_opening(folder: SafetensorsFolder) -> None:
    (folder.path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors.*'a' cannot be read: No such file"):
        folder.read("a")


def test_threads_share_a_file(folder: SafetensorsFolder) -> None:
    def piece(number: int) -> bool:
        skip = number * 37 % 1100
        buffer = torch.empty(100, dtype=torch.uint8)
        folder.read_into("a", skip, buffer)
        return torch.equal(buffer, BYTES[skip : skip + 100])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(piece, range(500)))


@pytest.mark.parametrize("limit", [0, 2, 256])
def test_descriptors_are_few_and_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(positioned_reads, "MAX_OPEN", limit)
    files = [tmp_path / str(number) for number in range(5)]
    for file in files:
        file.write_bytes(file.name.encode() * 3)
    before = open_descriptors()
    reads = PositionedReads()
    for _ in range(2):
        for file in files:
            data = bytearray(2)
            assert reads.read_into(file, 1, memoryview(data)) == 2
            assert data == file.name.encode() * 2
    assert open_descriptors() - before == min(limit, 5)
    assert reads.read_into(files[0], 2, memoryview(bytearray(5))) == 1
    del reads
    gc.collect()
    assert open_descriptors() == before
