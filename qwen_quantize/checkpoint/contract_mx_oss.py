"""The rules of gpt-oss's layout: the experts of a layer stacked, MXFP4 in `_blocks` beside exponents in `_scales`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qwen_quantize.checkpoint.contract_folder import ModelFolder
from qwen_quantize.checkpoint.contract_linear import CheckedLinear, LayoutCheck

_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"
_GROUP, _BYTES = 32, 16
_FAMILY = "GptOssForCausalLM"
OTHER_FAMILY = "mx-oss-other"  # the kind of experts that are stored so in a model that no engine reads so


def check_mx_oss(folder: ModelFolder, settings: Mapping[str, Any]) -> LayoutCheck:  # noqa: ARG001
    check = LayoutCheck()
    for name, stored in folder.tensors.items():
        if name.endswith(_SCALES) and name.removesuffix(_SCALES) + _BLOCKS not in folder.tensors:
            check.known.add(name)
            check.add(
                name,
                "scale-orphan",
                "its blocks are missing; engines stop, or leave the experts random",
                "write the folder again",
            )
        if name.endswith(_BLOCKS):
            _check_stack(
                folder, name.removesuffix(_BLOCKS), tuple(stored.info.shape), stored.info.dtype, check
            )
    return check


def _check_stack(
    folder: ModelFolder, stack: str, shape: tuple[int, ...], dtype: str, check: LayoutCheck
) -> None:
    blocks, scales = stack + _BLOCKS, stack + _SCALES
    check.known |= {blocks, scales, stack + _BIAS}
    if len(shape) != 4 or shape[-1] != _BYTES or dtype != "U8":
        check.add(
            blocks,
            "weight-shape",
            f"it is {dtype} {list(shape)}; blocks are U8 [experts, rows, groups, {_BYTES}]",
            "pack 32 values into 16 bytes, the even one in the low nibble",
        )
        return
    info = folder.info(scales)
    if info is None:
        check.add(
            scales, "scale-missing", f"{blocks!r} is there without it; engines stop", "write the folder again"
        )
        return
    if info.dtype != "U8" or tuple(info.shape) != shape[:3]:
        rule = "scale-dtype" if info.dtype != "U8" else "scale-shape"
        check.add(
            scales,
            rule,
            f"it is {info.dtype} {list(info.shape)} and must be U8 {list(shape[:3])}; engines view other bytes as "
            "exponents",
            "store one E8M0 byte for each block",
        )
        return
    values = folder.read(scales)
    if values is not None and bool((values.view(torch.uint8) == 0xFF).any()):
        check.add(
            scales,
            "scale-nan",
            "it holds the exponent byte 0xFF, which is NaN; every product with its block is NaN",
            "quantize the experts again",
        )
    check.take(
        CheckedLinear(
            stack,
            "mx-oss" if _FAMILY in _architectures(folder) else OTHER_FAMILY,
            (shape[1], shape[2] * _GROUP),
            region=(1, _GROUP),
            group=_GROUP,
            form="mx-oss",
            parts=frozenset({blocks, scales}),
        )
    )


def _architectures(folder: ModelFolder) -> list[Any]:
    found = folder.config.get("architectures")
    return found if isinstance(found, list) else []
