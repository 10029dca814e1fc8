"""A quick stand-in for rounding with a searched grid, for searches that round the same weights many times."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.ladder import ladder_of
from qwen_quantize.calibrators.native import grid_errors, quantized_values
from qwen_quantize.calibrators.range_search import (
    Grid,
    grid_codes,
    grid_values,
    min_max_grid,
    rounds_to_nearest,
    stored_scale,
)
from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.schemes import TensorSpec
from qwen_quantize.formats.spec import TableFormat

_SHARES = (1.0, 1.07, 0.93, 0.87, 0.81, 0.75, 0.69, 0.63)
_POWERS_OF_TWO = (1.0, 0.5, 2.0)


def clipped_rounding(weight: Tensor, column_weight: Tensor, spec: TensorSpec, cast: CastRule) -> Tensor:
    """[N, K] float32: `weight` rounded with the best of a few shares of each region's plain scale.

    weight: [N, K] float32; column_weight: [K] float32, what a squared error in each column counts. Eight shares from
    1.07 to 0.63, or three powers of two where scales are such, in one call of the kernel; `search_grid` tries more and
    refits. A zero point stays where plain rounding has it.
    """
    weight = weight.contiguous()
    tried = _tried(weight, column_weight, spec)
    best = tried.errors.argmin(dim=0, keepdim=True)
    grid = Grid(tried.scales.gather(0, best)[0], tried.plain.zero_point, tried.plain.tensor_scale)
    if not rounds_to_nearest(spec.format, cast):
        return grid_values(grid_codes(weight, spec, cast, grid), spec, grid)
    scale, offset = grid.expanded(spec.granularity, tuple(weight.shape))
    return quantized_values(weight, scale, offset, ladder_of(spec.format))


def clipped_error(weight: Tensor, column_weight: Tensor, spec: TensorSpec) -> float:
    """The sum of column_weight * (w - Q(w))^2 that `clipped_rounding` leaves where it rounds to nearest.

    The kernel has it already, so nothing is rounded again.
    """
    errors = _tried(weight.contiguous(), column_weight, spec).errors
    return float(errors.amin(dim=0).sum())


@dataclass(frozen=True, slots=True)
class _Tried:
    """scales, errors: [shares, down, across], of every region; plain: the grid that they are shares of."""

    scales: Tensor
    errors: Tensor
    plain: Grid


def _tried(weight: Tensor, column_weight: Tensor, spec: TensorSpec) -> _Tried:
    plain = min_max_grid(weight, spec)
    binary = spec.scale_rule is not None or isinstance(spec.format, TableFormat)
    shares = torch.tensor(_POWERS_OF_TWO if binary else _SHARES).view(-1, 1, 1)
    scales = plain.scale * shares
    scales = scales if binary else stored_scale(scales.flatten(0, 1), spec.scale_format).view_as(scales)
    zero = plain.zero_point
    errors = grid_errors(
        weight,
        column_weight.contiguous(),
        spec.granularity.block_shape(tuple(weight.shape)),
        scales if plain.tensor_scale == 1.0 else scales * plain.tensor_scale,
        None if zero is None else zero.expand_as(scales).contiguous(),
        ladder_of(spec.format),
    )
    return _Tried(scales, errors, plain)
