"""The header of a safetensors file, read as a hostile one.

A file is: 8 bytes little-endian header length N, N bytes of JSON, then the data section. The JSON maps each
tensor to dtype, shape and [begin, end) in the data section, and may hold string metadata. The tensors must
cover the data section exactly. All of that is checked before a byte of data is read or a buffer is sized.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_quantize.checkpoint.json_file import parse_object
from qwen_quantize.checkpoint.tensor_info import DTYPES, TensorInfo, storage_bits
from qwen_quantize.errors import UserError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the library's own limit
MAX_DIMENSIONS = 64  # torch's limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and where its first byte stands, counted from the start of the file."""

    info: TensorInfo
    begin: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """A validated header; `raw` is its bytes as they stand in the file."""

    file: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    file_bytes: int
    raw: bytes


def read_header(path: Path) -> SafetensorsHeader:
    """Read and validate the header of `path`; UserError naming file and tensor for whatever is wrong."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(LENGTH_BYTES)
            if len(prefix) < LENGTH_BYTES:
                raise UserError(
                    f"{path} holds {len(prefix)} bytes, too few for a safetensors file: the file is "
                    "truncated; download it again"
                )
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise UserError(
                    f"{path} declares a header of {length} bytes, more than the {MAX_HEADER_BYTES} that are "
                    "allowed: this is not a safetensors file, or it is damaged; download it again"
                )
            if length > size - LENGTH_BYTES:
                raise UserError(
                    f"{path} declares a header of {length} bytes and has {size - LENGTH_BYTES} after its "
                    "length field: the file is truncated; download it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(raw) != length:
        raise UserError(f"{path} became shorter while it was read; run again when it is complete")
    if not raw.startswith(b"{"):
        raise UserError(
            f"{path} has a header that does not begin with '{{': this is not a safetensors file, or it is "
            "damaged; download it again"
        )
    entries = parse_object(raw, f"the header of {path}")
    metadata = _metadata(path, entries.pop("__metadata__", {}))
    data_start = LENGTH_BYTES + length
    tensors = {
        name: _tensor(path, name, entry, data_start, size - data_start) for name, entry in entries.items()
    }
    _check_cover(path, tensors, data_start, size)
    return SafetensorsHeader(path, tensors, metadata, size, raw)


def _metadata(path: Path, found: object) -> dict[str, str]:
    if not isinstance(found, dict):
        raise UserError(f"{path}: '__metadata__' must map strings to strings, found {found!r:.80}")
    for key, value in found.items():
        if not isinstance(value, str):
            raise UserError(f"{path}: '__metadata__' entry {key!r} must be a string, found {value!r:.80}")
    return found


def _is_count(value: object) -> bool:
    # bool is a subclass of int, and JSON's `true` would pass for 1.
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _tensor(path: Path, name: str, entry: Any, data_start: int, data_bytes: int) -> StoredTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise UserError(
            f"{where} must be an object with dtype, shape and data_offsets, found {entry!r:.80}; "
            "download the file again"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(f"{where} has the unknown dtype {dtype!r:.80}; known are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(_is_count(size) for size in shape):
        raise UserError(
            f"{where} must have a shape of whole numbers that are not negative, found {shape!r:.80}"
        )
    if len(shape) > MAX_DIMENSIONS:
        raise UserError(f"{where} has {len(shape)} dimensions; at most {MAX_DIMENSIONS} can be read")
    if math.prod(max(size, 1) for size in shape) >= 1 << 63:  # torch counts strides in 63 bits
        raise UserError(f"{where} has the impossible shape {shape}; download the file again")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(o) for o in offsets):
        raise UserError(f"{where} must have data_offsets of two whole numbers, found {offsets!r:.80}")
    begin, end = offsets
    if end < begin:
        raise UserError(f"{where} ends at byte {end}, before its begin at {begin}; download the file again")
    bits = storage_bits(dtype, tuple(shape))
    if bits % 8 or (dtype == "F4" and math.prod(shape) and shape[-1] % 2):
        raise UserError(f"{where} of {dtype} {shape} does not end on a byte boundary")
    if end - begin != bits // 8:
        raise UserError(
            f"{where} of {dtype} {shape} needs {bits // 8} bytes, its data_offsets hold {end - begin}; "
            "download the file again"
        )
    if end > data_bytes:
        raise UserError(
            f"{where} ends at byte {end} of the data, which has {data_bytes}: the file is truncated: it has "
            f"{data_start + data_bytes} bytes and should have at least {data_start + end}; download it again"
        )
    info = TensorInfo(name, dtype, tuple(shape), end - begin, path)
    return StoredTensor(info, data_start + begin)


def _check_cover(path: Path, tensors: Mapping[str, StoredTensor], data_start: int, size: int) -> None:
    """The tensors must tile the data section: no byte in two of them, none in no tensor."""
    position = data_start
    last = None
    for tensor in sorted(tensors.values(), key=lambda t: (t.begin, t.info.nbytes)):
        name = tensor.info.name
        if tensor.begin < position:
            raise UserError(f"{path}: tensors {last!r} and {name!r} overlap; download the file again")
        if tensor.begin > position:
            raise UserError(
                f"{path}: {tensor.begin - position} bytes before tensor {name!r} belong to no tensor; "
                "download the file again"
            )
        position, last = tensor.begin + tensor.info.nbytes, name
    if position != size:
        raise UserError(
            f"{path}: {size - position} bytes after the last tensor {last!r} belong to no tensor; "
            "download the file again"
        )
