"""How each linear of a checkpoint is stored, found from the names, dtypes and shapes of its tensors.

The tensors beside a weight say how it is stored; config.json must admit it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from qwen_quantize.checkpoint.ascend_description import AscendDescription, parse_description
from qwen_quantize.checkpoint.ascend_storage import ASCEND_PARTS, describe_ascend
from qwen_quantize.checkpoint.awq_layout import AwqConfig, describe_awq
from qwen_quantize.checkpoint.compressed_config import CompressedTensors
from qwen_quantize.checkpoint.compressed_storage import describe_compressed
from qwen_quantize.checkpoint.gptq_layout import GptqConfig, describe_gptq
from qwen_quantize.checkpoint.layouts import (
    DEEPSEEK_FP8,
    BlockFp8Config,
    Hif8Config,
    Quantization,
    parse_quantization,
)
from qwen_quantize.checkpoint.linear_parts import (
    PACKED,
    PLAIN_DTYPES,
    WEIGHT,
    WORDS,
    ModuleTensors,
    StoredKind,
    StoredLinear,
)
from qwen_quantize.checkpoint.safetensors_folder import SafetensorsFolder
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.tensor_info import TensorInfo
from qwen_quantize.checkpoint.tiles_layout import TilesConfig, describe_tiles

_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")

# What follows a module's name in that of its scales, which multiply: our own layouts' and DeepSeek-V4's.
_BLOCK_SCALES = (f".{DEEPSEEK_FP8.scale_suffix}", ".scale")
_COMPRESSED_PARTS = (
    ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale",
)  # fmt: skip
_WORD_PARTS = (".qzeros", ".scales", ".g_idx")
# Scales of activations under the old quantization: no parts of a weight, and without meaning after it is gone.
_STATIC_PARTS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".output_zero_point",
)  # fmt: skip


class LinearStorage:
    """Describes the linears of one checkpoint; `module` is a name without `.weight`."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.quantization = _quantization_of(source)
        self._names = frozenset(source.names())

    def companions(self) -> frozenset[str]:
        """All scales, zero points and the like that belong to a weight and mean nothing without it."""
        return frozenset(name for name in self._names if self._is_companion(name))

    def _is_companion(self, name: str) -> bool:
        module, _, suffix = name.rpartition(".")
        suffix = f".{suffix}"
        weight = module + WEIGHT
        if isinstance(self.quantization, AscendDescription) and suffix in ASCEND_PARTS:
            return weight in self._names
        if suffix == ".scale":  # too plain a name to be one without a closer look
            return weight in self._names and self.source.info(weight).dtype in ("F8_E4M3", "I8")
        if suffix in _STATIC_PARTS:
            return any(module + part in self._names for part in (PACKED, ".weight_scale"))
        if suffix in _WORD_PARTS:
            return module + WORDS in self._names
        if suffix in _COMPRESSED_PARTS or suffix == _BLOCK_SCALES[0]:
            return weight in self._names or module + PACKED in self._names
        return False

    def integer_bits(self, stored: StoredLinear) -> int:
        """Bits of an integer code, which may stand in a wider byte."""
        match self.quantization:
            case GptqConfig() as gptq:
                return gptq.bits
            case CompressedTensors() as compressed if stored.kind is StoredKind.INT8:
                return 4 if compressed.bits("int") == {4} else 8
        return 8 if stored.kind is StoredKind.INT8 else 4

    def is_quantized(self, module: str) -> bool:
        """Whether the weight has scales, also for what is no linear; UserError where it cannot be read."""
        if module + PACKED in self._names or module + WORDS in self._names:
            return True
        if module + WEIGHT in self._names:
            info = self.source.info(module + WEIGHT)
            beside = self._tensors(module).present((*_BLOCK_SCALES[:1], *_COMPRESSED_PARTS))
            if not beside and (info.dtype in PLAIN_DTYPES or len(info.shape) != 2):
                return False
        return self.describe(module).kind is not StoredKind.PLAIN

    def _tensors(self, module: str) -> ModuleTensors:
        return ModuleTensors(self.source, self._names, module)

    def describe(self, module: str, shape: tuple[int, int] | None = None) -> StoredLinear:
        """How the linear is stored; UserError by name for whatever is missing or does not fit.

        shape: (out, in) as the model has it.
        """
        tensors = self._tensors(module)
        match self.quantization:
            case AscendDescription() as description:
                return _nonempty(tensors, describe_ascend(tensors, description, shape))
            case TilesConfig() as tiles:
                return _nonempty(tensors, describe_tiles(tensors, tiles, shape))
        found = tensors.present((WEIGHT, PACKED, WORDS))
        if len(found) > 1:
            raise tensors.fail(f"{found[0]} and {found[1]} are the same weight stored twice")
        if tensors.name(PACKED) is not None:
            stored = self._describe_packed(tensors, shape)
        elif tensors.name(WORDS) is not None:
            stored = self._describe_words(tensors, shape)
        else:
            stored = self._describe_bytes(tensors, shape)
        return _nonempty(tensors, stored)

    def _describe_bytes(self, tensors: ModuleTensors, shape: tuple[int, int] | None) -> StoredLinear:
        info = tensors.matrix(WEIGHT)
        found = StoredLinear(
            tensors.module, StoredKind.PLAIN, (info.shape[0], info.shape[1]), info.name, (info.name,)
        )
        tensors.check_shape(found.shape, shape, info.name)
        beside = tensors.present((*_BLOCK_SCALES[:1], *_COMPRESSED_PARTS))
        if info.dtype in PLAIN_DTYPES:
            if beside:
                raise tensors.fail(
                    f"tensor {info.name!r} is {info.dtype} but {beside[0]!r} stands beside it; a scale belongs to a "
                    "quantized weight, so one of the two is left over"
                )
            return found
        if info.dtype == "I8" and tensors.name(".scale") is not None:
            raise tensors.fail(
                f"tensor {info.name!r} holds packed FP4 with {tensors.module + '.scale'!r}, which cannot be read; take "
                "the FP8 release of the model"
            )
        match self.quantization:
            case BlockFp8Config() as config if info.dtype in ("F8_E4M3", "I8"):
                return _describe_block(tensors, found, info, config)
            case CompressedTensors() as compressed if info.dtype in ("F8_E4M3", "I8"):
                return describe_compressed(tensors, compressed, shape)
            case Hif8Config() as hif8 if info.dtype == "U8":
                return _describe_hif8(tensors, found, info, hif8)
        raise tensors.fail(
            f"tensor {info.name!r} is {info.dtype}; plain floats ({', '.join(PLAIN_DTYPES)}) can be read, and "
            "F8_E4M3 or I8 where config.json has a quantization_config that says how"
        )

    def _describe_packed(self, tensors: ModuleTensors, shape: tuple[int, int] | None) -> StoredLinear:
        if isinstance(self.quantization, CompressedTensors):
            return describe_compressed(tensors, self.quantization, shape)
        info = tensors.matrix(PACKED)
        raise tensors.fail(
            f"tensor {info.name!r} is {info.dtype}; packed weights are I32 or U8 and need a quantization_config of "
            "compressed-tensors in config.json"
        )

    def _describe_words(self, tensors: ModuleTensors, shape: tuple[int, int] | None) -> StoredLinear:
        match self.quantization:
            case AwqConfig() as awq:
                return describe_awq(tensors, awq, shape)
            case GptqConfig() as gptq:
                return describe_gptq(tensors, gptq, shape)
        info = tensors.matrix(WORDS)
        raise tensors.fail(
            f"tensor {info.name!r} is {info.dtype}; such words need a quantization_config of the method 'awq' or "
            "'gptq' in config.json"
        )


def _quantization_of(source: CheckpointSource) -> Quantization | None:
    """What the files beside the weights say; engines look for msModelSlim's before they open config.json."""
    if isinstance(source, SafetensorsFolder) and source.description is not None:
        return parse_description(source.description, source.config)
    return parse_quantization(source.config)


def _nonempty(tensors: ModuleTensors, stored: StoredLinear) -> StoredLinear:
    if 0 in stored.shape and stored.kind is not StoredKind.PLAIN:
        raise tensors.fail(
            f"tensor {stored.weight!r} makes a weight of shape {list(stored.shape)}: it is empty"
        )
    return stored


def _scale_of(tensors: ModuleTensors, suffixes: Iterable[str], info: TensorInfo) -> TensorInfo:
    names = tuple(suffixes)
    return tensors.need_scale(tensors.present(names), info, tensors.module + names[0])


def _describe_block(
    tensors: ModuleTensors, found: StoredLinear, info: TensorInfo, config: BlockFp8Config
) -> StoredLinear:
    if info.dtype != "F8_E4M3":
        raise tensors.fail(f"tensor {info.name!r} is {info.dtype}, and config.json speaks of F8_E4M3")
    scale = _scale_of(tensors, _BLOCK_SCALES, info)
    grid = tuple(math.ceil(size / side) for size, side in zip(found.shape, config.block, strict=True))
    if tuple(scale.shape) != grid or scale.dtype not in _SCALE_DTYPES:
        raise tensors.fail(
            f"the scales {scale.name!r} are {scale.dtype} {list(scale.shape)}; blocks of {list(config.block)} over "
            f"{list(found.shape)} need {list(grid)}, float or F8_E8M0"
        )
    return replace(
        found,
        kind=StoredKind.BLOCK_FP8,
        parts=(found.weight, scale.name),
        block=config.block,
        scale=scale.name,
        activation=config.activation,
    )


def _describe_hif8(
    tensors: ModuleTensors, found: StoredLinear, info: TensorInfo, config: Hif8Config
) -> StoredLinear:
    scale = tensors.part(".weight_scale", ("F32",), (found.shape[0], 1), info)
    return replace(
        found,
        kind=StoredKind.HIF8,
        parts=(found.weight, scale.name),
        scale=scale.name,
        group_size=found.shape[1],
        activation=config.activation,
    )
