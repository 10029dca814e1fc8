"""The layout of GGUF: one file, each linear as rows of blocks of 32 elements with their scale.

Q4_0 is a symmetric int4 with an FP16 scale, Q8_0 an int8 with one, MXFP4 an E2M1 with a power of two. Tensors are
planned under their Hugging Face names, as everywhere in this program; only the header has GGUF's (`gguf_writer`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import gguf
from torch import Tensor

from qwen_quantize.checkpoint.gguf_config import ARCHITECTURES, gguf_name
from qwen_quantize.checkpoint.layout_parts import (
    Destination,
    UsualFolder,
    check_parts,
    read_scale,
    refuse_partial_groups,
    scheme_words,
    stored_scale,
)
from qwen_quantize.checkpoint.shards import OutputTensor
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity, GranularityKind
from qwen_quantize.formats.packing import (
    pack_gguf_mxfp4,
    pack_gguf_q4_0,
    pack_gguf_q8_0,
    unpack_gguf_mxfp4,
    unpack_gguf_q4_0,
    unpack_gguf_q8_0,
)
from qwen_quantize.formats.schemes import Scheme, TensorSpec
from qwen_quantize.formats.tables import E2M1, E8M0, FP16, INT4, INT8
from qwen_quantize.models.lookup import require_blueprint

Kind: TypeAlias = gguf.GGMLQuantizationType

GROUP = 32
_GRID = Granularity.group(GROUP)
BLOCK_SPECS: dict[Kind, TensorSpec] = {
    Kind.Q4_0: TensorSpec(INT4, _GRID, FP16),
    Kind.Q8_0: TensorSpec(INT8, _GRID, FP16),
    Kind.MXFP4: TensorSpec(E2M1, _GRID, E8M0),
}
PLAIN_KINDS: dict[str, Kind] = {"F32": Kind.F32, "F16": Kind.F16, "BF16": Kind.BF16}

# Hugging Face architecture -> GGUF's; a Mistral has the tensors and the arithmetic of a Llama.
GGUF_ARCHITECTURES = {record.architecture: name for name, record in ARCHITECTURES.items()} | {
    "MistralForCausalLM": "llama"
}


@dataclass(frozen=True, slots=True)
class GgufLayout(UsualFolder):
    """See the module. architecture: GGUF's name for that of the model; `fitted` fills it in.

    permuted: ends of modules whose rows GGUF keeps in another order, and the heads in which they move.
    """

    name: str
    readers: tuple[str, ...]
    architecture: str = ""
    permuted: tuple[tuple[str, int], ...] = ()

    def fitted(self, destination: Destination) -> GgufLayout:
        """The layout of one model, from its config.json; UserError for one that GGUF cannot describe here."""
        model = require_blueprint(destination.config).config
        known = GGUF_ARCHITECTURES.get(model.architecture)
        if known is None:
            raise UserError(
                f"layout {self.name} is written for {', '.join(GGUF_ARCHITECTURES)}, not for {model.architecture}; "
                "choose another --layout"
            )
        for wrong, what in (
            (any(model.sliding_layers), "layers with a sliding window"),
            (model.activation != "silu", f"the activation {model.activation!r}"),
            (model.rope.partial_rotary_factor != 1, "heads that are rotated in part"),
        ):
            if wrong:
                raise UserError(
                    f"layout {self.name}: {what} have no place in a GGUF of {known}; choose another --layout"
                )
        heads = ((".q_proj", model.num_heads), (".k_proj", model.num_kv_heads))
        return replace(self, architecture=known, permuted=heads if ARCHITECTURES[known].permuted else ())

    def kind_of(self, scheme: Scheme) -> Kind:
        """The GGUF type that holds the scheme's weights bit by bit; UserError where there is none."""
        weight = scheme.weight
        grouped = weight.granularity.kind is GranularityKind.GROUP and weight.granularity.cols == GROUP
        if scheme.activation is None and grouped and weight.symmetric:
            for kind, spec in BLOCK_SPECS.items():
                if (weight.format, weight.scale_format) == (spec.format, spec.scale_format):
                    return kind
        raise UserError(
            f"layout {self.name} holds symmetric INT4 or INT8 with FP16 scales and E2M1 with power-of-two scales, each "
            f"for {GROUP} of a row, and leaves inputs as they are; scheme {scheme.name} has "
            f"{scheme_words(scheme)}; take w4a16, w8a16 or mxfp4, or another --layout"
        )

    def kept_dtype(self, name: str, dtype: str, shape: Sequence[int]) -> str:
        """The dtype of a tensor that is not quantized: llama.cpp computes with vectors in F32 only.

        UserError for a tensor that the architecture has no place for.
        """
        if gguf_name(name) is None:
            raise UserError(
                f"tensor {name!r} has no place in a GGUF of {self.architecture}; choose another --layout"
            )
        return dtype if len(shape) == 2 and dtype in PLAIN_KINDS else "F32"

    def permuted_heads(self, module: str) -> int | None:
        """The heads within which the file has the module's rows in another order, None where it has not."""
        return next((heads for ending, heads in self.permuted if module.endswith(ending)), None)

    def stored_rows(self, module: str, values: Tensor) -> Tensor:
        """Rows [out, ...] as the file has them: the two halves of a head become neighbouring pairs."""
        heads = self.permuted_heads(module)
        if heads is None:
            return values
        return _swap_halves(module, values, heads, 2, values.shape[0] // heads // 2)

    def model_rows(self, module: str, values: Tensor) -> Tensor:
        """The inverse of `stored_rows`."""
        heads = self.permuted_heads(module)
        if heads is None:
            return values
        return _swap_halves(module, values, heads, values.shape[0] // heads // 2, 2)

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """The one tensor of a linear [N, K], its rows as bytes; UserError where the layout cannot hold it."""
        kind = self.kind_of(scheme)
        refuse_partial_groups(self.name, module, shape[1], GROUP)
        if self.architecture:
            self.kept_dtype(f"{module}.weight", "F32", shape)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        return (OutputTensor(f"{module}.weight", "U8", (shape[0], shape[1] // block * size)),)

    def pack(
        self,
        module: str,
        quantized: QuantizedTensor,
        scheme: Scheme,
        input_amax: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """The tensor that `outputs` names; ValueError for scales that are not FP16, or no powers of two."""
        (output,) = self.outputs(module, (quantized.shape[0], quantized.shape[1]), scheme)
        kind = self.kind_of(scheme)
        if quantized.format != scheme.weight.format or quantized.zero_point is not None:
            raise ValueError(f"{module}: these are no codes of scheme {scheme.name}")
        codes = self.stored_rows(module, quantized.codes)
        scale = self.stored_rows(module, stored_scale(quantized.scale, "U8" if kind == Kind.MXFP4 else "F16"))
        pack = {Kind.Q4_0: pack_gguf_q4_0, Kind.Q8_0: pack_gguf_q8_0, Kind.MXFP4: pack_gguf_mxfp4}[kind]
        return {output.name: pack(codes, scale)}

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where the tensor is missing or does not fit."""
        (packed,) = check_parts(self.outputs(module, shape, scheme), tensors)
        codes, scale = unpack_blocks(packed, self.kind_of(scheme))
        return QuantizedTensor(
            codes=self.model_rows(module, codes),
            scale=self.model_rows(module, scale),
            zero_point=None,
            format=scheme.weight.format,
            granularity=scheme.weight.granularity,
            shape=shape,
        )

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:  # noqa: ARG002
        """Nothing: the header of a GGUF says all, and config.json beside it is that of the plain model."""
        return {}


GGUF = GgufLayout(name="gguf", readers=("llama.cpp", "transformers, which dequantizes", "SGLang"))


def unpack_blocks(packed: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """(codes [N, K], float32 scales [N, K/32]) of rows of blocks in one of `BLOCK_SPECS`."""
    unpack = {Kind.Q4_0: unpack_gguf_q4_0, Kind.Q8_0: unpack_gguf_q8_0, Kind.MXFP4: unpack_gguf_mxfp4}[kind]
    codes, scale = unpack(packed)
    return codes, read_scale(scale)


def _swap_halves(module: str, values: Tensor, heads: int, first: int, second: int) -> Tensor:
    if values.shape[0] % (2 * heads):
        raise UserError(f"{module!r} has {values.shape[0]} rows, which {heads} heads cannot share")
    rows = values.reshape(heads, first, second, *values.shape[1:])
    return rows.transpose(1, 2).reshape(values.shape).contiguous()
