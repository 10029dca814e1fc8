"""Every way in which a safetensors header can lie is refused, with the file and the tensor named."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint.safetensors_header import MAX_HEADER_BYTES, read_header
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.errors import UserError

Header = dict[str, Any]


def good() -> Header:
    return {
        "__metadata__": {"format": "pt"},
        "first": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "second": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }


def file_bytes(header: Header | bytes, data: int = 24) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(range(data))


def second(**changes: object) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        header["second"] |= changes
        return header

    return change


def without(key: str) -> Callable[[Header], Header]:
    def change(header: Header) -> Header:
        del header["second"][key]
        return header

    return change


# name of the lie: (change of the good header, words the message must hold)
LIES: dict[str, tuple[Callable[[Header], Header], list[str]]] = {
    "unknown dtype": (second(dtype="F8_E3M4"), ["'second'", "F8_E3M4"]),
    "dtype is no string": (second(dtype=7), ["'second'", "7"]),
    "dtype is a list": (second(dtype=["F32"]), ["'second'", "F32"]),
    "negative size": (second(shape=[-4]), ["'second'", "-4"]),
    "two negative sizes": (second(shape=[-2, -2]), ["'second'", "-2"]),
    "bool as size": (second(shape=[True, 4]), ["'second'", "True"]),
    "fraction as size": (second(shape=[4.0]), ["'second'", "4.0"]),
    "shape is no list": (second(shape=4), ["'second'", "shape"]),
    "too many dimensions": (second(shape=[1] * 65), ["'second'", "65"]),
    "size does not fit offsets": (second(shape=[5]), ["'second'", "10 bytes", "8"]),
    "huge size": (second(shape=[1 << 61]), ["'second'", str(1 << 62)]),
    "size beyond 63 bits": (second(shape=[1 << 62, 1 << 62]), ["'second'", "impossible"]),
    "empty but huge": (second(shape=[0, 1 << 64], data_offsets=[16, 16]), ["'second'", "impossible"]),
    "end before begin": (second(data_offsets=[24, 16]), ["'second'", "16", "24"]),
    "one offset": (second(data_offsets=[16]), ["'second'", "data_offsets"]),
    "negative offset": (second(data_offsets=[-8, 0]), ["'second'", "-8"]),
    "bool offset": (second(data_offsets=[False, 8]), ["'second'", "False"]),
    "past the end": (
        second(shape=[8], data_offsets=[16, 32]),
        ["'second'", "32", "24", "truncated", "again"],
    ),
    "overlap": (second(data_offsets=[12, 20]), ["'first'", "'second'", "overlap"]),
    "hole": (second(shape=[2], data_offsets=[20, 24]), ["'second'", "4 bytes"]),
    "bytes after the last": (second(shape=[2], data_offsets=[16, 20]), ["'second'", "4 bytes after"]),
    "no dtype": (without("dtype"), ["'second'", "dtype"]),
    "no shape": (without("shape"), ["'second'", "shape"]),
    "no offsets": (without("data_offsets"), ["'second'", "data_offsets"]),
    "entry is a list": (lambda h: h | {"second": [1]}, ["'second'"]),
    "entry is null": (lambda h: h | {"second": None}, ["'second'"]),
    "metadata value is a number": (lambda h: h | {"__metadata__": {"a": 1}}, ["__metadata__", "'a'"]),
    "metadata is a list": (lambda h: h | {"__metadata__": []}, ["__metadata__"]),
    "odd F4": (
        lambda h: h | {"second": {"dtype": "F4", "shape": [2, 7], "data_offsets": [16, 23]}},
        ["'second'", "byte boundary"],
    ),
    "F6 ends inside a byte": (
        lambda h: h | {"second": {"dtype": "F6_E2M3", "shape": [3], "data_offsets": [16, 18]}},
        ["'second'", "byte boundary"],
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused_by_name(tmp_path: Path, lie: str) -> None:
    change, words = LIES[lie]
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_bytes(change(good())))
    with pytest.raises(UserError) as caught:
        read_header(path)
    for word in [str(path), *words]:
        assert word in str(caught.value)


WHOLE = file_bytes(good())
BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "0 bytes"),
    "seven bytes": (WHOLE[:7], "7 bytes"),
    "cut in the header": (WHOLE[:40], "truncated"),
    "cut in the data": (WHOLE[:-1], "truncated"),
    "longer than declared": (WHOLE + b"x", "1 bytes after"),
    "header length of all ones": (b"\xff" * 8 + WHOLE[8:], "damaged"),
    "header length over the limit": (struct.pack("<Q", MAX_HEADER_BYTES + 1) + WHOLE[8:], "damaged"),
    "header of length 0": (struct.pack("<Q", 0) + WHOLE[8:], "'{'"),
    "no JSON": (file_bytes(b"{nonsense}"), "JSON"),
    "a JSON list": (file_bytes(b"[1, 2]  "), "'{'"),
    "a leading space": (file_bytes(b" {}", 0), "'{'"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "UTF-8"),
    "NaN": (file_bytes(b'{"a": NaN}'), "JSON"),
    "a name twice": (file_bytes(b'{"a": {}, "a": {}}'), "'a' stands twice"),
    "a key twice": (file_bytes(b'{"a": {"dtype": "U8", "dtype": "F32"}}'), "'dtype' stands twice"),
    "nested too deeply": (file_bytes(b'{"a":' + b"[" * 100_000), "deep"),
    "a number of 5000 digits": (file_bytes(b'{"a":' + b"9" * 5000 + b"}"), "JSON"),
    "half a surrogate pair": (file_bytes(b'{"\\ud800": 1}'), "no character"),
    "two documents": (file_bytes(b"{}{}", 0), "JSON"),
    "a zip archive": (b"PK\x03\x04" + bytes(100), "safetensors"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, name: str) -> None:
    data, word = BROKEN[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert word in str(caught.value)


def test_every_single_cut_of_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for length in range(len(WHOLE)):
        path.write_bytes(WHOLE[:length])
        with pytest.raises(UserError):
            read_header(path)
    path.write_bytes(WHOLE)
    assert set(read_header(path).tensors) == {"first", "second"}


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        name: torch.zeros(3, 4, dtype=stored.torch)
        for name, stored in DTYPES.items()
        if stored.torch is not None and name != "F4"
    }
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.zeros(0, 4)}
    path = tmp_path / "all.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.metadata == {"format": "pt"}
    assert {name: stored.info.shape for name, stored in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for name in DTYPES.keys() & tensors.keys():
        assert header.tensors[name].info.dtype == name
        assert header.tensors[name].info.nbytes == 12 * DTYPES[name].bits // 8


def test_a_missing_file_is_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone"):
        read_header(tmp_path / "gone.safetensors")
