"""Pages of a key-value cache: room that comes as the context grows, the newest in memory, older ones in a file.

A page holds a fixed number of tokens of one tensor (the keys or the values of one layer) and never moves. Where a
ceiling is set and the whole cache does not fit under it, the oldest page in memory is written to a file without a
name when a new one begins, and read back by whoever asks for it. What is read are the bytes that were written, and
attention goes through pages in the same order wherever they lie: so a ceiling changes no answer.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from qwen_quantize.checkpoint.disk import FULL, free_bytes, preallocate, write_at
from qwen_quantize.errors import UserError

PAGE_TOKENS = 512
Room = TypeVar("Room")


class CacheLayout(StrEnum):
    """How float32 keys lie in a page. Values lie head by head, token by token, in both."""

    HEAD_MAJOR = "head-major"  # [batch, heads, tokens, dim]
    INTERLEAVED = (
        "interleaved"  # [batch, heads, tokens / 16, dim, 16]: one channel of 16 tokens fills a cache line
    )


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """memory: bytes of a cache that may stay in memory, None: all. layout: None for the fastest.

    folder: of the file for the rest; None for the system's folder of temporary files.
    """

    memory: int | None = None
    layout: CacheLayout | None = None
    page_tokens: int = PAGE_TOKENS
    folder: Path | None = None


IN_MEMORY = CacheOptions()


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Bytes of a full cache, in memory and in the file; resident: pages of each tensor that are in memory."""

    memory: int
    file: int
    resident: int | None = None

    @property
    def total(self) -> int:
        return self.memory + self.file


def plan_pages(whole: int, page: int, fixed: int, pages: int, options: CacheOptions) -> CachePlan:
    """Split a cache between memory and file; UserError where the ceiling leaves no room for the newest page.

    whole: bytes of all pages when the cache is full; page: of one full page of all tensors; fixed: of what always
    stays in memory; pages: how many a tensor has when the cache is full.
    """
    total = fixed + whole
    if options.memory is None or total <= options.memory:
        return CachePlan(total, 0)
    resident = (options.memory - fixed) // page
    if resident < 1:
        raise UserError(
            f"--cache-memory {options.memory} bytes is too little: the newest {options.page_tokens} tokens and what "
            f"belongs to all tokens need {fixed + page} bytes"
        )
    file = (pages - resident) * page
    return CachePlan(total - file, file, resident)


class SpillFile:
    """A temporary file without a name: it is gone when the cache is, or the program, however that ends."""

    def __init__(self, nbytes: int, folder: Path | None) -> None:
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        try:
            self.descriptor, name = tempfile.mkstemp(prefix="qwen_quantize-cache-", dir=self._folder)
            try:
                Path(name).unlink()
            finally:
                self._close = weakref.finalize(self, os.close, self.descriptor)
            preallocate(self.descriptor, nbytes)
        except OSError as error:
            raise self._sentence(error, nbytes) from error

    def write(self, tensors: Sequence[Tensor], offset: int) -> None:
        """Tensors one behind the other, from byte `offset` on."""
        for tensor in tensors:
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            try:
                write_at(self.descriptor, data, offset)
            except OSError as error:
                raise self._sentence(error, len(data)) from error
            offset += len(data)

    def read(self, tensors: Sequence[Tensor], offset: int) -> None:
        """Fill contiguous tensors with what was written at `offset`."""
        for tensor in tensors:
            target = tensor if tensor.device.type == "cpu" else torch.empty_like(tensor, device="cpu")
            view = target.view(-1).view(torch.uint8).numpy().data
            try:
                while len(view):
                    got = os.preadv(self.descriptor, [view], offset)
                    if got == 0:
                        raise OSError(0, "it is shorter than what was written to it")
                    offset, view = offset + got, view[got:]
            except OSError as error:
                raise self._sentence(error, target.nbytes) from error
            if target is not tensor:
                tensor.copy_(target)

    def _sentence(self, error: OSError, nbytes: int) -> UserError:
        if error.errno in FULL:
            return UserError(
                f"the disk is full: the key-value cache needs {nbytes:,} bytes in {self._folder} and "
                f"{free_bytes(self._folder):,} are free; make room, set TMPDIR to a folder on a larger disk, or raise "
                "--cache-memory"
            )
        return UserError(
            f"the key-value cache's file in {self._folder} fails: {error.strerror or error}; set TMPDIR to another "
            "folder, or raise --cache-memory"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Tiers:
    """resident: the newest pages of each tensor, which stay in memory. stride: bytes from page to page in the file."""

    resident: int
    file: SpillFile
    stride: int


def tiers_of(plan: CachePlan, stride: int, options: CacheOptions) -> Tiers | None:
    """The file that a plan asks for, open; None where all pages stay in memory."""
    if plan.resident is None:
        return None
    return Tiers(plan.resident, SpillFile(plan.file, options.folder), stride)


class Pages(Generic[Room]):
    """The pages of one tensor. make: room for so many tokens; tensors_of: the contiguous tensors of a room.

    place: where the tensor's part of a page begins in the file.
    """

    def __init__(
        self,
        make: Callable[[int], Room],
        tensors_of: Callable[[Room], list[Tensor]],
        capacity: int,
        tokens: int,
        tiers: Tiers | None,
        place: int,
    ) -> None:
        self._make, self._tensors_of, self._tiers = make, tensors_of, tiers
        self._capacity, self.tokens, self.place = capacity, tokens, place
        self._rooms: list[Room | None] = []
        self.file_bytes = 0

    def __len__(self) -> int:
        return len(self._rooms)

    @property
    def memory_bytes(self) -> int:
        return sum(t.nbytes for room in self._rooms if room is not None for t in self._tensors_of(room))

    @property
    def rooms(self) -> Sequence[Room | None]:
        """In order; None for a page that is in the file."""
        return self._rooms

    def spans(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(page, first, last) for the tokens begin .. end - 1 by page, counted from the page's first token."""
        found = []
        for page in range(begin // self.tokens, -(-end // self.tokens)):
            base = page * self.tokens
            found.append((page, max(begin - base, 0), min(end - base, self.tokens)))
        return found

    def writable(self, page: int) -> Room:
        """A page in memory, the next one if there is none of this number yet; an older one may leave for it."""
        while len(self._rooms) <= page:
            new = len(self._rooms)
            if self._tiers is not None and new >= self._tiers.resident:
                self._spill(new - self._tiers.resident, self._tiers)
            self._rooms.append(self._make(self._size(new)))
        room = self._rooms[page]
        if room is None:
            raise ValueError(f"page {page} has left memory and cannot be written")
        return room

    def read(self, page: int) -> Room:
        """A page that was written, from memory or from the file."""
        room = self._rooms[page]
        if room is None:
            assert self._tiers is not None
            room = self._make(self._size(page))
            self._tiers.file.read(self._tensors_of(room), self._offset(page, self._tiers))
        return room

    def _size(self, page: int) -> int:
        return min(self.tokens, self._capacity - page * self.tokens)

    def _offset(self, page: int, tiers: Tiers) -> int:
        return page * tiers.stride + self.place

    def _spill(self, page: int, tiers: Tiers) -> None:
        room = self._rooms[page]
        assert room is not None
        tensors = self._tensors_of(room)
        tiers.file.write(tensors, self._offset(page, tiers))
        self.file_bytes += sum(tensor.nbytes for tensor in tensors)
        self._rooms[page] = None
