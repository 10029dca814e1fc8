"""The layout of GPTQ: integers in words along K, transposed; columns in their own order.

`qweight` I32 [K * bits/32, N], `qzeros` I32 [K/g, N * bits/32], `scales` F16 [K/g, N], `g_idx` I32 [K] with the
group of each input feature. The value is (q - zero) * scale. Version 1 ("gptq") stores the zero point less
one, version 2 as it is. Written is version 1, symmetric, which is what every engine reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.integer_weights import codes_of, words_of
from qwen_quantize.checkpoint.layout_parts import (
    UsualFolder,
    check_parts,
    one_scheme,
    refuse_partial_groups,
    require_half_scales,
    stored_scale,
)
from qwen_quantize.checkpoint.linear_parts import WORDS, ModuleTensors, StoredKind, StoredLinear
from qwen_quantize.checkpoint.shards import OutputTensor
from qwen_quantize.checkpoint.word_config import group_size_of, words_kept
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.packing import unpack_words
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.formats.tables import INT4, INT8
from qwen_quantize.models.config_values import shown

_FULL = 32  # GPTQModel packs and multiplies in units of this many features


@dataclass(frozen=True, slots=True)
class GptqLayout(UsualFolder):
    """See the module."""

    name: str
    readers: tuple[str, ...]

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """`qweight`, `qzeros`, `scales`, `g_idx` of a linear [N, K]; UserError where the layout cannot hold it."""
        rows, columns = shape
        weight = scheme.weight
        kinds = (GranularityKind.GROUP, GranularityKind.CHANNEL)
        integers = weight.format in (INT4, INT8) and weight.granularity.kind in kinds
        if not integers or scheme.activation is not None or not weight.symmetric:
            raise UserError(
                f"layout {self.name} holds symmetric integers in groups beside 16-bit inputs, not scheme {scheme.name}"
                f"{'' if weight.symmetric else ' with zero points'}; choose another --layout"
            )
        require_half_scales(self.name, weight)
        if rows % _FULL or columns % _FULL:
            raise UserError(
                f"{module!r} has {rows} x {columns} features, and readers of layout {self.name} need multiples of "
                f"{_FULL}; leave the module out with --ignore"
            )
        if weight.granularity.cols:
            refuse_partial_groups(self.name, module, columns, weight.granularity.cols)
        groups, bits = weight.granularity.scale_shape(shape)[1], weight.format.bits
        return (
            OutputTensor(f"{module}.qweight", "I32", (columns * bits // 32, rows)),
            OutputTensor(f"{module}.qzeros", "I32", (groups, rows * bits // 32)),
            OutputTensor(f"{module}.scales", "F16", (groups, rows)),
            OutputTensor(f"{module}.g_idx", "I32", (columns,)),
        )

    def pack(
        self,
        module: str,
        quantized: QuantizedTensor,
        scheme: Scheme,
        input_amax: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """The tensors that `outputs` names; ValueError for zero points and scales that are not FP16."""
        if quantized.zero_point is not None:
            raise ValueError(f"{module}: layout {self.name} is written without zero points")
        shape = (quantized.shape[0], quantized.shape[1])
        words, zeros, scales, index = self.outputs(module, shape, scheme)
        bits = quantized.format.bits
        middle = 1 << (bits - 1)
        codes = quantized.codes
        if codes.numel() and (int(codes.min()) < -middle or int(codes.max()) >= middle):
            raise ValueError(f"codes reach {int(codes.min())} .. {int(codes.max())}, too far for {bits} bits")
        unsigned = (codes.to(torch.int16) + middle).to(torch.uint8)
        stored_zero = torch.full(
            (zeros.shape[0], shape[0]), middle - 1, dtype=torch.uint8
        )  # version 1: less one
        group_size = scheme.weight.granularity.cols or shape[1]
        return {
            words.name: words_of(unsigned, bits).t().contiguous(),
            zeros.name: words_of(stored_zero, bits),
            scales.name: stored_scale(quantized.scale.t().contiguous(), "F16"),
            index.name: torch.arange(shape[1], dtype=torch.int32) // group_size,
        }

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where a tensor is missing or does not fit."""
        words, zeros, scales, index = check_parts(self.outputs(module, shape, scheme), tensors)
        weight = scheme.weight
        middle = 1 << (weight.format.bits - 1)
        group_size = weight.granularity.cols or shape[1]
        if bool((codes_of(zeros, weight.format.bits) != middle - 1).any()):
            raise UserError(
                f"tensor {module + '.qzeros'!r} holds zero points; a symmetric scheme has all {middle}"
            )
        if not torch.equal(index, torch.arange(shape[1], dtype=torch.int32) // group_size):
            raise UserError(f"tensor {module + '.g_idx'!r} puts the input features in another order")
        codes = codes_of(words.t(), weight.format.bits).to(torch.int16) - middle
        return QuantizedTensor(
            codes.to(torch.int8),
            scales.t().to(torch.float32).contiguous(),
            None,
            weight.format,
            weight.granularity,
            shape,
        )

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:
        """GPTQ's config; UserError unless all modules have one scheme.

        What stays is excluded by name, the head apart, which has a key of its own.
        """
        scheme = one_scheme(self.name, schemes)
        left = [name for name in kept if name != "lm_head"]
        return {
            "bits": scheme.weight.format.bits,
            "checkpoint_format": "gptq",
            "desc_act": False,
            "dynamic": {f"-:^{re.escape(name)}$": {} for name in left},
            "group_size": scheme.weight.granularity.cols or -1,
            "lm_head": "lm_head" in schemes,
            "pack_dtype": "int32",
            "quant_method": "gptq",
            "sym": True,
        }


GPTQ = GptqLayout(name="gptq", readers=("vLLM", "SGLang", "GPTQModel"))


@dataclass(frozen=True, slots=True)
class GptqConfig:
    """What config.json says of GPTQ weights; group_size: None for one group in a row; version: 1 or 2."""

    bits: int
    group_size: int | None
    version: int

    def describe(self) -> str:
        return f"int{self.bits} of GPTQ"


def parse_gptq(found: Mapping[str, Any]) -> GptqConfig:
    """The record of a GPTQ `quantization_config`; UserError for packings that lie otherwise."""
    words_kept(found)
    bits = found.get("bits")
    if type(bits) is not int or bits not in (2, 3, 4, 8):
        raise UserError(f"config.json: GPTQ weights of bits {shown(bits)} cannot be read; 2, 3, 4 and 8 can")
    form = found.get("checkpoint_format") or found.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise UserError(
            f"config.json: GPTQ weights of checkpoint_format {shown(form)} cannot be read; 'gptq' and 'gptq_v2' can"
        )
    dtype = found.get("pack_dtype", "int32")
    if dtype not in (None, "int32"):
        raise UserError(f"config.json: GPTQ weights of pack_dtype {shown(dtype)} cannot be read; 'int32' can")
    return GptqConfig(bits, group_size_of(found), 2 if form == "gptq_v2" else 1)


def describe_gptq(tensors: ModuleTensors, config: GptqConfig, wanted: tuple[int, int] | None) -> StoredLinear:
    """How a module with `qweight` is stored; UserError by name for whatever is missing or does not fit."""
    info = tensors.matrix(WORDS)
    columns, spare = divmod(info.shape[0] * 32, config.bits)
    shape = (info.shape[1], columns)
    if info.dtype != "I32" or spare:
        raise tensors.fail(
            f"tensor {info.name!r} is {info.dtype} {list(info.shape)}; it must be I32 words full of {config.bits} bits"
        )
    tensors.check_shape(shape, wanted, info.name)
    group_size = min(config.group_size or columns, columns)
    groups = -(-columns // group_size) if group_size else 0
    scale = tensors.part(".scales", ("F16", "BF16", "F32"), (groups, shape[0]), info)
    zeros = tensors.part(".qzeros", ("I32",), (groups, -(-shape[0] * config.bits // 32)), info)
    index = tensors.group_index(".g_idx", columns)
    parts = (info.name, zeros.name, scale.name)
    return StoredLinear(
        tensors.module,
        StoredKind.GPTQ,
        shape,
        info.name,
        parts if index is None else (*parts, index),
        scale=scale.name,
        zero_point=zeros.name,
        group_index=index,
        group_size=group_size,
    )


def unpack_transposed(words: Tensor, bits: int, columns: int) -> Tensor:
    """uint8 codes [N, columns] of words int32 [any, N] that hold them down the first dimension."""
    if bits in (4, 8):
        return codes_of(words.t(), bits)[:, :columns]
    return unpack_words(words.t().contiguous(), bits, columns)
