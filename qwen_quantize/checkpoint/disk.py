"""Writing to a disk that can be full and a process that can be killed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from qwen_quantize.errors import ResumableError, UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
TEMPORARY = ".tmp"  # ends the name of a file that is not whole yet
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


def require_free_space(path: Path, nbytes: int) -> None:
    """UserError with both numbers when fewer than `nbytes` are free where `path` is or will be."""
    free = free_bytes(path)
    if free < nbytes:
        raise UserError(
            f"{path} needs {nbytes:,} bytes of free disk space and has {free:,}; free some, or give another "
            "--output-path"
        )


@contextmanager
def disk_errors(path: Path, needed: int, failed: str = "written") -> Iterator[None]:
    """Turn an OSError at `path` into a ResumableError that says what could not be done with it.

    needed: bytes that a write asked for.
    """
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise ResumableError(
                f"the disk is full: {path} needs {needed:,} bytes more and {_free_text(path)} are free; "
                "make room and run again with --resume"
            ) from error
        raise ResumableError(
            f"{path} cannot be {failed}: {error.strerror or error}; repair that and run again with --resume"
        ) from error


def _free_text(path: Path) -> str:
    try:
        return f"{free_bytes(path):,}"
    except OSError:  # a disk that fails may not answer this either; the first error is the one to show
        return "unknown many"


def preallocate(descriptor: int, nbytes: int) -> None:
    """Give the file its size and its blocks now, so that a full disk shows before hours of work."""
    if nbytes == 0:
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
        os.ftruncate(descriptor, nbytes)  # this file system cannot reserve: a full disk shows later


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`; a system call may take only part of it."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)


def read_at(descriptor: int, view: memoryview, offset: int) -> int:
    """Fill `view`, bytes, from `offset` on; the number of bytes read, fewer at the file's end."""
    done = 0
    while done < len(view):
        # One call moves at most 2 GiB.
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file that takes the place of `path`, whole and durable, when the block ends.

    When the block or the disk fails, `path` is as it was and nothing of the new file stays.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
