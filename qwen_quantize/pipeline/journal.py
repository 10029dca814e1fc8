"""What is done: one line per finished unit of work, so that a killed run loses none of them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_quantize.checkpoint.disk import disk_errors, replacing
from qwen_quantize.errors import UserError

_LONGEST_SHOWN = 60  # characters of a value in a message; a digest is longer and tells a reader nothing


class Journal:
    """An append-only JSON-lines file. Its first line names the run; a torn last line is cut off.

    Several threads may finish units at once.

    units: what is finished, by name, in the order in which it was; a later line of a name replaces an earlier one.

    identity: what a resumed run must share with the interrupted one; its values are what JSON can hold.

    Raises UserError when the run was another one or a line is damaged, ResumableError when the disk fails.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.units: dict[str, dict[str, Any]] = {}
        head = _line({"run": dict(identity)})
        whole = found = b""
        if resume:
            with disk_errors(path, 0, "read"):
                found = path.read_bytes() if path.exists() else b""
            whole = found[: found.rfind(b"\n") + 1]
        if not whole:  # no line was ever complete, so nothing was finished
            self._replace(head)
            return
        self._load(whole, json.loads(head)["run"])
        if whole != found:
            self._replace(whole)

    def _load(self, whole: bytes, identity: dict[str, Any]) -> None:
        lines = whole.removesuffix(b"\n").split(b"\n")
        run = self._parse(lines[0], 1).get("run")
        if not isinstance(run, dict):
            raise self._damaged(1)
        differing = [
            _difference(key, run.get(key), identity.get(key))
            for key in {**identity, **run}
            if run.get(key) != identity.get(key)
        ]
        if differing:
            raise UserError(
                f"the interrupted run in {self.path.parent} had another {' and another '.join(differing)}; "
                "resume with the same command, or start again with --overwrite"
            )
        for number, line in enumerate(lines[1:], start=2):
            record = self._parse(line, number)
            unit = record.get("unit")
            if not isinstance(unit, str) or not unit:
                raise self._damaged(number)
            self.units[unit] = record

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._damaged(number) from error
        if not isinstance(record, dict):
            raise self._damaged(number)
        return record

    def _damaged(self, number: int) -> UserError:
        return UserError(
            f"line {number} of {self.path}, the journal of the interrupted run, is damaged; start again with "
            "--overwrite"
        )

    def finish(self, unit: str, record: Mapping[str, Any]) -> None:
        """Make durable that the unit is finished, and what there is to say about it."""
        entry = {"unit": unit, **record}
        line = _line(entry)
        with self._lock, disk_errors(self.path, len(line)), self.path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self.units[unit] = entry

    def linears(self) -> set[str]:
        """The names of all linears that a finished unit has written."""
        return {linear["name"] for record in self.units.values() for linear in record.get("linears", ())}

    def _replace(self, content: bytes) -> None:
        with disk_errors(self.path, len(content)), replacing(self.path) as file:
            file.write(content)


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode() + b"\n"


def _difference(key: str, before: object, now: object) -> str:
    """`key`, and in brackets what differs where a reader can make use of it."""
    if isinstance(before, dict) and isinstance(now, dict):
        fields = {**now, **before}
        parts = [_change(f"{field} ", before.get(field), now.get(field)) for field in fields
                 if before.get(field) != now.get(field)]  # fmt: skip
        return f"{key} ({'; '.join(parts)})"
    shown = _change("", before, now)
    return key if len(shown) > _LONGEST_SHOWN else f"{key} ({shown})"


def _change(name: str, before: object, now: object) -> str:
    return f"{name}{_shown(before)}, now {_shown(now)}"


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
