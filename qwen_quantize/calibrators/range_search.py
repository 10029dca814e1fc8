"""Scales and zero points of a weight: from its range, and by search for the least error they cause."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.calibrators.ladder import ladder_of
from qwen_quantize.calibrators.native import grid_errors, quantized_values, region_errors
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.granularity import Granularity, block_amax, expand_scale
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.scales import (
    MAX_EXPONENT,
    ScaleRule,
    exponents_to_scale,
    nvfp4_tensor_scale,
    scale_exponents,
)
from qwen_quantize.formats.schemes import TensorSpec
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat, TableFormat
from qwen_quantize.formats.tables import E4M3FN

# Shares of the range that a symmetric integer grid covers; 15/14 is that of amax / 7, which clips nothing.
_SYMMETRIC = (1.0, 15 / 14, *(1 - 0.03 * i for i in range(1, 14)))
_SIGNED_BITS = 4  # up to here the one code that the negative side has more is worth a search
_ASYMMETRIC_TOGETHER = tuple(1 - 0.025 * i for i in range(1, 17))
_ASYMMETRIC_APART = (1.0, 0.93, 0.86, 0.78, 0.7)
_MANTISSA_POSITIONS = 16  # of a float format's scale within a factor of two
_BLOCK_SCALES_BELOW, _BLOCK_SCALES_ABOVE = 2, 6  # E4M3 codes around that of amax / 6; amax / 4 is 4 or 5 up
_HIF8_BINADES = range(1, 9)  # of the largest magnitude after scaling by a power of two
_HIF8_BASELINE_BINADE = 3  # the last one with three mantissa bits
_REFITS = 1
_STRIP_CANDIDATES = 1 << 22


@dataclass(frozen=True, slots=True)
class Grid:
    """Where a weight's values may lie: (code - zero_point) * scale * tensor_scale.

    scale: float32, the granularity's scale shape of the weight, as the scale format holds it; zero_point:
    likewise, whole numbers in units of the codes, or None for 0.
    """

    scale: Tensor
    zero_point: Tensor | None
    tensor_scale: float = 1.0

    def effective_scale(self) -> Tensor:
        """The product of both scales, rounded to float32 as when codes are decoded."""
        return self.scale if self.tensor_scale == 1.0 else self.scale * self.tensor_scale

    def expanded(self, granularity: Granularity, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """(scale, zero point) of each element, both scales in one."""
        zero = None if self.zero_point is None else expand_scale(self.zero_point, granularity, shape)
        return expand_scale(self.effective_scale(), granularity, shape), zero


@dataclass(frozen=True, slots=True)
class GridChoice:
    """The chosen grid and the baseline; errors: float64 weighted squared error of each region under each.

    Cubed errors where the search was for those.
    """

    grid: Grid
    errors: Tensor
    baseline: Grid
    baseline_errors: Tensor


def min_max_grid(weight: Tensor, spec: TensorSpec, *, tensor_scale: float | None = None) -> Grid:
    """The grid of plain rounding, from each region's largest magnitude, or its range with a zero point.

    weight: [N, K] float32, finite. Integers without zero point: amax / 7.5 for INT4, as 16 codes span it. With
    E8M0 scales the spec's rule decides; where that is to search, `rceil` for eight-bit elements and `even` for
    narrower ones. NVFP4: amax / (6 * 448) for the tensor unless `tensor_scale` says otherwise (linears that a
    kernel fuses need one for all).
    """
    low, high = _range(weight, spec)
    return _baseline(low, high, spec, _tensor_scale(high, spec, tensor_scale))


def search_grid(
    weight: Tensor,
    spec: TensorSpec,
    cast: CastRule,
    column_weight: Tensor | None,
    *,
    tensor_scale: float | None = None,
    cubed: bool = False,
) -> GridChoice:
    """For each region the grid with the least sum of column_weight * (w - Q(w))^2.

    weight: [N, K] float32, finite; column_weight: [K] float32 (mean square of each input feature) or None.
    Q rounds floats under `cast` and integers to nearest, with the scale as its format holds it. The grid of
    `min_max_grid` is among the candidates and wins ties, so the choice is never worse. The scales of INT4 without
    zero point may be negative: the side that then reaches 8 steps is the one that needs it (one decibel).
    tensor_scale as there; left open, NVFP4 also tries amax / (6 * 256), under which every block may use 4 as its
    largest code. cubed: for integers |w - Q(w)|^3 counts instead, the errors returned are sums of it, and no scale is
    refitted, so that the few largest weights are clipped less.
    """
    cubed = cubed and isinstance(spec.format, IntFormat)
    weight = weight.contiguous()
    importance = torch.ones(weight.shape[1]) if column_weight is None else column_weight.contiguous()
    low, high = _range(weight, spec)
    first = _tensor_scale(high, spec, tensor_scale)
    baseline = _baseline(low, high, spec, first)
    baseline_errors = _errors(weight, spec, cast, importance, [baseline], cubed)[0]
    scales = [first]
    if spec.tensor_scale_format is not None and tensor_scale is None:
        scales.append(first * 448 / 256)
    best, errors = baseline, baseline_errors
    for chosen in scales:
        start = baseline if chosen == first else _baseline(low, high, spec, chosen)
        found, found_errors = _searched(weight, spec, cast, importance, low, high, start, cubed)
        if float(found_errors.sum()) < float(errors.sum()):
            best, errors = found, found_errors
    return GridChoice(best, errors, baseline, baseline_errors)


def _searched(
    weight: Tensor,
    spec: TensorSpec,
    cast: CastRule,
    importance: Tensor,
    low: Tensor,
    high: Tensor,
    start: Grid,
    cubed: bool,
) -> tuple[Grid, Tensor]:
    """The best candidate of each region, `start` among them, and its errors."""
    rows, _ = spec.granularity.block_shape(tuple(weight.shape))
    across = high.shape[1]
    step = max(1, _STRIP_CANDIDATES // (64 * across))  # rows of regions whose candidates exist at a time
    scales, zeros, errors = [], [], []
    for first in range(0, high.shape[0], step):
        part = slice(first, first + step)
        strip = weight[first * rows : (first + step) * rows]
        begin = Grid(
            start.scale[part],
            None if start.zero_point is None else start.zero_point[part],
            start.tensor_scale,
        )
        candidates = [begin, *_candidates(low[part], high[part], spec, begin)]
        grid, error = _best(strip, spec, cast, importance, candidates, cubed)
        for _ in range(_REFITS if _is_refitted(spec) and not cubed else 0):
            refitted = _refit(strip, spec, importance, grid)
            grid, error = _best(strip, spec, cast, importance, [grid, refitted], cubed)
        scales.append(grid.scale)
        zeros.append(grid.zero_point)
        errors.append(error)
    zero = None if zeros[0] is None else torch.cat([z for z in zeros if z is not None])
    return Grid(torch.cat(scales), zero, start.tensor_scale), torch.cat(errors)


def _best(
    weight: Tensor, spec: TensorSpec, cast: CastRule, importance: Tensor, candidates: list[Grid], cubed: bool
) -> tuple[Grid, Tensor]:
    """Region by region the candidate with the least error, the first of equals."""
    errors = _errors(weight, spec, cast, importance, candidates, cubed)
    best = errors.argmin(dim=0, keepdim=True)

    def chosen(grids: list[Tensor]) -> Tensor:
        return torch.stack(grids).gather(0, best)[0]

    zeros = [grid.zero_point for grid in candidates if grid.zero_point is not None]
    grid = Grid(
        chosen([grid.scale for grid in candidates]),
        chosen(zeros) if zeros else None,
        candidates[0].tensor_scale,
    )
    return grid, errors.gather(0, best)[0]


def _errors(
    weight: Tensor, spec: TensorSpec, cast: CastRule, importance: Tensor, candidates: list[Grid], cubed: bool
) -> Tensor:
    """[candidates, down, across] float64."""
    scale = torch.stack([grid.effective_scale() for grid in candidates])
    zeros = [grid.zero_point for grid in candidates if grid.zero_point is not None]
    zero = torch.stack(zeros) if zeros else None
    region = spec.granularity.block_shape(tuple(weight.shape))
    if rounds_to_nearest(spec.format, cast):
        return grid_errors(weight, importance, region, scale, zero, ladder_of(spec.format), cubed=cubed)

    def rounded(w: Tensor, s: Tensor, _: Tensor | None) -> Tensor:
        return quantize_values(w / s, spec.format, cast) * s

    return region_errors(weight, importance, region, scale, zero, rounded)


def rounds_to_nearest(format: Format, cast: CastRule) -> bool:
    """Whether weights become the nearest value: under such a cast, and as integers always."""
    plain = cast.rounding is Rounding.RNE and cast.subnormals is Subnormals.KEEP
    return isinstance(format, IntFormat) or plain


def grid_codes(weight: Tensor, spec: TensorSpec, cast: CastRule, grid: Grid) -> Tensor:
    """The codes [N, K] of plain rounding on a grid, as `QuantizedTensor` holds them."""
    scale, zero = grid.expanded(spec.granularity, tuple(weight.shape))
    if isinstance(spec.format, IntFormat):
        values = quantized_values(weight, scale, zero, ladder_of(spec.format))
        return value_codes(values, spec, grid)
    return encode((weight / scale).contiguous(), spec.format, cast)


def value_codes(values: Tensor, spec: TensorSpec, grid: Grid) -> Tensor:
    """The codes [N, K] of values that lie on a grid, exactly but for the rounding of their product."""
    scale, zero = grid.expanded(spec.granularity, tuple(values.shape))
    codes = values / scale  # off the code by a rounding error at most
    if zero is not None:
        codes = codes.round_().add_(zero)
    return encode(codes.contiguous(), spec.format, RNE_SATURATE)


def grid_values(codes: Tensor, spec: TensorSpec, grid: Grid) -> Tensor:
    """The float32 values [N, K] of codes on a grid."""
    scale, zero = grid.expanded(spec.granularity, tuple(codes.shape))
    values = decode(codes, spec.format)
    return (values if zero is None else values.sub_(zero)) * scale


def stored_scale(scale: Tensor, format: Format) -> Tensor:
    """float32 scales as `format` holds them: to nearest, no magnitude below its least or above its largest value."""
    if isinstance(format, FloatFormat) and format.bits == 32:
        return scale.abs().clamp_(min=torch.finfo(torch.float32).tiny).copysign_(scale)
    least = format.min_subnormal if isinstance(format, FloatFormat) else 1.0
    stored = quantize_values(scale.contiguous(), format, RNE_SATURATE)
    return stored.abs_().clamp_(min=least).copysign_(scale)


def _range(weight: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor]:
    """(low, high) of each region, low <= 0 <= high; without a zero point high is the largest magnitude."""
    if spec.symmetric:
        high = block_amax(weight, spec.granularity)
        return -high, high
    tiles = region_tiles(weight, spec.granularity)
    return tiles.amin(dim=(1, 3)).clamp_(max=0), tiles.amax(dim=(1, 3)).clamp_(min=0)


def _tensor_scale(high: Tensor, spec: TensorSpec, given: float | None) -> float:
    if spec.tensor_scale_format is None:
        return 1.0
    return float(nvfp4_tensor_scale(high.amax())) if given is None else given


def _baseline(low: Tensor, high: Tensor, spec: TensorSpec, tensor_scale: float) -> Grid:
    format = spec.format
    if spec.scale_rule is not None:
        return Grid(exponents_to_scale(scale_exponents(high, format, _rule(spec))), None)
    match format:
        case IntFormat():
            return _integer_grid(low, high, spec)
        case TableFormat():
            return _centred(high, format, _HIF8_BASELINE_BINADE)
        case FloatFormat():
            return _scaled(high, high / (format.max * tensor_scale), spec, tensor_scale)


def _rule(spec: TensorSpec) -> ScaleRule:
    if spec.scale_rule is not None and spec.scale_rule is not ScaleRule.SEARCH:
        return spec.scale_rule
    return ScaleRule.RCEIL if spec.format.bits >= 8 else ScaleRule.EVEN


def _candidates(low: Tensor, high: Tensor, spec: TensorSpec, start: Grid) -> list[Grid]:
    """What may be better than `start`."""
    format = spec.format
    if spec.scale_rule is not None:
        # Every published rule takes the floor exponent or the one above it.
        floor = scale_exponents(high, format, ScaleRule.FLOOR)
        exponents = [floor, torch.where(high > 0, floor + 1, 0).clamp_(max=MAX_EXPONENT).to(torch.int32)]
        return [Grid(exponents_to_scale(e), None) for e in exponents]
    match format:
        case IntFormat():
            return _integer_candidates(low, high, spec)
        case TableFormat():
            return [_centred(high, format, binade) for binade in _HIF8_BINADES]
        case FloatFormat() if spec.scale_format.bits == 8:
            codes = encode(start.scale, E4M3FN, RNE_SATURATE).to(torch.int16)
            around = range(-_BLOCK_SCALES_BELOW, _BLOCK_SCALES_ABOVE + 1)
            shifted = [(codes + i).clamp_(1, E4M3FN.max_code).to(torch.uint8) for i in around]
            return [Grid(decode(code, E4M3FN), None, start.tensor_scale) for code in shifted]
        case FloatFormat():
            positions = range(-2, _MANTISSA_POSITIONS)
            return [
                _scaled(high, high / format.max * 2 ** (i / _MANTISSA_POSITIONS), spec, 1.0)
                for i in positions
            ]


def _integer_candidates(low: Tensor, high: Tensor, spec: TensorSpec) -> list[Grid]:
    if spec.symmetric:
        grids = [_integer_grid(low * share, high * share, spec) for share in _SYMMETRIC]
        turned = [Grid(-grid.scale, None) for grid in grids if spec.format.bits <= _SIGNED_BITS]
        return grids + turned
    shares = [(share, share) for share in _ASYMMETRIC_TOGETHER] + list(product(_ASYMMETRIC_APART, repeat=2))
    return [_integer_grid(low * below, high * above, spec) for below, above in shares]


def _integer_grid(low: Tensor, high: Tensor, spec: TensorSpec) -> Grid:
    format = spec.format
    assert isinstance(format, IntFormat)
    scale = (high - low) / (format.maximum - format.minimum)
    grid = _scaled(high - low, scale, spec, 1.0)
    if spec.symmetric:
        return grid
    zero = (format.minimum - low / grid.scale).round_().clamp_(format.minimum, format.maximum)
    return Grid(grid.scale, torch.where(high - low > 0, zero, 0.0))


def _scaled(high: Tensor, scale: Tensor, spec: TensorSpec, tensor_scale: float) -> Grid:
    """`scale` as it is stored; 1 for a region of zeros."""
    return Grid(torch.where(high > 0, stored_scale(scale, spec.scale_format), 1.0), None, tensor_scale)


def _centred(high: Tensor, format: TableFormat, binade: int) -> Grid:
    """Powers of two that bring each region's largest magnitude into 2^binade .. 2^(binade + 1)."""
    floor = scale_exponents(high, format, ScaleRule.FLOOR)
    shifted = torch.where(high > 0, (floor + (format.emax - binade)).clamp_(-126, 126), 0)
    return Grid(exponents_to_scale(shifted.to(torch.int32)), None)


def _is_refitted(spec: TensorSpec) -> bool:
    return isinstance(spec.format, IntFormat) and spec.scale_rule is None


def _refit(weight: Tensor, spec: TensorSpec, importance: Tensor, grid: Grid) -> Grid:
    """The grid with the scales that are best for the integers it gives: weighted least squares."""
    format = spec.format
    assert isinstance(format, IntFormat)
    tiles = region_tiles(weight, spec.granularity)
    weights = functional.pad(importance, (0, tiles.shape[2] * tiles.shape[3] - importance.shape[0]))
    steps = tiles / _over_tiles(grid.effective_scale())
    if grid.zero_point is None:
        steps.clamp_(format.minimum, format.maximum)
    else:
        zero = _over_tiles(grid.zero_point)
        steps = torch.minimum(torch.maximum(steps, format.minimum - zero), format.maximum - zero)
    steps.round_()
    weighted = steps * weights.view(tiles.shape[2:])
    products = (weighted * tiles).sum(dim=(1, 3))
    squares = weighted.mul_(steps).sum(dim=(1, 3))
    same_sign = (squares > 0) & (products * grid.scale > 0)
    fitted = torch.where(same_sign, products / squares, grid.scale)
    return Grid(stored_scale(fitted, spec.scale_format), grid.zero_point, grid.tensor_scale)


def _over_tiles(region_values: Tensor) -> Tensor:
    """[down, across] as it broadcasts over `region_tiles`."""
    return region_values.unsqueeze(1).unsqueeze(3)


def region_tiles(x: Tensor, granularity: Granularity) -> Tensor:
    """x [N, K] as [down, rows, across, columns] of its regions, zeros behind its ends."""
    shape = tuple(x.shape)
    rows, columns = granularity.block_shape(shape)
    down, across = granularity.scale_shape(shape)
    if shape != (down * rows, across * columns):
        x = functional.pad(x, (0, across * columns - shape[1], 0, down * rows - shape[0]))
    return x.reshape(down, rows, across, columns)


def region_sums(x: Tensor, granularity: Granularity) -> Tensor:
    """The sum over each region of x [N, K] float32, of the scale's shape."""
    return region_tiles(x, granularity).sum(dim=(1, 3))
