"""What the C library does with memory that was freed; where it is not glibc, nothing is changed."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of mallopt
_KEPT = 32 << 20


def keep_freed_memory() -> None:
    """Keep up to 32 MiB that were freed for the next tensors, in one place that all threads share.

    By default the pages of every intermediate tensor are handed back and faulted in again; and each thread has a place
    of its own, which once it is warm keeps tens of MiB that no other thread can use.
    """
    _call("mallopt", _MMAP_THRESHOLD, _KEPT)
    _call("mallopt", _TRIM_THRESHOLD, _KEPT)
    _call("mallopt", _ARENA_MAX, 1)


def give_back_freed_memory() -> None:
    """Hand what was freed back to the system: for after a step whose memory the next steps do not want again."""
    _call("malloc_trim", 0)


def _call(name: str, *arguments: int) -> None:
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return
    function(*arguments)
