"""Experts as gpt-oss stores them: MXFP4, all experts of a layer in one tensor, gate and up rows taking turns.

`experts.gate_up_proj_blocks` U8 [E, 2I, H/32, 16] and `_scales` U8 [E, 2I, H/32]: even rows are the gate's, odd ones
up's. `experts.down_proj_blocks` U8 [E, H, I/32, 16] and `_scales` U8 [E, H, I/32]. The low nibble of a byte is the
even element, a scale is the byte of a power of two.

Only gpt-oss itself is served from such files (vLLM, SGLang, transformers); of the families here no engine but this
program's reads them, for whose sake `MxOssSource` shows each expert as a linear of compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from qwen_quantize.checkpoint.layout_parts import read_scale, stored_scale
from qwen_quantize.checkpoint.safetensors_folder import SafetensorsFolder
from qwen_quantize.checkpoint.tensor_info import TensorInfo
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.packing import pack_nibble_pairs, unpack_nibble_pairs
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import E2M1

GROUP, BLOCK_BYTES = 32, 16
_SCHEME = Scheme("mxfp4", SCHEMES["mxfp4"].weight, None, False, "MXFP4 weights; activations stay")
_FUSED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")
_STORED = {"blocks": "weight_packed", "scales": "weight_scale"}


def pack_experts(experts: list[QuantizedTensor]) -> tuple[Tensor, Tensor]:
    """(blocks U8 [E, N, K/32, 16], scales U8 [E, N, K/32]) of MXFP4 weights [N, K] of equal shapes."""
    for expert in experts:
        if expert.format != E2M1 or expert.granularity != Granularity.group(GROUP) or expert.shape[1] % GROUP:
            raise ValueError(
                f"experts of mx-oss are E2M1 in whole groups of {GROUP}, not {expert.format.name}"
            )
    blocks = torch.stack([pack_nibble_pairs(expert.codes) for expert in experts])
    scales = torch.stack([stored_scale(expert.scale, "U8") for expert in experts])
    return blocks.reshape(*scales.shape, BLOCK_BYTES), scales


def unpack_experts(blocks: Tensor, scales: Tensor) -> list[QuantizedTensor]:
    """The inverse of `pack_experts`; UserError where the two do not fit each other."""
    if (
        blocks.dtype != torch.uint8
        or scales.dtype != torch.uint8
        or blocks.shape != (*scales.shape, BLOCK_BYTES)
    ):
        raise UserError(
            f"experts of mx-oss are bytes [E, N, K/32, 16] and [E, N, K/32], not {list(blocks.shape)} and "
            f"{list(scales.shape)}"
        )
    experts, rows, groups = scales.shape
    codes = unpack_nibble_pairs(blocks.reshape(experts, rows, groups * BLOCK_BYTES))
    shape = (rows, groups * GROUP)
    grid = Granularity.group(GROUP)
    return [
        QuantizedTensor(codes[number], read_scale(scales[number]), None, E2M1, grid, shape)
        for number in range(experts)
    ]


def interleave(gate: Tensor, up: Tensor) -> Tensor:
    """[E, 2I, ...] of two tensors [E, I, ...]: gate's rows are the even ones."""
    return torch.stack((gate, up), dim=2).flatten(1, 2)


def separate(fused: Tensor) -> tuple[Tensor, Tensor]:
    """(gate, up), the inverse of `interleave`."""
    return fused[:, 0::2].contiguous(), fused[:, 1::2].contiguous()


@dataclass(frozen=True, slots=True)
class _Part:
    """One expert's tensor inside a fused one. first, step: the rows of the fused tensor that are its own."""

    fused: str
    expert: int
    first: int
    step: int
    info: TensorInfo


class MxOssSource:
    """A folder whose experts are stored as in gpt-oss, seen as one whose experts are linears by themselves.

    Its config states them in the words of compressed-tensors; tensors of other kinds pass as they are.
    """

    kind = "safetensors"

    def __init__(self, folder: SafetensorsFolder) -> None:
        self._folder = folder
        self.path = folder.path
        kept = {key: value for key, value in folder.config.items() if key != "quantization_config"}
        described = COMPRESSED_TENSORS.quantization_config({"experts": _SCHEME}, ())
        self.config: dict[str, Any] = kept | {"quantization_config": described}
        self._parts: dict[str, _Part] = {}
        for name in folder.names():
            match = _FUSED.fullmatch(name)
            if match is not None:
                self._add(name, match[1], match[2], match[3])
            elif name.endswith(("_proj_bias", "_blocks", "_scales")):
                raise UserError(f"{folder.path}: tensor {name!r} of mx-oss has no place in the families here")

    def _add(self, name: str, experts: str, linear: str, part: str) -> None:
        info = self._folder.info(name)
        if info.dtype != "U8" or len(info.shape) != (4 if part == "blocks" else 3):
            raise UserError(
                f"{self.path}: tensor {name!r} is {info.dtype} {list(info.shape)}; blocks are U8 [experts, rows, "
                "groups, 16] and scales U8 [experts, rows, groups]"
            )
        if part == "blocks" and info.shape[3] != BLOCK_BYTES:
            raise UserError(
                f"{self.path}: tensor {name!r} has blocks of {info.shape[3]} bytes, not of {BLOCK_BYTES}"
            )
        names = ("gate_proj", "up_proj") if linear == "gate_up_proj" else (linear,)
        count, rows, groups = info.shape[:3]
        if rows % len(names):
            raise UserError(f"{self.path}: tensor {name!r} has {rows} rows, which gate and up cannot share")
        width = groups * (BLOCK_BYTES if part == "blocks" else 1)
        shape = (rows // len(names), width)
        for expert in range(count):
            for first, own in enumerate(names):
                seen = f"{experts}.{expert}.{own}.{_STORED[part]}"
                own_info = TensorInfo(seen, "U8", shape, shape[0] * shape[1], info.file)
                self._parts[seen] = _Part(name, expert, first, len(names), own_info)

    @property
    def lossy_types(self) -> tuple[str, ...]:
        return ()

    def names(self) -> tuple[str, ...]:
        found: list[str] = []
        by_fused: dict[str, list[str]] = {}
        for name, part in self._parts.items():
            by_fused.setdefault(part.fused, []).append(name)
        for name in self._folder.names():
            found += by_fused.get(name, [name])
        return tuple(found)

    def info(self, name: str) -> TensorInfo:
        return self._parts[name].info if name in self._parts else self._folder.info(name)

    def read(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._folder.read(name)
        return self.read_rows(name, 0, self._parts[name].info.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """As of any source; all rows of the expert are read for some of them."""
        if name not in self._parts:
            return self._folder.read_rows(name, start, stop)
        part = self._parts[name]
        if not 0 <= start <= stop <= part.info.shape[0]:
            raise ValueError(
                f"rows [{start}, {stop}) do not exist in {name!r} of shape {list(part.info.shape)}"
            )
        fused = self._folder.read_rows(part.fused, part.expert, part.expert + 1)[0]
        return fused[part.first :: part.step].flatten(1)[start:stop].clone()

    def read_once(self) -> MxOssSource:
        return self

    def side_files(self) -> Mapping[str, bytes | Path]:
        return self._folder.side_files()

    def fingerprint(self) -> str:
        return self._folder.fingerprint()


def mx_oss_config(kept: list[str]) -> dict[str, Any]:
    """The `quantization_config` of gpt-oss; kept: patterns of the modules that stay in 16 bits."""
    return {"modules_to_not_convert": kept, "quant_method": "mxfp4"}
