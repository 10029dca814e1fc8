"""The C kernels as Python functions. Callers have checked dtypes and shapes and made tensors contiguous."""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.grid import MAX_PIECES, Grid, Tapered
from qwen_quantize.formats.native import load_native
from qwen_quantize.formats.spec import IntFormat
from qwen_quantize.formats.twin import Seed

SOURCE = Path(__file__).with_name("kernels.c")
_ALONE = 1 << 16  # elements that one thread does sooner than it wakes a second
_ALL = 0xFFFFFFFF

# The kinds of kernels.c, and for the linear ones the masks of (half, rest if positive, rest if negative).
_RNE, _LINEAR, _ODD, _STOCHASTIC, _HYBRID = range(5)
_KINDS: dict[Rounding, tuple[int, int, int, int]] = {
    Rounding.RNE: (_RNE, 0, 0, 0),
    Rounding.RNA: (_LINEAR, _ALL, 0, 0),
    Rounding.RTZ: (_LINEAR, 0, 0, 0),
    Rounding.FLOOR: (_LINEAR, 0, 0, _ALL),
    Rounding.CEIL: (_LINEAR, 0, _ALL, 0),
    Rounding.ODD: (_ODD, 0, 0, 0),
    Rounding.STOCHASTIC: (_STOCHASTIC, 0, 0, 0),
    Rounding.HYBRID: (_HYBRID, 0, 0, 0),
}


_NAN_RANK = 255  # as in kernels.c
_UNSIGNED_FIELDS = (
    *(
        "max_rank",
        "limit_positive",
        "limit_negative",
        "infinity_positive",
        "infinity_negative",
        "flush_below",
    ),
    *(
        "half_mask",
        "positive_mask",
        "negative_mask",
        "sign_code",
        "zero_sign_code",
        "nan_code",
        "nan_code_sign",
    ),
    *("integer", "zero_sign", "nan_bits", "nan_sign", "beyond_bits", "beyond_sign"),
    *("seed_low", "seed_high", "tapered"),
)


class _Grid(ctypes.Structure):
    """The image of `struct grid` in kernels.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rounding", "mantissa_bits", "min_exponent")),
        *((name, ctypes.c_uint32) for name in _UNSIGNED_FIELDS),
        ("piece_exponent", ctypes.c_int32 * MAX_PIECES),
        ("piece_mantissa_bits", ctypes.c_int32 * MAX_PIECES),
        ("piece_base", ctypes.c_uint32 * MAX_PIECES),
        *((name, ctypes.POINTER(ctypes.c_uint32)) for name in ("codes", "values")),
    )


def native_library() -> ctypes.CDLL | None:
    """The compiled kernels, or None (no compiler, or switched off): use the torch twin then."""
    library = load_native(SOURCE)
    if library is not None:
        _declare(library)
    return library


@functools.cache
def _declare(library: ctypes.CDLL) -> None:
    pointer, i32, i64, u32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint32
    grid, f32 = ctypes.POINTER(_Grid), ctypes.c_float
    signatures = {
        "qq_cast": (grid, pointer, pointer, i64, i32, i32),
        "qq_decode": (pointer, pointer, i64, pointer, i32),
        "qq_fake_quantize_groups": (grid, pointer, pointer, i64, i64, i64, i32, u32, i32),
        "qq_quantize_scaled": (
            *(grid, grid, grid, pointer, pointer, pointer, pointer, i64, i64, i64),
            *(f32, f32, i32, i32, i32),
        ),
        "qq_quantize_blocks": (grid, pointer, pointer, i64, i64, pointer, i64, i64, i32),
        "qq_dequantize_blocks": (pointer, pointer, i64, i64, pointer, i64, i64, pointer, i32),
        "qq_block_squared_error": (grid, pointer, i64, i64, pointer, i64, i64, i64, pointer, pointer, i32),
    }
    for name, argument_types in signatures.items():
        function = getattr(library, name)
        function.argtypes = argument_types
        function.restype = None


@functools.cache
def _native_grid(grid: Grid) -> _Grid:
    integer = isinstance(grid.format, IntFormat)
    kind, half_mask, positive_mask, negative_mask = _KINDS[grid.rounding]
    quiet, sign_code = 0x7FC00000, 1 << (grid.format.bits - 1)
    result = _Grid(
        rounding=kind,
        mantissa_bits=grid.mantissa_bits,
        min_exponent=grid.min_exponent + 127,
        max_rank=grid.max_rank,
        limit_positive=grid.limit_positive,
        limit_negative=grid.limit_negative,
        infinity_positive=grid.infinity_positive,
        infinity_negative=grid.infinity_negative,
        flush_below=grid.flush_below,
        half_mask=half_mask,
        positive_mask=positive_mask,
        negative_mask=negative_mask,
        sign_code=0 if integer else sign_code,
        zero_sign_code=sign_code if grid.has_negative_zero else 0,
        integer=_ALL if integer else 0,
        zero_sign=0x80000000 if grid.has_negative_zero else 0,
        nan_code=max(grid.nan_code, 0),
        nan_code_sign=sign_code if grid.nan_code >= 0 and grid.nan_keeps_sign else 0,
        nan_bits=quiet if grid.nan_code >= 0 else 0,
        nan_sign=_ALL if grid.nan_code >= 0 and grid.nan_keeps_sign else 0,
        beyond_bits=quiet if grid.overflow_is_nan else 0x7F800000,
        beyond_sign=_ALL if grid.nan_keeps_sign or not grid.overflow_is_nan else 0,
        tapered=int(grid.tapered is not None),
    )
    for index in range(MAX_PIECES):
        result.piece_exponent[index] = 0x7FFFFFFF
    if grid.tapered is not None:
        for index, piece in enumerate(grid.tapered.pieces):
            result.piece_exponent[index] = piece.exponent + 127
            result.piece_mantissa_bits[index] = piece.mantissa_bits
            result.piece_base[index] = piece.base & _ALL
        result.codes, result.values = _tables(grid, grid.tapered, quiet)
    return result


def _tables(grid: Grid, tapered: Tapered, quiet: int) -> tuple[ctypes.Array[ctypes.c_uint32], ...]:
    """Codes and float32 bits of each rank + 256 * negative.

    A pointer field keeps the array it is set to alive.
    """
    codes, values = (ctypes.c_uint32 * 512)(), (ctypes.c_uint32 * 512)()
    for rank, (code, value) in enumerate(zip(tapered.codes, tapered.values, strict=True)):
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
        codes[rank], values[rank] = code, bits
        signed = rank > 0 and not (rank > grid.max_rank and grid.overflow_is_nan)  # one zero and one NaN
        codes[256 + rank] = code | 0x80 if signed else code
        values[256 + rank] = bits | 0x80000000 if signed else bits
    for index in (_NAN_RANK, 256 + _NAN_RANK):
        codes[index] = max(grid.nan_code, 0)
        values[index] = quiet if grid.nan_code >= 0 else 0
    return codes, values


def _seeded(grid: Grid, seed: Seed) -> _Grid:
    native = _native_grid(grid)
    if grid.rounding is not Rounding.STOCHASTIC:
        return native
    copy = _Grid.from_buffer_copy(native)  # the cached one, which is never freed before, owns the tables
    copy.seed_low, copy.seed_high = seed
    return copy


def _threads(elements: int) -> int:
    return torch.get_num_threads() if elements > _ALONE else 1


def encode(library: ctypes.CDLL, x: Tensor, out: Tensor, grid: Grid, seed: Seed) -> None:
    """float32 x [n] -> bytes out [n]."""
    n = x.numel()
    library.qq_cast(_seeded(grid, seed), x.data_ptr(), out.data_ptr(), n, 1, _threads(n))


def quantize(library: ctypes.CDLL, x: Tensor, out: Tensor, grid: Grid, seed: Seed) -> None:
    """float32 x [n] -> float32 out [n]; out may be x."""
    n = x.numel()
    library.qq_cast(_seeded(grid, seed), x.data_ptr(), out.data_ptr(), n, 0, _threads(n))


def decode(library: ctypes.CDLL, codes: Tensor, out: Tensor, table: Tensor) -> None:
    """Bytes [n] -> float32 out [n] through table [256]."""
    n = codes.numel()
    library.qq_decode(codes.data_ptr(), out.data_ptr(), n, table.data_ptr(), _threads(n))


@dataclass(frozen=True, slots=True)
class Tiles:
    """A matrix [rows, columns] cut into tiles of block_rows x block_columns."""

    rows: int
    columns: int
    block_rows: int
    block_columns: int


def fake_quantize_groups(
    library: ctypes.CDLL,
    x: Tensor,
    out: Tensor,
    tiles: Tiles,
    offset: int,
    fraction: int,
    grid: Grid,
    seed: Seed,
) -> None:
    """float32 x -> out, both [rows, columns]; groups of block_columns along the columns; out may be x."""
    library.qq_fake_quantize_groups(
        _seeded(grid, seed), x.data_ptr(), out.data_ptr(), tiles.rows, tiles.columns, tiles.block_columns,
        offset, fraction, _threads(x.numel()),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScaledCast:
    """How a group's largest magnitude becomes its scale; scaled_groups.py says what the fields mean."""

    target: float
    smallest: float
    reciprocal: bool
    scale_grid: Grid | None
    path: Grid | None


def quantize_scaled(
    library: ctypes.CDLL, x: Tensor, out: Tensor, scales: Tensor, outer: Tensor | None, tiles: Tiles,
    how: ScaledCast, grid: Grid, seed: Seed, *, scaled: bool,
) -> None:  # fmt: skip
    """float32 x -> out, both [rows, columns], and scales [rows, groups]; outer: float32 [rows]; out may be x."""
    library.qq_quantize_scaled(
        _seeded(grid, seed), _optional(how.scale_grid), _optional(how.path), x.data_ptr(), out.data_ptr(),
        scales.data_ptr(), None if outer is None else outer.data_ptr(), tiles.rows, tiles.columns,
        tiles.block_columns, how.target, how.smallest, int(how.reciprocal), int(scaled), _threads(x.numel()),
    )  # fmt: skip


def _optional(grid: Grid | None) -> _Grid | None:
    return None if grid is None else _native_grid(grid)


def quantize_blocks(
    library: ctypes.CDLL, weight: Tensor, out: Tensor, exponents: Tensor, tiles: Tiles, grid: Grid, seed: Seed
) -> None:
    """float32 weight -> bytes out, both [rows, columns]; int32 exponents, one for each tile."""
    library.qq_quantize_blocks(
        _seeded(grid, seed), weight.data_ptr(), out.data_ptr(), tiles.rows, tiles.columns,
        exponents.data_ptr(), tiles.block_rows, tiles.block_columns, _threads(weight.numel()),
    )  # fmt: skip


def dequantize_blocks(
    library: ctypes.CDLL, codes: Tensor, out: Tensor, scale: Tensor, tiles: Tiles, table: Tensor
) -> None:
    """Bytes -> float32 out, both [rows, columns]; float32 scale, one for each tile."""
    library.qq_dequantize_blocks(
        codes.data_ptr(), out.data_ptr(), tiles.rows, tiles.columns, scale.data_ptr(),
        tiles.block_rows, tiles.block_columns, table.data_ptr(), _threads(codes.numel()),
    )  # fmt: skip


def block_squared_error(
    library: ctypes.CDLL, weight: Tensor, exponents: Tensor, column_weight: Tensor | None, out: Tensor,
    tiles: Tiles, grid: Grid,
) -> None:  # fmt: skip
    """float32 [rows, columns], int32 exponents [candidates, tiles] -> float64 out [candidates, tiles]."""
    weighted = None if column_weight is None else column_weight.data_ptr()
    candidates = exponents.shape[0]
    library.qq_block_squared_error(
        _native_grid(grid), weight.data_ptr(), tiles.rows, tiles.columns,
        exponents.data_ptr(), candidates, tiles.block_rows, tiles.block_columns, weighted,
        out.data_ptr(), _threads(weight.numel() * candidates),
    )  # fmt: skip
