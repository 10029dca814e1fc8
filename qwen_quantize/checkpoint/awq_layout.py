"""AutoAWQ's "GEMM" layout: four bits and a zero point, transposed, eight columns interleaved in a word.

`qweight` I32 [K, N/8], `qzeros` I32 [K/g, N/8], `scales` F16 [K/g, N]; the value is (q - zero) * scale with q
and zero 0 .. 15. Codes and zero points of this program are 8 less. A symmetric scheme has the zero point 8.
"""

from __future__ import annotations

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
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.formats.tables import INT4
from qwen_quantize.models.config_values import shown

# A word holds these of its eight columns, from the lowest nibble on; and the nibble of each column.
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NIBBLE = (0, 4, 1, 5, 2, 6, 3, 7)
_MIDDLE = 8


def pack_interleaved(codes: Tensor) -> Tensor:
    """int32 [rows, N/8] of unsigned codes uint8 0 .. 15 [rows, N]."""
    by_word = codes.reshape(codes.shape[0], -1, 8)[..., list(_ORDER)]
    return words_of(by_word.flatten(-2), 4)


def unpack_interleaved(words: Tensor) -> Tensor:
    """uint8 codes [rows, N] of words int32 [rows, N/8]; the inverse of `pack_interleaved`."""
    by_word = codes_of(words, 4).reshape(words.shape[0], -1, 8)
    return by_word[..., list(_NIBBLE)].flatten(-2)


@dataclass(frozen=True, slots=True)
class AwqLayout(UsualFolder):
    """See the module."""

    name: str
    readers: tuple[str, ...]

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """`qweight`, `qzeros`, `scales` of a linear [N, K]; UserError where the layout cannot hold it."""
        rows, columns = shape
        weight = scheme.weight
        kinds = (GranularityKind.GROUP, GranularityKind.CHANNEL)
        if weight.format != INT4 or scheme.activation is not None or weight.granularity.kind not in kinds:
            raise UserError(
                f"layout {self.name} holds INT4 weights in groups beside 16-bit inputs, not scheme {scheme.name}; "
                "choose another --layout"
            )
        require_half_scales(self.name, weight)
        if rows % 8:
            raise UserError(
                f"{module!r} has {rows} output features, and layout {self.name} packs them in eights; leave the module "
                "out with --ignore"
            )
        if weight.granularity.cols:
            refuse_partial_groups(self.name, module, columns, weight.granularity.cols)
        groups = weight.granularity.scale_shape(shape)[1]
        return (
            OutputTensor(f"{module}.qweight", "I32", (columns, rows // 8)),
            OutputTensor(f"{module}.qzeros", "I32", (groups, rows // 8)),
            OutputTensor(f"{module}.scales", "F16", (groups, rows)),
        )

    def pack(
        self,
        module: str,
        quantized: QuantizedTensor,
        scheme: Scheme,
        input_amax: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """The tensors that `outputs` names; ValueError for codes outside -8 .. 7 and scales that are not FP16."""
        weight, zeros, scales = self.outputs(module, (quantized.shape[0], quantized.shape[1]), scheme)
        zero = torch.zeros_like(quantized.scale) if quantized.zero_point is None else quantized.zero_point
        return {
            weight.name: pack_interleaved(_unsigned(quantized.codes).t()),
            zeros.name: pack_interleaved(_unsigned(zero.to(torch.int8)).t()),
            scales.name: stored_scale(quantized.scale.t().contiguous(), "F16"),
        }

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where a tensor is missing or does not fit."""
        words, zeros, scales = check_parts(self.outputs(module, shape, scheme), tensors)
        zero = _signed(unpack_interleaved(zeros)).t().to(torch.float32).contiguous()
        if scheme.weight.symmetric and bool(zero.any()):
            raise UserError(f"tensor {module + '.qzeros'!r} holds zero points; a symmetric scheme has all 8")
        return QuantizedTensor(
            _signed(unpack_interleaved(words)).t().contiguous(),
            scales.t().to(torch.float32).contiguous(),
            None if scheme.weight.symmetric else zero,
            INT4,
            scheme.weight.granularity,
            shape,
        )

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:
        """AutoAWQ's config; UserError unless all modules have one scheme."""
        scheme = one_scheme(self.name, schemes)
        return {
            "bits": 4,
            "group_size": scheme.weight.granularity.cols or -1,
            "modules_to_not_convert": list(kept),
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        }


AWQ = AwqLayout(name="awq", readers=("vLLM", "SGLang", "LMDeploy"))


def _unsigned(codes: Tensor) -> Tensor:
    if codes.numel() and (int(codes.min()) < -_MIDDLE or int(codes.max()) >= _MIDDLE):
        raise ValueError(f"codes reach {int(codes.min())} .. {int(codes.max())}, too far for 4 bits")
    return (codes + _MIDDLE).to(torch.uint8)


def _signed(codes: Tensor) -> Tensor:
    return codes.to(torch.int8) - _MIDDLE


@dataclass(frozen=True, slots=True)
class AwqConfig:
    """What config.json says of AutoAWQ weights; group_size: None for one group in a row."""

    group_size: int | None

    def describe(self) -> str:
        return "int4 of AutoAWQ"


def parse_awq(found: Mapping[str, Any]) -> AwqConfig:
    """The record of an AutoAWQ `quantization_config`; UserError for versions that lie otherwise."""
    words_kept(found)
    version = found.get("version") or found.get("format") or "gemm"  # newer writers call it format
    if not isinstance(version, str) or version.lower() != "gemm":
        raise UserError(
            f"config.json: AWQ weights of version {shown(version)} cannot be read; version 'gemm' can"
        )
    bits = found.get("bits", found.get("w_bit"))
    if type(bits) is not int or bits != 4:
        raise UserError(f"config.json: AWQ weights of bits {shown(bits)} cannot be read; 4 can")
    return AwqConfig(group_size_of(found, "q_group_size"))


def describe_awq(tensors: ModuleTensors, config: AwqConfig, wanted: tuple[int, int] | None) -> StoredLinear:
    """How a module with `qweight` is stored; UserError by name for whatever is missing or does not fit."""
    info = tensors.matrix(WORDS)
    columns, words = info.shape
    shape = (words * 8, columns)
    if info.dtype != "I32":
        raise tensors.fail(f"tensor {info.name!r} is {info.dtype}; the words of AutoAWQ are I32")
    tensors.check_shape(shape, wanted, info.name)
    group_size = min(config.group_size or columns, columns)
    groups = -(-columns // group_size) if group_size else 0
    scale = tensors.part(".scales", ("F16", "BF16", "F32"), (groups, shape[0]), info)
    zeros = tensors.part(".qzeros", ("I32",), (groups, words), info)
    return StoredLinear(
        tensors.module,
        StoredKind.AWQ,
        shape,
        info.name,
        (info.name, zeros.name, scale.name),
        scale=scale.name,
        zero_point=zeros.name,
        group_size=group_size,
    )
