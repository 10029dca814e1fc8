"""Quantized tensors of every scheme with random codes, and the cases that layouts are held against."""

from __future__ import annotations

from dataclasses import replace

import torch

from qwen_quantize.checkpoint.compressed_tensors import settled_tensor_scale
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.spec import IntFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, E8M0, FP16, FP32, HIF8, INT8


def with_scales(scheme: Scheme, fmt: object) -> Scheme:
    return replace(scheme, weight=replace(scheme.weight, scale_format=fmt))


def weight_only(scheme: Scheme) -> Scheme:
    return replace(scheme, activation=None, dynamic=False)


def static(scheme: Scheme) -> Scheme:
    assert scheme.activation is not None
    activation = replace(scheme.activation, granularity=Granularity.tensor())
    return replace(scheme, activation=activation, dynamic=False)


W4A16, W4A8 = SCHEMES["w4a16"].with_group(32), SCHEMES["w4a8"].with_group(32)
W8A16 = replace(W4A16, weight=replace(W4A16.weight, format=INT8))
COMPRESSED: dict[str, Scheme] = {
    "w4a16": W4A16,
    "w4a16 with zero points": W4A16.with_zero_point(),
    "w4a16 by row": W4A16.with_group(None),
    "w4a16 by row with zero points": W4A16.with_group(None).with_zero_point(),
    "w4a16, bfloat16 scales": with_scales(W4A16, BF16),
    "w4a16, float32 scales": with_scales(W4A16, FP32),
    "w8a16": W8A16,
    "w8a16 with zero points": W8A16.with_zero_point(),
    "w4a8": W4A8,
    "w4a8 with zero points": W4A8.with_zero_point(),
    "w8a8": SCHEMES["w8a8"],
    "w8a8 static": static(SCHEMES["w8a8"]),
    "fp8": SCHEMES["fp8"],
    "fp8 static": static(SCHEMES["fp8"]),
    "fp8 weights": weight_only(SCHEMES["fp8"]),
    "ue8m0": SCHEMES["ue8m0"].with_block(32, 32),
    "mxfp8": SCHEMES["mxfp8"],
    "mxfp6": SCHEMES["mxfp6"],
    "mxfp4": SCHEMES["mxfp4"],
    "mxfp4 weights": weight_only(SCHEMES["mxfp4"]),
    "nvfp4": SCHEMES["nvfp4"],
    "nvfp4 weights": weight_only(SCHEMES["nvfp4"]),
}


def sample(scheme: Scheme, shape: tuple[int, int], seed: int = 1) -> QuantizedTensor:
    """Any finite codes, scales in the scheme's format, zero points over their whole range."""
    generator = torch.Generator().manual_seed(seed)
    weight, fmt = scheme.weight, scheme.weight.format
    grid = weight.granularity.scale_shape(shape)
    if isinstance(fmt, IntFormat):
        codes = torch.randint(fmt.minimum, fmt.maximum + 1, shape, generator=generator).to(torch.int8)
    else:
        codes = torch.randint(0, 1 << fmt.bits, shape, generator=generator).to(torch.uint8)
        if fmt == E4M3FN:
            codes[codes & 0x7F == 0x7F] = 0
        if fmt == HIF8:
            codes[(codes == 0x80) | (codes & 0x7F == 0x6F)] = 0
    scale = torch.rand(grid, generator=generator) + 0.01
    if weight.scale_format == E8M0:
        exponents = torch.randint(-30, 30, grid, generator=generator)
        scale = torch.ldexp(torch.ones(grid), exponents)
    for narrow, dtype in ((FP16, torch.float16), (BF16, torch.bfloat16), (E4M3FN, torch.float8_e4m3fn)):
        if weight.scale_format == narrow:
            scale = (scale * 8).to(dtype).float()
    zero_point = None
    if not weight.symmetric:
        zero_point = torch.randint(fmt.minimum, fmt.maximum + 1, grid, generator=generator).float()
    tensor_scale = settled_tensor_scale(0.00123) if weight.tensor_scale_format is not None else 1.0
    return QuantizedTensor(codes, scale, zero_point, fmt, weight.granularity, shape, tensor_scale)


def same(one: QuantizedTensor, other: QuantizedTensor) -> bool:
    """Equal in every bit."""
    zeros = (one.zero_point, other.zero_point)
    return (
        torch.equal(one.codes, other.codes)
        and one.codes.dtype == other.codes.dtype
        and torch.equal(one.scale, other.scale)
        and ((zeros[0] is None and zeros[1] is None) or torch.equal(*zeros))
        and (one.format, one.granularity, one.shape, one.tensor_scale)
        == (other.format, other.granularity, other.shape, other.tensor_scale)
    )
