"""Hidden states between two layers, on disk: the only thing carried on, and what a resumed run starts from."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.errors import UserError


class HiddenStates:
    """Float32 states [windows, T, hidden] in a plain file, read and written by ranges of windows.

    A file is written under another name and renamed when it is complete, so that what exists is whole.
    Pages are not mapped: they would count as resident memory.
    """

    def __init__(self, folder: Path, windows: int, length: int, hidden: int) -> None:
        self.folder = folder
        self.shape = (windows, length, hidden)
        self.window_bytes = length * hidden * 4

    def path(self, layer: int) -> Path:
        """The states that layer `layer` reads."""
        return self.folder / f"hidden-{layer:05d}.f32"

    def is_complete(self, layer: int) -> bool:
        path = self.path(layer)
        return path.is_file() and path.stat().st_size == math.prod(self.shape) * 4

    def read(self, layer: int, begin: int, end: int) -> Tensor:
        """[end - begin, T, hidden] float32."""
        data = bytearray((end - begin) * self.window_bytes)
        with self.path(layer).open("rb") as file:
            file.seek(begin * self.window_bytes)
            if file.readinto(data) != len(data):
                raise UserError(
                    f"{self.path(layer)} is shorter than it must be; start again with --overwrite"
                )
        return torch.frombuffer(data, dtype=torch.float32).view(end - begin, *self.shape[1:])

    def begin(self, layer: int) -> HiddenWriter:
        return HiddenWriter(self.path(layer))

    def remove(self, layer: int) -> None:
        self.path(layer).unlink(missing_ok=True)


class HiddenWriter:
    """Appends windows in order; `finish` makes the file visible under its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_suffix(".tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.temporary.open("wb")

    def append(self, states: Tensor) -> None:
        try:
            self.file.write(states.contiguous().view(torch.uint8).numpy().data)
        except OSError as error:
            self.file.close()
            raise UserError(
                f"{self.temporary}: cannot write hidden states ({os.strerror(error.errno or 0)}); "
                "make room and run again with --resume"
            ) from error

    def finish(self) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        self.temporary.replace(self.path)
