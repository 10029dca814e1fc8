"""Weights in tiles with power-of-two scales: cast, cast back, and the error of each candidate exponent.

Scaling by 2^-e before the cast is exact, as in groups.py. The same input gives the same bytes whatever the
number of threads: each tile's sum is taken by one thread in a fixed order (eight lanes by column, rows
first), in float64.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qwen_quantize.formats import kernel_calls
from qwen_quantize.formats.cast_rule import CastRule, Rounding
from qwen_quantize.formats.codec import byte_codes, check_float32, code_dtype
from qwen_quantize.formats.granularity import Granularity, expand_scale
from qwen_quantize.formats.grid import Grid, byte_values, grid_for
from qwen_quantize.formats.kernel_calls import Tiles
from qwen_quantize.formats.scales import check_exponents, exponents_to_scale
from qwen_quantize.formats.seeds import draw_seed
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.twin import cast_to_codes, cast_to_values

_LANES = 8  # as in kernels.c


def quantize_blocks(
    weight: Tensor,
    exponents: Tensor,
    fmt: Format,
    rule: CastRule,
    block_rows: int,
    block_cols: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Codes of weight * 2^-exponent: [N, K], uint8 (int8 for integer formats).

    weight: float32 [N, K]. exponents: int32 [ceil(N/block_rows), ceil(K/block_cols)] in -127..127. Special
    values become what `encode` makes of them. ValueError for other shapes and dtypes, formats above 8 bits
    and E8M0.
    """
    _check_narrow(fmt)
    tiles = _checked_tiles(weight, block_rows, block_cols)
    check_exponents(exponents)
    _check_grid(exponents, tiles, "exponents")
    grid, seed = grid_for(fmt, rule), draw_seed(rule, generator)
    library = kernel_calls.native_library() if weight.device.type == "cpu" else None
    if library is None:
        expanded = expand_scale(exponents, Granularity.block(block_rows, block_cols), tuple(weight.shape))
        return cast_to_codes(weight, grid, expanded, seed).to(code_dtype(fmt))
    out = torch.empty(weight.shape, dtype=code_dtype(fmt))
    kernel_calls.quantize_blocks(library, weight.contiguous(), out, exponents.contiguous(), tiles, grid, seed)
    return out


def dequantize_blocks(codes: Tensor, scale: Tensor, fmt: Format, block_rows: int, block_cols: int) -> Tensor:
    """float32 [N, K]: the value of each code times the scale of its tile, rounded once.

    codes: uint8 or int8 [N, K]. scale: float32 [ceil(N/block_rows), ceil(K/block_cols)], any value (NaN makes
    the tile NaN).
    """
    _check_narrow(fmt)
    source = byte_codes(codes, fmt)
    tiles = _tiles(codes, block_rows, block_cols)
    check_float32(scale, "scale")
    _check_grid(scale, tiles, "scale")
    table = byte_values(fmt)
    library = kernel_calls.native_library() if codes.device.type == "cpu" else None
    if library is None:
        expanded = expand_scale(scale, Granularity.block(block_rows, block_cols), tuple(codes.shape))
        return table.to(codes.device)[source.to(torch.int64)] * expanded
    out = torch.empty(codes.shape, dtype=torch.float32)
    kernel_calls.dequantize_blocks(library, source, out, scale.contiguous(), tiles, table)
    return out


def block_squared_error(
    weight: Tensor,
    exponents: Tensor,
    fmt: Format,
    rule: CastRule,
    block_rows: int,
    block_cols: int,
    column_weight: Tensor | None = None,
) -> Tensor:
    """Each tile's sum of column_weight * (w - dequantized)^2 for each candidate exponent, float64.

    weight: float32 [N, K]. exponents: int32 [candidates, ceil(N/block_rows), ceil(K/block_cols)], as is the
    result. column_weight: float32 [K] or None for ones. A tile with NaN has error NaN. ValueError as for
    `quantize_blocks`, and for STOCHASTIC, whose error is not a number but a distribution.
    """
    tiles = _checked_tiles(weight, block_rows, block_cols)
    if exponents.dim() != 3:
        raise ValueError(
            f"exponents must be [candidates, tile rows, tile columns], got {tuple(exponents.shape)}"
        )
    check_exponents(exponents)
    _check_grid(exponents[0] if len(exponents) else exponents.sum(0), tiles, "exponents")
    if rule.rounding is Rounding.STOCHASTIC:
        raise ValueError(
            "the error of stochastic rounding is random: choose exponents under another rounding"
        )
    if column_weight is not None:
        check_float32(column_weight, "column_weight")
        if tuple(column_weight.shape) != (tiles.columns,):
            raise ValueError(f"column_weight must be [{tiles.columns}], got {tuple(column_weight.shape)}")
        column_weight = column_weight.contiguous()
    grid = grid_for(fmt, rule)
    out = torch.zeros(exponents.shape, dtype=torch.float64, device=weight.device)
    library = kernel_calls.native_library() if weight.device.type == "cpu" else None
    if library is not None:
        contiguous = exponents.contiguous()
        kernel_calls.block_squared_error(
            library, weight.contiguous(), contiguous, column_weight, out, tiles, grid
        )
        return out
    for candidate, chosen in enumerate(exponents):
        out[candidate] = _error_of(weight, chosen, grid, tiles, column_weight)
    return out


def _error_of(
    weight: Tensor, exponents: Tensor, grid: Grid, tiles: Tiles, column_weight: Tensor | None
) -> Tensor:
    """The twin of kernels.c: the same additions in the same order, for all tiles at once."""
    granularity, shape = Granularity.block(tiles.block_rows, tiles.block_columns), tuple(weight.shape)
    values = cast_to_values(weight, grid, expand_scale(exponents, granularity, shape), (0, 0))
    values *= expand_scale(exponents_to_scale(exponents), granularity, shape)
    difference = weight.to(torch.float64) - values.to(torch.float64)
    terms = difference * difference
    if column_weight is not None:
        terms = column_weight.to(torch.float64) * terms
    tile_rows, tile_columns = exponents.shape
    width = math.ceil(tiles.block_columns / _LANES) * _LANES  # adding zeros changes no sum
    padded = terms.new_zeros(tile_rows * tiles.block_rows, tile_columns, width)
    for tile in range(tile_columns):
        part = terms[:, tile * tiles.block_columns : (tile + 1) * tiles.block_columns]
        padded[: part.shape[0], tile, : part.shape[1]] = part
    by_lane = padded.view(tile_rows, tiles.block_rows, tile_columns, width // _LANES, _LANES)
    lanes = terms.new_zeros(tile_rows, tile_columns, _LANES)
    for row in range(tiles.block_rows):
        for step in range(width // _LANES):
            lanes += by_lane[:, row, :, step]
    half = _LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        half //= 2
    return lanes[..., 0]


def _check_narrow(fmt: Format) -> None:
    if fmt.bits > 8:
        raise ValueError(
            f"format {fmt.name} has {fmt.bits} bits: block functions take formats of at most 8 bits"
        )


def _checked_tiles(weight: Tensor, block_rows: int, block_cols: int) -> Tiles:
    check_float32(weight, "weight")
    return _tiles(weight, block_rows, block_cols)


def _tiles(matrix: Tensor, block_rows: int, block_cols: int) -> Tiles:
    if matrix.dim() != 2 or block_rows < 1 or block_cols < 1:
        raise ValueError(
            f"need a matrix [N, K] and block sizes >= 1, got {tuple(matrix.shape)}, "
            f"{block_rows} and {block_cols}"
        )
    return Tiles(matrix.shape[0], matrix.shape[1], block_rows, block_cols)


def _check_grid(grid: Tensor, tiles: Tiles, name: str) -> None:
    expected = (math.ceil(tiles.rows / tiles.block_rows), math.ceil(tiles.columns / tiles.block_columns))
    if tuple(grid.shape[-2:]) != expected or grid.dim() != 2:
        raise ValueError(f"{name} for {tiles} must have shape {expected}, got {tuple(grid.shape)}")
