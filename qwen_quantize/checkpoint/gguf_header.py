"""The header of a GGUF file, read as a hostile one.

Layout (ggml's docs/gguf.md, versions 2 and 3, little-endian): magic, version, tensor count, key count; the
key-value pairs; the tensor records; padding to the alignment; the data. Every count is held against the
bytes that are left before anything is built from it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from qwen_quantize.errors import UserError

Value = bool | int | float | str | list["Value"]

MAX_KEYS = 100_000
MAX_TENSORS = 1_000_000
MAX_ARRAY = 16_000_000  # vocabularies have a few hundred thousand entries
MAX_NESTING = 4
MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 65_535

_STRING, _ARRAY, _BOOL = 8, 9, 7
# fmt: off
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
            6: "<f4", 7: "u1", 10: "<u8", 11: "<i8", 12: "<f8"}
# fmt: on


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor record; shape in torch's order (rows first), begin counted from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    begin: int
    nbytes: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row along the last dimension, a whole number of quantization blocks."""
        block, size = gguf.GGML_QUANT_SIZES[self.type]
        return int(self.shape[-1] // block * size)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Everything before the data; header_bytes is where the data begins."""

    file: Path
    values: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]
    header_bytes: int
    file_bytes: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Read and validate the header of `path`; UserError naming file, key or tensor for whatever is wrong."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise UserError(f"{path} holds {size} bytes, too few for a GGUF; download it again")
            with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """A position in the header; every step checks that the bytes are there."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.position = 0

    def fail(self, what: str) -> UserError:
        return UserError(f"{self.path}: {what}; the file is damaged or not a GGUF, download it again")

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.position:
            raise self.fail(
                f"{what} needs {count} bytes at {self.position}, and the file ends at {self.size}: it is "
                "truncated"
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def number(self, layout: str, what: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]
        return value

    def text(self, what: str, limit: int | None = None) -> str:
        length = self.number("<Q", what)
        if limit is not None and length > limit:
            raise self.fail(f"{what} declares {length} bytes, more than the {limit} allowed")
        data = self.take(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            if limit is not None:
                raise self.fail(f"{what} is not UTF-8") from None
            # Some vocabularies hold single bytes of a character: keep them apart, one escape each.
            return data.decode("utf-8", "surrogateescape")

    def value(self, kind: int, what: str, depth: int = 0) -> Value:
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what, depth)
        if kind not in _SCALARS:
            raise self.fail(f"{what} has the unknown value type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        scalar = np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()
        return bool(scalar) if kind == _BOOL else scalar

    def array(self, what: str, depth: int) -> list[Value]:
        kind, count = self.number("<I", what), self.number("<Q", what)
        if depth >= MAX_NESTING:
            raise self.fail(f"{what} nests arrays more than {MAX_NESTING} deep")
        if count > MAX_ARRAY:
            raise self.fail(f"{what} declares {count} entries, more than the {MAX_ARRAY} allowed")
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            numbers = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
            found: list[Value] = (numbers.astype(bool) if kind == _BOOL else numbers).tolist()
            return found
        return [self.value(kind, what, depth + 1) for _ in range(count)]

    def header(self) -> GgufHeader:
        magic = self.take(4, "the magic")
        if magic != b"GGUF":
            raise self.fail(f"it begins with {magic!r} where b'GGUF' must stand")
        version = self.number("<I", "the version")
        if version not in (2, 3):
            hint = " (a big-endian file)" if version & 0xFFFF == 0 and version else ""
            raise self.fail(f"GGUF version {version}{hint} cannot be read; 2 and 3 can")
        tensor_count, key_count = self.number("<Q", "the counts"), self.number("<Q", "the counts")
        if tensor_count > MAX_TENSORS or key_count > MAX_KEYS:
            raise self.fail(
                f"it declares {tensor_count} tensors and {key_count} keys; at most {MAX_TENSORS} and "
                f"{MAX_KEYS} are allowed"
            )
        values: dict[str, Value] = {}
        for number in range(key_count):
            key = self.text(f"key {number}", MAX_NAME_BYTES)
            if key in values:
                raise self.fail(f"the key {key!r} stands twice")
            values[key] = self.value(self.number("<I", f"key {key!r}"), f"key {key!r}")
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self.fail(f"the alignment {alignment!r:.80} is no power of two between 8 and 1048576")
        records = [self.tensor_record(number) for number in range(tensor_count)]
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in records:
            if name in tensors:
                raise self.fail(f"tensor {name!r} stands twice")
            tensors[name] = self.tensor(name, shape, kind, offset, start, alignment)
        self.check_overlap(tensors)
        return GgufHeader(self.path, values, tensors, min(start, self.size), self.size)

    def tensor_record(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self.text(f"tensor {number}", MAX_NAME_BYTES)
        what = f"tensor {name!r}"
        dimensions = self.number("<I", what)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self.fail(f"{what} has {dimensions} dimensions; 1 to {MAX_DIMENSIONS} are allowed")
        # GGUF writes the fastest dimension first, torch last.
        shape = tuple(self.number("<Q", what) for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self.fail(f"{what} has the empty shape {list(shape)}")
        return name, shape, self.number("<I", what), self.number("<Q", what)

    def tensor(
        self, name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, alignment: int
    ) -> GgufTensor:
        what = f"tensor {name!r}"
        try:
            type_ = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise self.fail(f"{what} has the unknown type {kind}") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[type_]
        if shape[-1] % block:
            raise self.fail(f"{what} has rows of {shape[-1]}, no multiple of {block} as {type_.name} needs")
        nbytes = math.prod(shape) // block * block_bytes
        begin = start + offset
        if offset % alignment:
            raise self.fail(f"{what} begins at {offset}, which is not aligned to {alignment}")
        if begin + nbytes > self.size:
            raise self.fail(
                f"{what} of {type_.name} {list(shape)} ends at byte {begin + nbytes}, and the file ends at "
                f"{self.size}: it is truncated"
            )
        return GgufTensor(name, shape, type_, begin, nbytes)

    def check_overlap(self, tensors: Mapping[str, GgufTensor]) -> None:
        last: GgufTensor | None = None
        for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.nbytes)):
            if last is not None and tensor.begin < last.begin + last.nbytes:
                raise self.fail(f"tensors {last.name!r} and {tensor.name!r} overlap")
            last = tensor
