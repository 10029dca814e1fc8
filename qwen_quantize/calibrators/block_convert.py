"""Data-free block FP8 at the speed of memory: E4M3 weights in blocks with power-of-two scales.

The same codes and exponents as `block_fp8.solve_block_fp8` without calibration data, without its float32 copies:
bfloat16 and float16 are read as they are, and FP8 codes with other scales go through a map from 256 codes to 256
codes for each block, whose error follows from how often each code occurs. The compiled kernels know the cast that
every chip profile has so far (nearest even, saturating, subnormals kept); other casts, and machines without a
compiler, take the general kernels.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.calibrators.scale_search import search_exponents
from qwen_quantize.formats.block_kernels import dequantize_blocks, quantize_blocks
from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.granularity import Granularity, block_amax
from qwen_quantize.formats.grid import byte_values
from qwen_quantize.formats.native import load_native
from qwen_quantize.formats.tables import E4M3FN

SOURCE = Path(__file__).with_name("block_convert.c")
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}  # as in block_convert.c
_ALONE = 1 << 16  # elements that one thread does sooner than it wakes a second


@dataclass(frozen=True, slots=True)
class BlockConversion:
    """codes: uint8 [n, K]; exponents: int32 grid, 2^e multiplies a block.

    Sums of squares over all elements: noise of what was chosen, baseline_noise of the rceil rule, signal of the
    weight. searched_blocks: those whose exponent differs from the rceil rule's.
    """

    codes: Tensor
    exponents: Tensor
    noise: float
    baseline_noise: float
    signal: float
    searched_blocks: int
    zero_blocks: int


class NotFiniteError(ValueError):
    """A weight that is NaN or infinite, at `place` (row, column) of the rows given."""

    def __init__(self, place: tuple[int, int], value: float) -> None:
        super().__init__(f"the weight at {list(place)} is {value}: only finite weights can be quantized")
        self.place, self.value = place, value


def requantize_blocks(
    codes: Tensor,
    scale: Tensor,
    block: tuple[int, int],
    rule: CastRule,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
) -> BlockConversion:
    """E4M3 codes with any scales to E4M3 codes with power-of-two scales, in the same blocks.

    codes: uint8 [n, K]. scale: float32 [ceil(n / rows), ceil(K / columns)]; it multiplies. block: (rows,
    columns) of both. What is quantized is code * scale, rounded once to float32. out: uint8 [n, K] for the new
    codes, or None for a fresh tensor. threads: None for torch's number.

    Raises NotFiniteError for NaN codes, scales that are not finite and products that overflow; ValueError for other
    shapes and dtypes.
    """
    if codes.dtype != torch.uint8 or scale.dtype != torch.float32:
        raise ValueError(f"need uint8 codes and float32 scales, got {codes.dtype} and {scale.dtype}")
    grid = _grid(codes, block)
    if tuple(scale.shape) != grid:
        raise ValueError(f"scale has shape {list(scale.shape)}; blocks of {block} need {list(grid)}")
    library = _library(rule)
    if library is None:
        return _general(dequantize_blocks(codes, scale, E4M3FN, *block), block, rule, out)
    codes, scale, values = codes.contiguous(), scale.contiguous(), _magnitudes()
    report = _Report(grid)
    out = _output(codes, out)
    bad = library.qb_requantize(
        codes.data_ptr(), scale.data_ptr(), values.data_ptr(), out.data_ptr(), *codes.shape, *block,
        ctypes.byref(report.pointers), _threads(codes, threads),
    )  # fmt: skip
    if bad < codes.numel():
        row, column = divmod(bad, codes.shape[1])
        value = byte_values(E4M3FN)[int(codes[row, column])] * scale[row // block[0], column // block[1]]
        raise NotFiniteError((row, column), float(value))
    return report.conversion(out)


def quantize_rows(
    weight: Tensor,
    block: tuple[int, int],
    rule: CastRule,
    *,
    out: Tensor | None = None,
    threads: int | None = None,
) -> BlockConversion:
    """A weight to E4M3 codes with power-of-two scales of blocks (rows, columns).

    weight: bfloat16, float16 or float32 [n, K]. out: uint8 [n, K] for the codes, or None for a fresh tensor.
    threads: None for torch's number. Raises NotFiniteError for NaN and infinity; ValueError for other shapes and
    dtypes.
    """
    if weight.dtype not in _KINDS:
        raise ValueError(f"weight must be bfloat16, float16 or float32, not {weight.dtype}")
    grid = _grid(weight, block)
    library = _library(rule)
    if library is None:
        return _general(weight.float(), block, rule, out)
    weight, report = weight.contiguous(), _Report(grid)
    out = _output(weight, out)
    bad = library.qb_quantize(
        weight.data_ptr(), _KINDS[weight.dtype], out.data_ptr(), *weight.shape, *block,
        ctypes.byref(report.pointers), _threads(weight, threads),
    )  # fmt: skip
    if bad < weight.numel():
        row, column = divmod(bad, weight.shape[1])
        raise NotFiniteError((row, column), float(weight[row, column]))
    return report.conversion(out)


def find_not_finite(values: Tensor) -> tuple[tuple[int, ...], float] | None:
    """The first place where a float tensor of any shape is NaN or infinite, and what is there; None without one."""
    library = load_native(SOURCE) if values.dtype in _KINDS else None
    if library is None:
        bad = ~values.isfinite() if values.dtype.itemsize > 1 else ~values.float().isfinite()
        flat = int(bad.reshape(-1).int().argmax()) if bool(bad.any()) else values.numel()
    else:
        _declare(library)
        values = values.contiguous()
        flat = library.qb_find_bad(values.data_ptr(), _KINDS[values.dtype], values.numel())
    if flat == values.numel():
        return None
    place = []
    rest = flat
    for size in reversed(values.shape):
        rest, index = divmod(rest, size)
        place.append(index)
    return tuple(reversed(place)), float(values.reshape(-1)[flat])


class _Pointers(ctypes.Structure):
    """The image of `report` in block_convert.c."""

    _fields_ = tuple(
        (name, ctypes.c_void_p)
        for name in ("exponents", "baseline_exponents", "errors", "baseline_errors", "signal", "zero")
    )


class _Report:
    """Room for what the kernels say of each block of a grid."""

    def __init__(self, grid: tuple[int, int]) -> None:
        self.exponents, self.baseline = torch.zeros(2, *grid, dtype=torch.int32)
        self.sums = torch.zeros(3, *grid, dtype=torch.float64)  # errors, baseline errors, signal
        self.zero = torch.zeros(grid, dtype=torch.uint8)
        errors, baseline_errors, signal = self.sums
        kept = (self.exponents, self.baseline, errors, baseline_errors, signal, self.zero)
        self.pointers = _Pointers(*(tensor.data_ptr() for tensor in kept))

    def conversion(self, codes: Tensor) -> BlockConversion:
        noise, baseline_noise, signal = self.sums.sum(dim=(1, 2)).tolist()
        return BlockConversion(
            codes=codes,
            exponents=self.exponents,
            noise=noise,
            baseline_noise=baseline_noise,
            signal=signal,
            searched_blocks=int((self.exponents != self.baseline).sum()),
            zero_blocks=int(self.zero.sum()),
        )


def _general(weight: Tensor, block: tuple[int, int], rule: CastRule, out: Tensor | None) -> BlockConversion:
    """The conversion of float32 rows with the kernels that know every cast."""
    bad = ~weight.isfinite()
    if bool(bad.any()):
        row, column = bad.nonzero()[0].tolist()
        raise NotFiniteError((row, column), float(weight[row, column]))
    choice = search_exponents(weight, E4M3FN, rule, *block, None)
    codes = quantize_blocks(weight, choice.exponents, E4M3FN, rule, *block)
    return BlockConversion(
        codes=codes if out is None else _output(weight, out).copy_(codes),
        exponents=choice.exponents,
        noise=float(choice.errors.sum()),
        baseline_noise=float(choice.baseline_errors.sum()),
        signal=float(torch.linalg.vector_norm(weight, dtype=torch.float64).square()),
        searched_blocks=int((choice.exponents != choice.baseline_exponents).sum()),
        zero_blocks=int((block_amax(weight, Granularity.block(*block)) == 0).sum()),
    )


def _grid(matrix: Tensor, block: tuple[int, int]) -> tuple[int, int]:
    if matrix.dim() != 2 or min(block) < 1:
        raise ValueError(
            f"need a matrix [n, K] and block sizes >= 1, got {list(matrix.shape)} and {list(block)}"
        )
    return math.ceil(matrix.shape[0] / block[0]), math.ceil(matrix.shape[1] / block[1])


def _output(matrix: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(matrix.shape, dtype=torch.uint8)
    if out.dtype != torch.uint8 or out.shape != matrix.shape or not out.is_contiguous():
        raise ValueError(f"out must be contiguous uint8 {list(matrix.shape)}")
    return out


def _threads(matrix: Tensor, threads: int | None) -> int:
    if threads is not None:
        return threads
    return torch.get_num_threads() if matrix.numel() > _ALONE else 1


@functools.cache
def _magnitudes() -> Tensor:
    """float32 [128]: the values of the codes without sign."""
    return byte_values(E4M3FN)[:128].contiguous()


def _library(rule: CastRule) -> ctypes.CDLL | None:
    """The compiled kernels if there are any and they know the cast; what it makes of NaN does not matter here."""
    if (rule.rounding, rule.overflow, rule.subnormals) != (
        Rounding.RNE,
        Overflow.SATURATE,
        Subnormals.KEEP,
    ):
        return None
    library = load_native(SOURCE)
    if library is not None:
        _declare(library)
    return library


@functools.cache
def _declare(library: ctypes.CDLL) -> None:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    sizes, report = (i64, i64, i64, i64), ctypes.POINTER(_Pointers)
    library.qb_requantize.argtypes = (pointer, pointer, pointer, pointer, *sizes, report, i32)
    library.qb_quantize.argtypes = (pointer, i32, pointer, *sizes, report, i32)
    library.qb_find_bad.argtypes = (pointer, i32, i64)
    for function in (library.qb_requantize, library.qb_quantize, library.qb_find_bad):
        function.restype = i64
