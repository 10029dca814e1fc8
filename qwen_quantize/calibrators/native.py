"""The calibrators' compiled inner loops and their torch twins, which give the same bits."""

from __future__ import annotations

import ctypes
import importlib.resources
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.calibrators.ladder import ValueLadder
from qwen_quantize.formats.native import load_native

_HISTOGRAM_BINS = 2048
_TERMS_APART = 1 << 21  # errors of single weights that one thread works out sooner than it starts a second


def _library(name: str = "kernels.c") -> ctypes.CDLL | None:
    source = importlib.resources.files("qwen_quantize.calibrators") / name
    return load_native(Path(str(source)))


def _floats(tensor: Tensor | None, offset: int = 0) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr() + 4 * offset)


def _in_parts(rows: int, least: int, run: Callable[[int, int], None]) -> None:
    """Call `run` on consecutive ranges of rows, one for each thread, of at least `least` rows."""
    threads = max(1, min(torch.get_num_threads(), rows // least))
    bounds = [rows * i // threads for i in range(threads + 1)]
    if threads == 1:
        run(0, rows)
        return
    with ThreadPoolExecutor(threads - 1) as pool:
        others = pool.map(run, bounds[1:-1], bounds[2:])
        run(0, bounds[1])
        list(others)


def error_feedback(
    weights: Tensor, first: int, factor: Tensor, scale: Tensor, zero_point: Tensor | None, ladder: ValueLadder
) -> Tensor:
    """Quantize columns of `weights` in place, left to right, feeding each error to the columns behind it.

    weights: [rows, K] float32, contiguous; factor: [width, width] float32 upper triangular; scale and
    zero_point: [rows, width] float32, contiguous. Columns first .. first + width - 1 become quantized values.
    Returns the errors divided by the factor's diagonal, [rows, width], with which the caller updates the
    columns behind the block.
    """
    rows, columns = weights.shape
    width = factor.shape[0]
    errors = torch.empty(rows, width)
    library = _library()
    if library is None:
        _error_feedback_torch(weights, first, factor, scale, zero_point, ladder, errors)
        return errors

    def run(begin: int, end: int) -> None:
        library.error_feedback(
            _floats(weights, begin * columns),
            ctypes.c_int64(columns),
            ctypes.c_int64(first),
            ctypes.c_int64(width),
            ctypes.c_int64(end - begin),
            _floats(factor),
            _floats(scale, begin * width),
            _floats(zero_point, begin * width),
            _floats(ladder.steps),
            ctypes.c_float(ladder.low),
            ctypes.c_float(ladder.high),
            _floats(errors, begin * width),
        )

    _in_parts(rows, 16, run)
    return errors


def quantized_values(weight: Tensor, scale: Tensor, zero_point: Tensor | None, ladder: ValueLadder) -> Tensor:
    """The nearest value of the ladder times scale, about the zero point; all of one shape, float32."""
    zero = 0.0 if zero_point is None else zero_point
    scaled = torch.minimum(
        torch.maximum(weight / scale, torch.as_tensor(ladder.low - zero)), torch.as_tensor(ladder.high - zero)
    )
    return ladder.nearest(scaled) * scale


def _error_feedback_torch(
    weights: Tensor,
    first: int,
    factor: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    ladder: ValueLadder,
    errors: Tensor,
) -> None:
    width = factor.shape[0]
    block = weights[:, first : first + width]
    for i in range(width):
        zero = None if zero_point is None else zero_point[:, i]
        quantized = quantized_values(block[:, i], scale[:, i], zero, ladder)
        error = (block[:, i] - quantized) / factor[i, i]
        errors[:, i] = error
        block[:, i] = quantized
        block[:, i + 1 :] -= error.unsqueeze(1) * factor[i, i + 1 :]


def refine_values(
    values: Tensor,
    gradient: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    hessian: Tensor,
    order: Tensor,
    ladder: ValueLadder,
) -> int:
    """One sweep of coordinate descent on the sum of (w - v) H (w - v)^T over rows; how many values changed.

    values, scale, zero_point: [rows, K] float32, contiguous; gradient: [rows, K], (w - v) H; hessian: [K, K],
    symmetric. In the order of columns given, each value becomes the best one of the grid while the others of
    its row stay. values and gradient change in place.
    """
    rows, columns = values.shape
    library = _library()
    if library is None:
        return _refine_torch(values, gradient, scale, zero_point, hessian, order, ladder)
    refine = library.refine
    refine.restype = ctypes.c_int64
    changed: list[int] = []

    def run(begin: int, end: int) -> None:
        at = begin * columns
        found = refine(
            _floats(values, at),
            _floats(gradient, at),
            _floats(scale, at),
            _floats(zero_point, at),
            _floats(hessian),
            ctypes.c_void_p(order.data_ptr()),
            ctypes.c_int64(end - begin),
            ctypes.c_int64(columns),
            _floats(ladder.steps),
            ctypes.c_float(ladder.low),
            ctypes.c_float(ladder.high),
        )
        changed.append(found)

    _in_parts(rows, 16, run)
    return sum(changed)


def _refine_torch(
    values: Tensor,
    gradient: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    hessian: Tensor,
    order: Tensor,
    ladder: ValueLadder,
) -> int:
    changed = 0
    for k in order.tolist():
        row, diagonal = hessian[k], hessian[k, k]
        slope, before = gradient[:, k], values[:, k]
        zero = None if zero_point is None else zero_point[:, k]
        after = quantized_values(before + slope / diagonal, scale[:, k], zero, ladder)
        change = after - before
        better = change * (2.0 * slope - change * diagonal) > 0
        changed += int(better.sum())
        values[:, k] = torch.where(better, after, before)
        gradient -= torch.where(better, change, 0.0).unsqueeze(1) * row
    return changed


def grid_errors(
    weight: Tensor,
    column_weight: Tensor,
    region: tuple[int, int],
    scale: Tensor,
    zero_point: Tensor | None,
    ladder: ValueLadder,
    *,
    cubed: bool = False,
) -> Tensor:
    """[candidates, down, across] float64: each region's sum of column_weight * (w - Q(w))^2 under each candidate.

    weight: [N, K] float32, contiguous; column_weight: [K] float32; region: its rows and columns; scale and
    zero_point: [candidates, down, across] float32, contiguous. A row of a region is summed in float32 (sixteen
    lanes by column), rows in float64. cubed: |w - Q(w)|^3 instead, for a uniform ladder.
    """
    if cubed and not ladder.uniform:
        raise ValueError("cubed errors are for evenly spaced values")
    library = _library("range_search.c")
    if library is None:
        return region_errors(
            weight,
            column_weight,
            region,
            scale,
            zero_point,
            lambda w, s, z: quantized_values(w, s, z, ladder),
            cubed=cubed,
        )
    errors = torch.zeros(scale.shape, dtype=torch.float64)

    def run(begin: int, end: int) -> None:
        library.grid_errors(
            _floats(weight),
            _floats(column_weight),
            *(ctypes.c_int64(size) for size in (*weight.shape, *region, begin, end)),
            _floats(scale),
            _floats(zero_point),
            ctypes.c_int64(scale.shape[0]),
            _floats(ladder.steps),
            ctypes.c_float(ladder.low),
            ctypes.c_float(ladder.high),
            ctypes.c_int(ladder.uniform),
            ctypes.c_int(cubed),
            ctypes.c_void_p(errors.data_ptr()),
        )

    # Threads cost more than a small search.
    row_terms = scale.shape[0] * region[0] * weight.shape[1]
    _in_parts(scale.shape[1], max(1, -(-_TERMS_APART // max(row_terms, 1))), run)
    return errors


_LANES = 16  # as in range_search.c


def region_errors(
    weight: Tensor,
    column_weight: Tensor,
    region: tuple[int, int],
    scale: Tensor,
    zero_point: Tensor | None,
    rounded: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    *,
    cubed: bool = False,
) -> Tensor:
    """As `grid_errors`, for any `rounded(weight, scale, zero_point)` of tensors [N, K]."""
    columns = weight.shape[1]
    errors = torch.zeros(scale.shape, dtype=torch.float64)
    width = -(-region[1] // _LANES) * _LANES  # adding zeros changes no sum
    down, across = scale.shape[1:]
    for candidate in range(scale.shape[0]):

        def spread(grid: Tensor, candidate: int = candidate) -> Tensor:
            by_row = grid[candidate].repeat_interleave(region[0], dim=0)[: weight.shape[0]]
            return by_row.repeat_interleave(region[1], dim=1)[:, :columns]

        zero = None if zero_point is None else spread(zero_point)
        difference = weight - rounded(weight, spread(scale), zero)
        terms = difference * difference * column_weight
        if cubed:
            terms *= difference.abs()
        padded = terms.new_zeros(down * region[0], across, width)
        for part in range(across):
            piece = terms[:, part * region[1] : (part + 1) * region[1]]
            padded[: piece.shape[0], part, : piece.shape[1]] = piece
        by_lane = padded.view(down * region[0], across, width // _LANES, _LANES)
        lanes = terms.new_zeros(down * region[0], across, _LANES)
        for step in range(width // _LANES):
            lanes += by_lane[:, :, step]
        half = _LANES // 2
        while half:
            lanes = lanes[..., :half] + lanes[..., half : 2 * half]
            half //= 2
        by_row = lanes[..., 0].double().view(down, region[0], across)
        for row in range(region[0]):
            errors[candidate] += by_row[:, row]
    return errors


@dataclass(frozen=True, slots=True)
class ColumnSums:
    """By column of x [rows, K]: amax float32; total, squares, cross float64, the sums of x, x^2 and weight * seen * x.

    histogram: [256, 8] int64, how often each float32 exponent field and top three mantissa bits occur.
    """

    amax: Tensor
    total: Tensor
    squares: Tensor
    cross: Tensor
    histogram: Tensor


_BLOCK_ROWS = 64  # as in kernels.c
_COLUMNS_APART = 256  # that one thread works on sooner than it starts a second


def column_sums(x: Tensor, seen: Tensor, weight: Tensor | None) -> ColumnSums:
    """x, seen: [rows, K] float32; weight: [rows] float32 or None for ones.

    Blocks of 64 rows are summed in float32 from top to bottom, blocks in float64.
    """
    x, seen = x.contiguous(), seen.contiguous()
    weight = None if weight is None else weight.contiguous()
    rows, columns = x.shape
    library = _library()
    if library is None:
        return _column_sums_torch(x, seen, weight)
    amax = torch.zeros(columns)
    total, squares, cross = torch.zeros(3, columns, dtype=torch.float64)
    counts: list[Tensor] = []

    def run(begin: int, end: int) -> None:
        own = torch.zeros(_HISTOGRAM_BINS, dtype=torch.int64)
        library.column_sums(
            *(_floats(tensor) for tensor in (x, seen, weight)),
            *(ctypes.c_int64(size) for size in (rows, columns, begin, end)),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (amax, total, squares, cross, own)),
        )
        counts.append(own)

    _in_parts(columns, _COLUMNS_APART, run)
    return ColumnSums(amax, total, squares, cross, torch.stack(counts).sum(dim=0).view(256, 8))


def _column_sums_torch(x: Tensor, seen: Tensor, weight: Tensor | None) -> ColumnSums:
    bins = (x.view(torch.int32).flatten() >> 20) & (_HISTOGRAM_BINS - 1)
    weighed = seen if weight is None else seen * weight.unsqueeze(1)
    return ColumnSums(
        x.abs().amax(dim=0),
        _summed_in_blocks(x),
        _summed_in_blocks(x * x),
        _summed_in_blocks(weighed * x),
        torch.bincount(bins, minlength=_HISTOGRAM_BINS).view(256, 8),
    )


def _summed_in_blocks(terms: Tensor) -> Tensor:
    """[K] float64."""
    padded = functional.pad(terms, (0, 0, 0, -terms.shape[0] % _BLOCK_ROWS))
    blocks = padded.view(-1, _BLOCK_ROWS, terms.shape[1])
    sums = torch.zeros_like(blocks[:, 0])
    for row in range(_BLOCK_ROWS):
        sums += blocks[:, row]
    total = torch.zeros(terms.shape[1], dtype=torch.float64)
    for block in sums.double():
        total += block
    return total
