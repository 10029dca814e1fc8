"""How the commands speak: people on stderr or a terminal, programs through one JSON document on stdout."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

StageProgress = Callable[[str, int, int], None]


class Speaker:
    """Where a command's words go. With `--json` everything for people goes to stderr."""

    def __init__(self, as_json: bool, quiet: bool, verbose: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.console = Console(stderr=as_json, highlight=False)
        self.errors = Console(stderr=True, highlight=False)

    @property
    def terminal(self) -> bool:
        return self.console.is_terminal

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self.terminal:
            self.console.print(text, markup=False)
        else:
            self.console.file.write(text + "\n")
            self.console.file.flush()

    def show(self, tables: list[Table], lines: list[str]) -> None:
        """Tables for a terminal, the same facts as plain lines for a pipe."""
        if self.quiet:
            return
        if self.terminal:
            for table in tables:
                self.console.print(table)
        else:
            for line in lines:
                self.say(line)

    def result(self, record: dict[str, Any]) -> None:
        """The one JSON document of a command that was asked for it."""
        if self.as_json:
            sys.stdout.write(json.dumps(finite(record), indent=2) + "\n")

    @contextmanager
    def progress(self, title: str) -> Iterator[StageProgress]:
        """One bar with an ETA on a terminal, a line every few seconds in a pipe; with `--verbose` one for every step.

        With `--json` such a line is an object with `event`, `stage`, `what`, `done`, `total` and `seconds_left`.
        """
        if self.quiet:
            yield lambda _what, _done, _total: None
        elif self.errors.is_terminal and not self.verbose:
            with Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self.errors,
                transient=True,
            ) as bar:
                tasks: dict[str, Any] = {}

                def draw(what: str, done: int, total: int) -> None:
                    if what not in tasks:
                        tasks[what] = bar.add_task(f"{title}: {what}", total=total)
                    bar.update(tasks[what], completed=done)

                yield draw
        else:
            yield _plain_progress(title, 0 if self.verbose else 1 if self.as_json else 5, self.as_json)


def _plain_progress(title: str, pause: float, as_json: bool) -> StageProgress:
    """pause: seconds between lines, but for the last step of a stage, which always has one."""
    begun: dict[str, float] = {}
    last = [time.monotonic()]

    def write(what: str, done: int, total: int) -> None:
        now = time.monotonic()
        begun.setdefault(what, now)
        if now - last[0] < pause and done != total:
            return
        last[0] = now
        spent = now - begun[what]
        left = spent / done * (total - done) if 0 < done < total else None
        if as_json:
            event = {"event": "progress", "stage": title, "what": what, "done": done, "total": total}
            line = json.dumps({**event, "seconds_left": left})
        else:
            line = f"{title}: {what} {done}/{total}" + ("" if left is None else f", about {left:.0f} s left")
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    return write


def finite(value: Any) -> Any:
    """The same structure with NaN and infinities as null: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def canonical_json(record: dict[str, Any]) -> bytes:
    """The bytes of a record on disk: the same record, the same bytes."""
    text = json.dumps(finite(record), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    return text.encode("utf-8", "backslashreplace")  # a path may hold bytes that are no UTF-8
