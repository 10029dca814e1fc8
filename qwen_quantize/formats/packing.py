"""Several codes in one byte or word, as checkpoints store them; each packing beside its exact inverse.

Named after who uses them. "Low nibble" is bits 0-3. Words are int32 and little-endian; bit 31 may be set, so
they look negative. All functions take and give whole tensors; shapes are in elements.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

# AutoAWQ stores eight columns of a word in this order, lowest nibble first.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_nibble_pairs(codes: Tensor) -> Tensor:
    """uint8 [..., K/2]: even k in the low nibble, odd k in the high one (FP4 of all safetensors layouts).

    codes: uint8 0..15 or int8 -8..7 (two's complement nibbles) [..., K]; ValueError for odd K.
    """
    nibbles = _nibbles(codes)
    if codes.shape[-1] % 2:
        raise ValueError(
            f"cannot pack {codes.shape[-1]} nibbles of a row into bytes: pad the row to an even length"
        )
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack_nibble_pairs(packed: Tensor) -> Tensor:
    """uint8 codes [..., K] of packed [..., K/2]; the inverse of `pack_nibble_pairs`. See `signed_nibbles`."""
    _check(packed, torch.uint8, "packed")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def pack_nibble_halves(codes: Tensor, block: int = 32) -> Tensor:
    """uint8 [..., K/2]: in each block, low nibbles hold its first half and high nibbles its second half.

    GGUF Q4_0 and MXFP4 have blocks of 32, the nibbles of Q4_K blocks of 64. codes as in `pack_nibble_pairs`.
    """
    nibbles = _nibbles(codes)
    _check_multiple(codes.shape[-1], block, "row length")
    first, second = nibbles.reshape(*codes.shape[:-1], -1, 2, block // 2).unbind(-2)
    return (first | (second << 4)).flatten(-2)


def unpack_nibble_halves(packed: Tensor, block: int = 32) -> Tensor:
    """uint8 codes [..., K] of packed [..., K/2]; the inverse of `pack_nibble_halves`."""
    _check(packed, torch.uint8, "packed")
    _check_multiple(packed.shape[-1] * 2, block, "row length")
    by_block = packed.reshape(*packed.shape[:-1], -1, block // 2)
    return torch.stack((by_block & 15, by_block >> 4), dim=-2).flatten(-3)


def pack_row_pairs(codes: Tensor) -> Tensor:
    """uint8 [N/2, K]: row 2n in the low nibble, row 2n+1 in the high one (msModelSlim W4A8, int8 codes)."""
    nibbles = _nibbles(codes)
    if codes.shape[0] % 2:
        raise ValueError(
            f"cannot pack {codes.shape[0]} rows in pairs: the layout needs an even number of rows"
        )
    return nibbles[0::2] | (nibbles[1::2] << 4)


def unpack_row_pairs(packed: Tensor) -> Tensor:
    """uint8 codes [N, K] of packed [N/2, K]; the inverse of `pack_row_pairs`. See `signed_nibbles`."""
    _check(packed, torch.uint8, "packed")
    return torch.stack((packed & 15, packed >> 4), dim=1).flatten(0, 1)


def signed_nibbles(nibbles: Tensor) -> Tensor:
    """int8 -8..7 of two's complement nibbles 0..15."""
    return ((nibbles.to(torch.int16) ^ 8) - 8).to(torch.int8)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """int32 [..., ceil(K * bits / 32)]: unsigned codes along the last axis, lowest bits first, zero-padded.

    codes: integer tensor of 0 .. 2^bits - 1; densely packed, so one may span two words.
    """
    _check_range(codes, 0, (1 << bits) - 1)
    length = codes.shape[-1]
    words = math.ceil(length * bits / 32)
    # Reassemble from single bits: shape [..., K, bits] read in order is the bit stream.
    stream = (codes.to(torch.int64)[..., None] >> torch.arange(bits, device=codes.device)) & 1
    stream = functional.pad(stream.flatten(-2), (0, words * 32 - length * bits))
    weights = torch.ones(32, dtype=torch.int64, device=codes.device) << torch.arange(32, device=codes.device)
    return _to_int32((stream.reshape(*codes.shape[:-1], words, 32) * weights).sum(-1))


def unpack_words(packed: Tensor, bits: int, length: int) -> Tensor:
    """uint8 codes [..., length]; the inverse of `pack_words` for up to 8 bits."""
    _check(packed, torch.int32, "packed")
    if packed.shape[-1] != math.ceil(length * bits / 32):
        raise ValueError(f"{length} codes of {bits} bits do not fill {packed.shape[-1]} words exactly")
    stream = (packed[..., None] >> torch.arange(32, device=packed.device, dtype=torch.int32)) & 1
    by_code = stream.flatten(-2)[..., : length * bits].reshape(*packed.shape[:-1], length, bits)
    weights = torch.ones(bits, dtype=torch.int32, device=packed.device) << torch.arange(
        bits, device=packed.device
    )
    return (by_code * weights).sum(-1).to(torch.uint8)


def pack_offset_words(codes: Tensor, bits: int) -> Tensor:
    """compressed-tensors pack-quantized: signed codes [N, K], stored as code + 2^(bits-1) along K."""
    _check_range(codes, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    return pack_words(codes.to(torch.int16) + (1 << (bits - 1)), bits)


def unpack_offset_words(packed: Tensor, bits: int, length: int) -> Tensor:
    """int8 codes [N, length]; the inverse of `pack_offset_words`."""
    return (unpack_words(packed, bits, length).to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def pack_gptq_weight(codes: Tensor, bits: int) -> Tensor:
    """GPTQ `qweight`, int32 [K * bits / 32, N]: unsigned codes [N, K] packed along K and transposed."""
    _check_multiple(codes.shape[-1] * bits, 32, "bits of a row")
    return pack_words(codes, bits).t().contiguous()


def unpack_gptq_weight(packed: Tensor, bits: int) -> Tensor:
    """uint8 codes [N, K]; the inverse of `pack_gptq_weight`."""
    return unpack_words(packed.t().contiguous(), bits, packed.shape[0] * 32 // bits)


def pack_gptq_zeros(zero_points: Tensor, bits: int, *, version: int) -> Tensor:
    """GPTQ `qzeros`, int32 [groups, N * bits / 32]: unsigned zero points [N, groups] packed along N.

    Version 1 ("gptq") stores zero - 1 (a zero of 0 wraps around), version 2 ("gptq_v2") the zero itself.
    """
    _check_range(zero_points, 0, (1 << bits) - 1)
    _check_multiple(zero_points.shape[0] * bits, 32, "bits of a column")
    stored = (zero_points.to(torch.int16) - _gptq_offset(version)) & ((1 << bits) - 1)
    return pack_words(stored.t().contiguous(), bits)


def unpack_gptq_zeros(packed: Tensor, bits: int, *, version: int) -> Tensor:
    """uint8 zero points [N, groups]; the inverse of `pack_gptq_zeros`."""
    stored = unpack_words(packed, bits, packed.shape[-1] * 32 // bits).to(torch.int16)
    return ((stored + _gptq_offset(version)) & ((1 << bits) - 1)).to(torch.uint8).t().contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """AutoAWQ "GEMM" words, int32 [K, N/8]: unsigned 4-bit codes [N, K], transposed, interleaved along N.

    For `qzeros` give the zero points [N, groups]: the result is [groups, N/8], with no offset.
    """
    _check_multiple(codes.shape[0], 8, "number of output features")
    columns = codes.t().reshape(codes.shape[1], -1, 8)[..., list(_AWQ_ORDER)].flatten(-2)
    return pack_words(columns, 4)


def unpack_awq(packed: Tensor) -> Tensor:
    """uint8 codes [N, K]; the inverse of `pack_awq`."""
    columns = unpack_words(packed, 4, packed.shape[-1] * 8).reshape(packed.shape[0], -1, 8)
    return columns[..., list(_AWQ_INVERSE)].flatten(-2).t().contiguous()


def pack_exponent_words(codes: Tensor) -> Tensor:
    """DeepGEMM's scale words, int32 [..., groups/4]: four E8M0 bytes each, the first one lowest."""
    _check(codes, torch.uint8, "codes")
    _check_multiple(codes.shape[-1], 4, "number of groups")
    return pack_words(codes, 8)


def unpack_exponent_words(packed: Tensor) -> Tensor:
    """uint8 E8M0 codes [..., groups]; the inverse of `pack_exponent_words`."""
    return unpack_words(packed, 8, packed.shape[-1] * 4)


def pack_deq_scale(scale: Tensor) -> Tensor:
    """Ascend `deq_scale`, int64: the bits of a float32 scale, sign-extended; no conversion."""
    _check(scale, torch.float32, "scale")
    return scale.contiguous().view(torch.int32).to(torch.int64)


def unpack_deq_scale(packed: Tensor) -> Tensor:
    """float32 scales; the inverse of `pack_deq_scale`."""
    _check(packed, torch.int64, "packed")
    return _to_int32(packed & 0xFFFFFFFF).view(torch.float32)


def pack_gguf_q4_0(codes: Tensor, scale: Tensor) -> Tensor:
    """GGUF Q4_0 blocks, uint8 [..., K/32 * 18]: the scale, then 16 bytes of split halves of code + 8.

    codes: int8 -8..7 [..., K]. scale: float16 [..., K/32]; it multiplies and may be negative.
    """
    _check(scale, torch.float16, "scale")
    _check_range(codes, -8, 7)
    halves = pack_nibble_halves((codes + 8).to(torch.uint8)).reshape(*scale.shape, 16)
    return torch.cat((scale[..., None].contiguous().view(torch.uint8), halves), dim=-1).flatten(-2)


def unpack_gguf_q4_0(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes, float16 scale); the inverse of `pack_gguf_q4_0`."""
    scale, halves = _gguf_blocks(packed, 18)
    return unpack_nibble_halves(halves.flatten(-2).contiguous()).to(torch.int8) - 8, scale


def pack_gguf_q8_0(codes: Tensor, scale: Tensor) -> Tensor:
    """GGUF Q8_0 blocks, uint8 [..., K/32 * 34]: the scale, then 32 codes.

    codes: int8 [..., K]. scale: float16 [..., K/32]; it multiplies.
    """
    _check(scale, torch.float16, "scale")
    _check(codes, torch.int8, "codes")
    _check_multiple(codes.shape[-1], 32, "row length")
    octets = codes.contiguous().view(torch.uint8).reshape(*scale.shape, 32)
    return torch.cat((scale[..., None].contiguous().view(torch.uint8), octets), dim=-1).flatten(-2)


def unpack_gguf_q8_0(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 codes, float16 scale); the inverse of `pack_gguf_q8_0`."""
    scale, octets = _gguf_blocks(packed, 34)
    return octets.flatten(-2).contiguous().view(torch.int8), scale


def pack_gguf_mxfp4(codes: Tensor, scale_codes: Tensor) -> Tensor:
    """GGUF MXFP4 blocks, uint8 [..., K/32 * 17]: the E8M0 byte, then 16 bytes of split halves.

    codes: E2M1 codes, uint8 [..., K]. scale_codes: E8M0, uint8 [..., K/32].
    """
    _check(scale_codes, torch.uint8, "scale_codes")
    halves = pack_nibble_halves(codes).reshape(*scale_codes.shape, 16)
    return torch.cat((scale_codes[..., None], halves), dim=-1).flatten(-2)


def unpack_gguf_mxfp4(packed: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale_codes); the inverse of `pack_gguf_mxfp4`."""
    _check(packed, torch.uint8, "packed")
    _check_multiple(packed.shape[-1], 17, "bytes of a row")
    blocks = packed.reshape(*packed.shape[:-1], -1, 17)
    return unpack_nibble_halves(blocks[..., 1:].flatten(-2).contiguous()), blocks[..., 0].contiguous()


def _gguf_blocks(packed: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(float16 scale of each block of `size` bytes, the bytes after it)."""
    _check(packed, torch.uint8, "packed")
    _check_multiple(packed.shape[-1], size, "bytes of a row")
    blocks = packed.reshape(*packed.shape[:-1], -1, size)
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0], blocks[..., 2:]


def _nibbles(codes: Tensor) -> Tensor:
    if codes.dtype == torch.int8:
        _check_range(codes, -8, 7)
        return codes.view(torch.uint8) & 15
    _check(codes, torch.uint8, "codes")
    _check_range(codes, 0, 15)
    return codes


def _gptq_offset(version: int) -> int:
    if version not in (1, 2):
        raise ValueError(f"GPTQ checkpoint version {version} is unknown: 1 (zero - 1 stored) or 2")
    return 1 if version == 1 else 0


def _to_int32(words: Tensor) -> Tensor:
    """int64 0 .. 2^32 - 1 as int32 with the same bits."""
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _check(tensor: Tensor, dtype: torch.dtype, name: str) -> None:
    if tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype}, not {tensor.dtype}")


def _check_range(codes: Tensor, low: int, high: int) -> None:
    if codes.is_floating_point():
        raise ValueError(f"codes must be integers, not {codes.dtype}")
    if codes.numel() and (int(codes.min()) < low or int(codes.max()) > high):
        raise ValueError(f"codes reach {int(codes.min())} .. {int(codes.max())}; allowed are {low} .. {high}")


def _check_multiple(size: int, unit: int, what: str) -> None:
    if size % unit:
        raise ValueError(f"{what} {size} is no multiple of {unit}: this layout has no padding")
