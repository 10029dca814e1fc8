"""The dynamic activation path, fused: what a chip with power-of-two group scales makes of activations.

Per token and group of K: the largest magnitude gives an exponent e by the scale rule; each element times 2^-e
goes through the cast; the result is multiplied by 2^e. The scaling down is exact, whatever the exponents (the
cast takes e as an integer, so no float32 subnormal is rounded twice). The scaling up is one float32 product:
exact but at the ends of float32's range, where it rounds to nearest even or overflows to infinity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats import kernel_calls
from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.codec import check_float32
from qwen_quantize.formats.granularity import Granularity, block_amax, expand_scale
from qwen_quantize.formats.grid import grid_for
from qwen_quantize.formats.rounding import checked_out
from qwen_quantize.formats.scales import ScaleRule, exponents_to_scale, scale_exponents, scale_threshold
from qwen_quantize.formats.seeds import draw_seed
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.twin import cast_to_values


def fake_quantize_groups(
    x: Tensor,
    fmt: Format,
    rule: CastRule,
    scale_rule: ScaleRule,
    group_size: int,
    out: Tensor | None = None,
    *,
    threshold: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """x quantized and dequantized, float32 [tokens, K], with an E8M0 scale per token and `group_size` of K.

    The last group may be partial. A zero group stays zero (scale 1). A group with a NaN or an infinity has no
    scale (E8M0 0xFF) and is NaN throughout. `threshold` is RCEIL's t; `out` as in `quantize_values`.
    ValueError for the SEARCH rule, a group size below 1, formats without a zero (E8M0) and FP32.
    """
    check_float32(x, "x")
    if x.dim() != 2 or group_size < 1:
        raise ValueError(f"x must be [tokens, K] and group_size >= 1, got {tuple(x.shape)} and {group_size}")
    out = checked_out(x, out)
    grid, seed = grid_for(fmt, rule), draw_seed(rule, generator)
    limits = scale_threshold(fmt, scale_rule, threshold=threshold)
    library = kernel_calls.native_library() if x.device.type == "cpu" else None
    if library is not None:
        tiles = kernel_calls.Tiles(x.shape[0], x.shape[1], 1, group_size)
        kernel_calls.fake_quantize_groups(
            library, x.contiguous(), out, tiles, limits.offset, limits.fraction_threshold, grid, seed
        )
        return out
    granularity, shape = Granularity.group(group_size), tuple(x.shape)
    amax = block_amax(x, granularity)
    unscalable = ~amax.isfinite()
    exponents = scale_exponents(torch.where(unscalable, 0.0, amax), fmt, scale_rule, threshold=threshold)
    values = cast_to_values(x, grid, expand_scale(exponents, granularity, shape), seed)
    values *= expand_scale(exponents_to_scale(exponents), granularity, shape)
    return out.copy_(torch.where(expand_scale(unscalable, granularity, shape), torch.nan, values))
