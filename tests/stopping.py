"""A run that is stopped while it writes, as by Ctrl-C."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from qwen_quantize.pipeline.journal import Journal


@contextmanager
def stopped_after(units: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Inside, a run is interrupted once it has put so many units on record; gives their names."""
    finish: Callable[..., None] = Journal.finish
    seen: list[str] = []

    def stopping(self: Journal, unit: str, record: dict[str, object]) -> None:
        finish(self, unit, record)
        seen.append(unit)
        if len(seen) == units:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", stopping)
        yield seen
