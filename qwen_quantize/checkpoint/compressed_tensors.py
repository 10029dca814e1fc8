"""The layout of compressed-tensors: integers, FP8, MX and NVFP4, each in the package's own format.

The names of formats and tensors, shapes and dtypes are those that compressed-tensors 0.20 writes. Scales
multiply, except `weight_global_scale` and `input_global_scale` of NVFP4, which divide.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.integer_weights import (
    pack_columns,
    pack_rows,
    pack_sixes,
    unpack_columns,
    unpack_rows,
    unpack_sixes,
)
from qwen_quantize.checkpoint.layout_parts import (
    UsualFolder,
    check_parts,
    float_dtype,
    read_scale,
    refuse_partial_groups,
    static_input_scale,
    stored_scale,
)
from qwen_quantize.checkpoint.shards import OutputTensor
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.packing import pack_nibble_pairs, unpack_nibble_pairs
from qwen_quantize.formats.schemes import Scheme, TensorSpec
from qwen_quantize.formats.spec import Format, IntFormat
from qwen_quantize.formats.tables import E2M1, E2M3, E4M3FN, E8M0, INT4, INT8

_PACKED_INTS = "pack-quantized"
_PLAIN_INTS = "int-quantized"
_MX = {E4M3FN: "mxfp8-quantized", E2M3: "mxfp6-pack-quantized", E2M1: "mxfp4-pack-quantized"}
_NVFP4 = "nvfp4-pack-quantized"
_MX_GROUP, _NVFP4_GROUP = 32, 16
_NVFP4_LARGEST = 448.0 * 6.0

# The version of the package whose files these are; readers tell packings of 3 and 5 bits apart by it.
_VERSION = "0.20.1"


@dataclass(frozen=True, slots=True)
class CompressedTensorsLayout(UsualFolder):
    """See the module; `input_amax` is the largest magnitude that calibration saw in the linear's input."""

    name: str
    readers: tuple[str, ...]

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """The tensors of a linear [N, K], its weight first; UserError where the layout cannot hold it."""
        form, weight = storage_format(scheme), scheme.weight
        rows, columns = shape
        grid = weight.granularity
        if grid.kind is GranularityKind.GROUP:
            refuse_partial_groups(self.name, module, columns, grid.cols)
        scales = (1,) if grid.kind is GranularityKind.TENSOR else grid.scale_shape(shape)
        bits = weight.format.bits
        parts: list[tuple[str, str, tuple[int, ...]]]
        if form == _PACKED_INTS:
            parts = [("weight_packed", "I32", (rows, -(-columns * bits // 32)))]
        elif weight.format in (E2M1, E2M3):
            parts = [("weight_packed", "U8", (rows, columns * bits // 8))]
        else:
            dtype = "I8" if isinstance(weight.format, IntFormat) else "F8_E4M3"
            parts = [("weight", dtype, (rows, columns))]
        parts.append(("weight_scale", _scale_dtype(weight), scales))
        if form == _NVFP4:
            parts.append(("weight_global_scale", "F32", (1,)))
        if not weight.symmetric and form == _PACKED_INTS:
            parts.append(("weight_zero_point", "I32", (-(-rows * bits // 32), scales[-1])))
        elif not weight.symmetric:
            parts.append(("weight_zero_point", "I8", scales))
        if form == _PACKED_INTS:
            parts.append(("weight_shape", "I64", (2,)))
        if _input_scale_name(scheme) is not None:
            parts.append((str(_input_scale_name(scheme)), "F32", (1,)))
        return tuple(OutputTensor(f"{module}.{suffix}", dtype, size) for suffix, dtype, size in parts)

    def pack(
        self, module: str, quantized: QuantizedTensor, scheme: Scheme, input_amax: float | None = None
    ) -> dict[str, Tensor]:
        """The tensors that `outputs` names; ValueError where `quantized` is not what the scheme says.

        input_amax: needed where the scheme has a static scale for the input: NVFP4's second level and the one
        scale of static activations.
        """
        _check_quantized(quantized, scheme)
        shape = (quantized.shape[0], quantized.shape[1])
        found: dict[str, Tensor] = {}
        bits = scheme.weight.format.bits
        for output in self.outputs(module, shape, scheme):
            match output.name.removeprefix(f"{module}."):
                case "weight":
                    plain = quantized.codes
                    found[output.name] = plain if output.dtype == "I8" else plain.view(torch.float8_e4m3fn)
                case "weight_packed":
                    found[output.name] = _pack_codes(quantized.codes, scheme.weight.format)
                case "weight_scale":
                    scale = stored_scale(quantized.scale, output.dtype)
                    found[output.name] = scale.reshape(output.shape)
                case "weight_global_scale":
                    found[output.name] = 1 / torch.tensor([quantized.tensor_scale])
                case "weight_zero_point":
                    assert quantized.zero_point is not None
                    zero = quantized.zero_point.to(torch.int8)
                    found[output.name] = (
                        pack_rows(zero, bits) if output.dtype == "I32" else zero.reshape(output.shape)
                    )
                case "weight_shape":
                    found[output.name] = torch.tensor(shape)
                case "input_global_scale":
                    found[output.name] = torch.tensor([_NVFP4_LARGEST]) / _known_amax(module, input_amax)
                case "input_scale":
                    assert scheme.activation is not None
                    found[output.name] = static_input_scale(module, scheme.activation, input_amax)
        return found

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where a tensor is missing or does not fit."""
        outputs = self.outputs(module, shape, scheme)
        parts = dict(
            zip(
                (it.name.removeprefix(f"{module}.") for it in outputs),
                check_parts(outputs, tensors),
                strict=True,
            )
        )
        weight = scheme.weight
        if "weight_shape" in parts and parts["weight_shape"].tolist() != list(shape):
            raise UserError(
                f"tensor {module + '.weight_shape'!r} holds {parts['weight_shape'].tolist()}; here it must be "
                f"{list(shape)}"
            )
        zero_point = parts.get("weight_zero_point")
        scales = weight.granularity.scale_shape(shape)
        if zero_point is not None and zero_point.dtype == torch.int32:
            zero_point = unpack_rows(zero_point, weight.format.bits, 0, shape[0])
        if zero_point is not None:
            zero_point = zero_point.to(torch.float32).reshape(scales)
        codes = parts.get("weight")
        if codes is None:
            codes = _unpack_codes(parts["weight_packed"], weight.format, shape[1])
        elif codes.dtype == torch.float8_e4m3fn:
            codes = codes.view(torch.uint8)
        tensor_scale = parts.get("weight_global_scale")
        return QuantizedTensor(
            codes=codes,
            scale=read_scale(parts["weight_scale"]).reshape(scales),
            zero_point=zero_point,
            format=weight.format,
            granularity=weight.granularity,
            shape=shape,
            tensor_scale=1.0 if tensor_scale is None else float(1 / tensor_scale),
        )

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:
        """One config group for each scheme; `kept` modules are ignored.

        One scheme for everything is aimed at the class "Linear", several at the names of their modules.
        """
        distinct = list(dict.fromkeys(schemes.values()))
        formats = {scheme: storage_format(scheme) for scheme in distinct}
        targets = {distinct[0]: ["Linear"]} if len(distinct) == 1 else _targets(schemes, kept)
        return {
            "config_groups": {
                f"group_{number}": _group(scheme, targets[scheme], formats[scheme])
                for number, scheme in enumerate(distinct)
            },
            "format": formats[distinct[0]] if len(set(formats.values())) == 1 else "mixed-precision",
            "global_compression_ratio": None,
            "ignore": list(kept),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
            "version": _VERSION,
        }


COMPRESSED_TENSORS = CompressedTensorsLayout(
    name="compressed-tensors",
    readers=("transformers with the package compressed-tensors", "vLLM", "SGLang"),
)


def settled_tensor_scale(scale: float) -> float:
    """The float32 nearest to `scale` whose reciprocal's reciprocal is itself, at most one step away.

    compressed-tensors stores the reciprocal of NVFP4's tensor scale: what is written is then what was measured.
    """
    return float(1 / (1 / torch.tensor(scale, dtype=torch.float32)))


def storage_format(scheme: Scheme) -> str:
    """The compressed-tensors format that holds the scheme's weights; UserError where there is none."""
    weight, kind = scheme.weight, scheme.weight.granularity.kind
    group = weight.granularity.cols if kind is GranularityKind.GROUP else None
    if weight.format in (INT4, INT8) and kind is not GranularityKind.BLOCK:
        return _PLAIN_INTS if scheme.activation is not None else _PACKED_INTS
    if weight.format in _MX and group == _MX_GROUP and weight.scale_format == E8M0:
        return _MX[weight.format]
    if weight.format == E2M1 and group == _NVFP4_GROUP and weight.scale_format == E4M3FN:
        return _NVFP4
    if weight.format == E4M3FN and group is None:
        return "naive-quantized" if scheme.activation is None else "float-quantized"
    raise UserError(
        f"layout compressed-tensors has no format for {weight.format.name} weights with {weight.scale_format.name} "
        f"scales for each {kind} (scheme {scheme.name}); choose another --layout"
    )


def _scale_dtype(weight: TensorSpec) -> str:
    if weight.scale_format == E4M3FN:
        return "F8_E4M3"
    if weight.scale_format == E8M0:  # the powers of two of FP8 blocks are plain floats to their readers
        return "U8" if weight.granularity.kind is GranularityKind.GROUP else "F32"
    return float_dtype(weight.scale_format)


def _input_scale_name(scheme: Scheme) -> str | None:
    """The suffix of the tensor with the input's static scale, where there is one."""
    if scheme.activation is None:
        return None
    if scheme.activation.tensor_scale_format is not None:
        return "input_global_scale"
    return None if scheme.dynamic else "input_scale"


def _known_amax(module: str, amax: float | None) -> Tensor:
    if amax is None or not 0 < amax < float("inf"):
        raise ValueError(
            f"{module}: a static input scale needs the largest magnitude of the input, got {amax}"
        )
    return torch.tensor([amax], dtype=torch.float32)


def _check_quantized(quantized: QuantizedTensor, scheme: Scheme) -> None:
    weight = scheme.weight
    same = (quantized.format, quantized.granularity) == (weight.format, weight.granularity)
    if not same or (quantized.zero_point is None) != weight.symmetric:
        raise ValueError(
            f"weights in {quantized.format.name} with scales for each {quantized.granularity} are not those of scheme "
            f"{scheme.name}"
        )


def _pack_codes(codes: Tensor, fmt: Format) -> Tensor:
    if isinstance(fmt, IntFormat):
        return pack_columns(codes, fmt.bits)
    return pack_nibble_pairs(codes) if fmt == E2M1 else pack_sixes(codes)


def _unpack_codes(packed: Tensor, fmt: Format, columns: int) -> Tensor:
    if isinstance(fmt, IntFormat):
        return unpack_columns(packed, fmt.bits, columns)
    return unpack_nibble_pairs(packed) if fmt == E2M1 else unpack_sixes(packed)


def _group(scheme: Scheme, targets: Sequence[str], form: str) -> dict[str, Any]:
    activation = None
    if scheme.activation is not None:
        dynamic = "local" if scheme.activation.tensor_scale_format is not None else scheme.dynamic
        activation = _arguments(scheme.activation, dynamic, form)
    return {
        "format": form,
        "input_activations": activation,
        "output_activations": None,
        "targets": list(targets),
        "weights": _arguments(scheme.weight, False, form),
    }


def _arguments(spec: TensorSpec, dynamic: bool | str, form: str) -> dict[str, Any]:
    grid = spec.granularity
    strategy = "tensor_group" if spec.tensor_scale_format is not None else str(grid.kind)
    found: dict[str, Any] = {
        "dynamic": dynamic,
        "group_size": grid.cols if grid.kind is GranularityKind.GROUP else None,
        "num_bits": spec.format.bits,
        "strategy": strategy,
        "symmetric": spec.symmetric,
        "type": "int" if isinstance(spec.format, IntFormat) else "float",
    }
    if grid.kind is GranularityKind.BLOCK:
        found["block_structure"] = [grid.rows, grid.cols]
    if form == _NVFP4:
        found["scale_dtype"] = "torch.float8_e4m3fn"
    elif form in _MX.values():
        found["scale_dtype"] = "torch.uint8"
    return found


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def _targets(schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[Scheme, list[str]]:
    """Names of modules for each scheme; one pattern for all layers and experts where they agree."""
    alike: dict[str, set[Scheme | None]] = {}
    for module, scheme in [*schemes.items(), *((name, None) for name in kept)]:
        alike.setdefault(_NUMBER.sub("0", module), set()).add(scheme)
    counts = Counter(_NUMBER.sub("0", module) for module in schemes)
    found: dict[Scheme, dict[str, None]] = {}
    for module, scheme in schemes.items():
        shape = _NUMBER.sub("0", module)
        if counts[shape] > 1 and alike[shape] == {scheme}:
            target = "re:^" + r"\d+".join(re.escape(part) for part in _NUMBER.split(module)) + "$"
        else:
            target = module
        found.setdefault(scheme, {})[target] = None
    return {scheme: list(targets) for scheme, targets in found.items()}
