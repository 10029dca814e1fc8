"""Reading and writing large ranges past the page cache, where the file system allows it.

A conversion touches each byte once, so caching it only costs: a copy of every byte by the processor, and everything
else that the machine had cached. Direct transfers need file offsets, lengths and memory addresses that are multiples
of a block; what sticks out at either end goes the ordinary way, in other pages of the file, which keeps both coherent.
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.checkpoint.disk import write_at

ALIGNMENT = 4096  # no disk has larger blocks, and it is the page size
LEAST_BYTES = 1 << 20  # below, the ordinary way is as fast
_DIRECT = getattr(os, "O_DIRECT", 0)  # 0: a system without it
_LARGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL)
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP)


def aligned_bytes(nbytes: int, phase: int = 0) -> Tensor:
    """uint8 [nbytes], uninitialized, whose address is `phase` modulo ALIGNMENT.

    Large ones are pages of their own, which go back to the system with the tensor: among smaller ones they leave holes
    that several threads together never fill.
    """
    size = nbytes + ALIGNMENT
    if size < LEAST_BYTES:
        room = torch.empty(size, dtype=torch.uint8)
    else:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            pages.madvise(_LARGE_PAGES)
        room = torch.frombuffer(pages, dtype=torch.uint8)
    skip = (phase - room.data_ptr()) % ALIGNMENT
    return room[skip : skip + nbytes]


def read_range(path: Path, begin: int, nbytes: int) -> tuple[Tensor, int]:
    """uint8 [nbytes] of `path` from byte `begin` on, and how many of them the file had. Raises OSError.

    What the page cache holds already comes from there.
    """
    phase = begin % ALIGNMENT
    room = aligned_bytes(-(-(phase + nbytes) // ALIGNMENT) * ALIGNMENT)
    wanted = room[phase : phase + nbytes]
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if nbytes >= LEAST_BYTES and _DIRECT and not _is_cached(descriptor, begin + nbytes // 2):
            done = _read_directly(path, begin - phase, room)
            if done is not None:
                return wanted, max(0, min(done - phase, nbytes))
        return wanted, _fill(descriptor, begin, wanted, 1)
    finally:
        os.close(descriptor)


def _is_cached(descriptor: int, place: int) -> bool:
    """Whether the page cache holds the page at `place`, as far as the system tells."""
    os.posix_fadvise(
        descriptor, 0, 0, os.POSIX_FADV_RANDOM
    )  # the question itself shall fetch no more than a page
    try:
        return os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT) == 1
    except OSError:  # not without waiting, or not on this file system
        return False
    finally:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_NORMAL)


def _read_directly(path: Path, begin: int, room: Tensor) -> int | None:
    """Fill `room`, all of it aligned; the bytes read, None where the file system refuses."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | _DIRECT)
        try:
            return _fill(descriptor, begin, room, ALIGNMENT)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        return None


def _fill(descriptor: int, begin: int, room: Tensor, block: int) -> int:
    """Read until `room` is full or the file ends; the bytes read."""
    view, done = room.numpy().data, 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], begin + done)
        done += got
        if got == 0 or got % block:  # a direct read stops inside a block only where the file ends
            break
    return done


class PlacedFile:
    """An existing file, open for writing at any place, from several threads. Every method may raise OSError."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._direct = -1
        if _DIRECT:
            with suppress(OSError):  # a file system that knows no direct transfers
                self._direct = os.open(path, os.O_WRONLY | os.O_CLOEXEC | _DIRECT)

    def write(self, data: Tensor, begin: int) -> None:
        """Write uint8 [n] from byte `begin` on. Directly where the address is `begin` modulo ALIGNMENT."""
        view, end = data.numpy().data, begin + data.numel()
        first, last = -(-begin // ALIGNMENT) * ALIGNMENT, end // ALIGNMENT * ALIGNMENT
        fits = (data.data_ptr() - begin) % ALIGNMENT == 0 and data.numel() >= LEAST_BYTES
        if (
            self._direct < 0
            or not fits
            or not self._write_directly(view[first - begin : last - begin], first)
        ):
            write_at(self.descriptor, view, begin)
            return
        write_at(self.descriptor, view[: first - begin], begin)
        write_at(self.descriptor, view[last - begin :], last)

    def _write_directly(self, data: memoryview, begin: int) -> bool:
        """False when the file system refuses; what was written then is written again."""
        done = 0
        try:
            while done < len(data) and done % ALIGNMENT == 0:
                done += os.pwrite(self._direct, data[done:], begin + done)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            return False
        return done == len(data)

    def sync(self) -> None:
        os.fsync(self.descriptor)

    def close(self) -> None:
        os.close(self.descriptor)
        if self._direct >= 0:
            os.close(self._direct)
