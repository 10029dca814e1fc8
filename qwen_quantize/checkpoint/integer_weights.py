"""Integers of compressed-tensors, packed in words of 32 bits, and their values.

A code q is stored as q + 2^(bits - 1), the first one in the lowest bits. Weights are packed along a row, zero
points along a column. As words are little-endian, 8-bit codes are bytes and 4-bit codes nibbles in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats.packing import unpack_nibble_pairs


def unpack_columns(words: Tensor, bits: int, columns: int) -> Tensor:
    """int8 [rows, columns] of words int32 [rows, ceil(columns * bits / 32)]; bits: 4 or 8."""
    # A copy, for a transposed column of one word counts as contiguous and cannot be viewed as bytes.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    stored = octets if bits == 8 else unpack_nibble_pairs(octets)
    shift = 1 << (bits - 1)
    return (stored[:, :columns].to(torch.int16) - shift).to(torch.int8)


def unpack_rows(words: Tensor, bits: int, skip: int, rows: int) -> Tensor:
    """int8 [rows, groups] of words int32 [any, groups] packed along the first dimension, after `skip` codes."""
    return unpack_columns(words.t(), bits, skip + rows)[:, skip:].t()


def scale_integers(
    codes: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, index: Tensor | None
) -> Tensor:
    """(codes - zero_point) * scale with one rounding, in place: codes float32 [rows, columns] is the result.

    scale, zero_point: float32 [rows, groups]. index: int64 [columns], the group of each column; without it
    `group_size` columns in a row share one, and the last group may be partial.
    """
    rows, columns = codes.shape
    if index is None and scale.shape[1] > 1 and columns % group_size:
        index = torch.arange(columns) // group_size
    if index is not None:
        if zero_point is not None:
            codes -= zero_point[:, index]
        codes *= scale[:, index]
        return codes
    grouped = codes.view(rows, scale.shape[1], -1)
    if zero_point is not None:
        grouped -= zero_point[..., None]
    grouped *= scale[..., None]
    return codes
