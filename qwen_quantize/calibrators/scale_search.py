"""Power-of-two block scales chosen by the error they cause, under the cast that is really used."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.block_kernels import block_squared_error
from qwen_quantize.formats.blocks import block_amax
from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.scales import ScaleRule, scale_exponents
from qwen_quantize.formats.spec import Format

MAX_EXPONENT = 127  # E8M0 code 254; code 255 is NaN and is never written


@dataclass(frozen=True, slots=True)
class ScaleChoice:
    """exponents: int32 [row blocks, column blocks]; errors: float64 weighted squared error of each block.

    The baseline is DeepSeek's rule, ceil(log2(amax / max)), on the same objective.
    """

    exponents: Tensor
    errors: Tensor
    baseline_exponents: Tensor
    baseline_errors: Tensor


def search_exponents(
    weight: Tensor,
    format: Format,
    rule: CastRule,
    block_rows: int,
    block_columns: int,
    column_weight: Tensor | None,
) -> ScaleChoice:
    """The exponent of every block with the least sum of column_weight * (w - Q(w))^2.

    weight: [N, K] float32, finite; column_weight: [K] float32 (mean square of each input feature) or None.
    The candidates are the OCP floor exponent and the one above it. Every published rule (floor; ceil;
    DeepSeek's and NVIDIA's rceil; Quark's even) takes one of these two, so none can be better on this
    objective. Equal errors go to rceil, which never clips. Blocks at the edge may be partial; an all-zero
    block gets exponent 0.
    """
    amax = block_amax(weight, Granularity.block(block_rows, block_columns))
    floor = scale_exponents(amax, format, ScaleRule.FLOOR)
    rceil = scale_exponents(amax, format, ScaleRule.RCEIL)
    other = torch.where(rceil == floor, floor + 1, floor).clamp_(max=MAX_EXPONENT)
    candidates = torch.stack([rceil, other])
    candidates[:, amax == 0] = 0
    errors = block_squared_error(weight, candidates, format, rule, block_rows, block_columns, column_weight)
    best = errors.argmin(dim=0, keepdim=True)  # the first of equals, that is rceil
    return ScaleChoice(
        exponents=candidates.gather(0, best)[0].contiguous(),
        errors=errors.gather(0, best)[0],
        baseline_exponents=candidates[0].contiguous(),
        baseline_errors=errors[0],
    )
