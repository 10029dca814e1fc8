"""The rules of FP8 as DeepSeek stores it: E4M3 weights and, beside each, `weight_scale_inv`, which multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qwen_quantize.checkpoint.contract_folder import ModelFolder, shown_json, whole_number
from qwen_quantize.checkpoint.contract_linear import PLAIN, CheckedLinear, LayoutCheck, ModuleParts

_SCALE, _V4_SCALE = "weight_scale_inv", "scale"
_FRACTION = 0x007F_FFFF  # the fraction bits of a float32, all 0 in a power of two
_KEYS: dict[str, tuple[object, ...]] = {
    "fmt": (None, "e4m3"),
    "scale_fmt": (None, "ue8m0", "float"),
    "activation_scheme": ("dynamic", "static"),
}


def check_block_fp8(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:
    check = LayoutCheck()
    for key, allowed in _KEYS.items():
        value = settings.get(key)
        if value not in allowed:
            check.add(
                "config.json",
                "config-value",
                f"quantization_config.{key} is {shown_json(value)}; engines know "
                f"{', '.join(shown_json(one) for one in allowed if one is not None)}",
                f"set {key} to what the weights are",
            )
    block = _block(settings, check)
    for module in folder.modules:
        _check_module(ModuleParts(folder, module, check), block, settings)
    return check


def _block(settings: Mapping[str, Any], check: LayoutCheck) -> tuple[int, int] | None:
    found = settings.get("weight_block_size")
    if found is None:  # one scale for the whole tensor
        return None
    if isinstance(found, list) and len(found) == 2 and all(whole_number(size) for size in found):
        return int(found[0]), int(found[1])
    check.add(
        "config.json",
        "config-value",
        f"quantization_config.weight_block_size is {shown_json(found)} and must be two positive whole numbers",
        "write the rows and columns of a block, such as [128, 128]",
    )
    return None


def _check_module(parts: ModuleParts, block: tuple[int, int] | None, settings: Mapping[str, Any]) -> None:
    weight = parts.info("weight")
    beside = [suffix for suffix in (_SCALE, "weight_scale") if suffix in parts.suffixes]
    if weight is None or weight.dtype in PLAIN:
        for suffix in beside:
            parts.check.known.add(parts.name(suffix))
            parts.check.add(
                parts.name(suffix),
                "scale-orphan",
                "a scale stands beside no quantized weight; engines multiply with it, or stop at a tensor they do "
                "not know",
                "remove the scale, or bring back the FP8 weight that it belongs to",
            )
        return
    if weight.dtype != "F8_E4M3" and not beside:
        return
    if parts.matrix("weight", ("F8_E4M3",)) is None:
        parts.check.known |= parts.parts | {parts.name(suffix) for suffix in beside}
        return
    rows, columns = weight.shape
    region = (1, 1)
    if block is None:
        parts.part("weight_scale", ("F32",), [(1,), ()])
        if "weight_scale" in parts.suffixes:
            parts.positive("weight_scale")
        kind = "fp8-tensor"
    else:
        region, kind = block, "block-fp8"
        _check_scales(parts, (-(-rows // block[0]), -(-columns // block[1])), settings)
    if settings.get("activation_scheme") == "static":
        parts.single("input_scale")
    parts.take(
        CheckedLinear(
            parts.module, kind, (rows, columns), region=region, group=region[1], casts_inputs=True, form=kind
        )
    )


def _check_scales(parts: ModuleParts, grid: tuple[int, int], settings: Mapping[str, Any]) -> None:
    suffix = _V4_SCALE if _V4_SCALE in parts.suffixes and _SCALE not in parts.suffixes else _SCALE
    power_of_two = settings.get("scale_fmt") == "ue8m0"
    dtypes = ("F8_E8M0", "F32") if suffix == _V4_SCALE else ("F32", "BF16")
    info = parts.part(
        suffix,
        dtypes,
        [grid],
        wrong_dtype="readers of V3 and V3.1 allocate float32, and engines on older libraries cannot open E8M0 at all",
    )
    if info is None:
        return
    if info.dtype == "F8_E8M0":
        parts.exponents(suffix)
        return
    values = parts.positive(suffix)
    if (
        values is not None
        and power_of_two
        and bool((values.contiguous().view(torch.int32) & _FRACTION).any())
    ):
        parts.check.add(
            info.name,
            "scale-power",
            "scale_fmt is ue8m0 and not every scale is a power of two; kernels that take the exponent alone drop "
            "the rest, "
            "up to half of each weight",
            "quantize with power-of-two scales (rounding the stored ones alone is wrong), or set scale_fmt to null",
        )
