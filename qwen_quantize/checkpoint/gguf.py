"""A single GGUF file as a checkpoint: tensors are dequantized to float32 one at a time."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from qwen_quantize.checkpoint.gguf_config import (
    ROPE_FACTORS,
    architecture_of,
    build_config,
    hugging_face_name,
)
from qwen_quantize.checkpoint.gguf_header import GgufTensor, read_gguf_header
from qwen_quantize.checkpoint.gguf_layout import BLOCK_SPECS, PLAIN_KINDS, unpack_blocks
from qwen_quantize.checkpoint.gguf_tokenizer import tokenizer_files
from qwen_quantize.checkpoint.tensor_info import TensorInfo
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.spec import Format

_Array = np.ndarray[Any, np.dtype[Any]]
_CHUNK_BYTES = 16 << 20  # of file data dequantized at once: numpy's temporaries are several times as large

# Types that are numbers as they stand.
_PLAIN: dict[gguf.GGMLQuantizationType, np.dtype[Any]] = {
    gguf.GGMLQuantizationType.F64: np.dtype("<f8"),
    gguf.GGMLQuantizationType.I8: np.dtype("i1"),
    gguf.GGMLQuantizationType.I16: np.dtype("<i2"),
    gguf.GGMLQuantizationType.I32: np.dtype("<i4"),
    gguf.GGMLQuantizationType.I64: np.dtype("<i8"),
}
_INTEGERS = frozenset(kind.name for kind in _PLAIN)


class GgufSource:
    """A GGUF file seen as the Hugging Face model it was converted from; every tensor reads as F32."""

    kind = "gguf"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._header = read_gguf_header(path)
        _, self._architecture = architecture_of(self._header)
        factors = self._header.tensors.get(ROPE_FACTORS)
        table = None if factors is None else self._rows(factors, 0, 1).reshape(-1)
        self.config: dict[str, Any] = build_config(self._header, table)
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in self._header.tensors.items():
            if name != ROPE_FACTORS:
                self._tensors[hugging_face_name(self._header, name)] = tensor

    @property
    def lossy_types(self) -> tuple[str, ...]:
        found = {tensor.type.name: _bits_per_element(tensor) for tensor in self._tensors.values()}
        return tuple(sorted(name for name, bits in found.items() if bits < 16 and name not in _INTEGERS))

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def info(self, name: str) -> TensorInfo:
        shape = self._find(name).shape
        return TensorInfo(name, "F32", shape, 4 * int(np.prod(shape, dtype=np.int64)), self.path)

    def _find(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise UserError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]

    def read(self, name: str) -> Tensor:
        return self.read_rows(name, 0, self._find(name).shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        tensor = self._find(name)
        if not 0 <= start <= stop <= tensor.shape[0]:
            raise ValueError(f"rows [{start}, {stop}) do not exist in {name!r} of shape {list(tensor.shape)}")
        head_rows = self._head_rows(name, tensor)
        if head_rows is None:
            values = self._entries(tensor, start, stop)
        else:  # rows move within their head only
            first, last = start // head_rows, -(-stop // head_rows)
            stored = self._entries(tensor, first * head_rows, last * head_rows)
            values = unpermute(stored, max(last - first, 1))[start - first * head_rows :][: stop - start]
        return torch.from_numpy(np.ascontiguousarray(values))

    def _head_rows(self, name: str, tensor: GgufTensor) -> int | None:
        """Rows of one attention head where the file keeps them in another order, else None."""
        heads = self._permuted_heads(name)
        if heads is None:
            return None
        rows = tensor.shape[0]
        if rows % (2 * heads):
            raise UserError(
                f"{self.path}: tensor {tensor.name!r} has {rows} rows, which {heads} heads cannot share; the "
                "header belongs to another model, download the file again"
            )
        return rows // heads

    def _entries(self, tensor: GgufTensor, start: int, stop: int) -> _Array:
        """[start, stop) along the first dimension; a vector is one row of the file and is read whole."""
        if len(tensor.shape) == 1:
            return self._rows(tensor, 0, 1).reshape(-1)[start:stop]
        inner = math.prod(tensor.shape[1:-1])
        return self._rows(tensor, start * inner, stop * inner).reshape(stop - start, *tensor.shape[1:])

    def _permuted_heads(self, name: str) -> int | None:
        if self._architecture.permuted:
            if ".q_proj." in name:
                return int(self.config["num_attention_heads"])
            if ".k_proj." in name:
                return int(self.config["num_key_value_heads"])
        return None

    def _rows(self, tensor: GgufTensor, start: int, stop: int) -> _Array:
        """Rows [start, stop) of the tensor seen as a matrix, [stop - start, last dimension] float32."""
        values = np.empty((stop - start, tensor.shape[-1]), np.float32)
        step = max(1, _CHUNK_BYTES // max(tensor.row_bytes, 1))
        for begin in range(start, stop, step):
            end = min(begin + step, stop)
            data = self._bytes(tensor, begin, end)
            values[begin - start : end - start] = self._dequantize(data, tensor, end - begin)
        return values

    def _bytes(self, tensor: GgufTensor, start: int, stop: int) -> bytes:
        """Rows [start, stop) as the file has them."""
        length = (stop - start) * tensor.row_bytes
        try:
            with self.path.open("rb") as file:
                data = os.pread(file.fileno(), length, tensor.begin + start * tensor.row_bytes)
        except OSError as error:
            raise UserError(
                f"{self.path}: tensor {tensor.name!r} cannot be read: {error.strerror}"
            ) from error
        if len(data) != length:
            raise UserError(
                f"{self.path}: tensor {tensor.name!r} ends early: the file was cut since it was opened; "
                "download it again"
            )
        return data

    def _dequantize(self, data: bytes, tensor: GgufTensor, rows: int) -> _Array:
        if tensor.type in _PLAIN:
            plain: _Array = np.frombuffer(data, _PLAIN[tensor.type]).reshape(rows, -1).astype(np.float32)
            return plain
        try:
            found: _Array = gguf.quants.dequantize(
                np.frombuffer(data, np.uint8).reshape(rows, tensor.row_bytes), tensor.type
            )
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: tensor {tensor.name!r} has the type {tensor.type.name}, which cannot be "
                "dequantized; take another GGUF of the model, or its safetensors"
            ) from error
        return found

    def stored_dtype(self, name: str) -> str | None:
        """The safetensors dtype that the file has a tensor in; None for a type of blocks."""
        kind = self._find(name).type
        return next((dtype for dtype, plain in PLAIN_KINDS.items() if plain == kind), None)

    def has_codes(self, name: str) -> bool:
        """Whether `read_quantized` has codes for the tensor; an embedding in blocks is looked up, not multiplied."""
        tensor = self._find(name)
        return tensor.type in BLOCK_SPECS and len(tensor.shape) == 2 and tensor.name != "token_embd.weight"

    def scale_format(self, name: str) -> Format:
        """The format of the scales of a tensor with codes."""
        return BLOCK_SPECS[self._find(name).type].scale_format

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """A matrix in one of `BLOCK_SPECS` as its codes, in the model's order of rows; None for other types."""
        tensor = self._find(name)
        if tensor.type not in BLOCK_SPECS or len(tensor.shape) != 2:
            return None
        rows, heads = tensor.shape[0], self._head_rows(name, tensor)
        packed = np.frombuffer(self._bytes(tensor, 0, rows), np.uint8).reshape(rows, tensor.row_bytes)
        if heads is not None:
            packed = unpermute(packed, rows // heads)
        codes, scale = unpack_blocks(torch.from_numpy(np.array(packed)), tensor.type)
        spec = BLOCK_SPECS[tensor.type]
        return QuantizedTensor(codes, scale, None, spec.format, spec.granularity, tensor.shape)

    def read_once(self) -> GgufSource:
        return self

    def side_files(self) -> Mapping[str, bytes | Path]:
        return tokenizer_files(self._header, self.config)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        digest.update(json.dumps(self.config, sort_keys=True).encode())
        digest.update(self._header.file_bytes.to_bytes(8, "little"))
        with self.path.open("rb") as file:
            digest.update(file.read(self._header.header_bytes))
        return digest.hexdigest()


def _bits_per_element(tensor: GgufTensor) -> float:
    block, nbytes = gguf.GGML_QUANT_SIZES[tensor.type]
    return 8 * float(nbytes) / float(block)


def unpermute(values: _Array, heads: int) -> _Array:
    """Undo the row order that llama.cpp's converter gives q and k: pairs side by side back to two halves.

    values: [heads * head_dim, ...], weights or biases.
    """
    rows = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return rows.swapaxes(1, 2).reshape(values.shape)
