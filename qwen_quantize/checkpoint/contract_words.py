"""The rules of AutoAWQ and GPTQ: integers in int32 words, transposed, with zero points beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qwen_quantize.checkpoint.contract_folder import ModelFolder, shown_json, whole_number
from qwen_quantize.checkpoint.contract_linear import CheckedLinear, LayoutCheck, ModuleParts

_PARTS = ("qzeros", "scales", "g_idx")
# Words full of the middle zero point of symmetric integers: less one in version 1, as it is in version 2.
_MIDDLE = {
    (4, 1): 0x77777777,
    (4, 2): 0x88888888,
    (8, 1): 0x7F7F7F7F,
    (8, 2): 0x80808080,
    (2, 1): 0x55555555,
    (2, 2): 0xAAAAAAAA,
}
_SCALES = ("F16", "BF16", "F32")


def check_awq(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:
    check = LayoutCheck()
    version = settings.get("version") or settings.get("format") or "gemm"
    if str(version).lower() != "gemm":
        check.add(
            "config.json",
            "awq-version",
            f"version is {shown_json(version)}; gemv and marlin pack the same names in another order, and vLLM, "
            "SGLang and "
            "LMDeploy read gemm only",
            "pack the weights as gemm, or correct the key if they are",
        )
    if settings.get("bits", settings.get("w_bit")) != 4:
        check.add(
            "config.json",
            "config-value",
            f"bits is {shown_json(settings.get('bits'))}; AutoAWQ's words hold 4",
            "set bits to 4",
        )
    if settings.get("zero_point") is False:
        check.add(
            "config.json",
            "config-value",
            "zero_point is false; readers then take no zero points from the file, and those of this layout count",
            "set zero_point to true (symmetric weights have the zero point 8)",
        )
    group = _group(settings, "q_group_size", check)
    for module in folder.modules:
        parts = ModuleParts(folder, module, check)
        if not _has_words(parts):
            continue
        info = parts.matrix("qweight", ("I32",))
        if info is None:
            parts.check.known |= {parts.name(suffix) for suffix in parts.suffixes & {*_PARTS}}
            continue
        columns, words = info.shape
        shape = (words * 8, columns)
        groups = _groups(parts, columns, group)
        zeros = parts.part("qzeros", ("I32",), [(groups, words)], beside="qweight", rule="zero-point")
        if parts.part("scales", _SCALES, [(groups, shape[0])], beside="qweight") is not None:
            parts.positive("scales", signed=True)
        if zeros is not None:
            stored = parts.read("qzeros")
            if stored is not None and bool((stored == _signed(0x77777777)).all()):
                check.add(
                    zeros.name,
                    "zero-point",
                    "all zero points are 7, as GPTQ stores its middle less one; AWQ readers subtract 7 where 8 is "
                    "meant, "
                    "and every weight is off by one step",
                    "store the zero points as they are (8 for symmetric weights)",
                )
        if "g_idx" in parts.suffixes:
            check.known.add(parts.name("g_idx"))
            check.add(
                parts.name("g_idx"),
                "g-idx",
                "AutoAWQ has no order of columns; readers ignore it or stop",
                "remove the tensor, or name the method gptq if it is",
            )
        parts.take(
            CheckedLinear(
                module,
                "awq",
                shape,
                region=(8, group or columns),
                group=group or 0,
                symmetric=False,
                form=f"awq {group}",
            )
        )
    return check


def check_gptq(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:
    check = LayoutCheck()
    bits = settings.get("bits")
    if bits not in (2, 3, 4, 8):
        check.add(
            "config.json",
            "config-value",
            f"bits is {shown_json(bits)}; GPTQ has 2, 3, 4 and 8",
            "set bits to the width of the stored codes",
        )
        return check
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        check.add(
            "config.json",
            "checkpoint-format",
            f"checkpoint_format is {shown_json(form)}; readers know gptq and gptq_v2, and where the zero points lie "
            "depends on it",
            "name the form in which the zero points are stored",
        )
    group = _group(settings, None, check)
    version = 2 if form == "gptq_v2" else 1
    for module in folder.modules:
        _check_gptq_module(ModuleParts(folder, module, check), settings, int(bits), group, version)
    return check


def _check_gptq_module(
    parts: ModuleParts, settings: Mapping[str, Any], bits: int, group: int | None, version: int
) -> None:
    if not _has_words(parts):
        return
    info = parts.matrix("qweight", ("I32",))
    if info is None:
        parts.check.known |= {parts.name(suffix) for suffix in parts.suffixes & {*_PARTS}}
        return
    columns, rows = info.shape[0] * 32 // bits, info.shape[1]
    groups = _groups(parts, columns, group)
    zeros = parts.part(
        "qzeros", ("I32",), [(groups, -(-rows * bits // 32))], beside="qweight", rule="zero-point"
    )
    if parts.part("scales", _SCALES, [(groups, rows)], beside="qweight") is not None:
        parts.positive("scales", signed=True)
    if zeros is not None and settings.get("sym", True) is not False:
        _check_middle(parts, bits, version)
    _check_order(parts, settings.get("desc_act") is True, columns, group or columns)
    parts.take(
        CheckedLinear(
            parts.module,
            f"gptq{bits}",
            (rows, columns),
            region=(32 // bits if 32 % bits == 0 else 32, group or columns),
            group=group or 0,
            symmetric=settings.get("sym", True) is not False,
            form=f"gptq{bits} {group}",
        )
    )


def _has_words(parts: ModuleParts) -> bool:
    """Whether the module is packed; what is left of one without its `qweight` is a finding."""
    if "qweight" in parts.suffixes:
        if "weight" in parts.suffixes:
            parts.check.add(
                parts.name("weight"),
                "weight-twice",
                "the same linear is there packed and plain; which one an engine takes depends on the order of its "
                "files",
                "remove the one that is left over",
            )
        return True
    for suffix in _PARTS:
        if suffix in parts.suffixes and parts.suffixes & {"qzeros", "g_idx"}:
            parts.check.known.add(parts.name(suffix))
            parts.check.add(
                parts.name(suffix),
                "scale-orphan",
                f"it stands there without {parts.name('qweight')!r}; engines stop at it or leave the linear random",
                "bring the weight back, or remove what is left of the linear",
            )
    return False


def _group(settings: Mapping[str, Any], other: str | None, check: LayoutCheck) -> int | None:
    size = settings.get("group_size", settings.get(other) if other is not None else None)
    if size == -1 and type(size) is int:
        return None
    found = whole_number(size)
    if found is None:
        check.add(
            "config.json",
            "config-value",
            f"group_size is {shown_json(size)} and must be a positive whole number or -1",
            "write the number of input features that share a scale",
        )
    return found


def _groups(parts: ModuleParts, columns: int, group: int | None) -> int:
    if group is None:
        return 1
    if columns % group:
        parts.check.add(
            parts.name("qweight"),
            "group-partial",
            f"groups of {group} do not divide {columns} input features; no kernel reads a partial group",
            "choose a group size that divides every row",
        )
    return -(-columns // group)


def _check_middle(parts: ModuleParts, bits: int, version: int) -> None:
    stored = parts.read("qzeros")
    if stored is None or (bits, version) not in _MIDDLE:
        return
    if bool((stored == _signed(_MIDDLE[bits, version])).all()):
        return
    if bool((stored == _signed(_MIDDLE[bits, 3 - version])).all()):
        parts.check.add(
            parts.name("qzeros"),
            "checkpoint-format",
            f"its zero points are those of version {3 - version} and config.json says version {version}; readers "
            "that "
            "believe it shift every weight by one step",
            f"set checkpoint_format to {'gptq_v2' if version == 1 else 'gptq'}",
        )
        return
    parts.check.add(
        parts.name("qzeros"),
        "zero-point",
        f"sym is true and not every word is 0x{_MIDDLE[bits, version]:08X}; vLLM takes the middle for all and "
        "ignores what "
        "is stored, others use it",
        "set sym to false if the weights have zero points; else quantize again",
    )


def _check_order(parts: ModuleParts, reordered: bool, columns: int, group: int) -> None:
    if "g_idx" not in parts.suffixes:
        if reordered:
            parts.part("g_idx", ("I32",), [(columns,)], beside="qweight", rule="g-idx")
        return
    if parts.part("g_idx", ("I32", "I64"), [(columns,)], beside="qweight", rule="g-idx") is None:
        return
    stored = parts.read("g_idx")
    if stored is None:
        return
    index, groups = stored.long(), -(-columns // group)
    name = parts.name("g_idx")
    if int(index.min()) < 0 or int(index.max()) >= groups:
        parts.check.add(
            name,
            "g-idx",
            f"it names the groups {int(index.min())} .. {int(index.max())} and there are {groups}; kernels read "
            "scales that "
            "are not there",
            "quantize the linear again",
        )
    elif not torch.equal(torch.bincount(index, minlength=groups), _sizes(columns, group)):
        parts.check.add(
            name,
            "g-idx",
            f"its groups are not {group} features each; the kernels that sort columns by group cut them elsewhere",
            "quantize the linear again",
        )
    elif not reordered and not torch.equal(index, torch.arange(columns) // group):
        parts.check.add(
            name,
            "g-idx",
            "it puts columns in another order and desc_act is false; engines then ignore it and take other scales",
            "set desc_act to true, or quantize without reordering",
        )


def _sizes(columns: int, group: int) -> torch.Tensor:
    return torch.bincount(torch.arange(columns) // group)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
