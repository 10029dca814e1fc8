"""What a tensor in a file is: its name, stored dtype, shape and size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """A safetensors dtype: its width and the torch dtype that holds it, None where torch has none."""

    bits: int
    torch: torch.dtype | None


# The order is the enumeration of safetensors 0.8: it ascends in size, and a file's data is laid out in the
# reverse of it, which keeps every tensor aligned without holes.
DTYPES: dict[str, StoredDtype] = {
    "BOOL": StoredDtype(8, torch.bool),
    "F4": StoredDtype(4, torch.float4_e2m1fn_x2),
    "F6_E2M3": StoredDtype(6, None),
    "F6_E3M2": StoredDtype(6, None),
    "U8": StoredDtype(8, torch.uint8),
    "I8": StoredDtype(8, torch.int8),
    "F8_E5M2": StoredDtype(8, torch.float8_e5m2),
    "F8_E4M3": StoredDtype(8, torch.float8_e4m3fn),
    "F8_E8M0": StoredDtype(8, torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": StoredDtype(8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": StoredDtype(8, torch.float8_e5m2fnuz),
    "I16": StoredDtype(16, torch.int16),
    "U16": StoredDtype(16, torch.uint16),
    "F16": StoredDtype(16, torch.float16),
    "BF16": StoredDtype(16, torch.bfloat16),
    "I32": StoredDtype(32, torch.int32),
    "U32": StoredDtype(32, torch.uint32),
    "F32": StoredDtype(32, torch.float32),
    "C64": StoredDtype(64, torch.complex64),
    "F64": StoredDtype(64, torch.float64),
    "I64": StoredDtype(64, torch.int64),
    "U64": StoredDtype(64, torch.uint64),
}


def storage_bits(dtype: str, shape: tuple[int, ...]) -> int:
    """Size in bits, which a file can only hold when it is a multiple of 8."""
    return DTYPES[dtype].bits * math.prod(shape)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the torch tensor; F4 packs two elements into one along the last dimension."""
    if dtype == "F4" and shape:
        return (*shape[:-1], shape[-1] // 2)
    return shape


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a checkpoint; dtype is the safetensors name, shape the logical shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
