"""Writing a model folder that is complete or absent, tensor by tensor, and resumable."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from qwen_quantize.checkpoint.direct_io import ALIGNMENT, PlacedFile, aligned_bytes, read_range
from qwen_quantize.checkpoint.disk import (
    TEMPORARY,
    disk_errors,
    preallocate,
    replacing,
    require_free_space,
    sync_folder,
    write_at,
)
from qwen_quantize.checkpoint.local_files import is_plain_name
from qwen_quantize.checkpoint.shards import OutputTensor, ShardPlan, index_bytes, index_name, plan_shards
from qwen_quantize.checkpoint.staging import StagingFolder
from qwen_quantize.checkpoint.tensor_info import DTYPES, torch_shape
from qwen_quantize.errors import ResumableError, UserError

__all__ = ["OutputFolder", "OutputTensor", "ShardPlan", "plan_shards", "require_free_space"]

_RECORD = ".written.jsonl"  # what is known to be on the disk: lines {"tensor": name} and {"file": name}


class OutputFolder:
    """A model folder under construction in `staging`, a hidden sibling of the target.

    Every shard gets its final size and header at once; `write` fills in tensors in any order and may repeat
    one, `write_rows` a part of one; `sync` makes them durable; `finish` renames the folder to its target. Until
    then the target is as it was. Other parts of the program may keep files in `staging`; `finish` removes them.
    `write`, `write_rows`, `row_buffer`, `is_written` and `sync` may be called from several threads at once.

    Raises UserError when the target or the staging folder is in the way, ResumableError when the disk fails.
    """

    def __init__(self, target: Path, plan: Sequence[ShardPlan], *, resume: bool, overwrite: bool) -> None:
        self._plan = tuple(plan)
        self._shards = {name: shard for shard in self._plan for name in shard.tensors}
        self._open: dict[str, PlacedFile] = {}
        self._lock = threading.Lock()  # over everything below; never held during a transfer
        self._syncing = threading.Lock()
        self._rows: dict[str, list[tuple[int, int]]] = {}  # the rows of unfinished tensors that are written
        self._unsynced: list[dict[str, str]] = []
        self._dirty: set[str] = set()
        self._written: set[str] = set()
        self._files: set[str] = set()
        self._staging = StagingFolder(target, resume=resume, overwrite=overwrite)
        self.target = self._staging.target
        self.staging = self._staging.path
        self.resumed = self._staging.resumed
        try:
            self._load_record()
            self._allocate()
        except ResumableError as error:
            if self.resumed:
                self.close()
                raise
            # Nothing was done yet, so there is nothing to resume: give the disk back.
            self.discard()
            raise UserError(str(error).replace("run again with --resume", "run again")) from error
        except BaseException:
            self.close()
            raise

    def _load_record(self) -> None:
        """Read what is known to be written; what a lost or damaged record does not say counts as not written."""
        path = self.staging / _RECORD
        with disk_errors(path, 0, "read"):
            found = path.read_bytes() if path.exists() else None
        intact = []
        for line in (found or b"").splitlines(keepends=True):
            # A killed run may have left half a line, which can be JSON by chance.
            entry = _record_entry(line) if line.endswith(b"\n") else None
            if entry is None:
                continue
            kind, name = entry
            (self._written if kind == "tensor" else self._files).add(name)
            intact.append(line)
        kept = b"".join(intact)
        if kept != found:
            with disk_errors(path, len(kept)), replacing(path) as record:
                record.write(kept)

    def _allocate(self) -> None:
        """Create the shards that are missing and hold those that exist against the plan."""
        missing = []
        for shard in self._plan:
            path = self.staging / shard.file
            with disk_errors(path, 0, "read"):
                if not path.exists():
                    missing.append(shard)
                    continue
                with path.open("rb") as file:
                    found, size = file.read(len(shard.header)), os.fstat(file.fileno()).st_size
            if found != shard.header or size != shard.nbytes:
                raise UserError(
                    f"the interrupted run in {self.staging} planned {shard.file} otherwise; resume with the "
                    "same command, or start again with --overwrite"
                )
        needed = sum(shard.nbytes for shard in missing)
        if any(self._is_begun(name) for shard in missing for name in shard.tensors):
            raise UserError(
                f"{self.staging} lost files that the interrupted run had written; start again with "
                "--overwrite"
            )
        for shard in missing:
            temporary = self.staging / (shard.file + TEMPORARY)
            with disk_errors(self.target, needed):
                descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
                try:
                    preallocate(descriptor, shard.nbytes)
                    write_at(descriptor, memoryview(shard.header), 0)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                # A shard under its own name has its whole header, so a resumed run can trust what it finds.
                temporary.rename(self.staging / shard.file)
            needed -= shard.nbytes
        with disk_errors(self.staging, 0):
            sync_folder(self.staging)

    def _is_begun(self, name: str) -> bool:
        """Whether the record knows of bytes of a tensor, all or some."""
        return name in self._written

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a planned tensor at its place. ValueError when name, dtype or shape are not as planned."""
        planned, shape = self._planned(name)
        dtype = DTYPES[planned.dtype].torch
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name!r} was planned as {planned.dtype} {list(planned.shape)} and came as {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        self._put_bytes(name, tensor, 0)
        self._done(name, None)

    def write_rows(self, name: str, start: int, tensor: Tensor) -> None:
        """Write the rows of a planned tensor from `start` on, in any order; rows may be repeated.

        The tensor counts as written when all its rows are. Fastest from a `row_buffer` of the same rows.
        ValueError when name, dtype or shape are not as planned, or rows lie outside.
        """
        planned, shape = self._planned(name)
        dtype, stop = DTYPES[planned.dtype].torch, start + (len(tensor) if tensor.dim() else 0)
        if tensor.dtype != dtype or tensor.dim() == 0 or tuple(tensor.shape[1:]) != shape[1:] or not shape:
            raise ValueError(
                f"rows of {name!r}, which was planned as {planned.dtype} {list(planned.shape)}, came as "
                f"{tensor.dtype} {list(tensor.shape)}"
            )
        if not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"rows [{start}, {stop}) lie outside {name!r} of shape {list(planned.shape)}")
        self._put_bytes(name, tensor, start * self._row_bytes(planned, shape))
        self._done(name, (start, stop))

    def row_buffer(self, name: str, start: int, stop: int) -> Tensor:
        """Room for rows [start, stop) of a planned tensor, uninitialized, where `write_rows` likes it best."""
        planned, shape = self._planned(name)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"rows [{start}, {stop}) lie outside {name!r} of shape {list(planned.shape)}")
        row = self._row_bytes(planned, shape)
        begin = self._shards[name].offsets[name] + start * row
        room = aligned_bytes((stop - start) * row, begin % ALIGNMENT)
        dtype = DTYPES[planned.dtype].torch
        assert dtype is not None
        return room.view(dtype).view(stop - start, *shape[1:])

    def _planned(self, name: str) -> tuple[OutputTensor, tuple[int, ...]]:
        """What was planned under a name, and the shape of its torch tensor."""
        if name not in self._shards:
            raise ValueError(f"{name!r} is not in the plan of {self.target}")
        planned = self._shards[name].tensors[name]
        return planned, torch_shape(planned.dtype, planned.shape)

    def _row_bytes(self, planned: OutputTensor, shape: tuple[int, ...]) -> int:
        return planned.nbytes // shape[0] if shape[0] else 0

    def _put_bytes(self, name: str, tensor: Tensor, skip: int) -> None:
        shard = self._shards[name]
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if not data.numel():
            return
        with disk_errors(self.target, data.numel()):
            self._file(shard.file).write(data, shard.offsets[name] + skip)
        with self._lock:  # after the transfer: a sync that began before may have missed it
            self._dirty.add(shard.file)

    def _done(self, name: str, rows: tuple[int, int] | None) -> None:
        """Note what was written; None is the whole tensor."""
        with self._lock:
            if rows is not None:
                spans = _merged([*self._rows.get(name, ()), rows])
                self._rows[name] = spans
                if name in self._written or spans != [(0, self._planned(name)[1][0])]:
                    return
            self._rows.pop(name, None)
            self._written.add(name)
            self._unsynced.append({"tensor": name})

    def is_written(self, name: str) -> bool:
        """Whether the tensor was written by this run, or by the interrupted one before its last `sync`.

        False also when the record of the interrupted run was lost or damaged where it named the tensor.
        """
        with self._lock:
            return name in self._written

    def read(self, name: str) -> Tensor:
        """A written tensor, as it stands in the folder. ValueError for one that is not."""
        planned, shape = self._planned(name)
        if not self.is_written(name):
            raise ValueError(f"{name!r} is not written yet")
        shard, dtype = self._shards[name], DTYPES[planned.dtype].torch
        assert dtype is not None
        path = self.staging / shard.file
        with disk_errors(path, 0, "read"):
            data, found = read_range(path, shard.offsets[name], planned.nbytes)
            if found < planned.nbytes:
                raise OSError(0, "it was cut while it was written")
        return data.view(dtype).view(shape)

    def _file(self, file: str) -> PlacedFile:
        with self._lock:
            if file not in self._open:
                self._open[file] = PlacedFile(self.staging / file)
            return self._open[file]

    def sync(self) -> None:
        """Make everything that was written before the call survive a crash of the machine."""
        with self._syncing:
            with self._lock:
                dirty, entries = self._dirty, self._unsynced
                self._dirty, self._unsynced = set(), []
            try:
                self._make_durable(dirty, entries)
            except BaseException:
                with self._lock:
                    self._dirty |= dirty
                    self._unsynced[:0] = entries
                raise

    def _make_durable(self, dirty: set[str], entries: list[dict[str, str]]) -> None:
        with disk_errors(self.target, 0):
            for file in sorted(dirty):
                self._file(file).sync()
            if entries:
                with (self.staging / _RECORD).open("ab") as record:
                    record.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
                    record.flush()
                    os.fsync(record.fileno())

    def add_file(self, name: str, content: bytes | Path) -> None:
        """Put a side file into the folder under a plain name, replacing one of that name whole."""
        planned = {shard.file for shard in self._plan} | {index_name(self._plan)}
        if not is_plain_name(name) or name in planned or name.endswith(TEMPORARY):
            raise UserError(f"{name!r} cannot be the name of a file beside the weights of {self.target}")
        self._put(name, content)

    def _put(self, name: str, content: bytes | Path) -> None:
        needed = len(content) if isinstance(content, bytes) else content.stat().st_size
        with disk_errors(self.target, needed), replacing(self.staging / name) as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                with content.open("rb") as original:
                    shutil.copyfileobj(original, file)
        with self._lock:
            self._files.add(name)
            self._unsynced.append({"file": name})

    def write_index(self) -> None:
        """Write the index that several shards need, so that `staging` can be read as a model."""
        if len(self._plan) > 1:
            self._put(index_name(self._plan), index_bytes(self._plan))

    def finish(self) -> Path:
        """Publish the folder and return its path. ValueError while a planned tensor is unwritten."""
        unwritten = [name for name in self._shards if name not in self._written]
        if unwritten:
            raise ValueError(
                f"{len(unwritten)} tensors of {self.target} were not written, the first is {unwritten[0]!r}"
            )
        self.write_index()
        self.sync()
        self._close_files()
        kept = {shard.file for shard in self._plan} | self._files
        with disk_errors(self.target, 0):
            for entry in sorted(self.staging.iterdir()):
                if entry.name in kept or entry.name == _RECORD:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            # The record goes last: a run killed here must not find a journal of work without its record.
            sync_folder(self.staging)
            (self.staging / _RECORD).unlink(missing_ok=True)
            sync_folder(self.staging)
            self._staging.publish()
        self._staging.release()
        return self.target

    def discard(self) -> None:
        """Remove all that was written and give up the output; the target stays as it was."""
        self._close_files()
        self._staging.remove()
        self._staging.release()

    def close(self) -> None:
        """Stop without publishing and keep what is written for a resumed run; harmless after `finish`."""
        self._close_files()
        self._staging.release()

    def _close_files(self) -> None:
        with self._lock:
            for file in self._open.values():
                file.close()
            self._open.clear()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges [start, stop) in order, those that touch or overlap as one, without empty ones."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        elif start < stop:
            merged.append((start, stop))
    return merged


def _record_entry(line: bytes) -> tuple[str, str] | None:
    """The kind and the name in a line of the record; None when the line is damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or len(entry) != 1:
        return None
    ((kind, name),) = entry.items()
    return (kind, name) if kind in ("tensor", "file") and isinstance(name, str) else None


@contextmanager
def filling(folder: OutputFolder) -> Iterator[None]:
    """A block that writes into the folder. When it fails, what a resumed run goes on from stays, and nothing else.

    A UserError of a fresh run removes all: after it, the target is as it was.
    """
    try:
        yield
    except BaseException as error:
        resumable = isinstance(error, ResumableError) or not isinstance(error, UserError)
        if folder.resumed or resumable:
            folder.close()  # finished work is worth more than a tidy folder
        else:
            folder.discard()
        raise
