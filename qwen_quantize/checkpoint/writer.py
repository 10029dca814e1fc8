"""Writing a model folder that is complete or absent, tensor by tensor, and resumable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

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
from qwen_quantize.checkpoint.safetensors_folder import INDEX_FILE
from qwen_quantize.checkpoint.shards import OutputTensor, ShardPlan, index_bytes, plan_shards
from qwen_quantize.checkpoint.staging import StagingFolder
from qwen_quantize.checkpoint.tensor_info import DTYPES, torch_shape
from qwen_quantize.errors import ResumableError, UserError

__all__ = ["OutputFolder", "OutputTensor", "ShardPlan", "plan_shards", "require_free_space"]

_RECORD = ".written.jsonl"  # what is known to be on the disk: lines {"tensor": name} and {"file": name}


class OutputFolder:
    """A model folder under construction in `staging`, a hidden sibling of the target.

    Every shard gets its final size and header at once; `write` fills in tensors in any order and may repeat
    one; `sync` makes them durable; `finish` renames the folder to its target. Until then the target is as it
    was. Other parts of the program may keep files in `staging`; `finish` removes them.

    Raises UserError when the target or the staging folder is in the way, ResumableError when the disk fails.
    """

    def __init__(self, target: Path, plan: Sequence[ShardPlan], *, resume: bool, overwrite: bool) -> None:
        self._plan = tuple(plan)
        self._shards = {name: shard for shard in self._plan for name in shard.tensors}
        self._descriptors: dict[str, int] = {}
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
        if any(name in self._written for shard in missing for name in shard.tensors):
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

    def write(self, name: str, tensor: Tensor) -> None:
        """Write a planned tensor at its place. ValueError when name, dtype or shape are not as planned."""
        shard = self._shards.get(name)
        if shard is None:
            raise ValueError(f"{name!r} is not in the plan of {self.target}")
        planned = shard.tensors[name]
        dtype, shape = DTYPES[planned.dtype].torch, torch_shape(planned.dtype, planned.shape)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name!r} was planned as {planned.dtype} {list(planned.shape)} and came as {tensor.dtype} "
                f"{list(tensor.shape)}"
            )
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        with disk_errors(self.target, planned.nbytes):
            if planned.nbytes:
                data = flat.view(torch.uint8).numpy().data
                write_at(self._descriptor(shard.file), data, shard.offsets[name])
                self._dirty.add(shard.file)
        self._written.add(name)
        self._unsynced.append({"tensor": name})

    def is_written(self, name: str) -> bool:
        """Whether the tensor was written by this run, or by the interrupted one before its last `sync`.

        False also when the record of the interrupted run was lost or damaged where it named the tensor.
        """
        return name in self._written

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = os.open(self.staging / file, os.O_RDWR | os.O_CLOEXEC)
        return self._descriptors[file]

    def sync(self) -> None:
        """Make everything written so far survive a crash of the machine."""
        with disk_errors(self.target, 0):
            for file in sorted(self._dirty):
                os.fsync(self._descriptor(file))
            self._dirty.clear()
            if self._unsynced:
                with (self.staging / _RECORD).open("ab") as record:
                    record.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in self._unsynced))
                    record.flush()
                    os.fsync(record.fileno())
                self._unsynced.clear()

    def add_file(self, name: str, content: bytes | Path) -> None:
        """Put a side file into the folder under a plain name, replacing one of that name whole."""
        planned = {shard.file for shard in self._plan} | {INDEX_FILE}
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
        self._files.add(name)
        self._unsynced.append({"file": name})

    def write_index(self) -> None:
        """Write the index that several shards need, so that `staging` can be read as a model."""
        if len(self._plan) > 1:
            self._put(INDEX_FILE, index_bytes(self._plan))

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
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


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
