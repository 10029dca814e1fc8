"""Which scheme of a layout holds a stored linear bit by bit: codes, scales, zero points and what becomes of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_quantize.checkpoint.layouts import Layout
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity, GranularityKind
from qwen_quantize.formats.schemes import SCHEMES, Scheme, TensorSpec
from qwen_quantize.formats.spec import Format, IntFormat
from qwen_quantize.formats.tables import BF16, E2M1, E4M3FN, E8M0, FP16, FP32

_NVFP4_LARGEST = 448.0 * 6.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """What becomes of a linear's input: spec None where it stays. amax: of a static scale, its largest magnitude."""

    spec: TensorSpec | None = None
    dynamic: bool = False
    amax: float | None = None


@dataclass(frozen=True, slots=True)
class Fit:
    """A scheme that holds the linear, and the tensors that it becomes."""

    scheme: Scheme
    quantized: QuantizedTensor
    tensors: dict[str, Tensor]
    keeps_inputs: bool


def fit_linear(
    layout: Layout,
    module: str,
    quantized: QuantizedTensor,
    scale_format: Format,
    inputs: Inputs,
    *,
    zero_points: bool,
) -> Fit:
    """The first scheme of `layout` that holds the linear exactly; UserError with the first reason why none does.

    scale_format: in which the source has the scales. zero_points: write them although all of this linear are 0,
    because a sibling's are not.
    """
    if zero_points and quantized.zero_point is None and isinstance(quantized.format, IntFormat):
        quantized = replace(quantized, zero_point=torch.zeros_like(quantized.scale))
    reasons = []
    for candidate, wanted in _forms(quantized):
        for scheme, keeps in _schemes(candidate, wanted, scale_format, inputs):
            try:
                layout.outputs(module, (quantized.shape[0], quantized.shape[1]), scheme)
                packed = layout.pack(module, candidate, scheme, inputs.amax)
            except (UserError, ValueError) as error:
                reasons.append(str(error))
                continue
            return Fit(scheme, candidate, packed, keeps)
    raise UserError(reasons[0])


def _forms(quantized: QuantizedTensor) -> Iterator[tuple[QuantizedTensor, Granularity]]:
    """The linear, and the same with one group for each row written as groups or the other way round."""
    grid, columns = quantized.granularity, quantized.shape[1]
    yield quantized, grid
    if grid.kind is GranularityKind.GROUP and grid.cols >= columns:
        yield replace(quantized, granularity=Granularity.channel()), Granularity.channel()
    if grid.kind is GranularityKind.BLOCK and grid.rows == 1:
        whole = Granularity.group(grid.cols)
        yield replace(quantized, granularity=whole), whole


def _schemes(
    quantized: QuantizedTensor, grid: Granularity, scale_format: Format, inputs: Inputs
) -> Iterator[tuple[Scheme, bool]]:
    second = FP32 if scale_format == E4M3FN and quantized.format == E2M1 else None
    symmetric = quantized.zero_point is None
    for keeps in (True, False) if inputs.spec is not None else (True,):
        for scales in _scale_formats(quantized, scale_format, inputs):
            weight = TensorSpec(quantized.format, grid, scales, None, second, symmetric)
            activation, dynamic = (inputs.spec, inputs.dynamic) if keeps else (None, False)
            name = scheme_name(weight, activation)
            yield Scheme(name, weight, activation, dynamic, "as it was stored"), keeps


def _scale_formats(quantized: QuantizedTensor, own: Format, inputs: Inputs) -> tuple[Format, ...]:
    """Formats that the scales may be written in where their values fit; the packing checks each value."""
    if quantized.format == E4M3FN and quantized.granularity.kind is GranularityKind.BLOCK:
        # Layouts of FP8 blocks say of inputs what they say of weights, and the inputs' scales are to stay as they are.
        plain = inputs.spec is not None and inputs.spec.scale_format == FP32
        return (FP32, E8M0) if plain or own != E8M0 else (E8M0, FP32)
    if own in (E4M3FN, E8M0):
        return (own,)
    return tuple(dict.fromkeys((own, FP16, BF16, FP32)))


def scheme_name(weight: TensorSpec, activation: TensorSpec | None) -> str:
    """The named scheme with these elements, else a description."""

    def elements(spec: TensorSpec | None) -> tuple[Format, bool] | None:
        return None if spec is None else (spec.format, spec.scale_format == E8M0)

    for scheme in SCHEMES.values():
        if elements(scheme.weight) == elements(weight) and elements(scheme.activation) == elements(
            activation
        ):
            return scheme.name
    return weight.format.name if activation is None else f"{weight.format.name} x {activation.format.name}"


def static_amax(scale: float, largest: float) -> float:
    """An amax whose quotient amax / largest is `scale` in float32; ValueError where there is none."""
    return _solve(torch.tensor(scale) * largest, lambda amax: amax / largest, scale)


def global_amax(divisor: float) -> float:
    """An amax whose NVFP4 divisor 448 * 6 / amax is `divisor` in float32; ValueError where there is none."""
    return _solve(
        torch.tensor(_NVFP4_LARGEST) / divisor, lambda amax: torch.tensor(_NVFP4_LARGEST) / amax, divisor
    )


def _solve(start: Tensor, function: Callable[[Tensor], Tensor], wanted: float) -> float:
    amax = start.to(torch.float32)
    goal = torch.tensor(wanted, dtype=torch.float32)
    for toward in (0.0, float("inf")):
        near = amax
        for _ in range(4):
            if bool(function(near) == goal):
                return float(near)
            near = torch.nextafter(near, torch.tensor(toward))
    raise ValueError(f"the static input scale {wanted} cannot be written otherwise")
