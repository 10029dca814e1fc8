"""The `quantization_config` of compressed-tensors, read so that every fault in it is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from qwen_quantize.checkpoint.contract_folder import shown_json, whole_number
from qwen_quantize.checkpoint.contract_linear import LayoutCheck
from qwen_quantize.checkpoint.finding import Severity


class Form(StrEnum):
    """How the weights of a format are stored; the MX and NVFP4 ones are names of the engines' tables too."""

    PACKED_INTS = "packed-ints"
    INTS = "ints"
    FLOATS = "floats"
    MXFP8 = "mxfp8"
    MXFP6 = "mxfp6"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"


FORMATS: dict[str, Form] = {
    "pack-quantized": Form.PACKED_INTS,
    "int-quantized": Form.INTS,
    "float-quantized": Form.FLOATS,
    "naive-quantized": Form.FLOATS,
    "mxfp8-quantized": Form.MXFP8,
    "mxfp6-pack-quantized": Form.MXFP6,
    "mxfp4-pack-quantized": Form.MXFP4,
    "nvfp4-pack-quantized": Form.NVFP4,
}
# Form -> (type, widths, strategies, group sizes; empty: any).
_ALLOWED: dict[Form, tuple[str, tuple[int, ...], tuple[str, ...], tuple[int, ...]]] = {
    Form.PACKED_INTS: ("int", (2, 3, 4, 5, 6, 7, 8), ("tensor", "channel", "group"), ()),
    Form.INTS: ("int", (4, 8), ("tensor", "channel", "group"), ()),
    Form.FLOATS: ("float", (8,), ("tensor", "channel", "block", "group"), ()),
    Form.MXFP8: ("float", (8,), ("group",), (32,)),
    Form.MXFP6: ("float", (6,), ("group",), (32,)),
    Form.MXFP4: ("float", (4,), ("group",), (32,)),
    Form.NVFP4: ("float", (4,), ("tensor_group",), (16,)),
}
_REMEDY = "write what the stored tensors are"


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """One config group; inputs: "static", "dynamic", "local", or None where they stay; size: 0 for the whole row."""

    name: str
    targets: tuple[str, ...]
    format: str
    bits: int
    kind: str
    strategy: str
    size: int
    block: tuple[int, int] | None
    symmetric: bool
    inputs: str | None


def read_groups(settings: Mapping[str, Any], check: LayoutCheck) -> tuple[WeightGroup, ...]:
    """The groups that can be understood; the rest of the config is held against what engines demand."""
    if settings.get("quantization_status") not in (None, "compressed"):
        _value(check, "quantization_status", settings.get("quantization_status"), '"compressed"')
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key):
            check.add(
                "config.json",
                "config-value",
                f"quantization_config.{key} is not empty; vLLM serves no sparse compression, and rotations only "
                "where its "
                "kernels know them",
                "export the model without it",
                Severity.WARNING,
            )
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        _value(check, "config_groups", groups, "an object of one or more groups")
        return ()
    found = []
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            _value(check, f"config_groups.{name}", group, "an object")
            continue
        if group.get("weights") is None:
            continue
        one = _group(str(name), group, settings.get("format"), check)
        if one is not None:
            found.append(one)
    return tuple(found)


def _value(check: LayoutCheck, key: str, value: object, wanted: str) -> None:
    check.add(
        "config.json",
        "config-value",
        f"quantization_config.{key} is {shown_json(value)} and must be {wanted}; engines stop at it, or build other "
        "layers than the stored ones",
        _REMEDY,
    )


def _group(name: str, group: Mapping[str, Any], default: object, check: LayoutCheck) -> WeightGroup | None:
    where = f"config_groups.{name}"
    form = group.get("format") or default
    if not isinstance(form, str) or form not in FORMATS:
        check.add(
            "config.json",
            "format-unknown",
            f"the format of {where} is {shown_json(form)}; readable are {', '.join(FORMATS)}",
            "name the format in which the weights are stored",
        )
        return None
    if default not in (None, "mixed-precision", form):
        _value(
            check, f"{where}.format", form, f"{shown_json(default)} as the whole, or that 'mixed-precision'"
        )
    targets = group.get("targets")
    if not isinstance(targets, list) or not targets or not all(isinstance(one, str) for one in targets):
        _value(check, f"{where}.targets", targets, "a list of module names, patterns or classes")
        targets = ["Linear"]
    arguments = group["weights"]
    if not isinstance(arguments, Mapping):
        _value(check, f"{where}.weights", arguments, "an object")
        return None
    kind, widths, strategies, sizes = _ALLOWED[FORMATS[form]]
    stated, bits, strategy = arguments.get("type"), arguments.get("num_bits"), arguments.get("strategy")
    naive = form == "naive-quantized" and stated == "int"
    if stated != kind and not naive:
        _value(check, f"{where}.weights.type", stated, f"{kind!r} for {form}")
        return None
    if type(bits) is not int or bits not in widths:
        _value(check, f"{where}.weights.num_bits", bits, f"{' or '.join(map(str, widths))} for {form}")
        return None
    if strategy not in strategies:
        _value(check, f"{where}.weights.strategy", strategy, f"one of {', '.join(strategies)} for {form}")
        return None
    size = whole_number(arguments.get("group_size")) or 0
    if strategy in ("group", "tensor_group") and (not size or (sizes and size not in sizes)):
        wanted = " or ".join(map(str, sizes)) if sizes else "a positive whole number"
        _value(check, f"{where}.weights.group_size", arguments.get("group_size"), wanted)
        return None
    if arguments.get("actorder") in ("group", True):
        check.add(
            "config.json",
            "actorder",
            f"{where}.weights.actorder is 'group', which compressed-tensors and vLLM removed in August 2026: both "
            "stop",
            "quantize with actorder 'static' or none",
        )
    if FORMATS[form] in (Form.MXFP8, Form.MXFP6, Form.MXFP4) and "uint8" not in str(
        arguments.get("scale_dtype")
    ):
        check.add(
            "config.json",
            "scale-dtype-key",
            f"{where}.weights.scale_dtype is {shown_json(arguments.get('scale_dtype'))}; vLLM tells MX weights by "
            "'torch.uint8' and takes these for another scheme",
            "set scale_dtype to 'torch.uint8'",
        )
    block = _block(arguments.get("block_structure")) if strategy == "block" else None
    if strategy == "block" and block is None:
        _value(
            check, f"{where}.weights.block_structure", arguments.get("block_structure"), "such as [128, 128]"
        )
        return None
    return WeightGroup(
        name=name,
        targets=tuple(targets),
        format=form,
        bits=bits,
        kind=kind if not naive else "int",
        strategy=str(strategy),
        size=size if strategy in ("group", "tensor_group") else 0,
        block=block,
        symmetric=arguments.get("symmetric", True) is not False,
        inputs=_inputs(group.get("input_activations"), where, check),
    )


def _block(found: object) -> tuple[int, int] | None:
    if isinstance(found, list) and len(found) == 2 and all(whole_number(size) for size in found):
        return int(found[0]), int(found[1])
    return None


def _inputs(found: object, where: str, check: LayoutCheck) -> str | None:
    if found is None:
        return None
    if not isinstance(found, Mapping):
        _value(check, f"{where}.input_activations", found, "an object or null")
        return None
    dynamic = found.get("dynamic", False)
    if dynamic == "local":
        return "local"
    if not isinstance(dynamic, bool):
        _value(check, f"{where}.input_activations.dynamic", dynamic, "true, false or 'local'")
        return None
    if not dynamic and found.get("strategy") not in (None, "tensor"):
        _value(
            check,
            f"{where}.input_activations.strategy",
            found.get("strategy"),
            "'tensor' where scales are static",
        )
    return "dynamic" if dynamic else "static"
