"""Scales for codes already chosen: best by least squares on the output error, or right on average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.calibrators.error_feedback import ranges_of
from qwen_quantize.calibrators.problem import HessianFactor
from qwen_quantize.calibrators.range_search import Grid, grid_values, region_sums, stored_scale
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import TensorSpec
from qwen_quantize.formats.spec import Format

_MOST_GROWTH = 1.1


def refitted_scales(
    weight: Tensor,
    steps: Tensor,
    grid: Grid,
    granularity: Granularity,
    scale_format: Format,
    factors: Sequence[HessianFactor],
) -> Grid:
    """The grid with a smaller trace(D H D^T), D = W - steps * scale, the codes fixed.

    weight, steps: [N, K] float32, steps = code - zero point. Regions side by side are fitted in turn, each for
    the others as they are, which has a closed form; a scale is replaced only where that, rounded to its format,
    makes the error less, and keeps its sign.
    """
    rows, columns = granularity.block_shape(tuple(weight.shape))
    ranges = ranges_of(factors)
    scale = grid.effective_scale().clone()
    stored = grid.scale.clone()
    spread = scale.repeat_interleave(rows, dim=0)[: weight.shape[0]]
    difference = weight - steps * spread.repeat_interleave(columns, dim=1)[:, : weight.shape[1]]
    gradients = [difference[:, c] @ f.hessian for c, f in zip(ranges, factors, strict=True)]
    del difference
    for region in range(scale.shape[1]):
        begin, end = region * columns, min((region + 1) * columns, weight.shape[1])
        slope, curvature = scale.new_zeros(scale.shape[0]), scale.new_zeros(scale.shape[0])
        parts = []
        for index, range_ in enumerate(ranges):
            first, last = max(begin, range_.start), min(end, range_.stop)
            if first >= last:
                continue
            here = slice(first - range_.start, last - range_.start)
            codes, hessian = steps[:, first:last], factors[index].hessian
            slope += _by_region(torch.linalg.vecdot(codes, gradients[index][:, here]), rows)
            curvature += _by_region(torch.linalg.vecdot(codes @ hessian[here, here], codes), rows)
            parts.append((gradients[index], codes, hessian[here]))
        wanted = stored[:, region] + torch.where(curvature > 0, slope / curvature, 0.0) / grid.tensor_scale
        after = stored_scale(wanted, scale_format)
        change = after * grid.tensor_scale - scale[:, region]
        better = (wanted * stored[:, region] > 0) & (change * (2 * slope - change * curvature) > 0)
        change = torch.where(better, change, 0.0)
        stored[:, region] = torch.where(better, after, stored[:, region])
        by_row = change.repeat_interleave(rows)[: weight.shape[0]].unsqueeze(1)
        for gradient, codes, hessian in parts:
            gradient.addmm_(codes * by_row, hessian, alpha=-1)
    return Grid(stored, grid.zero_point, grid.tensor_scale)


def unbiased_scales(weight: Tensor, codes: Tensor, spec: TensorSpec, grid: Grid) -> Grid:
    """The grid under which the codes [N, K] are right on average: in each region w . Q(w) = w . w.

    weight: [N, K] float32. The scale of least squares, w . q / q . q for integers q, and every clipped range shrink
    the weights by about one per cent: an error less at each linear, but all shrink alike, and over the layers that
    adds up. A region that lost much more keeps its scale: there many weights became zero, and the few that did not
    would grow to make up for them.
    """
    products = region_sums(weight * grid_values(codes, spec, grid), spec.granularity)
    squares = region_sums(weight.square(), spec.granularity)
    growth = squares / products
    growth = torch.where((products > 0) & (growth <= _MOST_GROWTH), growth, 1.0)
    return Grid(stored_scale(grid.scale * growth, spec.scale_format), grid.zero_point, grid.tensor_scale)


def _by_region(x: Tensor, rows: int) -> Tensor:
    """Sums of x [N] over `rows` neighbours."""
    down = -(-x.shape[0] // rows)
    return functional.pad(x, (0, down * rows - x.shape[0])).view(down, rows).sum(dim=1)
