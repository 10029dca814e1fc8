"""How a linear of a compressed-tensors checkpoint is stored: its tensors say, and config.json must admit it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from qwen_quantize.checkpoint.compressed_config import CompressedTensors
from qwen_quantize.checkpoint.linear_parts import PACKED, ModuleTensors, StoredKind, StoredLinear
from qwen_quantize.checkpoint.tensor_info import TensorInfo

_SCALE, _ZERO, _TENSOR_SCALE = ".weight_scale", ".weight_zero_point", ".weight_global_scale"
_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")
_MX = {4: StoredKind.MXFP4, 6: StoredKind.MXFP6, 8: StoredKind.MXFP8}
# The type and width of the elements; bytes of int4 count as INT8 here and may be either in the config.
_ELEMENTS: dict[StoredKind, tuple[str, tuple[int, ...]]] = {
    StoredKind.BLOCK_FP8: ("float", (8,)),
    StoredKind.CHANNEL_FP8: ("float", (8,)),
    StoredKind.MXFP8: ("float", (8,)),
    StoredKind.MXFP6: ("float", (6,)),
    StoredKind.MXFP4: ("float", (4,)),
    StoredKind.NVFP4: ("float", (4,)),
    StoredKind.INT8: ("int", (8, 4)),
    StoredKind.INT4: ("int", (4,)),
}


def describe_compressed(
    tensors: ModuleTensors, config: CompressedTensors, wanted: tuple[int, int] | None
) -> StoredLinear:
    """The linear with `weight` or `weight_packed`; UserError by name for whatever is missing or does not fit."""
    return _with_inputs(tensors, config, _Description(tensors, config).run(wanted))


def describe_unpacked(
    tensors: ModuleTensors, config: CompressedTensors, weight: TensorInfo, shape: tuple[int, int]
) -> StoredLinear:
    """A linear [N, K] whose elements lie in `weight` in an order of another's: scales and inputs are as usual."""
    description = _Description(tensors, config)
    integers = {"I8": StoredKind.INT8, "I32": StoredKind.INT4}
    kind = integers.get(weight.dtype, StoredKind.CHANNEL_FP8)
    found = StoredLinear(tensors.module, kind, shape, weight.name, (weight.name,))
    scale = tensors.need_scale(tensors.present((_SCALE,)), weight, tensors.module + _SCALE)
    if weight.dtype in integers:
        return _with_inputs(tensors, config, description.with_groups(found, scale, packed=False))
    return _with_inputs(tensors, config, description.bytes_of_floats(found, scale))


def _with_inputs(tensors: ModuleTensors, config: CompressedTensors, found: StoredLinear) -> StoredLinear:
    kind, bits = _ELEMENTS[found.kind]
    form = config.inputs_of(found.module, kind, bits)
    if form is None:
        return found
    static = None if form.dynamic else tensors.name(".input_scale")
    zero = None if form.symmetric or form.dynamic else tensors.name(".input_zero_point")
    second = tensors.name(".input_global_scale")
    return replace(
        found, activation=replace(form, input_scale=static, input_zero_point=zero, global_scale=second)
    )


class _Description:
    def __init__(self, tensors: ModuleTensors, config: CompressedTensors) -> None:
        self.tensors = tensors
        self.config = config

    def run(self, wanted: tuple[int, int] | None) -> StoredLinear:
        tensors = self.tensors
        packed = tensors.name(PACKED) is not None
        info = tensors.matrix(PACKED if packed else ".weight")
        if packed:
            if info.dtype == "U8":
                return self.packed_floats(info, wanted)
            return self.packed_integers(info, wanted)
        shape = (info.shape[0], info.shape[1])
        tensors.check_shape(shape, wanted, info.name)
        found = StoredLinear(tensors.module, StoredKind.INT8, shape, info.name, (info.name,))
        scale = tensors.need_scale(tensors.present((_SCALE,)), info, tensors.module + _SCALE)
        if info.dtype == "I8":
            return self.with_groups(found, scale, packed=False)
        return self.bytes_of_floats(found, scale)

    def packed_floats(self, info: TensorInfo, wanted: tuple[int, int] | None) -> StoredLinear:
        """FP4 and FP6: bytes tell the columns once the width is known, and that follows from the scales."""
        tensors = self.tensors
        scale = tensors.need_scale(tensors.present((_SCALE,)), info, tensors.module + _SCALE)
        self.refuse_zero_point()
        fitting = []
        for bits in (4, 6):
            columns = info.shape[1] * 8 // bits
            for size in self.config.group_sizes("float", bits):
                whole = columns * bits == info.shape[1] * 8 and columns % size == 0
                if whole and tuple(scale.shape) == (info.shape[0], columns // size):
                    fitting.append((bits, size, columns))
        if len(fitting) != 1:
            raise self.wrong_scale(scale, (info.shape[0], info.shape[1]), self.config.strategies("float"))
        bits, size, columns = fitting[0]
        shape = (info.shape[0], columns)
        tensors.check_shape(shape, wanted, info.name)
        parts = (info.name, scale.name)
        found = StoredLinear(
            tensors.module, _MX[bits], shape, info.name, parts, scale=scale.name, group_size=size
        )
        if scale.dtype in _EXPONENTS:
            return found
        if bits != 4 or scale.dtype != "F8_E4M3":
            raise tensors.fail(
                f"the scales {scale.name!r} are {scale.dtype}; U8 and F8_E8M0 can be read for MX, F8_E4M3 for NVFP4"
            )
        second = tensors.single(_TENSOR_SCALE, info).name
        return replace(found, kind=StoredKind.NVFP4, parts=(*parts, second), tensor_scale=second)

    def bytes_of_floats(self, found: StoredLinear, scale: TensorInfo) -> StoredLinear:
        strategies = self.config.strategies("float")
        parts = (found.weight, scale.name)
        if scale.dtype in _EXPONENTS:
            sizes = [
                size
                for size in self.config.group_sizes("float", 8)
                if found.shape[1] % size == 0
                and tuple(scale.shape) == (found.shape[0], found.shape[1] // size)
            ]
            if len(sizes) != 1:
                raise self.wrong_scale(scale, found.shape, strategies)
            self.refuse_zero_point()
            return replace(found, kind=StoredKind.MXFP8, parts=parts, scale=scale.name, group_size=sizes[0])
        single = math.prod(scale.shape) == 1
        by_row = tuple(scale.shape) in ((found.shape[0],), (found.shape[0], 1))
        if (single and "tensor" in strategies) or (by_row and "channel" in strategies):
            self.check_plain_scale(scale)
            return replace(found, kind=StoredKind.CHANNEL_FP8, parts=parts, scale=scale.name)
        fitting = [
            block
            for block in sorted(self.config.blocks())
            if tuple(scale.shape) == (-(-found.shape[0] // block[0]), -(-found.shape[1] // block[1]))
        ]
        if len(fitting) == 1:
            self.check_plain_scale(scale)
            return replace(found, kind=StoredKind.BLOCK_FP8, parts=parts, block=fitting[0], scale=scale.name)
        raise self.wrong_scale(scale, found.shape, strategies)

    def packed_integers(self, info: TensorInfo, wanted: tuple[int, int] | None) -> StoredLinear:
        tensors = self.tensors
        if info.dtype != "I32":
            raise tensors.fail(
                f"tensor {info.name!r} is {info.dtype}; packed weights are I32, or U8 for FP4 and FP6"
            )
        shape = tensors.stored_shape(tensors.module + PACKED)
        tensors.check_shape(shape, wanted, info.name)
        widths = {-(-shape[1] * bits // 32): bits for bits in sorted(self.config.bits("int"))}
        if info.shape[0] != shape[0] or info.shape[1] not in widths:
            raise tensors.fail(
                f"tensor {info.name!r} has shape {list(info.shape)}, which does not hold {list(shape)} elements of "
                f"{' or '.join(map(str, widths.values())) or 'no'} bits"
            )
        kind = StoredKind.INT4 if widths[info.shape[1]] == 4 else StoredKind.INT8
        parts = (info.name, tensors.module + ".weight_shape")
        found = StoredLinear(tensors.module, kind, shape, info.name, parts)
        scale = tensors.need_scale(tensors.present((_SCALE,)), info, tensors.module + _SCALE)
        return self.with_groups(found, scale, packed=True)

    def with_groups(self, found: StoredLinear, scale: TensorInfo, *, packed: bool) -> StoredLinear:
        rows, columns = found.shape
        strategies = self.config.strategies("int")
        shape, group_size, groups = tuple(scale.shape), columns, 1
        single = math.prod(shape) == 1 and "tensor" in strategies
        if not single and not (shape in ((rows,), (rows, 1)) and "channel" in strategies):
            sizes = {
                min(size, columns)
                for size in self.config.group_sizes("int")
                if shape == (rows, -(-columns // size))
            }
            if len(sizes) != 1:
                raise self.wrong_scale(scale, found.shape, strategies)
            group_size, groups = sizes.pop(), shape[1]
        self.check_plain_scale(scale)
        zero_point = self.zero_point(found, scale, groups, packed)
        index = self.tensors.group_index(".weight_g_idx", columns)
        extra = [name for name in (zero_point, index) if name is not None]
        return replace(
            found,
            parts=(*found.parts, scale.name, *extra),
            scale=scale.name,
            zero_point=zero_point,
            group_index=index,
            group_size=group_size,
        )

    def zero_point(self, found: StoredLinear, scale: TensorInfo, groups: int, packed: bool) -> str | None:
        name = self.tensors.name(_ZERO)
        if name is None:
            return None
        info = self.tensors.source.info(name)
        bits = 4 if found.kind is StoredKind.INT4 else 8
        if info.dtype == "I8" and info.shape == scale.shape:
            return name
        if packed and info.dtype == "I32" and tuple(info.shape) == (-(-found.shape[0] * bits // 32), groups):
            return name
        raise self.tensors.fail(
            f"the zero points {name!r} are {info.dtype} {list(info.shape)}, which does not fit the scales "
            f"{list(scale.shape)} of a weight {list(found.shape)}"
        )

    def refuse_zero_point(self) -> None:
        name = self.tensors.name(_ZERO)
        if name is not None:
            raise self.tensors.fail(
                f"tensor {name!r} is left over: floats with shared exponents have no zero point"
            )

    def check_plain_scale(self, scale: TensorInfo) -> None:
        if scale.dtype not in _FLOATS:
            raise self.tensors.fail(
                f"the scales {scale.name!r} are {scale.dtype}; F32, BF16 and F16 can be read"
            )

    def wrong_scale(self, scale: TensorInfo, shape: tuple[int, int], strategies: Iterable[str]) -> Exception:
        return self.tensors.fail(
            f"the scales {scale.name!r} have shape {list(scale.shape)}, which fits a weight of {list(shape)} under no "
            f"strategy of config.json ({', '.join(sorted(strategies)) or 'none for such weights'})"
        )
