"""Schemes by their types in msModelSlim's description, what a loader asks for of each, and samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import BF16, E4M3FN, FP16

DESCRIPTION = "quant_model_description.json"
Shape = tuple[int, ...]


def held_as(scheme: Scheme, fmt: Any = BF16) -> Scheme:
    """Plain scales in the model's dtype, as the program chooses them for this layout."""
    activation = scheme.activation
    if activation is not None and not scheme.dynamic:
        activation = replace(activation, scale_format=fmt)
    return replace(scheme, weight=replace(scheme.weight, scale_format=fmt), activation=activation)


MXFP4 = SCHEMES["mxfp4"]
BY_TYPE: dict[str, Scheme] = {
    "W8A8": held_as(SCHEMES["w8a8_static"]),
    "W8A8_DYNAMIC": held_as(SCHEMES["w8a8"]),
    "W8A16": replace(held_as(SCHEMES["w8a8"]), activation=None, dynamic=False),
    "W8A8_MXFP8": SCHEMES["mxfp8"],
    "W4A8_DYNAMIC": held_as(SCHEMES["w4a8"].with_group(None)),
    "W4A16": held_as(SCHEMES["w4a16"].with_group(32).with_zero_point()),
    "W4A4_MXFP4": MXFP4,
    "W4A8_MXFP": replace(MXFP4, activation=SCHEMES["mxfp8"].activation),
}

# What vLLM Ascend allocates for a linear [N, K], and msModelSlim's files have for it: suffix -> (dtypes, shape).
# Written down from their sources, by name, and from nothing of this program.
Rule = dict[str, tuple[tuple[str, ...], Callable[[int, int], Shape]]]
BY_ROW: Rule = {
    "weight_scale": (("F32",), lambda n, _: (n, 1)),
    "weight_offset": (("F32",), lambda n, _: (n, 1)),
}
INT8_WEIGHT: Rule = {"weight": (("I8",), lambda n, k: (n, k))}
E8M0_SCALE: Rule = {"weight_scale": (("U8",), lambda n, k: (n, k // 32))}
LOADER: dict[str, Rule] = {
    "W8A8": {
        **INT8_WEIGHT,
        "input_scale": (("F32",), lambda _, __: (1,)),
        "input_offset": (("F32",), lambda _, __: (1,)),
        "quant_bias": (("I32",), lambda n, _: (n,)),
        "deq_scale": (("F32",), lambda n, _: (n,)),
    },
    "W8A8_DYNAMIC": INT8_WEIGHT | BY_ROW,
    "W8A16": INT8_WEIGHT | BY_ROW,
    "W8A8_MXFP8": {"weight": (("F8_E4M3",), lambda n, k: (n, k)), **E8M0_SCALE},
    "W4A8_DYNAMIC": {
        "weight": (("I8",), lambda n, k: (n // 2, k)),
        **BY_ROW,
        "scale_bias": (("F32",), lambda n, _: (n, 1)),
    },
    "W4A16": {
        "weight": (("I8",), lambda n, k: (n // 2, k)),
        "weight_scale": (("F32",), lambda n, k: (n, k // 32)),
        "weight_offset": (("F32",), lambda n, k: (n, k // 32)),
    },
    "W4A4_MXFP4": {"weight": (("U8",), lambda n, k: (n, k // 2)), **E8M0_SCALE},
    "W4A8_MXFP": {"weight": (("U8",), lambda n, k: (n, k // 2)), **E8M0_SCALE},
}


def sample(scheme: Scheme, rows: int, columns: int, seed: int) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    spec, shape = scheme.weight, (rows, columns)
    size = spec.granularity.scale_shape(shape)
    if spec.format.bits == 8 and spec.format != E4M3FN:
        codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    elif spec.format == MXFP4.weight.format:
        codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    elif spec.format == E4M3FN:
        codes = torch.randint(0, 127, shape, generator=generator).to(torch.uint8)
    else:
        codes = torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    if spec.scale_rule is not None:
        scale = torch.exp2(torch.randint(-20, 20, size, generator=generator).float())
    else:
        narrow = torch.float16 if spec.scale_format == FP16 else torch.bfloat16
        scale = (torch.rand(size, generator=generator) * 0.02 + 1e-4).to(narrow).float()
    zero = None if spec.symmetric else torch.randint(-8, 8, size, generator=generator).float()
    return QuantizedTensor(codes, scale, zero, spec.format, spec.granularity, shape)


def make_reference(model: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(
        {name: tensor.float().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
