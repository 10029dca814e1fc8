"""What is done: one line per finished layer, so that a killed run loses none of them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_quantize.errors import UserError


class Journal:
    """An append-only JSON-lines file. Its first line names the run; a torn last line is cut off."""

    def __init__(self, path: Path, identity: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        self.layers: dict[int, dict[str, Any]] = {}
        if resume and path.exists():
            self._load(dict(identity))
        else:
            path.write_text("")
            self._append({"run": dict(identity)})

    def _load(self, identity: dict[str, Any]) -> None:
        whole = self.path.read_bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in whole.splitlines()]
        if not lines or "run" not in lines[0]:
            self.path.write_text("")
            self._append({"run": identity})
            return
        for key, value in identity.items():
            if lines[0]["run"].get(key) != value:
                raise UserError(
                    f"the interrupted run in {self.path.parent} had another {key}; resume with the same "
                    "command, or start again with --overwrite"
                )
        self.path.write_bytes(whole)
        for line in lines[1:]:
            self.layers[int(line["layer"])] = line

    def finish_layer(self, layer: int, record: Mapping[str, Any]) -> None:
        line = {"layer": layer, **record}
        self._append(line)
        self.layers[layer] = line

    def next_layer(self) -> int:
        """The first layer that is not finished."""
        layer = 0
        while layer in self.layers:
            layer += 1
        return layer

    def _append(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
