"""How each linear of a checkpoint is stored, found from the names, dtypes and shapes of its tensors.

The tensors beside a weight say how it is stored; config.json must admit it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from qwen_quantize.checkpoint.compressed_config import CompressedTensors
from qwen_quantize.checkpoint.layouts import LAYOUTS, BlockFp8Config, parse_quantization
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.tensor_info import TensorInfo
from qwen_quantize.errors import UserError

PLAIN_DTYPES = ("F32", "BF16", "F16", "F64")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")

_WEIGHT, _PACKED = ".weight", ".weight_packed"
# What follows a module's name in that of its scales, which multiply: our own layouts' and DeepSeek-V4's.
_BLOCK_SCALES = (*(f".{layout.scale_suffix}" for layout in LAYOUTS.values()), ".scale")
_COMPRESSED_PARTS = (".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx")
# Scales of activations under the old quantization: no parts of a weight, and without meaning after it is gone.
_STATIC_PARTS = (".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point")


class StoredKind(StrEnum):
    """How the elements of a linear are stored."""

    PLAIN = "plain"
    BLOCK_FP8 = "block_fp8"
    CHANNEL_FP8 = "channel_fp8"  # one scale for each row, or one for all
    INT8 = "int8"
    INT4 = "int4"


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One linear and the tensors that make it.

    shape: (out, in). weight: the tensor with its elements. parts: all tensors that its values depend on.
    block: (rows, columns) that share a scale, only for BLOCK_FP8. group_size: columns that share an integer's
    scale, the whole row where each row has one. `scale` multiplies; zero_point is subtracted before that.
    group_index: a tensor with the group of each column.
    """

    module: str
    kind: StoredKind
    shape: tuple[int, int]
    weight: str
    parts: tuple[str, ...]
    block: tuple[int, int] | None = None
    scale: str | None = None
    zero_point: str | None = None
    group_index: str | None = None
    group_size: int | None = None


class LinearStorage:
    """Describes the linears of one checkpoint; `module` is a name without `.weight`."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.quantization = parse_quantization(source.config)
        self._names = frozenset(source.names())

    def companions(self) -> frozenset[str]:
        """All scales, zero points and the like that belong to a weight and mean nothing without it."""
        return frozenset(name for name in self._names if self._is_companion(name))

    def _is_companion(self, name: str) -> bool:
        module, _, suffix = name.rpartition(".")
        suffix = f".{suffix}"
        weight = module + _WEIGHT
        if suffix == ".scale":  # too plain a name to be one without a closer look
            return weight in self._names and self.source.info(weight).dtype in ("F8_E4M3", "I8")
        if suffix in _STATIC_PARTS:
            return any(module + part in self._names for part in (_PACKED, ".weight_scale"))
        if suffix in _COMPRESSED_PARTS or suffix == _BLOCK_SCALES[0]:
            return weight in self._names or module + _PACKED in self._names
        return False

    def is_quantized(self, module: str) -> bool:
        """Whether the weight has scales, also for what is no linear; UserError where it cannot be read."""
        if module + _PACKED in self._names:
            return True
        if module + _WEIGHT in self._names:
            info = self.source.info(module + _WEIGHT)
            beside = self._present(module, (*_BLOCK_SCALES[:1], *_COMPRESSED_PARTS))
            if not beside and (info.dtype in PLAIN_DTYPES or len(info.shape) != 2):
                return False
        return self.describe(module).kind is not StoredKind.PLAIN

    def describe(self, module: str, shape: tuple[int, int] | None = None) -> StoredLinear:
        """How the linear is stored; UserError by name for whatever is missing or does not fit.

        shape: (out, in) as the model has it.
        """
        if module + _PACKED in self._names:
            if module + _WEIGHT in self._names:
                raise self._fail(
                    f"{module}.weight and {module}.weight_packed are the same weight stored twice"
                )
            return self._describe_packed(module, shape)
        info = self._matrix(module + _WEIGHT)
        found = StoredLinear(
            module, StoredKind.PLAIN, (info.shape[0], info.shape[1]), info.name, (info.name,)
        )
        self._check_shape(found.shape, shape, info.name)
        beside = self._present(module, (*_BLOCK_SCALES[:1], *_COMPRESSED_PARTS))
        if info.dtype in PLAIN_DTYPES:
            if beside:
                raise self._fail(
                    f"tensor {info.name!r} is {info.dtype} but {beside[0]!r} stands beside it; a scale belongs to a "
                    "quantized weight, so one of the two is left over"
                )
            return found
        if info.dtype == "I8" and module + ".scale" in self._names:
            raise self._fail(
                f"tensor {info.name!r} holds packed FP4 with {module + '.scale'!r}, which cannot be read; take "
                "the FP8 release of the model"
            )
        if self.quantization is None or info.dtype not in ("F8_E4M3", "I8"):
            raise self._fail(
                f"tensor {info.name!r} is {info.dtype}; plain floats ({', '.join(PLAIN_DTYPES)}) can be read, and "
                "F8_E4M3 or I8 where config.json has a quantization_config that says how"
            )
        if isinstance(self.quantization, BlockFp8Config):
            return self._describe_block(found, info, self.quantization)
        return self._describe_compressed(found, info, self.quantization)

    def _fail(self, text: str) -> UserError:
        return UserError(f"{self.source.path}: {text}")

    def _present(self, module: str, suffixes: Iterable[str]) -> list[str]:
        return [module + suffix for suffix in suffixes if module + suffix in self._names]

    def _matrix(self, name: str) -> TensorInfo:
        if name not in self._names:
            raise self._fail(
                f"the tensor {name!r} is missing; the checkpoint is incomplete or its config.json belongs to "
                "another model"
            )
        info = self.source.info(name)
        if len(info.shape) != 2:
            raise self._fail(
                f"tensor {name!r} has shape {list(info.shape)}; the weight of a linear has two dimensions"
            )
        return info

    def _check_shape(self, found: tuple[int, int], wanted: tuple[int, int] | None, name: str) -> None:
        if wanted is None or found == wanted:
            return
        hint = "; it is transposed" if found == wanted[::-1] else ""
        raise self._fail(
            f"tensor {name!r} has shape {list(found)}, its config.json says {list(wanted)}{hint}"
        )

    def _need_scale(self, names: list[str], weight: TensorInfo, usual: str) -> TensorInfo:
        if not names:
            raise self._fail(
                f"{weight.name!r} is {weight.dtype} but {usual!r} is missing; without its scales the weight means "
                "nothing; download the model again"
            )
        if len(names) > 1:
            raise self._fail(
                f"{weight.name!r} has two scales, {names[0]!r} and {names[1]!r}; which one is meant?"
            )
        return self.source.info(names[0])

    def _describe_block(self, found: StoredLinear, info: TensorInfo, config: BlockFp8Config) -> StoredLinear:
        names = self._present(found.module, _BLOCK_SCALES)
        usual = found.module + _BLOCK_SCALES[0]
        if info.dtype != "F8_E4M3":
            raise self._fail(f"tensor {info.name!r} is {info.dtype}, and config.json speaks of F8_E4M3")
        return self._with_block(found, self._need_scale(names, info, usual), config.block)

    def _with_block(self, found: StoredLinear, scale: TensorInfo, block: tuple[int, int]) -> StoredLinear:
        grid = tuple(math.ceil(size / side) for size, side in zip(found.shape, block, strict=True))
        if tuple(scale.shape) != grid or scale.dtype not in _SCALE_DTYPES:
            raise self._fail(
                f"the scales {scale.name!r} are {scale.dtype} {list(scale.shape)}; blocks of {list(block)} over "
                f"{list(found.shape)} need {list(grid)}, float or F8_E8M0"
            )
        parts = (found.weight, scale.name)
        return replace(found, kind=StoredKind.BLOCK_FP8, parts=parts, block=block, scale=scale.name)

    def _describe_compressed(
        self, found: StoredLinear, info: TensorInfo, config: CompressedTensors
    ) -> StoredLinear:
        usual = found.module + ".weight_scale"
        scale = self._need_scale(self._present(found.module, (".weight_scale",)), info, usual)
        kind = "float" if info.dtype == "F8_E4M3" else "int"
        if info.dtype == "I8":
            return self._with_groups(replace(found, kind=StoredKind.INT8), scale, config, packed=False)
        strategies = config.strategies(kind)
        single = math.prod(scale.shape) == 1
        by_row = tuple(scale.shape) in ((found.shape[0],), (found.shape[0], 1))
        if (single and "tensor" in strategies) or (by_row and "channel" in strategies):
            self._check_compressed_scale(scale)
            parts = (found.weight, scale.name)
            return replace(found, kind=StoredKind.CHANNEL_FP8, parts=parts, scale=scale.name)
        blocks = sorted(config.blocks())
        fitting = [
            block
            for block in blocks
            if tuple(scale.shape) == (-(-found.shape[0] // block[0]), -(-found.shape[1] // block[1]))
        ]
        if len(fitting) == 1:
            self._check_compressed_scale(scale)
            return self._with_block(found, scale, fitting[0])
        raise self._wrong_scale(scale, found.shape, strategies)

    def _check_compressed_scale(self, scale: TensorInfo) -> None:
        if scale.dtype not in ("F32", "BF16", "F16"):
            raise self._fail(f"the scales {scale.name!r} are {scale.dtype}; F32, BF16 and F16 can be read")

    def _wrong_scale(self, scale: TensorInfo, shape: tuple[int, int], strategies: Iterable[str]) -> UserError:
        return self._fail(
            f"the scales {scale.name!r} have shape {list(scale.shape)}, which fits a weight of {list(shape)} under no "
            f"strategy of config.json ({', '.join(sorted(strategies)) or 'none for such weights'})"
        )

    def _describe_packed(self, module: str, wanted: tuple[int, int] | None) -> StoredLinear:
        info = self._matrix(module + _PACKED)
        if not isinstance(self.quantization, CompressedTensors) or info.dtype != "I32":
            raise self._fail(
                f"tensor {info.name!r} is {info.dtype}; packed weights are I32 and need a quantization_config of "
                "compressed-tensors in config.json"
            )
        shape = self._packed_shape(module)
        self._check_shape(shape, wanted, info.name)
        widths = {-(-shape[1] * bits // 32): bits for bits in sorted(self.quantization.bits("int"))}
        if info.shape[0] != shape[0] or info.shape[1] not in widths:
            raise self._fail(
                f"tensor {info.name!r} has shape {list(info.shape)}, which does not hold {list(shape)} elements of "
                f"{' or '.join(map(str, widths.values())) or 'no'} bits"
            )
        kind = StoredKind.INT4 if widths[info.shape[1]] == 4 else StoredKind.INT8
        found = StoredLinear(module, kind, shape, info.name, (info.name, module + ".weight_shape"))
        names = self._present(module, (".weight_scale",))
        scale = self._need_scale(names, info, module + ".weight_scale")
        return self._with_groups(found, scale, self.quantization, packed=True)

    def _packed_shape(self, module: str) -> tuple[int, int]:
        name = module + ".weight_shape"
        if name not in self._names:
            raise self._fail(
                f"{module + _PACKED!r} is packed but {name!r} is missing; download the model again"
            )
        info = self.source.info(name)
        if info.dtype not in ("I64", "I32") or tuple(info.shape) != (2,):
            raise self._fail(
                f"tensor {name!r} is {info.dtype} {list(info.shape)}; it must be two whole numbers"
            )
        rows, columns = (int(size) for size in self.source.read(name))
        if min(rows, columns) < 1 or max(rows, columns) >= 1 << 31:
            raise self._fail(f"tensor {name!r} holds {[rows, columns]}, which is no shape")
        return rows, columns

    def _with_groups(
        self, found: StoredLinear, scale: TensorInfo, config: CompressedTensors, *, packed: bool
    ) -> StoredLinear:
        rows, columns = found.shape
        strategies = config.strategies("int")
        shape, group_size, groups = tuple(scale.shape), columns, 1
        single = math.prod(shape) == 1 and "tensor" in strategies
        if not single and not (shape in ((rows,), (rows, 1)) and "channel" in strategies):
            sizes = {
                min(size, columns) for size in config.group_sizes() if shape == (rows, -(-columns // size))
            }
            if len(sizes) != 1:
                raise self._wrong_scale(scale, found.shape, strategies)
            group_size, groups = sizes.pop(), shape[1]
        self._check_compressed_scale(scale)
        zero_point = self._zero_point(found, scale, groups, packed)
        index = self._group_index(found.module, columns)
        extra = [name for name in (zero_point, index) if name is not None]
        return replace(
            found,
            parts=(*found.parts, scale.name, *extra),
            scale=scale.name,
            zero_point=zero_point,
            group_index=index,
            group_size=group_size,
        )

    def _zero_point(self, found: StoredLinear, scale: TensorInfo, groups: int, packed: bool) -> str | None:
        name = found.module + ".weight_zero_point"
        if name not in self._names:
            return None
        info = self.source.info(name)
        bits = 4 if found.kind is StoredKind.INT4 else 8
        if info.dtype == "I8" and info.shape == scale.shape:
            return name
        if packed and info.dtype == "I32" and tuple(info.shape) == (-(-found.shape[0] * bits // 32), groups):
            return name
        raise self._fail(
            f"the zero points {name!r} are {info.dtype} {list(info.shape)}, which does not fit the scales "
            f"{list(scale.shape)} of a weight {list(found.shape)}"
        )

    def _group_index(self, module: str, columns: int) -> str | None:
        name = module + ".weight_g_idx"
        if name not in self._names:
            return None
        info = self.source.info(name)
        if info.dtype not in ("I32", "I64") or tuple(info.shape) != (columns,):
            raise self._fail(
                f"tensor {name!r} is {info.dtype} {list(info.shape)}; it must name the group of {columns} columns"
            )
        return name
