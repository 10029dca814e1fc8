"""Hidden states between two layers, on disk: the only thing carried on, and what a resumed run starts from."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.checkpoint.disk import disk_errors, sync_folder, write_at
from qwen_quantize.errors import UserError


class HiddenStates:
    """Float32 states [windows, T, hidden] in a plain file, read and written by ranges of windows.

    A file is written under another name and renamed when it is complete, so that what exists is whole.
    Pages are not mapped: they would count as resident memory.

    Raises ResumableError, with the file's name, whenever the disk fails.
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
        with disk_errors(path, 0, "read"):
            return path.is_file() and path.stat().st_size == math.prod(self.shape) * 4

    def read(self, layer: int, begin: int, end: int) -> Tensor:
        """[end - begin, T, hidden] float32. UserError when the file is shorter than that."""
        data = bytearray((end - begin) * self.window_bytes)
        path = self.path(layer)
        with disk_errors(path, 0, "read"), path.open("rb") as file:
            file.seek(begin * self.window_bytes)
            found = file.readinto(data)
        if found != len(data):
            raise UserError(f"{path} is shorter than it must be; start again with --overwrite")
        return torch.frombuffer(data, dtype=torch.float32).view(end - begin, *self.shape[1:])

    def begin(self, layer: int) -> HiddenWriter:
        return HiddenWriter(self.path(layer))

    def remove(self, layer: int) -> None:
        path = self.path(layer)
        with disk_errors(path, 0, "removed"):
            path.unlink(missing_ok=True)


class HiddenWriter:
    """Appends windows in order; `finish` makes the file visible under its name, durably.

    When the disk fails, ResumableError is raised, the temporary file is removed and the writer is of no more use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_suffix(".tmp")
        self._written = 0
        with disk_errors(self.temporary, 0):
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(path.parent.parent)
            # Unbuffered, so that closing has nothing left to write and cannot fail for want of room.
            self._file = self.temporary.open("wb", buffering=0)

    def append(self, states: Tensor) -> None:
        data = states.contiguous().reshape(-1).view(torch.uint8).numpy().data
        with self._removing_on_failure(), disk_errors(self.temporary, len(data)):
            write_at(self._file.fileno(), data, self._written)
        self._written += len(data)

    def finish(self) -> None:
        with self._removing_on_failure(), disk_errors(self.temporary, self._written):
            os.fsync(self._file.fileno())
            self._file.close()
            self.temporary.replace(self.path)
            # The journal will call the layer finished: the name has to be on the disk before that line is.
            sync_folder(self.path.parent)

    @contextmanager
    def _removing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Frees the space of a full disk at once; the error that is under way matters more than one here.
            with suppress(OSError):
                self._file.close()
            with suppress(OSError):
                self.temporary.unlink(missing_ok=True)
            raise
