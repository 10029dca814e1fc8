"""A GGUF that lies, is cut or is something else ends in a UserError that names what is wrong."""

from __future__ import annotations

import random
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from qwen_quantize.checkpoint.gguf_header import read_gguf_header
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.errors import UserError
from tests.checkpoint.tiny_gguf import make_model, write_gguf

HUGE = (1 << 63) + 7


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32, 2), kind: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", kind, offset)


@dataclass
class File:
    """A GGUF put together by hand."""

    magic: bytes = b"GGUF"
    version: int = 3
    keys: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=lambda: [tensor()])
    key_count: int | None = None
    tensor_count: int | None = None
    data: int = 256

    def build(self) -> bytes:
        counts = (
            len(self.tensors) if self.tensor_count is None else self.tensor_count,
            len(self.keys) if self.key_count is None else self.key_count,
        )
        head = self.magic + struct.pack("<I", self.version) + struct.pack("<QQ", *counts)
        head += b"".join(self.keys) + b"".join(self.tensors)
        return head + b"\0" * (-len(head) % 32) + b"\0" * self.data


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + data


NESTED = array(9, 1) * 10_000
LIES: dict[str, tuple[File, str]] = {
    "another magic": (File(magic=b"GGML"), "GGML"),
    "version 1": (File(version=1), "version 1"),
    "version 4": (File(version=4), "version 4"),
    "big-endian": (File(version=3 << 24), "big-endian"),
    "huge tensor count": (File(tensor_count=HUGE), str(HUGE)),
    "huge key count": (File(key_count=HUGE), str(HUGE)),
    "more tensors than there are": (File(tensor_count=900_000), "tensor"),
    "more keys than there are": (File(key_count=90_000), "key"),
    "huge key name": (File(keys=[struct.pack("<Q", HUGE)]), str(HUGE)),
    "long key name": (File(keys=[text(b"k" * 70_000)]), "70000"),
    "key name not UTF-8": (File(keys=[key(b"\xff", 0, b"\0")]), "UTF-8"),
    "huge string": (File(keys=[key(b"k", 8, struct.pack("<Q", HUGE))]), "'k'"),
    "huge array": (File(keys=[key(b"k", 9, array(0, HUGE))]), "'k'"),
    "array past the end": (File(keys=[key(b"k", 9, array(12, 1_000_000))]), "'k'"),
    "array of strings past the end": (File(keys=[key(b"k", 9, array(8, 15_000_000))]), "'k'"),
    "nested arrays": (File(keys=[key(b"k", 9, NESTED)]), "'k'"),
    "unknown value type": (File(keys=[key(b"k", 13, b"")]), "13"),
    "unknown type in an array": (File(keys=[key(b"k", 9, array(99, 3))]), "99"),
    "a key twice": (File(keys=[key(b"k", 0, b"\0")] * 2), "'k'"),
    "alignment 0": (File(keys=[key(b"general.alignment", 4, struct.pack("<I", 0))]), "alignment"),
    "alignment 48": (File(keys=[key(b"general.alignment", 4, struct.pack("<I", 48))]), "48"),
    "alignment as text": (File(keys=[key(b"general.alignment", 8, text(b"32"))]), "alignment"),
    "no dimensions": (File(tensors=[tensor(dims=())]), "'t'"),
    "five dimensions": (File(tensors=[tensor(dims=(32, 1, 1, 1, 1))]), "'t'"),
    "huge dimension": (File(tensors=[tensor(dims=(1 << 63, 1 << 63))]), "'t'"),
    "empty shape": (File(tensors=[tensor(dims=(0, 1 << 62))]), "'t'"),
    "unknown tensor type": (File(tensors=[tensor(kind=4)]), "type 4"),
    "half a block": (File(tensors=[tensor(dims=(48,), kind=2)]), "48"),
    "past the end": (File(data=255), "truncated"),
    "huge offset": (File(tensors=[tensor(offset=1 << 62)]), "'t'"),
    "unaligned offset": (File(tensors=[tensor(dims=(4,), offset=4)]), "aligned"),
    "a tensor twice": (File(tensors=[tensor(), tensor()]), "'t' stands twice"),
    "overlap": (File(tensors=[tensor(b"a"), tensor(b"b", offset=32)], data=512), "'a' and 'b' overlap"),
    "tensor name not UTF-8": (File(tensors=[tensor(b"\xfe\xff")]), "UTF-8"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_header_is_refused_by_name(tmp_path: Path, lie: str) -> None:
    file, word = LIES[lie]
    path = tmp_path / "m.gguf"
    path.write_bytes(file.build())
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        open_source(path)
    assert time.monotonic() - started < 2
    assert str(path) in str(caught.value)
    assert word in str(caught.value)


def test_the_file_without_a_lie(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(File(keys=[key(b"k", 9, array(8, 2, text(b"x") + text("é".encode())))]).build())
    header = read_gguf_header(path)
    assert header.values == {"k": ["x", "é"]}
    assert header.tensors["t"].shape == (2, 32)


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF" + bytes(19), b"\0" * 100], ids=len)
def test_what_is_no_gguf(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"m\.gguf"):
        open_source(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("whole") / "m.gguf", make_model("llama")).read_bytes()


def test_cut_anywhere(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "m.gguf"
    for length in [*range(0, 300, 7), *range(300, len(whole), len(whole) // 60), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"m\.gguf"):
            open_source(path)


def test_damaged_anywhere(tmp_path: Path, whole: bytes) -> None:
    """Random bytes of the header are changed: it opens and its files can be built, or it is a UserError."""
    path = tmp_path / "m.gguf"
    path.write_bytes(whole)
    header_bytes = read_gguf_header(path).header_bytes
    generator = random.Random(5)
    refused = []
    for _ in range(400):
        damaged = bytearray(whole)
        for _ in range(generator.choice((1, 1, 2, 8))):
            damaged[generator.randrange(header_bytes)] = generator.randrange(256)
        path.write_bytes(damaged)
        try:
            source = open_source(path)
            source.side_files()
            for name in source.names():
                source.read(name)
        except UserError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(path) in message for message in refused)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (b"llama.block_count", 0),
        (b"llama.embedding_length", -1),
        (b"llama.attention.head_count", 0),
        (b"llama.rope.dimension_count", 8),
    ],
)
def test_a_config_that_cannot_be(tmp_path: Path, whole: bytes, name: bytes, value: int) -> None:
    path = tmp_path / "m.gguf"
    place = whole.index(name) + len(name) + 4
    path.write_bytes(whole[:place] + struct.pack("<i", value) + whole[place + 4 :])
    with pytest.raises(UserError, match=r"m\.gguf"):
        open_source(path)
