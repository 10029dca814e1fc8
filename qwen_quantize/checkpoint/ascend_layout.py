"""The layout of msModelSlim, which vLLM Ascend and SGLang load on Ascend chips.

Every linear has a type (W8A8, W8A8_DYNAMIC, ...) that `quant_model_description.json` gives with each of its tensors;
all other tensors are FLOAT there. config.json has no `quantization_config`. The engine holds scales in the model's
dtype, so that they are to be rounded to it before codes are chosen; the files have them as F32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.ascend_description import (
    DESCRIPTION_FILE,
    FLOAT,
    KV_TYPE,
    KV_TYPE_KEYS,
    MX_GROUP,
    WEIGHTS_STEM,
    description_bytes,
    entries,
)
from qwen_quantize.checkpoint.ascend_packing import (
    pack_int4_pairs,
    pack_scale_words,
    quant_bias,
    scale_bias,
    scale_bias_columns,
    unpack_int4_pairs,
    unpack_scale_words,
)
from qwen_quantize.checkpoint.layout_parts import (
    Destination,
    check_parts,
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
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.formats.tables import E2M1, E4M3FN, E8M0, INT4, INT8

_MX_TYPES = ("W8A8_MXFP8", "W4A8_MXFP", "W4A4_MXFP4")
_SCALES = ("weight_scale", "weight_offset")
_NOTES = {
    "W8A8_MXFP8": "W8A8_MXFP8 needs an Ascend 950: older chips have no FP8",
    "W4A8_MXFP": "W4A8_MXFP needs an Ascend 950: older chips have no FP4",
    "W4A4_MXFP4": "W4A4_MXFP4 needs an Ascend 950: older chips have no FP4",
    "W4A8_DYNAMIC": "vLLM Ascend loads W4A8_DYNAMIC for routed experts alone; dense linears need w8a8 there",
    "W4A16": "vLLM Ascend does not load W4A16 in this layout, but from --layout compressed-tensors, for experts alone",
}


@dataclass(frozen=True, slots=True)
class AscendLayout:
    """See the module. dtype: of the model's unquantized tensors, a safetensors name."""

    name: str
    readers: tuple[str, ...]
    dtype: str = "BF16"

    @property
    def weights_stem(self) -> str:
        return WEIGHTS_STEM

    def fitted(self, destination: Destination) -> AscendLayout:
        return replace(self, dtype=destination.dtype)

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """The tensors of a linear [N, K], its weight first; UserError where the layout cannot hold it."""
        rows, columns = shape
        kind = self.type_of(scheme)
        grid = scheme.weight.granularity
        groups = grid.scale_shape(shape)[1]
        if grid.kind is GranularityKind.GROUP:
            refuse_partial_groups(self.name, module, columns, grid.cols)
        by_row = [(suffix, "F32", (rows, groups)) for suffix in _SCALES]
        parts: list[tuple[str, str, tuple[int, ...]]]
        match kind:
            case "W8A8":
                parts = [
                    ("weight", "I8", shape),
                    ("input_scale", "F32", (1,)),
                    ("input_offset", "F32", (1,)),
                    ("quant_bias", "I32", (rows,)),
                    ("deq_scale", "I64" if self.dtype == "F16" else "F32", (rows,)),
                ]
            case "W8A8_DYNAMIC" | "W8A16":
                parts = [("weight", "I8", shape), *by_row]
            case "W8A8_MXFP8":
                parts = [("weight", "F8_E4M3", shape), ("weight_scale", "U8", (rows, groups))]
            case "W4A8_MXFP" | "W4A4_MXFP4":
                parts = [("weight", "U8", (rows, columns // 2)), ("weight_scale", "U8", (rows, groups))]
            case _:
                if rows % 2:
                    raise UserError(
                        f"{module!r} has {rows} output features, and {kind} packs rows in pairs; leave the module out "
                        "with --ignore"
                    )
                parts = [("weight", "I8", (rows // 2, columns)), *by_row]
                if kind == "W4A8_DYNAMIC":
                    parts.append(("scale_bias", "F32", (rows, self._shares(module, columns))))
        return tuple(OutputTensor(f"{module}.{suffix}", dtype, size) for suffix, dtype, size in parts)

    def _shares(self, module: str, columns: int) -> int:
        shares = scale_bias_columns(module)
        if columns % shares:
            raise UserError(
                f"{module!r} has {columns} input features, no multiple of {shares}: W4A8_DYNAMIC stores a share of its "
                "scale_bias for each of so many devices; leave the module out with --ignore"
            )
        return shares

    def pack(
        self, module: str, quantized: QuantizedTensor, scheme: Scheme, input_amax: float | None = None
    ) -> dict[str, Tensor]:
        """The tensors that `outputs` names; ValueError where `quantized` is not what the scheme says.

        input_amax: needed for W8A8, whose weight scales and input scale must multiply exactly in float32.
        """
        weight = scheme.weight
        if (quantized.format, quantized.granularity) != (weight.format, weight.granularity):
            raise ValueError(
                f"{module}: weights in {quantized.format.name} are not those of scheme {scheme.name}"
            )
        found: dict[str, Tensor] = {}
        for output in self.outputs(module, (quantized.shape[0], quantized.shape[1]), scheme):
            match output.name.removeprefix(f"{module}."):
                case "weight":
                    found[output.name] = _stored_codes(quantized.codes, output)
                case "weight_scale":
                    found[output.name] = stored_scale(quantized.scale, output.dtype)
                case "weight_offset":
                    zero = quantized.zero_point
                    found[output.name] = torch.zeros(output.shape) if zero is None else zero.to(torch.float32)
                case "scale_bias":
                    found[output.name] = scale_bias(quantized.dequantize(), output.shape[1])
                case "input_scale":
                    assert scheme.activation is not None
                    found[output.name] = static_input_scale(module, scheme.activation, input_amax)
                case "input_offset":
                    found[output.name] = torch.zeros(1)
                case "quant_bias":
                    found[output.name] = torch.zeros(output.shape, dtype=torch.int32)
                case "deq_scale":
                    scale = _product(module, quantized.scale[:, 0], found[f"{module}.input_scale"])
                    found[output.name] = pack_scale_words(scale) if output.dtype == "I64" else scale
        return found

    def with_bias(self, module: str, packed: Mapping[str, Tensor], bias: Tensor) -> dict[str, Tensor]:
        """W8A8 has the bias in its integers; the plain one beside it is not read by the engine."""
        name = f"{module}.quant_bias"
        if name not in packed:
            return dict(packed)
        scale = read_deq_scale(packed[f"{module}.deq_scale"])
        sums = packed[f"{module}.weight"].sum(dim=1, dtype=torch.int64)
        return {**packed, name: quant_bias(bias, scale, 0, sums)}

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where a tensor is missing or does not fit."""
        outputs = self.outputs(module, shape, scheme)
        suffixes = (output.name.removeprefix(f"{module}.") for output in outputs)
        parts = dict(zip(suffixes, check_parts(outputs, tensors), strict=True))
        weight = scheme.weight
        if "deq_scale" in parts:
            scale = (read_deq_scale(parts["deq_scale"]) / parts["input_scale"]).unsqueeze(1)
        else:
            scale = read_scale(parts["weight_scale"])
        return QuantizedTensor(
            codes=_read_codes(parts["weight"], scheme),
            scale=scale,
            zero_point=None if weight.symmetric else parts["weight_offset"],
            format=weight.format,
            granularity=weight.granularity,
            shape=shape,
        )

    def quantization_config(
        self,
        schemes: Mapping[str, Scheme],  # noqa: ARG002
        kept: Sequence[str],  # noqa: ARG002
    ) -> dict[str, Any] | None:
        return None

    def side_files(self, schemes: Mapping[str, Scheme], tensors: Sequence[OutputTensor]) -> dict[str, bytes]:
        """`quant_model_description.json` with an entry for every tensor of the folder."""
        types: dict[str, str] = {}
        sizes = set()
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        for module, scheme in schemes.items():
            kind = self.type_of(scheme)
            types[f"{module}.weight"] = kind
            own = (
                "weight_scale",
                "weight_offset",
                "scale_bias",
                "input_scale",
                "input_offset",
                "quant_bias",
                "deq_scale",
            )
            types |= {f"{module}.{suffix}": kind for suffix in own if f"{module}.{suffix}" in shapes}
            grid = scheme.weight.granularity
            if grid.kind is GranularityKind.GROUP:
                sizes.add(grid.cols)
        cached = [name for name in shapes if name.endswith((".kv_cache_scale", ".kv_cache_offset"))]
        types |= dict.fromkeys(cached, KV_TYPE)
        extra = dict.fromkeys(KV_TYPE_KEYS, KV_TYPE) if cached else {}
        if len(sizes) > 1:
            raise UserError(
                f"layout {self.name} states one group size for the whole model, and the linears have "
                f"{' and '.join(map(str, sorted(sizes)))}; choose one --group-size"
            )
        group_size = sizes.pop() if sizes else 0
        return {DESCRIPTION_FILE: description_bytes(entries(shapes, types), group_size, extra)}

    def notes(self, schemes: Mapping[str, Scheme]) -> tuple[str, ...]:
        found = []
        if self.dtype not in ("BF16", "F16"):
            found.append(
                f"layout {self.name}: the {self.dtype} model counts as BF16, which Ascend computes it in"
            )
        kinds = dict.fromkeys(self.type_of(scheme) for scheme in dict.fromkeys(schemes.values()))
        found += [_NOTES[kind] for kind in kinds if kind in _NOTES]
        if self.dtype == "F16" and "W8A8_DYNAMIC" in kinds:
            found.append(
                "vLLM Ascend cannot run W8A8_DYNAMIC in FP16: serve with --dtype bfloat16, or take a BF16 model"
            )
        return tuple(found)

    def type_of(self, scheme: Scheme) -> str:
        """The type string of a scheme; UserError where the layout has none."""
        weight, activation = scheme.weight, scheme.activation
        kind, group = weight.granularity.kind, weight.granularity.cols
        channel = kind is GranularityKind.CHANNEL
        inputs = None if activation is None else activation.format
        found = None
        if weight.scale_format == E8M0 and (kind, group) == (GranularityKind.GROUP, MX_GROUP):
            found = {
                (E4M3FN, E4M3FN): "W8A8_MXFP8",
                (E2M1, E4M3FN): "W4A8_MXFP",
                (E2M1, E2M1): "W4A4_MXFP4",
            }.get((weight.format, inputs))  # type: ignore[arg-type]
        elif weight.format == INT8 and channel and weight.symmetric and inputs == INT8:
            found = "W8A8_DYNAMIC" if scheme.dynamic else "W8A8"
        elif weight.format == INT8 and channel and weight.symmetric and inputs is None:
            found = "W8A16"
        elif weight.format == INT4 and channel and weight.symmetric and inputs == INT8 and scheme.dynamic:
            found = "W4A8_DYNAMIC"
        elif (
            weight.format == INT4
            and kind in (GranularityKind.CHANNEL, GranularityKind.GROUP)
            and inputs is None
        ):
            found = "W4A16"
        if found is None:
            hint = ""
            if weight.format == INT4 and inputs == INT8 and not channel:
                hint = "; with --group-size 0 it has one for each output channel, which is W4A8_DYNAMIC"
            raise UserError(
                f"layout {self.name} has no type for {weight.format.name} weights with a scale "
                f"{weight.granularity.describe()} (scheme {scheme.name}){hint or '; choose another --layout'}"
            )
        return found


ASCEND = AscendLayout(name="ascend", readers=("vLLM Ascend", "SGLang on Ascend"))


def read_deq_scale(stored: Tensor) -> Tensor:
    """float32 [N] of a `deq_scale` in either dtype; ValueError for words that are no scales."""
    return unpack_scale_words(stored) if stored.dtype == torch.int64 else stored.to(torch.float32)


def _product(module: str, scale: Tensor, input_scale: Tensor) -> Tensor:
    product = scale * input_scale
    if not torch.equal(product / input_scale, scale):
        raise ValueError(
            f"{module}: scales do not multiply exactly: round those of weights and inputs to the model's dtype first"
        )
    return product


def _stored_codes(codes: Tensor, output: OutputTensor) -> Tensor:
    if output.dtype == "F8_E4M3":
        return codes.view(torch.float8_e4m3fn)
    if output.dtype == "U8":
        return pack_nibble_pairs(codes)
    return codes if output.shape == tuple(codes.shape) else pack_int4_pairs(codes)


def _read_codes(stored: Tensor, scheme: Scheme) -> Tensor:
    if scheme.weight.format == INT4:
        return unpack_int4_pairs(stored)
    if scheme.weight.format == E2M1:
        return unpack_nibble_pairs(stored)
    return stored.view(torch.uint8) if stored.dtype == torch.float8_e4m3fn else stored


__all__ = ["ASCEND", "FLOAT", "AscendLayout", "read_deq_scale"]
