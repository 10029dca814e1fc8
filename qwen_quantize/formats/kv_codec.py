"""Keys and values to packed bytes and back, one part of a cache at a time.

Tensors are [..., tokens, channels]. Codes are made by `encode`, so a chip's rounding holds here too. What a scale
and offset describe are codes from 0 to 2^bits - 1, stored as two's complement less half the range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.kv_scheme import KvElement, KvScaling
from qwen_quantize.formats.packing import pack_nibble_pairs, signed_nibbles, unpack_nibble_pairs
from qwen_quantize.formats.spec import FloatFormat

_SMALLEST_SCALE = 2.0**-24  # FP16's smallest number
_SMALLEST_TOKEN_SCALE = 2.0**-126
_HALF_MAX = 65504.0


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Stored values; which tensors there are depends on the element.

    codes: 16-bit floats, or uint8 or int8, two 4-bit codes in a byte; scale: float32 for each token and group, or
    float16 with an offset.
    """

    codes: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.codes, self.scale, self.offset) if tensor is not None)


def to_half(x: Tensor) -> Tensor:
    """float16, the largest finite value where x is beyond it: how tokens are kept that are not quantized."""
    return x.clamp(-_HALF_MAX, _HALF_MAX).to(torch.float16)


def empty_part(element: KvElement, batch: tuple[int, ...], tokens: int, channels: int) -> PackedPart:
    """Zeroed room for `tokens`, a multiple of `element.tokens`. ValueError for 4-bit codes of an odd channel count."""
    width = channels
    if element.format.bits == 4:
        if channels % 2:
            raise ValueError(f"{channels} channels of 4 bits do not fill whole bytes")
        width //= 2
    if element.format.bits == 16:
        dtype = torch.bfloat16 if element.format.name == "bf16" else torch.float16
        return PackedPart(torch.zeros(*batch, tokens, width, dtype=dtype))
    dtype = torch.int8 if element.format.name == "int8" else torch.uint8
    codes = torch.zeros(*batch, tokens, width, dtype=dtype)
    groups = -(-channels // element.group)
    match element.scaling:
        case KvScaling.TOKEN:
            return PackedPart(codes, torch.zeros(*batch, tokens, groups))
        case KvScaling.SLICE:
            scale = torch.zeros(*batch, tokens, groups, dtype=torch.float16)
            return PackedPart(codes, scale, torch.zeros_like(scale))
        case KvScaling.SPAN:
            scale = torch.zeros(*batch, tokens // element.group, channels, dtype=torch.float16)
            return PackedPart(codes, scale, torch.zeros_like(scale))
    return PackedPart(codes)


def rows_of(part: PackedPart, element: KvElement, begin: int, end: int) -> PackedPart:
    """Views of tokens begin .. end - 1; both are multiples of `element.tokens`."""
    step = element.tokens
    scaled = slice(begin // step, end // step)
    return PackedPart(
        part.codes[..., begin:end, :],
        None if part.scale is None else part.scale[..., scaled, :],
        None if part.offset is None else part.offset[..., scaled, :],
    )


def store(part: PackedPart, packed: PackedPart) -> None:
    """Copy `packed` over the views of `part`."""
    for kept, new in ((part.codes, packed.codes), (part.scale, packed.scale), (part.offset, packed.offset)):
        if kept is not None and new is not None:
            kept.copy_(new)


def pack(
    x: Tensor, element: KvElement, static: Tensor | None = None, rule: CastRule = RNE_SATURATE
) -> PackedPart:
    """Quantize float32 x [..., tokens, channels]; tokens: a multiple of `element.tokens`.

    static: float32, broadcastable to x, the scales of an element whose scaling is static.
    """
    if element.format.bits == 16:
        codes = encode(x, element.format, rule)
        return PackedPart(codes.view(torch.bfloat16 if element.format.name == "bf16" else torch.float16))
    match element.scaling:
        case KvScaling.TOKEN:
            scale = _grouped(x, element.group).abs().amax(dim=-1) / element.format.max
            scale = scale.clamp(min=_SMALLEST_TOKEN_SCALE)
            codes = encode(x / _spread(scale, element.group, x.shape[-1]), element.format, rule)
            return PackedPart(codes, scale)
        case KvScaling.SLICE:
            groups = _grouped(x, element.group)
            scale, offset = _affine(groups.amin(dim=-1), groups.amax(dim=-1), element)
            wide = [_spread(part.float(), element.group, x.shape[-1]) for part in (scale, offset)]
            return PackedPart(_codes(x, wide[0], wide[1], element, rule), scale, offset)
        case KvScaling.SPAN:
            groups = _spans(x, element.group)
            scale, offset = _affine(groups.amin(dim=-2), groups.amax(dim=-2), element)
            codes = _codes(
                groups, scale.float().unsqueeze(-2), offset.float().unsqueeze(-2), element, rule
            ).flatten(-3, -2)
            return PackedPart(codes, scale, offset)
    if static is None:
        raise ValueError(f"{element.describe()}: there is no scale")
    return PackedPart(encode(x / static, element.format, rule))


def unpack(part: PackedPart, element: KvElement, static: Tensor | None = None) -> Tensor:
    """float32 [..., tokens, channels] of what `pack` stored."""
    if element.format.bits == 16:
        return part.codes.float()
    if element.format.bits == 4:
        values = signed_nibbles(unpack_nibble_pairs(part.codes.contiguous())).float()
    elif isinstance(element.format, FloatFormat):
        values = decode(part.codes, element.format)
    else:
        values = part.codes.float()
    if part.scale is None:
        if static is None:
            raise ValueError(f"{element.describe()}: there is no scale")
        return values.mul_(static)
    if part.offset is None:
        return values.mul_(_spread(part.scale, element.group, values.shape[-1]))
    scale, offset = part.scale.float(), part.offset.float()
    values += _half_range(element)
    if element.scaling is KvScaling.SLICE:
        width = values.shape[-1]
        return values.mul_(_spread(scale, element.group, width)).add_(_spread(offset, element.group, width))
    groups = _spans(values, element.group)
    return groups.mul_(scale.unsqueeze(-2)).add_(offset.unsqueeze(-2)).flatten(-3, -2)


def requantized(
    x: Tensor, element: KvElement, static: Tensor | None = None, rule: CastRule = RNE_SATURATE
) -> Tensor:
    """What is left of x after storing it: `unpack` of `pack`."""
    return unpack(pack(x, element, static, rule), element, static)


def _half_range(element: KvElement) -> int:
    return 1 << (element.format.bits - 1)


def _affine(lowest: Tensor, highest: Tensor, element: KvElement) -> tuple[Tensor, Tensor]:
    """(scale, offset) as float16 such that codes 0 .. 2^bits - 1 reach from the lowest value to the highest.

    The scale is taken from the rounded offset, so that the highest value stays inside the range.
    """
    offset = to_half(lowest)
    steps = (1 << element.format.bits) - 1
    scale = to_half(((highest - offset.float()) / steps).clamp(min=_SMALLEST_SCALE))
    return scale, offset


def _codes(x: Tensor, scale: Tensor, offset: Tensor, element: KvElement, rule: CastRule) -> Tensor:
    codes = encode(((x - offset) / scale) - _half_range(element), element.format, rule)
    return pack_nibble_pairs(codes) if element.format.bits == 4 else codes


def _grouped(x: Tensor, group: int) -> Tensor:
    """x [..., n] as [..., groups, group]; a last group that is short repeats its last element."""
    missing = -x.shape[-1] % group
    if missing:
        x = torch.cat((x, x[..., -1:].expand(*x.shape[:-1], missing)), dim=-1)
    return x.reshape(*x.shape[:-1], -1, group)


def _spans(x: Tensor, group: int) -> Tensor:
    """x [..., tokens, n] as [..., spans, group, n]."""
    return x.reshape(*x.shape[:-2], -1, group, x.shape[-1])


def _spread(scale: Tensor, group: int, channels: int) -> Tensor:
    """[..., groups] over the channels of each group: [..., channels]."""
    return scale.repeat_interleave(group, dim=-1)[..., :channels]
