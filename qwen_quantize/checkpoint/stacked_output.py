"""Tensors that stand inside others: an expert's weights, written as they come into the tensor of all experts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from qwen_quantize.checkpoint.direct_io import read_range
from qwen_quantize.checkpoint.disk import disk_errors
from qwen_quantize.checkpoint.shards import OutputTensor, ShardPlan
from qwen_quantize.checkpoint.tensor_info import DTYPES, torch_shape
from qwen_quantize.checkpoint.writer import OutputFolder


@dataclass(frozen=True, slots=True)
class StackedPart:
    """Rows first, first + step, ... of entry `entry` of the tensor `stack`; its bytes are those of `tensor`."""

    tensor: OutputTensor
    stack: str
    entry: int
    first: int = 0
    step: int = 1


class StackedFolder(OutputFolder):
    """An output folder where the parts of stacks are written under their own names, in any order.

    Memory holds an entry until its last part comes; `sync` writes what is there of it, and the rest joins it on the
    disk. So a part that a resumed run finds on record is one whose bytes are there. A stack counts as written when
    all its parts are.
    """

    def __init__(
        self,
        target: Path,
        plan: Sequence[ShardPlan],
        parts: Mapping[str, StackedPart],
        *,
        resume: bool,
        overwrite: bool,
    ) -> None:
        self._parts = dict(parts)
        self._members: dict[str, set[str]] = {}
        for name, part in self._parts.items():
            self._members.setdefault(part.stack, set()).add(name)
        self._left: dict[str, set[str]] = {}
        self._waiting: dict[tuple[str, int], dict[str, Tensor]] = {}
        self._entries = threading.Lock()  # over what waits, and over entries on their way to the disk
        super().__init__(target, plan, resume=resume, overwrite=overwrite)
        self._left = {stack: names - self._written for stack, names in self._members.items()}
        self._written |= {stack for stack, left in self._left.items() if not left}

    def _is_begun(self, name: str) -> bool:
        return super()._is_begun(name) or not self._members.get(name, set()).isdisjoint(self._written)

    def write(self, name: str, tensor: Tensor) -> None:
        """As in any output folder; a part counts as written at once."""
        part = self._parts.get(name)
        if part is None:
            super().write(name, tensor)
            return
        planned = part.tensor
        shape = torch_shape(planned.dtype, planned.shape)
        if tensor.dtype != DTYPES[planned.dtype].torch or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name!r} was planned as {planned.dtype} {list(planned.shape)} and came as {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        place = (part.stack, part.entry)
        with self._entries:
            waiting = self._waiting.setdefault(place, {})
            waiting[name] = tensor.detach()
            if len({self._parts[one].first for one in waiting}) == part.step:
                self._put_entry(place)

    def is_written(self, name: str) -> bool:
        part = self._parts.get(name)
        if part is not None:
            with self._entries:
                if name in self._waiting.get((part.stack, part.entry), {}):
                    return True
        return super().is_written(name)

    def read(self, name: str) -> Tensor:
        part = self._parts.get(name)
        if part is None:
            return super().read(name)
        if not self.is_written(name):
            raise ValueError(f"{name!r} is not written yet")
        with self._entries:
            self._put_entry((part.stack, part.entry))
            rows = self._read_entry(part.stack, part.entry)[part.first :: part.step]
        return rows.reshape(torch_shape(part.tensor.dtype, part.tensor.shape)).clone()

    def sync(self) -> None:
        self._put_all()
        super().sync()

    def finish(self) -> Path:
        self._put_all()
        return super().finish()

    def _put_all(self) -> None:
        with self._entries:
            for place in list(self._waiting):
                self._put_entry(place)

    def _put_entry(self, place: tuple[str, int]) -> None:
        """Write what waits for an entry, between what the disk has of its other parts."""
        waiting = self._waiting.get(place)
        if not waiting:
            return
        stack, number = place
        shape = self._planned(stack)[1][1:]
        parts = {name: self._parts[name] for name in waiting}
        first = next(iter(parts.values()))
        whole = len(waiting) == first.step
        entry = next(iter(waiting.values())).new_empty(shape) if whole else self._read_entry(stack, number)
        for name, tensor in waiting.items():
            rows = entry[parts[name].first :: parts[name].step]
            rows.copy_(tensor.reshape(rows.shape))
        self._put_bytes(stack, entry, number * entry.numel() * entry.element_size())
        del self._waiting[place]
        with self._lock:
            self._written |= waiting.keys()
            self._unsynced += [{"tensor": name} for name in waiting]
            self._left[stack] -= waiting.keys()
            if not self._left[stack]:
                self._written.add(stack)

    def _read_entry(self, stack: str, number: int) -> Tensor:
        planned, shape = self._planned(stack)
        shard, dtype = self._shards[stack], DTYPES[planned.dtype].torch
        assert dtype is not None
        size = self._row_bytes(planned, shape)
        path = self.staging / shard.file
        with disk_errors(path, 0, "read"):
            data, found = read_range(path, shard.offsets[stack] + number * size, size)
            if found < size:
                raise OSError(0, "it was cut while it was written")
        return data.view(dtype).view(shape[1:])
