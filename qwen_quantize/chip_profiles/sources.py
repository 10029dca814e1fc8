"""The table of sources that leaves cite by code."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Source:
    """One source: its code, what it is, where it is to be found, and the day it was read."""

    code: str
    title: str
    where: str
    read: str


@cache
def source_table() -> Mapping[str, Source]:
    """The shipped sources by code; the table is read-only and the same on every call."""
    text = (files("qwen_quantize.chip_profiles") / "sources.toml").read_text(encoding="utf-8")
    document = tomllib.loads(text)
    read = str(document["read"])
    table = {
        code: Source(code, str(entry["title"]), str(entry.get("where", "")), str(entry.get("read", read)))
        for code, entry in document["sources"].items()
    }
    return MappingProxyType(table)
