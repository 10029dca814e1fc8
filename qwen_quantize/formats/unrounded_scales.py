"""Dynamic activation groups with float32 scales: what a chip loses by rounding scales to powers of two is the rest."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.codec import check_float32
from qwen_quantize.formats.granularity import Granularity, block_amax, expand_scale
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import Format

_SMALLEST_SCALE = 2.0**-126


def fake_quantize_unrounded(x: Tensor, fmt: Format, rule: CastRule, group_size: int) -> Tensor:
    """x quantized and dequantized, float32 [tokens, K]: each group's scale is its largest magnitude over the format's.

    Scales below 2^-126 become that, and a zero group stays zero. A group with a NaN or an infinity is NaN throughout,
    as with power-of-two scales. ValueError unless x is a float32 matrix.
    """
    check_float32(x, "x")
    if x.dim() != 2 or group_size < 1:
        raise ValueError(f"x must be [tokens, K] and group_size >= 1, got {tuple(x.shape)} and {group_size}")
    granularity, shape = Granularity.group(group_size), tuple(x.shape)
    amax = block_amax(x, granularity)
    scale = expand_scale((amax / fmt.max).clamp(min=_SMALLEST_SCALE), granularity, shape)
    # amax over its own scale may be a bit below the format's maximum, and a truncating cast would lose a whole step.
    largest = (x.abs() == expand_scale(amax, granularity, shape)) & (scale > _SMALLEST_SCALE)
    codes = torch.where(largest, torch.copysign(torch.full_like(x, fmt.max), x), x / scale)
    values = quantize_values(codes, fmt, rule) * scale
    return torch.where(expand_scale(amax.isfinite(), granularity, shape), values, torch.nan)
