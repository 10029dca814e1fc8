"""How a linear of an Ascend checkpoint is stored: the description names its type, its tensors must bear it out."""

from __future__ import annotations

from dataclasses import replace

from qwen_quantize.checkpoint.ascend_description import (
    DESCRIPTION_FILE,
    FLOAT,
    MX_GROUP,
    AscendDescription,
)
from qwen_quantize.checkpoint.linear_parts import (
    PLAIN_DTYPES,
    WEIGHT,
    Arrangement,
    ModuleTensors,
    StoredKind,
    StoredLinear,
)
from qwen_quantize.checkpoint.tensor_info import TensorInfo
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import E2M1, E4M3FN, E8M0, FP32, INT4, INT8

# What follows a linear's name in those of the tensors that mean nothing without its weight.
ASCEND_PARTS = (
    ".weight_scale", ".weight_offset", ".scale_bias", ".input_scale", ".input_offset", ".quant_bias", ".deq_scale",
    ".weight_scale_second", ".weight_offset_second", ".kv_cache_scale", ".kv_cache_offset",
)  # fmt: skip

_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")
# Type -> (how the elements are stored, what inputs are cast to), one scale for 32 of both.
_MX: dict[str, tuple[StoredKind, Format]] = {
    "W8A8_MXFP8": (StoredKind.MXFP8, E4M3FN),
    "W4A8_MXFP": (StoredKind.MXFP4, E4M3FN),
    "W4A4_MXFP4": (StoredKind.MXFP4, E2M1),
}
# Type -> (bits of the weight's integers, what inputs are cast to for each token).
_INTEGERS: dict[str, tuple[int, Format | None]] = {
    "W8A8_DYNAMIC": (8, INT8),
    "W8A16": (8, None),
    "W4A8_DYNAMIC": (4, INT8),
    "W4A4_DYNAMIC": (4, INT4),
    "W4A16": (4, None),
}
_READABLE = (FLOAT, "W8A8", *_INTEGERS, *_MX)


def describe_ascend(
    tensors: ModuleTensors, description: AscendDescription, wanted: tuple[int, int] | None
) -> StoredLinear:
    """The linear as its entry has it; UserError by name for whatever is missing or does not fit.

    A weight without an entry counts as FLOAT.
    """
    info = tensors.matrix(WEIGHT)
    kind = description.types.get(info.name, FLOAT)
    shape = (info.shape[0], info.shape[1])
    found = StoredLinear(tensors.module, StoredKind.PLAIN, shape, info.name, (info.name,))
    if kind == FLOAT:
        tensors.check_shape(shape, wanted, info.name)
        if info.dtype not in PLAIN_DTYPES:
            raise tensors.fail(
                f"tensor {info.name!r} is {info.dtype}, and {DESCRIPTION_FILE} has it as {FLOAT}; one of the two "
                "belongs to another model"
            )
        return found
    if kind == "W8A8":
        return _static(tensors, description, info, found, wanted)
    if kind in _MX:
        return _microscaled(tensors, description, info, found, wanted, kind)
    if kind in _INTEGERS:
        return _integers(tensors, description, info, found, wanted, kind)
    raise tensors.fail(
        f"{DESCRIPTION_FILE} has {info.name!r} as {kind!r}, which cannot be read; {', '.join(_READABLE)} can"
    )


def _need(tensors: ModuleTensors, info: TensorInfo, dtypes: tuple[str, ...], kind: str) -> None:
    if info.dtype not in dtypes:
        raise tensors.fail(
            f"tensor {info.name!r} is {info.dtype}, and {DESCRIPTION_FILE} has it as {kind}: that is "
            f"{' or '.join(dtypes)}"
        )


def _static(
    tensors: ModuleTensors,
    description: AscendDescription,
    info: TensorInfo,
    found: StoredLinear,
    wanted: tuple[int, int] | None,
) -> StoredLinear:
    """W8A8: its one scale of weight and input is that of the sums."""
    _need(tensors, info, ("I8",), "W8A8")
    tensors.check_shape(found.shape, wanted, info.name)
    rows = (found.shape[0],)
    scale = tensors.part(".deq_scale", ("F32", "I64"), rows, info)
    input_scale = tensors.part(".input_scale", _FLOATS, (1,), info)
    offset = tensors.part(".input_offset", (*_FLOATS, "I8"), (1,), info)
    steps = tensors.part(".quant_bias", ("I32",), rows, info)
    moved = float(tensors.source.read(offset.name).float())
    if not abs(moved) <= 128 or moved != round(moved):
        raise tensors.fail(
            f"tensor {offset.name!r} holds {moved}; an offset of int8 codes is a whole number of them"
        )
    form = ActivationForm(
        INT8,
        Granularity.tensor(),
        description.scale_format,
        dynamic=False,
        input_scale=input_scale.name,
        symmetric=moved == 0,
        input_zero_point=None if moved == 0 else offset.name,
    )
    return replace(
        found,
        kind=StoredKind.INT8_STATIC,
        parts=(info.name, scale.name, input_scale.name, offset.name, steps.name),
        scale=scale.name,
        group_size=found.shape[1],
        bias_steps=steps.name,
        activation=form,
    )


def _microscaled(
    tensors: ModuleTensors,
    description: AscendDescription,
    info: TensorInfo,
    found: StoredLinear,
    wanted: tuple[int, int] | None,
    kind: str,
) -> StoredLinear:
    stored, inputs = _MX[kind]
    packed = stored is StoredKind.MXFP4
    _need(tensors, info, ("U8", "I8") if packed else ("F8_E4M3",), kind)
    if description.group_size not in (0, MX_GROUP):
        raise tensors.fail(
            f"{DESCRIPTION_FILE} has {info.name!r} as {kind} and a group_size of {description.group_size}; the engine "
            f"would take that for the group of all, and it is {MX_GROUP}"
        )
    shape = (found.shape[0], found.shape[1] * (2 if packed else 1))
    tensors.check_shape(shape, wanted, info.name)
    scale = tensors.part(".weight_scale", _EXPONENTS, (shape[0], -(-shape[1] // MX_GROUP)), info)
    return replace(
        found,
        kind=stored,
        shape=shape,
        parts=(info.name, scale.name),
        scale=scale.name,
        group_size=MX_GROUP,
        activation=ActivationForm(inputs, Granularity.group(MX_GROUP), E8M0, dynamic=True),
    )


def _integers(
    tensors: ModuleTensors,
    description: AscendDescription,
    info: TensorInfo,
    found: StoredLinear,
    wanted: tuple[int, int] | None,
    kind: str,
) -> StoredLinear:
    bits, inputs = _INTEGERS[kind]
    _need(tensors, info, ("I8",), kind)
    second = tensors.name(".weight_scale_second")
    if second is not None:
        raise tensors.fail(
            f"tensor {second!r} makes the weight one of two levels of scales, which cannot be read"
        )
    scale = tensors.need_scale(tensors.present((".weight_scale",)), info, f"{tensors.module}.weight_scale")
    if len(scale.shape) not in (1, 2) or scale.dtype not in _FLOATS:
        raise tensors.fail(
            f"the scales {scale.name!r} are {scale.dtype} {list(scale.shape)}; they must be by row"
        )
    rows, groups = scale.shape[0], scale.shape[1] if len(scale.shape) == 2 else 1
    grouped = groups * description.group_size if groups > 1 else 0
    arrangement, shape = _arranged(tensors, info, rows, grouped, bits, kind)
    tensors.check_shape(shape, wanted, info.name)
    group_size = shape[1] if groups == 1 else description.group_size
    if not group_size or groups != -(-shape[1] // group_size):
        raise tensors.fail(
            f"the scales {scale.name!r} have shape {list(scale.shape)}; a weight of {list(shape)} in groups of "
            f"{description.group_size or shape[1]} has others"
        )
    offset = tensors.name(".weight_offset")
    if offset is not None:
        tensors.part(".weight_offset", (*_FLOATS, "I8"), scale.shape, info)
    parts = [info.name, scale.name, *([] if offset is None else [offset])]
    return replace(
        found,
        kind=StoredKind.INT8 if bits == 8 else StoredKind.INT4,
        shape=shape,
        parts=tuple(parts),
        scale=scale.name,
        zero_point=offset if inputs is None else None,
        zero_offset=None if inputs is None else offset,
        group_size=group_size,
        arrangement=arrangement,
        activation=None
        if inputs is None
        else ActivationForm(inputs, Granularity.token(), FP32, dynamic=True),
    )


def _arranged(
    tensors: ModuleTensors, info: TensorInfo, rows: int, grouped: int, bits: int, kind: str
) -> tuple[Arrangement, tuple[int, int]]:
    """How the codes lie, and (out, in): shapes tell, for versions of msModelSlim packed int4 in several ways.

    grouped: columns that the scales speak of; 0 where they have no groups.
    """
    stored, columns = info.shape
    if bits == 4 and 2 * stored == rows:
        return Arrangement.ROW_PAIRS, (rows, columns)
    if kind == "W4A16" and stored == rows and grouped == 2 * columns:
        return Arrangement.COLUMN_PAIRS, (rows, grouped)
    if stored == rows and (bits == 8 or kind != "W4A8_DYNAMIC"):
        return Arrangement.ROWS, (rows, columns)
    raise tensors.fail(
        f"tensor {info.name!r} has shape {list(info.shape)}, and its scales are those of {rows} rows: that is no {kind}"
    )
