"""The dynamic activation path with scales that have a mantissa: float32 per token, or E4M3 per 16 elements.

In the order of the serving kernels. Integers: scale = amax / 127, and an element is multiplied with 127 / amax, as
vLLM's int8 kernel does. Floats: scale = amax / max, no smaller than 1 / (512 max), and an element is divided by it,
as vLLM's fp8 kernel does. A second, outer scale for each row (NVFP4) divides the block's scale before that is
rounded, as vLLM's kernel has it, but with true divisions in the place of its approximate reciprocals. HiF8 has its
full precision up to 15, so that is where its largest element goes (as torch_npu trains with it; CANN's DynamicQuant
puts it at 32768, where one bit is left).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_quantize.formats import kernel_calls
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import check_float32
from qwen_quantize.formats.granularity import Granularity, block_amax, expand_scale
from qwen_quantize.formats.grid import grid_for
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.seeds import draw_seed
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat, TableFormat
from qwen_quantize.formats.tables import FP32
from qwen_quantize.formats.twin import cast_to_values

ON_THE_WAY = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)  # casts between the vector types
_SMALLEST_SCALE = 2.0**-126
_SMALLEST_AMAX = 1e-10  # of a group, in vLLM's per_token_group_quant_fp8
_HIF8_TARGET = 15.0  # the largest value of the binades that have three bits of mantissa


@dataclass(frozen=True, slots=True)
class ScaleSearch:
    """Where the scales of groups of a row come from.

    group_size None: the whole row. target: what the largest magnitude becomes, and the bound of all. smallest: of
    a scale before it is rounded to scale_format. reciprocal: multiply by target / amax instead of dividing by the
    scale. path: types that a scaled value is rounded to on its way to the code.
    """

    target: float
    smallest: float
    reciprocal: bool
    group_size: int | None = None
    scale_format: FloatFormat = FP32
    path: tuple[FloatFormat, ...] = field(default=())


def search_for(
    fmt: Format,
    scale_format: FloatFormat = FP32,
    group_size: int | None = None,
    path: tuple[FloatFormat, ...] = (),
) -> ScaleSearch:
    """The search of the serving kernels for codes of `fmt`; see the module."""
    wide = scale_format == FP32
    target = _HIF8_TARGET if isinstance(fmt, TableFormat) else fmt.max
    smallest = _SMALLEST_SCALE
    if isinstance(fmt, FloatFormat) and fmt.bits == 8:
        smallest = _single(1.0 / (fmt.max * 512.0) if group_size is None else _SMALLEST_AMAX / fmt.max)
    if not wide:
        smallest = max(smallest, scale_format.min_subnormal)
    return ScaleSearch(target, smallest, isinstance(fmt, IntFormat) and wide, group_size, scale_format, path)


def quantize_scaled(
    x: Tensor,
    fmt: Format,
    rule: CastRule,
    search: ScaleSearch,
    outer: Tensor | None = None,
    *,
    scaled: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes' values times their scales, scales): float32 [tokens, K] and [tokens, groups] of float32 x [tokens, K].

    scaled False: the codes' values alone. outer: float32 [tokens], multiplies the scales to get back; it is in
    neither result. The last group may be partial. A zero group stays zero, and so does one whose scale rounds to
    zero. A group with a NaN or an infinity is NaN throughout, its scale too. ValueError unless x is a float32
    matrix, for formats without a zero (E8M0), and for FP32.
    """
    check_float32(x, "x")
    size = x.shape[1] if x.dim() == 2 and search.group_size is None else search.group_size
    if x.dim() != 2 or size is None or (size < 1 and x.numel()):
        raise ValueError(f"x must be [tokens, K] and group_size >= 1, got {tuple(x.shape)} and {size}")
    size = max(size, 1)
    grid, seed = grid_for(fmt, rule), draw_seed(rule, generator)
    library = kernel_calls.native_library() if x.device.type == "cpu" else None
    if library is not None and len(search.path) <= 1:
        tiles = kernel_calls.Tiles(x.shape[0], x.shape[1], 1, size)
        how = kernel_calls.ScaledCast(
            search.target,
            search.smallest,
            search.reciprocal,
            None if search.scale_format == FP32 else grid_for(search.scale_format, RNE_SATURATE),
            grid_for(search.path[0], ON_THE_WAY) if search.path else None,
        )
        out = torch.empty(x.shape)
        scales = torch.empty(x.shape[0], -(-x.shape[1] // size))
        kernel_calls.quantize_scaled(
            library,
            x.contiguous(),
            out,
            scales,
            None if outer is None else outer.contiguous(),
            tiles,
            how,
            grid,
            seed,
            scaled=scaled,
        )
        return out, scales
    granularity, shape = Granularity.group(size), tuple(x.shape)
    largest = block_amax(x, granularity)
    usable = largest.isfinite()
    largest = torch.where(usable, largest, 0.0)
    target = torch.tensor(search.target, device=x.device)
    scale = largest / target
    if outer is not None:
        scale = scale / outer.unsqueeze(1)
    floored = ~(scale > search.smallest)
    scale = torch.where(floored, search.smallest, scale)
    if search.scale_format != FP32:
        scale = quantize_values(scale.contiguous(), search.scale_format, RNE_SATURATE)
    total = scale if outer is None else scale * outer.unsqueeze(1)
    if search.reciprocal:
        smallest = torch.tensor(1.0 / search.smallest, device=x.device)
        # Tensor over tensor: a number over a tensor is a reciprocal times the number, and rounds twice.
        codes = x * expand_scale(torch.where(floored, smallest, target / largest), granularity, shape)
    else:
        codes = x / expand_scale(total, granularity, shape)
    codes = torch.where(expand_scale(total == 0, granularity, shape), 0.0, codes)
    codes = codes.clamp(-search.target, search.target)
    for step in search.path:
        codes = quantize_values(codes, step, ON_THE_WAY)
    values = cast_to_values(codes, grid, None, seed)
    if scaled:
        values *= expand_scale(scale, granularity, shape)
    values = torch.where(expand_scale(usable, granularity, shape), values, torch.nan)
    return values, torch.where(usable, scale, torch.nan)


def _single(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
