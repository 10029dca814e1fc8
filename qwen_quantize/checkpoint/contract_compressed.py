"""The rules of compressed-tensors: which tensors each of its formats has, and what its config must say of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.checkpoint.compressed_inputs import rank_of_match
from qwen_quantize.checkpoint.contract_compressed_config import FORMATS, Form, WeightGroup, read_groups
from qwen_quantize.checkpoint.contract_folder import ModelFolder
from qwen_quantize.checkpoint.contract_linear import FLOATS, PLAIN, CheckedLinear, LayoutCheck, ModuleParts
from qwen_quantize.errors import UserError

_SCALED = (
    "weight_scale",
    "weight_packed",
    "weight_zero_point",
    "weight_global_scale",
    "weight_shape",
    "weight_g_idx",
)
_INPUTS = ("input_scale", "input_zero_point", "input_global_scale")
_OF_OTHERS = {"weight_scale_inv": "weight_scale", "weight_scale_2": "weight_global_scale"}


@dataclass(frozen=True, slots=True)
class _Grid:
    """What a weight is stored as: its tensor, the logical (out, in) and the shapes that its scales may have."""

    suffix: str
    rows: int
    columns: int
    scales: tuple[tuple[int, ...], ...]


def check_compressed(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:
    check = LayoutCheck()
    groups = read_groups(settings, check)
    used: set[str] = set()
    for module in folder.modules:
        parts = ModuleParts(folder, module, check)
        weight = parts.info("weight")
        scaled = [suffix for suffix in _SCALED if suffix in parts.suffixes]
        narrow = weight is not None and weight.dtype not in PLAIN
        if not scaled and not narrow:
            continue
        if weight is not None and not narrow and "weight_packed" not in parts.suffixes:
            check.known |= {parts.name(suffix) for suffix in scaled}
            check.add(
                parts.name(scaled[0]),
                "scale-orphan",
                f"it stands beside a weight in {weight.dtype}, which has no scales; engines stop at it or multiply "
                "with it",
                "remove it, or bring the quantized weight back",
            )
            continue
        if weight is not None and "weight_packed" in parts.suffixes:
            check.add(
                parts.name("weight"),
                "weight-twice",
                "the same linear is there packed and plain; which one an engine takes depends on the order of its "
                "files",
                "remove the one that is left over",
            )
        group = _group_of(module, groups, parts)
        check.known |= {
            parts.name(suffix) for suffix in (*scaled, *_INPUTS, "weight") if suffix in parts.suffixes
        }
        if group is not None:
            used.add(group.name)
            _check_module(parts, group)
    for group in groups:
        if group.name not in used:
            check.add(
                "config.json",
                "target-unmatched",
                f"no quantized linear belongs to config_groups.{group.name} (targets "
                f"{', '.join(group.targets)[:80]})",
                "correct its targets, or remove the group",
            )
    return check


def _group_of(module: str, groups: tuple[WeightGroup, ...], parts: ModuleParts) -> WeightGroup | None:
    try:
        ranked = [(rank_of_match(module, group.targets), group) for group in groups]
    except UserError as error:
        parts.check.add(
            "config.json", "config-value", str(error), "name the modules, or write a plainer pattern"
        )
        return None
    matching = [(rank, group) for rank, group in ranked if rank is not None]
    if matching:
        return min(matching, key=lambda found: found[0])[1]
    if groups:
        parts.check.add(
            module,
            "target-missing",
            "the linear is quantized and no target of config_groups is its name, matches it or is its class; "
            "engines build "
            "a plain linear and stop at its tensors",
            "name the module, or a pattern that matches it, in the targets of its group",
        )
    return None


def _check_module(parts: ModuleParts, group: WeightGroup) -> None:
    form = FORMATS[group.format]
    for suffix, right in _OF_OTHERS.items():
        if suffix in parts.suffixes:
            parts.check.known.add(parts.name(suffix))
            parts.check.add(
                parts.name(suffix),
                "tensor-name",
                f"compressed-tensors calls this {right}; under this name no engine looks for it here",
                f"store it as {parts.name(right)!r}, as its reciprocal where the other layout multiplies",
            )
    grid = _packed_ints(parts, group) if form is Form.PACKED_INTS else _bytes(parts, group, form)
    if grid is None:
        return
    _check_scales(parts, group, form, grid)
    if "weight_g_idx" in parts.suffixes:
        parts.check.add(
            parts.name("weight_g_idx"),
            "g-idx",
            "activation ordering by group was removed from compressed-tensors and vLLM in August 2026: both stop "
            "at it",
            "quantize with actorder 'static' or none",
        )
    if form is Form.NVFP4:
        parts.single("weight_global_scale", missing="scale", shared=True)
        if group.inputs is not None:
            parts.single("input_global_scale", shared=True)
    elif group.inputs == "static":
        parts.single("input_scale", shared=True)
    rows, columns = grid.rows, grid.columns
    size = group.size or (group.block[1] if group.block else 0)
    zeros = 32 // group.bits if "weight_zero_point" in parts.suffixes and form is Form.PACKED_INTS else 1
    parts.take(
        CheckedLinear(
            parts.module,
            _kind(group, form),
            (rows, columns),
            region=(group.block[0] if group.block else zeros, size or 1),
            group=size,
            symmetric=group.symmetric,
            casts_inputs=group.inputs is not None,
            form=f"{group.format} {group.bits} {group.strategy} {size} {group.symmetric} {group.inputs}",
        )
    )


def _kind(group: WeightGroup, form: Form) -> str:
    if form is Form.PACKED_INTS:
        return f"pack{group.bits}"
    if form is Form.INTS:
        return "int8" if group.bits == 8 else "int4-bytes"
    if form is Form.FLOATS:
        if group.kind == "int":
            return "int8-naive"
        return {"block": "ct-block-fp8", "tensor": "fp8-tensor"}.get(group.strategy, "fp8-channel")
    return form.value


def _packed_ints(parts: ModuleParts, group: WeightGroup) -> _Grid | None:
    info = parts.matrix("weight_packed", ("I32",))
    told = parts.part("weight_shape", ("I64", "I32"), [(2,)], rule="weight-shape", beside="weight_packed")
    if info is None or told is None:
        return None
    values = parts.read("weight_shape")
    if values is None:
        return None
    rows, columns = (int(size) for size in values)
    wanted = (rows, -(-columns * group.bits // 32)) if min(rows, columns) > 0 else None
    if wanted is None or tuple(info.shape) != wanted:
        parts.check.add(
            told.name,
            "weight-shape",
            f"it says {[rows, columns]}, which {group.bits} bits do not pack into the stored {list(info.shape)} "
            "words; "
            "decompression cuts or stops",
            "store the true [out, in], and num_bits as packed",
        )
        return None
    if not group.symmetric:
        count = math.prod(_scale_shapes(group, rows, columns)[0][1:])
        shape = (-(-rows * group.bits // 32), count)
        parts.part("weight_zero_point", ("I32",), [shape], rule="zero-point", beside="weight_packed")
    else:
        _refuse_zero(parts)
    return _Grid("weight_packed", rows, columns, _scale_shapes(group, rows, columns))


def _bytes(parts: ModuleParts, group: WeightGroup, form: Form) -> _Grid | None:
    suffix = "weight_packed" if form in (Form.MXFP4, Form.MXFP6, Form.NVFP4) else "weight"
    dtype = {"weight_packed": "U8", "weight": "F8_E4M3" if group.kind == "float" else "I8"}[suffix]
    info = parts.matrix(suffix, (dtype,))
    if info is None:
        return None
    rows, columns = (
        info.shape[0],
        info.shape[1] * 8 // group.bits if suffix == "weight_packed" else info.shape[1],
    )
    if group.symmetric:
        _refuse_zero(parts)
    else:
        parts.part("weight_zero_point", ("I8",), _scale_shapes(group, rows, columns), rule="zero-point")
    return _Grid(suffix, rows, columns, _scale_shapes(group, rows, columns))


def _refuse_zero(parts: ModuleParts) -> None:
    if "weight_zero_point" in parts.suffixes:
        parts.check.add(
            parts.name("weight_zero_point"),
            "zero-point",
            "the config says symmetric and zero points are stored; engines stop at the tensor or leave it out, and "
            "every "
            "weight is shifted",
            "set symmetric to false if they count; remove them otherwise",
        )


def _scale_shapes(group: WeightGroup, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
    match group.strategy:
        case "tensor":
            return ((1,), ())
        case "channel":
            return ((rows, 1), (rows,))
        case "block" if group.block is not None:
            return ((-(-rows // group.block[0]), -(-columns // group.block[1])),)
    return ((rows, -(-columns // (group.size or columns))),)


def _check_scales(parts: ModuleParts, group: WeightGroup, form: Form, grid: _Grid) -> None:
    dtypes: tuple[str, ...] = FLOATS
    wrong = "engines allocate another dtype and convert the numbers, not the bits"
    if form in (Form.MXFP8, Form.MXFP6, Form.MXFP4):
        dtypes, wrong = (
            ("U8",),
            "engines allocate uint8; a numeric cast of exponents gives 0 or another power",
        )
    elif form is Form.NVFP4:
        dtypes = ("F8_E4M3",)
    if group.size and grid.columns % group.size:
        parts.check.add(
            parts.name(grid.suffix),
            "group-partial",
            f"groups of {group.size} do not divide {grid.columns} input features; no kernel reads a partial group",
            "choose a group size that divides every row",
        )
    info = parts.part("weight_scale", dtypes, grid.scales, beside=grid.suffix, wrong_dtype=wrong)
    if info is None:
        return
    if dtypes == ("U8",):
        parts.exponents("weight_scale")
        return
    values = parts.positive("weight_scale", signed=group.kind == "int")
    if values is not None and group.strategy == "tensor":
        parts.scales.append(("weight_scale", float(values.reshape(()))))
