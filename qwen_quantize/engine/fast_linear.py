"""Linears computed straight from packed codes: int4, int8 and E4M3 weights, through one compiled kernel.

Weights lie in tiles of sixteen rows, as fast_linear.c reads them. Where there is no C compiler, torch decodes the
same tiles and multiplies in float32.
"""

from __future__ import annotations

import ctypes
import functools
import os
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.formats.activation_cast import ActivationCast
from qwen_quantize.formats.codec import decode
from qwen_quantize.formats.native import load_native
from qwen_quantize.formats.tables import E4M3FN

SOURCE = Path(__file__).with_name("fast_linear.c")
# Sums of products are worth an instruction of their own here: nothing relies on equal bits between machines.
OPTIONS = ("-ffp-contract=fast", "-Wno-psabi")
LANES = 16
BLOCK = 32
_TINY = 1e-30  # blocks below it count as zeros: no quotient overflows
_MANY = 48  # inputs from which decoding a weight once, for torch's matrix product, is the quicker way


class Kind(IntEnum):
    """How elements are packed; the numbers are those of fast_linear.c."""

    FLOAT_ROWS = 0
    INT4 = 1
    INT8 = 2
    E4M3 = 3


class Input(IntEnum):
    """What becomes of the input: it stays float32, or is integers with a scale for each 32 elements or each token.

    INT16_BLOCKS are two bytes with 15 bits, -16256 .. 16256: each element errs by at most 1/32512 of the largest of
    its 32. The numbers are those of fast_linear.c.
    """

    FLOAT = 0
    INT8_BLOCKS = 1
    INT8_TOKEN = 2
    INT16_BLOCKS = 3


class LinearStruct(ctypes.Structure):
    """The image of `struct linear` in fast_linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scale", "zero", "bias")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "padded", "group")),
        *((name, ctypes.c_int32) for name in ("kind", "input")),
    )


class Pool:
    """Threads that wait for products, the caller's own included; they end with this object."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self.library = library
        self._process = os.getpid()
        self.handle = ctypes.c_void_p(library.qq_pool_new(threads))
        if not self.handle.value:
            raise MemoryError("no memory for the threads of the fast kernels")

    def __del__(self) -> None:
        # A forked process has none of the threads, and would wait for them for ever.
        if self.handle.value and os.getpid() == self._process:
            self.library.qq_pool_free(self.handle)

    def __enter__(self) -> Pool:
        """Its turn: what the kernel does for one caller waits for another's."""
        self.library.qq_pool_enter(self.handle)
        return self

    def __exit__(self, *_: object) -> None:
        self.library.qq_pool_leave(self.handle)


def native_library() -> ctypes.CDLL | None:
    """The compiled kernel, or None (no compiler, or switched off)."""
    library = load_native(SOURCE, libraries=OPTIONS)
    if library is not None:
        library.qq_pool_new.restype = ctypes.c_void_p
        library.qq_pool_free.restype = None
    return library


def pool() -> Pool | None:
    """The pool of torch's number of threads in this process; None without the compiled kernel."""
    library = native_library()
    return None if library is None else _pool(library, torch.get_num_threads(), os.getpid())


@functools.lru_cache(maxsize=4)
def _pool(library: ctypes.CDLL, threads: int, process: int) -> Pool:  # noqa: ARG001
    return Pool(library, threads)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight in tiles. codes: uint8, see fast_linear.c; scale: float32 [tiles, groups, 16]; zero: uint8 like it.

    group: columns of one scale, a multiple of 32. Without `zero` the zero point is 8 for INT4, 128 for INT8.
    """

    kind: Kind
    rows: int
    columns: int
    group: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.zero is None else self.zero.nbytes)

    @property
    def padded(self) -> int:
        return -(-self.columns // BLOCK) * BLOCK

    def struct(self, bias: Tensor | None, given: Input) -> LinearStruct:
        """What the kernel reads; it points into tensors that must outlive it."""
        return LinearStruct(
            self.codes.data_ptr(),
            self.scale.data_ptr(),
            None if self.zero is None else self.zero.data_ptr(),
            None if bias is None else bias.data_ptr(),
            *(self.rows, self.columns, self.padded, self.group),
            *(self.kind, given),
        )

    def decode(self) -> Tensor:
        """[rows, columns] float32."""
        tiles, groups = self.scale.shape[:2]
        match self.kind:
            case Kind.INT4:
                nibbles = torch.stack((self.codes & 15, self.codes >> 4), dim=-2)  # [tiles, k/8, 16, 2, 4]
                elements = nibbles.permute(0, 2, 1, 3, 4)
            case Kind.INT8:
                elements = self.codes.permute(0, 2, 1, 3)
            case _:
                elements = self.codes.permute(0, 2, 1)
        elements = elements.reshape(tiles * LANES, self.padded)
        values = decode(elements.contiguous(), E4M3FN) if self.kind is Kind.E4M3 else elements.float()
        width = groups * self.group
        values = functional.pad(values, (0, width - self.padded)).view(tiles, LANES, groups, self.group)
        if self.kind is not Kind.E4M3:
            zero = (
                self._default_zero if self.zero is None else self.zero.float().permute(0, 2, 1).unsqueeze(-1)
            )
            values = values - zero
        values = values * self.scale.permute(0, 2, 1).unsqueeze(-1)
        return values.view(tiles * LANES, width)[: self.rows, : self.columns].contiguous()

    @property
    def _default_zero(self) -> int:
        return 8 if self.kind is Kind.INT4 else 128


def pack_weight(
    kind: Kind, codes: Tensor, scale: Tensor, zero: Tensor | None = None, group: int | None = None
) -> PackedWeight:
    """Tiles of codes uint8 [rows, columns], unsigned (E4M3: its codes), with scales float32 [rows, groups].

    zero: uint8 like `scale`. group: columns that share a scale, the last group may be partial; None for all of them.
    ValueError for a group that is no multiple of 32 and not the whole row.
    """
    rows, columns = codes.shape
    padded = -(-columns // BLOCK) * BLOCK
    if group is None or group >= columns:
        group = padded
    if group % BLOCK or scale.shape != (rows, -(-columns // group)):
        raise ValueError(f"scales {list(scale.shape)} for groups of {group} in codes {list(codes.shape)}")
    tiles = -(-rows // LANES)
    more = tiles * LANES - rows
    full = functional.pad(codes, (0, padded - columns, 0, more))
    match kind:
        case Kind.INT4:
            parts = full.view(tiles, LANES, padded // 8, 2, 4)
            packed = (parts[..., 0, :] | (parts[..., 1, :] << 4)).permute(0, 2, 1, 3)
        case Kind.INT8:
            packed = full.view(tiles, LANES, padded // 4, 4).permute(0, 2, 1, 3)
        case Kind.E4M3:
            packed = full.view(tiles, LANES, padded).permute(0, 2, 1)
        case Kind.FLOAT_ROWS:
            raise ValueError("float32 rows are not packed")

    def spread(grid: Tensor) -> Tensor:
        return functional.pad(grid, (0, 0, 0, more)).view(tiles, LANES, -1).permute(0, 2, 1).contiguous()

    return PackedWeight(
        kind,
        rows,
        columns,
        group,
        packed.contiguous(),
        spread(scale.float()),
        None if zero is None else spread(zero),
    )


def quantize_rows(weight: Tensor, group: int = BLOCK) -> PackedWeight:
    """A float32 weight [rows, columns] as int8 with a scale for each `group` columns, the largest value at 127."""
    rows, columns = weight.shape
    group = min(group, -(-columns // BLOCK) * BLOCK)
    blocks = functional.pad(weight, (0, -columns % group)).view(rows, -1, group)
    scale = blocks.abs().amax(dim=-1) / 127
    codes = (blocks / torch.where(scale == 0, 1.0, scale).unsqueeze(-1)).round() + 128
    return pack_weight(Kind.INT8, codes.to(torch.uint8).view(rows, -1)[:, :columns], scale, group=group)


@dataclass(frozen=True, slots=True, eq=False)
class FastGroup:
    """Linears of one input stream that share a packed weight; a LinearGroup.

    given: what the kernel makes of the input. cast: what the chip makes of it before, where that is no int8.
    """

    weight: PackedWeight
    bias: Tensor | None
    sizes: tuple[int, ...]
    given: Input = Input.FLOAT
    cast: ActivationCast | None = None

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def struct(self) -> LinearStruct:
        return self.weight.struct(self.bias, self.given)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.cast is not None:
            x = self.cast(x)
        flat = x.reshape(-1, x.shape[-1])
        result = self._product(flat).view(*x.shape[:-1], -1)
        return torch.split(result, list(self.sizes), dim=-1)

    def _product(self, x: Tensor) -> Tensor:
        threads = pool()
        if threads is None or (self.given is Input.FLOAT and x.shape[0] >= _MANY):
            return functional.linear(cast_input(x, self.given), self.weight.decode(), self.bias)
        return run_linear(threads, self.struct(), x)


def run_linear(threads: Pool, struct: LinearStruct, x: Tensor) -> Tensor:
    """[m, rows] float32 of x [m, columns] float32, by the kernel."""
    x = x.contiguous()
    y = torch.empty(x.shape[0], struct.rows)
    library, i64 = threads.library, ctypes.c_int64
    with threads:
        failed = library.qq_linear(
            threads.handle,
            ctypes.byref(struct),
            *(ctypes.c_void_p(x.data_ptr()), i64(x.shape[1])),
            *(ctypes.c_void_p(y.data_ptr()), i64(struct.rows)),
            i64(x.shape[0]),
        )
    if failed:
        raise MemoryError("no memory for an input as int8")
    return y


def cast_input(x: Tensor, given: Input) -> Tensor:
    """x [m, columns] as the kernel sees it: decoded again, for the torch path and as its definition."""
    if given is Input.FLOAT:
        return x
    rows, columns = x.shape
    block = columns if given is Input.INT8_TOKEN else BLOCK
    blocks = functional.pad(x, (0, -columns % block)).view(rows, -1, block)
    most = blocks.abs().amax(dim=-1, keepdim=True)
    target = 16256.0 if given is Input.INT16_BLOCKS else 127.0
    # Tensor over tensor: a number over a tensor is a reciprocal times the number, and rounds twice.
    inverse = torch.where(most < _TINY, 0.0, torch.full_like(most, target) / most)
    return ((blocks * inverse).round() * (most / target)).view(rows, -1)[:, :columns]
