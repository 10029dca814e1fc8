"""What layouts share: scales in the dtype that a file holds them in, and tensors held against the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from qwen_quantize.checkpoint.shards import DEFAULT_STEM, OutputTensor
from qwen_quantize.checkpoint.tensor_info import DTYPES, torch_shape
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.schemes import Scheme, TensorSpec
from qwen_quantize.formats.spec import FloatFormat, Format
from qwen_quantize.formats.tables import BF16, FP16, FP32

_FLOAT_DTYPES: dict[Format, str] = {FP16: "F16", BF16: "BF16", FP32: "F32"}


@dataclass(frozen=True, slots=True)
class Destination:
    """What a layout may have to know of model and chip before it plans a tensor.

    config: the model's config.json. dtype: of its unquantized tensors, a safetensors name. weight_layout: the chip
    profile's words on how its matrix unit wants weights, None where no document says.
    """

    config: Mapping[str, Any]
    dtype: str
    chip: str
    weight_layout: str | None


class UsualFolder:
    """What most layouts' folders are like: `model.safetensors`, and no file that describes the tensors."""

    __slots__ = ()

    @property
    def weights_stem(self) -> str:
        return DEFAULT_STEM

    def fitted(self, destination: Destination) -> Self:  # noqa: ARG002
        return self

    def with_bias(self, module: str, packed: Mapping[str, Tensor], bias: Tensor) -> dict[str, Tensor]:  # noqa: ARG002
        return dict(packed)

    def side_files(
        self,
        schemes: Mapping[str, Scheme],  # noqa: ARG002
        tensors: Sequence[OutputTensor],  # noqa: ARG002
    ) -> dict[str, bytes]:
        return {}

    def notes(self, schemes: Mapping[str, Scheme]) -> tuple[str, ...]:  # noqa: ARG002
        return ()


def static_input_scale(module: str, spec: TensorSpec, amax: float | None) -> Tensor:
    """float32 [1]: the one scale of a linear's input, in the type that its engine holds it in.

    amax: the largest magnitude that calibration saw, which becomes the largest code. ValueError where it is no
    positive number.
    """
    if amax is None or not 0 < amax < float("inf"):
        raise ValueError(
            f"{module}: a static input scale needs the largest magnitude of the input, got {amax}"
        )
    scale = torch.tensor([amax], dtype=torch.float32) / spec.format.max
    if spec.scale_format == FP32:
        return scale
    assert isinstance(spec.scale_format, FloatFormat)
    return quantize_values(scale, spec.scale_format, RNE_SATURATE).clamp(min=spec.scale_format.min_normal)


def float_dtype(scale_format: Format) -> str:
    """The safetensors dtype of plain scales; ValueError for a format that needs its own rule (E8M0, E4M3)."""
    try:
        return _FLOAT_DTYPES[scale_format]
    except KeyError:
        raise ValueError(f"scales in {scale_format.name} are stored by the rules of their layout") from None


def stored_scale(scale: Tensor, dtype: str) -> Tensor:
    """float32 scales in the safetensors dtype of a file; U8 and F8_E8M0 hold the exponent of a power of two.

    ValueError where the dtype cannot hold a scale exactly: scales are rounded before codes are chosen, never
    after.
    """
    if dtype in ("U8", "F8_E8M0"):
        mantissa, exponent = torch.frexp(scale)
        codes = exponent + 126  # frexp's mantissa is 0.5 for a power of two
        if not bool(((mantissa == 0.5) & (codes >= 0) & (codes <= 254)).all()):
            raise ValueError("scales that are stored as exponents must be powers of two, 2^-127 .. 2^127")
        octets = codes.to(torch.uint8)
        return octets if dtype == "U8" else octets.view(torch.float8_e8m0fnu)
    torch_dtype = DTYPES[dtype].torch
    assert torch_dtype is not None
    stored = scale.to(torch_dtype)
    if not torch.equal(stored.to(torch.float32), scale):
        raise ValueError(f"scales do not fit {dtype} exactly: round them to it before codes are chosen")
    return stored


def read_scale(stored: Tensor) -> Tensor:
    """float32 scales of any dtype that a file holds them in; a byte is an exponent, 0xFF of it NaN."""
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    return stored.to(torch.float32)


def check_parts(outputs: Sequence[OutputTensor], tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that `outputs` names, in their order; UserError for one that is missing or another's."""
    found = []
    for output in outputs:
        tensor = tensors.get(output.name)
        if tensor is None:
            raise UserError(f"the tensor {output.name!r} is missing; the folder is not complete")
        shape = torch_shape(output.dtype, output.shape)
        if tensor.dtype != DTYPES[output.dtype].torch or tuple(tensor.shape) != shape:
            raise UserError(
                f"tensor {output.name!r} is {tensor.dtype} {list(tensor.shape)}; here it must be {output.dtype} "
                f"{list(output.shape)}"
            )
        found.append(tensor)
    return found


def refuse_partial_groups(layout: str, module: str, columns: int, group_size: int) -> None:
    """UserError where the last group of a row would be partial, which no reader of the layout takes."""
    if columns % group_size:
        raise UserError(
            f"{module!r} has {columns} input features, no multiple of its group of {group_size}, and {layout} has no "
            "partial groups; choose a group size that divides them or leave the module out with --ignore"
        )


def one_scheme(layout: str, schemes: Mapping[str, Scheme]) -> Scheme:
    """The scheme of all modules, for a layout whose config has room for one; UserError where they differ."""
    found = list(dict.fromkeys(schemes.values()))
    if len(found) == 1:
        return found[0]
    if not found:
        raise UserError(
            f"no linear is quantized, so there is nothing to say in the config of layout {layout}"
        )
    first, second = found[0], found[1]
    names = {scheme: name for name, scheme in reversed(list(schemes.items()))}
    raise UserError(
        f"layout {layout} holds one scheme for all linears, but {names[first]!r} is {first.name} and "
        f"{names[second]!r} is {second.name if second.name != first.name else 'the same with another grid'}; "
        "choose --layout compressed-tensors"
    )


def require_half_scales(layout: str, weight: TensorSpec) -> None:
    """UserError unless the scales are FP16, for layouts whose readers compute in it."""
    if weight.scale_format != FP16:
        raise UserError(
            f"layout {layout} stores its scales in FP16, not in {weight.scale_format.name}; choose another --layout"
        )


def scheme_words(scheme: Scheme) -> str:
    """What a scheme stores of a linear, for a layout that cannot hold it."""
    weight = scheme.weight
    zero = "" if weight.symmetric else " and zero points"
    inputs = "" if scheme.activation is None else f" and {scheme.activation.format.name} inputs"
    return f"{weight.format.name} with {weight.scale_format.name} scales {weight.granularity.describe()}{zero}{inputs}"
