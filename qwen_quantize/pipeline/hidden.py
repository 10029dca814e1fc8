"""What lies between steps of the layer loop, on disk: hidden states, which a resumed run starts from, and inputs."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from qwen_quantize.checkpoint.disk import disk_errors, read_at, sync_folder, write_at
from qwen_quantize.errors import UserError


def window_ranges(windows: int, step: int) -> list[tuple[int, int]]:
    return [(begin, min(begin + step, windows)) for begin in range(0, windows, step)]


class HiddenStates:
    """Float32 states [windows, T, hidden] in a plain file, read and written by ranges of windows or by token.

    A step is half a layer: step 2 n is what layer n reads, step 2 n + 1 what its MLP reads.

    A file is written under another name and renamed when it is complete, so that what exists is whole.
    Pages are not mapped: they would count as resident memory.

    Raises ResumableError, with the file's name, whenever the disk fails.
    """

    def __init__(self, folder: Path, windows: int, length: int, hidden: int) -> None:
        self.folder = folder
        self.shape = (windows, length, hidden)
        self.window_bytes = length * hidden * 4

    def path(self, step: int) -> Path:
        return self.folder / f"hidden-{step:05d}.f32"

    def is_complete(self, step: int) -> bool:
        path = self.path(step)
        with disk_errors(path, 0, "read"):
            return path.is_file() and path.stat().st_size == math.prod(self.shape) * 4

    def read(self, step: int, begin: int, end: int) -> Tensor:
        """[end - begin, T, hidden] float32. UserError when the file is shorter than that."""
        states = torch.empty(end - begin, *self.shape[1:])
        path = self.path(step)
        with disk_errors(path, 0, "read"), path.open("rb") as file:
            file.seek(begin * self.window_bytes)
            found = file.readinto(_bytes_of(states))
        if found != states.nbytes:
            raise UserError(f"{path} is shorter than it must be; start again with --overwrite")
        return states

    def gather(self, step: int, tokens: Tensor) -> Tensor:
        """[n, hidden] float32: the states of `tokens`, ascending int64 positions in the flat [windows * T]."""
        path = self.path(step)
        found = torch.empty(tokens.numel(), self.shape[2])
        with disk_errors(path, 0, "read"), path.open("rb", buffering=0) as file:
            read = _read_rows(file.fileno(), tokens, found)
        if read != found.nbytes:
            raise UserError(f"{path} is shorter than it must be; start again with --overwrite")
        return found

    def begin(self, step: int) -> HiddenWriter:
        return HiddenWriter(self.path(step), self.shape[2])

    @contextmanager
    def writing(self, step: int) -> Iterator[HiddenWriter]:
        """A writer that is finished when the block ends, and leaves nothing when the block fails."""
        writer = self.begin(step)
        try:
            yield writer
        except BaseException:
            writer.abandon()
            raise
        writer.finish()

    @contextmanager
    def holding(self) -> Iterator[HeldInputs]:
        """A place for a linear's inputs within half a layer; nothing of it stays, even when the program is killed."""
        with ExitStack() as stack:
            with disk_errors(self.folder, 0):
                self.folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(tempfile.TemporaryFile(dir=self.folder, buffering=0))
            yield HeldInputs(self.folder, file)

    def remove(self, step: int) -> None:
        path = self.path(step)
        with disk_errors(path, 0, "removed"):
            path.unlink(missing_ok=True)


class HiddenWriter:
    """Appends windows in order; `finish` makes the file visible under its name, durably.

    When the disk fails, ResumableError is raised, the temporary file is removed and the writer is of no more use.
    """

    def __init__(self, path: Path, hidden: int) -> None:
        self.path = path
        self.hidden = hidden
        self.temporary = path.with_suffix(".tmp")
        self._written = 0
        with disk_errors(self.temporary, 0):
            if not path.parent.is_dir():
                path.parent.mkdir(parents=True, exist_ok=True)
                sync_folder(path.parent.parent)
            # Unbuffered, so that closing has nothing left to write and cannot fail for want of room.
            self._file = self.temporary.open("w+b", buffering=0)

    def append(self, states: Tensor) -> None:
        data = _bytes_of(states.contiguous())
        with self._removing_on_failure(), disk_errors(self.temporary, len(data)):
            write_at(self._file.fileno(), data, self._written)
        self._written += len(data)

    def add(self, tokens: Tensor, values: Tensor) -> None:
        """Add [n, hidden] float32 to the states of `tokens` (ascending, each once), which are appended already."""
        with self._removing_on_failure(), disk_errors(self.temporary, 0):
            states = torch.empty_like(values)
            if _read_rows(self._file.fileno(), tokens, states) != states.nbytes:
                raise ValueError("only states that were appended can be added to")
            states += values
            for offset, rows in _runs(tokens, states):
                write_at(self._file.fileno(), _bytes_of(rows), offset)

    def finish(self) -> None:
        with self._removing_on_failure(), disk_errors(self.temporary, self._written):
            os.fsync(self._file.fileno())
            self._file.close()
            self.temporary.replace(self.path)
            # The journal will call the layer finished: the name has to be on the disk before that line is.
            sync_folder(self.path.parent)

    def abandon(self) -> None:
        """Give up and free the space; harmless after a failure. The error that is under way matters more."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self.temporary.unlink(missing_ok=True)

    @contextmanager
    def _removing_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise


class HeldInputs:
    """What a linear will read, batch by batch, as bfloat16 in a file without a name: it may be larger than the layer.

    Raises ResumableError whenever the disk fails.
    """

    def __init__(self, folder: Path, file: IO[bytes]) -> None:
        self._folder = folder
        self._file = file
        self._shapes: list[tuple[int, ...]] = []
        self._written = 0

    def append(self, inputs: Tensor) -> None:
        data = _bytes_of(inputs.to(torch.bfloat16).contiguous())
        with disk_errors(self._folder, len(data)):
            write_at(self._file.fileno(), data, self._written)
        self._written += len(data)
        self._shapes.append(tuple(inputs.shape))

    def read(self) -> Iterator[Tensor]:
        """Each batch in turn, float32, in the shape that it came in."""
        offset = 0
        for shape in self._shapes:
            rows = torch.empty(shape, dtype=torch.bfloat16)
            with disk_errors(self._folder, 0, "read"):
                found = read_at(self._file.fileno(), _bytes_of(rows), offset)
            assert found == rows.nbytes  # nobody else can write to a file without a name
            offset += found
            yield rows.float()


def _runs(tokens: Tensor, rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(byte offset, flat part of `rows`) for every run of neighbouring tokens."""
    if tokens.numel() == 0:
        return
    breaks = (tokens.diff() != 1).nonzero().flatten() + 1
    bounds = [0, *breaks.tolist(), tokens.numel()]
    width = rows.shape[1] * 4
    first = tokens[[0, *breaks.tolist()]].tolist()
    for start, begin, end in zip(first, bounds, bounds[1:], strict=False):
        yield start * width, rows[begin:end].reshape(-1)


def _read_rows(descriptor: int, tokens: Tensor, rows: Tensor) -> int:
    """Fill contiguous `rows` [n, hidden] from the file; returns the bytes that were there."""
    done = 0
    for offset, part in _runs(tokens, rows):
        found = read_at(descriptor, _bytes_of(part), offset)
        done += found
        if found < part.nbytes:
            break
    return done


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of any shape, for reading and writing."""
    return tensor.view(-1).view(torch.uint8).numpy().data
