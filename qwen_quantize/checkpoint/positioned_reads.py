"""Reads by position from files that stay open, from several threads at once."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

from qwen_quantize.checkpoint.disk import read_at

MAX_OPEN = 256  # well below the 1024 descriptors that a process usually has


class PositionedReads:
    """Descriptors of the files read so far; they are closed with this object."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._open)

    def read_into(self, file: Path, begin: int, view: memoryview) -> int:
        """Fill `view`, bytes, from byte `begin` of `file` on; the number of bytes read, fewer at the file's end.

        OSError as the system reports it.
        """
        descriptor, kept = self._descriptor(file)
        try:
            return read_at(descriptor, view, begin)
        finally:
            if not kept:
                os.close(descriptor)

    def _descriptor(self, file: Path) -> tuple[int, bool]:
        """A descriptor and whether it stays open: none is closed while another thread may read from it."""
        with self._lock:
            found = self._open.get(file)
            if found is not None:
                return found, True
            descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            kept = len(self._open) < MAX_OPEN
            if kept:
                self._open[file] = descriptor
            return descriptor, kept


def _close_all(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()
