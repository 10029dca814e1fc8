"""What becomes of a linear's input before the product, as a checkpoint's config states it."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.spec import Format


@dataclass(frozen=True, slots=True)
class ActivationForm:
    """The format that an input is cast to and where its scales come from.

    granularity: token, group or tensor. scale_format: of the scales at that granularity (E8M0 for MX, E4M3FN
    for NVFP4). dynamic: those scales are found at run time; else `input_scale` names the tensor that holds the
    one scale, which multiplies. global_scale: the tensor with NVFP4's second-level scale, which divides, as
    compressed-tensors stores it: 448 * 6 / amax. symmetric False: integers with a zero point, found at run time
    or in the tensor `input_zero_point`.
    """

    format: Format
    granularity: Granularity
    scale_format: Format
    dynamic: bool
    input_scale: str | None = None
    global_scale: str | None = None
    symmetric: bool = True
    input_zero_point: str | None = None
