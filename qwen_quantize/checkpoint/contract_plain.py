"""Rules of folders that few readers know: plain weights, HiFloat8 in rows, and a chip's own tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen_quantize.checkpoint.contract_folder import ModelFolder
from qwen_quantize.checkpoint.contract_linear import PLAIN, CheckedLinear, LayoutCheck, ModuleParts
from qwen_quantize.checkpoint.tensor_info import DTYPES

# Suffixes that only quantized linears have.
_SCALES = (
    "weight_scale_inv", "weight_scale", "weight_packed", "qweight", "qzeros", "weight_global_scale", "deq_scale",
)  # fmt: skip
_MOST = 4


def check_plain(folder: ModelFolder) -> LayoutCheck:
    """Nothing may be quantized where config.json says nothing of it."""
    check = LayoutCheck()
    for name, stored in folder.tensors.items():
        suffix = name.rpartition(".")[2]
        narrow = suffix == "weight" and DTYPES[stored.info.dtype].bits <= 8 and stored.info.dtype != "BOOL"
        if suffix not in _SCALES and not narrow:
            continue
        check.known.add(name)
        if len(check.findings) < _MOST:
            check.add(
                name,
                "config-missing",
                f"it is {stored.info.dtype} of a quantized linear and config.json has no quantization_config; "
                "engines load "
                "codes as if they were weights, or stop at the scales",
                "write the quantization_config of the layout into config.json",
            )
    return check


def check_hif8(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:
    check = LayoutCheck()
    for module in folder.modules:
        parts = ModuleParts(folder, module, check)
        weight = parts.info("weight")
        if weight is None or (weight.dtype in PLAIN and "weight_scale" not in parts.suffixes):
            continue
        if parts.matrix("weight", ("U8",)) is None:
            check.known |= {parts.name(suffix) for suffix in parts.suffixes}
            continue
        if parts.part("weight_scale", ("F32",), [(weight.shape[0], 1)]) is not None:
            parts.positive("weight_scale")
        parts.take(
            CheckedLinear(
                module,
                "hif8",
                (weight.shape[0], weight.shape[1]),
                casts_inputs=settings.get("activation_scheme") is not None,
                form="hif8",
            )
        )
    return check


def check_tiles(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:  # noqa: ARG001
    """Weights in a chip's own tiles, whose shapes are not those of the linears; their scales are looked at."""
    check = LayoutCheck()
    check.known |= set(folder.tensors)
    for module in folder.modules:
        parts = ModuleParts(folder, module, check)
        weight = parts.info("weight")
        if weight is None or weight.dtype in PLAIN:
            continue
        scale = parts.info("weight_scale")
        if scale is not None and scale.dtype in PLAIN:
            parts.positive("weight_scale", signed=True)
        parts.take(CheckedLinear(module, "tiles", None, form="tiles"))
    return check
