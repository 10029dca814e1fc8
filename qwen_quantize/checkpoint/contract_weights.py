"""Rules on the codes of weights, which take reading them: NaN codes of FP8, and weights that were never written."""

from __future__ import annotations

from collections.abc import Collection

import torch

from qwen_quantize.checkpoint.contract_folder import ModelFolder
from qwen_quantize.checkpoint.finding import Finding, warning
from qwen_quantize.checkpoint.tensor_info import TensorInfo

DEFAULT_LIMIT = 1 << 30
_FP8 = "F8_E4M3"
_CODES = (_FP8, "I8", "U8", "I32")
_WEIGHTS = ("weight", "weight_packed", "qweight")


def check_weights(
    folder: ModelFolder, known: Collection[str], limit: int | None
) -> tuple[list[Finding], int, int]:
    """(findings, bytes read, bytes there). limit: on the bytes; None reads all, else the first of each weight."""
    weights = [
        stored.info
        for name, stored in folder.tensors.items()
        if stored.info.dtype in _CODES
        and name.rpartition(".")[2] in _WEIGHTS
        and (name in known or not known)
    ]
    there = sum(info.nbytes for info in weights)
    whole = limit is None or there <= limit
    share = None if whole or limit is None else max(limit // max(len(weights), 1), 4096)
    found: list[Finding] = []
    done = 0
    for info in weights:
        size = info.nbytes if share is None else min(info.nbytes, share)
        data = folder.read(info.name, size)
        if data is None:
            continue
        done += size
        finding = _judge(info, data)
        if finding is not None:
            found.append(finding)
    return found, done, there


def _judge(info: TensorInfo, data: torch.Tensor) -> Finding | None:
    if info.dtype == _FP8 and bool(((data & 0x7F) == 0x7F).any()):
        count = int(((data & 0x7F) == 0x7F).sum())
        return Finding(
            info.name,
            "weight-nan",
            f"{count} of its codes are 0x7F or 0xFF, the NaN of E4M3; every token comes out as NaN",
            "clip to 448 before the cast and quantize again",
        )
    # Packed integers are unsigned, so that their zero is another code.
    if info.dtype != "I32" and data.numel() == info.nbytes and not bool(data.any()):
        return warning(
            info.name,
            "weight-zero",
            "all of its codes are 0; the tensor was planned and never written, or its linear is dead",
            "quantize the linear again",
        )
    return None
