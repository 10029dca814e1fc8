"""Narrow codes packed in words of 32 bits or in bytes, and the values of integers.

compressed-tensors stores a code q as q + 2^(bits - 1), the first one in the lowest bits. Weights are packed
along a row, zero points along a column. As words are little-endian, 8-bit codes are bytes and 4-bit codes
nibbles in order. These functions are quick; those of formats/packing.py say the same bit by bit.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.formats.packing import pack_nibble_pairs, unpack_nibble_pairs


def pack_columns(codes: Tensor, bits: int) -> Tensor:
    """int32 [rows, ceil(columns * bits / 32)] of signed codes int8 [rows, columns]; bits: 4 or 8."""
    shift = 1 << (bits - 1)
    if codes.numel() and (int(codes.min()) < -shift or int(codes.max()) >= shift):
        raise ValueError(f"codes reach {int(codes.min())} .. {int(codes.max())}, too far for {bits} bits")
    return words_of((codes.to(torch.int16) + shift).to(torch.uint8), bits)


def words_of(stored: Tensor, bits: int) -> Tensor:
    """int32 [rows, ceil(columns * bits / 32)] of unsigned codes uint8; what is left of the last word is 0."""
    padded = functional.pad(stored, (0, -stored.shape[1] % (32 // bits)))
    octets = padded if bits == 8 else pack_nibble_pairs(padded)
    # A copy, for a single row may count as contiguous whatever its strides, and cannot be viewed as words.
    return octets.clone(memory_format=torch.contiguous_format).view(torch.int32)


def codes_of(words: Tensor, bits: int) -> Tensor:
    """uint8 [rows, columns] of full words int32 [rows, columns * bits / 32]; bits: 4 or 8."""
    # A copy, for a transposed column of one word counts as contiguous and cannot be viewed as bytes.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return octets if bits == 8 else unpack_nibble_pairs(octets)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """int32 [ceil(rows * bits / 32), groups] of signed codes int8 [rows, groups], packed down the rows."""
    return pack_columns(codes.t().contiguous(), bits).t().contiguous()


def pack_sixes(codes: Tensor) -> Tensor:
    """uint8 [rows, columns * 3/4]: four 6-bit codes in three bytes, the first one in the lowest bits."""
    if codes.shape[1] % 4:
        raise ValueError(f"{codes.shape[1]} codes of 6 bits do not fill whole bytes in fours")
    if codes.numel() and int(codes.max()) > 63:
        raise ValueError(f"code {int(codes.max())} has more than 6 bits")
    one, two, three, four = codes.view(codes.shape[0], -1, 4).unbind(-1)
    first, second, third = one | (two << 6), (two >> 2) | (three << 4), (three >> 4) | (four << 2)
    return torch.stack((first, second, third), dim=-1).flatten(-2)


def unpack_sixes(packed: Tensor) -> Tensor:
    """uint8 codes [rows, columns] of bytes [rows, columns * 3/4]; the inverse of `pack_sixes`."""
    first, second, third = packed.reshape(packed.shape[0], -1, 3).unbind(-1)
    codes = (first, (first >> 6) | (second << 2), (second >> 4) | (third << 4), third >> 2)
    return (torch.stack(codes, dim=-1) & 63).flatten(-2)


def unpack_columns(words: Tensor, bits: int, columns: int) -> Tensor:
    """int8 [rows, columns] of words int32 [rows, ceil(columns * bits / 32)]; bits: 4 or 8."""
    shift = 1 << (bits - 1)
    return (codes_of(words, bits)[:, :columns].to(torch.int16) - shift).to(torch.int8)


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
