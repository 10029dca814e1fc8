"""Which layouts hold which weights bit by bit: between any two that do, a conversion is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from qwen_quantize.checkpoint.compressed_config import CompressedTensors
from qwen_quantize.checkpoint.layouts import LAYOUTS, BlockFp8Config, Layout, parse_quantization
from qwen_quantize.checkpoint.tiles_layout import TilesConfig
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.spec import Format, IntFormat
from qwen_quantize.formats.tables import FP32
from qwen_quantize.pipeline.conversion_fit import Inputs, fit_linear

_SHAPE = (256, 256)
_MODULE = "model.layers.0.mlp.experts.0.up_proj"  # mx-oss holds experts alone
_FITTING, _UNFIT = 0.25, 1 / 3  # a scale that every format holds, and one that only float32 does


@dataclass(frozen=True, slots=True)
class ConversionRow:
    """form: of the weights, in words. verdicts: by layout.

    "exact": codes, scales and what becomes of inputs; "weights": codes and scales, but inputs are no longer cast;
    "input scales": codes and scales, but the inputs' scales are of another format; "fitting scales" and "fitting
    weights": "exact" and "weights" where the scales are numbers of the layout's narrower type; "no": not at all.
    """

    form: str
    verdicts: Mapping[str, str]


def exact_conversions() -> tuple[ConversionRow, ...]:
    """A row for each form of weights, found by packing a linear of that form into every layout."""
    return tuple(
        ConversionRow(
            form,
            {name: _verdict(layout, scheme) for name, layout in LAYOUTS.items()},
        )
        for form, scheme in _forms().items()
    )


def _forms() -> dict[str, Scheme]:
    four, eight = SCHEMES["w4a16"].with_group(32), SCHEMES["w8a16"].with_group(32)
    wide = replace(four, weight=replace(four.weight, scale_format=FP32))
    blocks = SCHEMES["ue8m0"]
    plain = replace(blocks, weight=replace(blocks.weight, scale_format=FP32))
    assert blocks.activation is not None
    plain = replace(plain, activation=replace(blocks.activation, scale_format=FP32, scale_rule=None))
    return {
        "w4a16, groups of 32": four,
        "w4a16, groups of 32, float32 scales": wide,
        "w4a16, groups of 32, zero points": four.with_zero_point(),
        "w4a16, groups of 128": SCHEMES["w4a16"],
        "w8a16, groups of 32": eight,
        "w8a16, groups of 128": SCHEMES["w8a16"],
        "ue8m0": blocks,
        "block FP8, float32 scales": plain,
        **{
            name: SCHEMES[name]
            for name in ("mxfp8", "mxfp6", "mxfp4", "nvfp4", "fp8", "w8a8", "w4a8", "hif8")
        },
    }


def _verdict(layout: Layout, scheme: Scheme) -> str:
    for value in (_UNFIT, _FITTING) if scheme.weight.scale_format == FP32 else (_FITTING,):
        inputs = Inputs(scheme.activation, scheme.dynamic, 1.0)
        try:
            fit = fit_linear(
                layout,
                _MODULE,
                _linear(scheme, value),
                scheme.weight.scale_format,
                inputs,
                zero_points=not scheme.weight.symmetric,
            )
        except UserError:
            continue
        fitting = value == _FITTING and scheme.weight.scale_format == FP32
        if not fit.keeps_inputs:
            return "fitting weights" if fitting else "weights"
        if scheme.activation is not None and not _states(layout, fit.scheme, scheme.activation.scale_format):
            return "input scales"
        return "fitting scales" if fitting else "exact"
    return "no"


def _states(layout: Layout, scheme: Scheme, scale_format: Format) -> bool:
    """Whether the layout's config says of the inputs' scales what the scheme does."""
    config = layout.quantization_config({_MODULE: scheme}, ())
    match parse_quantization({"quantization_config": config}):
        case BlockFp8Config() as blocks:
            return blocks.activation.scale_format == scale_format
        case (CompressedTensors() as compressed) | TilesConfig(ways=compressed):
            return all(
                it.inputs is not None and it.inputs.scale_format == scale_format for it in compressed.weights
            )
    return True


def _linear(scheme: Scheme, scale: float) -> QuantizedTensor:
    weight = scheme.weight
    dtype = torch.int8 if isinstance(weight.format, IntFormat) else torch.uint8
    grid = weight.granularity.scale_shape(_SHAPE)
    return QuantizedTensor(
        codes=torch.ones(_SHAPE, dtype=dtype),
        scale=torch.full(grid, scale),
        zero_point=None if weight.symmetric else torch.ones(grid),
        format=weight.format,
        granularity=weight.granularity,
        shape=_SHAPE,
        tensor_scale=1.0 if weight.tensor_scale_format is None else 0.5,
    )
