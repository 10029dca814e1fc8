"""Tiny models stored under any scheme: plain rounding, and the layout that the program writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_quantize.checkpoint.compressed_tensors import settled_tensor_scale
from qwen_quantize.checkpoint.layouts import DEFAULT_LAYOUT, LAYOUTS
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.formats.blocks import QuantizedTensor, block_amax, expand_scale
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.codec import encode
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.scales import ScaleRule, exponents_to_scale, scale_exponents
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import E8M0, FP32

INPUT_AMAX = 3.0


def small(name: str) -> Scheme:
    """A named scheme with groups that fit the dimensions of tiny models."""
    scheme = SCHEMES[name]
    if name == "ue8m0":
        return scheme.with_block(32, 32)
    return scheme.with_group(16) if name in ("w4a16", "w8a16", "w4a8") else scheme


def rounded(weight: Tensor, scheme: Scheme) -> QuantizedTensor:
    """Each region scaled by its largest magnitude."""
    spec, shape = scheme.weight, (weight.shape[0], weight.shape[1])
    amax, second = block_amax(weight, spec.granularity), 1.0
    target = 8.0 if spec.format.name == "hif8" else spec.format.max
    if spec.tensor_scale_format is not None:
        second = settled_tensor_scale(float(weight.abs().max()) / (448 * spec.format.max))
    if spec.scale_format == E8M0:
        scale = exponents_to_scale(scale_exponents(amax, spec.format, ScaleRule.RCEIL))
    elif spec.scale_format == FP32:
        scale = amax / target
    else:
        scale = quantize_values(amax / target / second, spec.scale_format, RNE_SATURATE)
    codes = encode(
        (weight / expand_scale(scale * second, spec.granularity, shape)).contiguous(),
        spec.format,
        RNE_SATURATE,
    )
    return QuantizedTensor(codes, scale, None, spec.format, spec.granularity, shape, second)


def store(folder: Path, scheme_of: Callable[[str], Scheme | None] | Scheme) -> dict[str, Tensor]:
    """Quantize the linears of a one-file model in place; None: stays. The dequantized weights by module."""
    modules = ModelReader(open_source(folder)).blueprint.linear_modules()
    tensors = load_file(folder / "model.safetensors")
    schemes, values = {}, {}
    for module in modules:
        scheme = scheme_of if isinstance(scheme_of, Scheme) else scheme_of(module)
        if scheme is None:
            continue
        weight = tensors.pop(f"{module}.weight").float()
        quantized = rounded(weight, scheme)
        layout = LAYOUTS[DEFAULT_LAYOUT[scheme.name]]
        tensors |= layout.pack(module, quantized, scheme, INPUT_AMAX)
        schemes[module], values[module] = scheme, quantized.dequantize()
    kept = [module for module in modules if module not in schemes] + ["lm_head"]
    config = json.loads((folder / "config.json").read_text())
    layout = LAYOUTS[DEFAULT_LAYOUT[next(iter(schemes.values())).name]]
    config["quantization_config"] = layout.quantization_config(schemes, kept)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return values


def static(scheme: Scheme) -> Scheme:
    """The scheme with one scale for all activations, found in calibration."""
    assert scheme.activation is not None
    shape = type(scheme.activation.granularity).tensor()
    return replace(scheme, activation=replace(scheme.activation, granularity=shape), dynamic=False)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
