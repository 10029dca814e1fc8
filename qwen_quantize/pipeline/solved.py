"""Streams that were solved once, kept in files until they are needed again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_quantize.checkpoint.disk import disk_errors, free_bytes
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.spec import Format


@dataclass(frozen=True, slots=True)
class SolvedStream:
    """weights: of each linear, by module. input_amax: the largest magnitude of their input, None if not observed."""

    weights: Mapping[str, QuantizedTensor]
    input_amax: float | None


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a file of tensors does not say: of each linear, in order, (name, format, granularity, tensor scale)."""

    path: Path
    linears: tuple[tuple[str, Format, Granularity, float], ...]
    input_amax: float | None


class SolvedStore:
    """Solved streams by candidate and first linear, in a folder of their own.

    They take at most half of what is free on its disk; what finds no room is not kept, and is solved again.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._room = free_bytes(folder) // 2
        self._kept: dict[tuple[str, str], _Kept] = {}

    def put(self, candidate: str, module: str, solved: SolvedStream) -> None:
        """Keep it if there is room."""
        tensors = {
            f"{number}.{part}": tensor.contiguous()
            for number, weight in enumerate(solved.weights.values())
            for part, tensor in _parts(weight).items()
        }
        size = sum(tensor.nbytes for tensor in tensors.values())
        if size > self._room or (candidate, module) in self._kept:
            return
        path = self._folder / f"{len(self._kept)}.safetensors"
        try:
            save_file(tensors, path)
        except (OSError, SafetensorError):  # others fill the disk too
            path.unlink(missing_ok=True)
            self._room = 0
            return
        self._room -= size
        linears = tuple(
            (name, weight.format, weight.granularity, weight.tensor_scale)
            for name, weight in solved.weights.items()
        )
        self._kept[candidate, module] = _Kept(path, linears, solved.input_amax)

    def get(self, candidate: str, module: str) -> SolvedStream | None:
        """The stream as it was put; ResumableError when the disk fails."""
        kept = self._kept.get((candidate, module))
        if kept is None:
            return None
        with disk_errors(kept.path, 0, "read"):
            tensors = load_file(kept.path)
        weights = {}
        for number, (name, fmt, granularity, tensor_scale) in enumerate(kept.linears):
            codes, scale = tensors[f"{number}.codes"], tensors[f"{number}.scale"]
            zero_point = tensors.get(f"{number}.zero_point")
            weights[name] = QuantizedTensor(
                codes, scale, zero_point, fmt, granularity, tuple(codes.shape), tensor_scale
            )
        return SolvedStream(weights, kept.input_amax)


def _parts(weight: QuantizedTensor) -> dict[str, Tensor]:
    parts = {"codes": weight.codes, "scale": weight.scale}
    return parts if weight.zero_point is None else {**parts, "zero_point": weight.zero_point}
