"""Tensors in codes with one scale for each region."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.block_kernels import dequantize_blocks
from qwen_quantize.formats.codec import decode
from qwen_quantize.formats.granularity import (
    Granularity,
    GranularityKind,
    block_amax,
    check_scale_shape,
    expand_scale,
)
from qwen_quantize.formats.spec import Format

__all__ = ["Granularity", "GranularityKind", "QuantizedTensor", "block_amax", "expand_scale"]


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """Codes and what turns them back into numbers: (decode(codes) - zero_point) * scale * tensor_scale.

    codes: `shape`, as `encode` gives them (unpacked). scale: float32, `granularity.scale_shape(shape)`; it
    always multiplies and may be negative (full-range INT4). zero_point: like scale, in units of the decoded
    codes. tensor_scale: of the whole tensor, a float32 number beside the regions' scales (NVFP4); commonly 1.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    format: Format
    granularity: Granularity
    shape: tuple[int, ...]
    tensor_scale: float = 1.0

    def __post_init__(self) -> None:
        if tuple(self.codes.shape) != self.shape:
            raise ValueError(f"codes have shape {tuple(self.codes.shape)}, the tensor has {self.shape}")
        if self.scale.dtype != torch.float32:
            raise ValueError(
                f"scale must be float32, not {self.scale.dtype}: decode E8M0 or FP16 scales first"
            )
        check_scale_shape(self.scale, self.granularity, self.shape)
        if self.zero_point is not None:
            check_scale_shape(self.zero_point, self.granularity, self.shape)

    def dequantize(self) -> Tensor:
        """The float32 values, `shape`; one rounding, that of the product with the scale.

        The product of the two scales is rounded to float32 before it meets the codes.
        """
        scale = self.scale if self.tensor_scale == 1.0 else self.scale * self.tensor_scale
        if self.zero_point is None and len(self.shape) == 2 and self.format.bits <= 8:
            return dequantize_blocks(
                self.codes, scale, self.format, *self.granularity.block_shape(self.shape)
            )
        values = decode(self.codes, self.format)
        if self.zero_point is not None:
            values -= expand_scale(self.zero_point.to(torch.float32), self.granularity, self.shape)
        return values * expand_scale(scale, self.granularity, self.shape)
