"""The words of the two editions, and what the makers of their tables share."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class ReadmeError(RuntimeError):
    """A README or the results cannot be used; says which and why."""


@dataclass(frozen=True, slots=True)
class Language:
    """One edition: its file and its words for what the tables say."""

    file: str
    words: Mapping[str, str]

    def __call__(self, word: str) -> str:
        """The edition's word; in English most words stand for themselves."""
        return self.words.get(word, word)


WORDS = tomllib.loads(Path(__file__).with_name("readme_words.toml").read_text(encoding="utf-8"))
ENGLISH = Language("README.md", WORDS["en"])
CHINESE = Language("README.zh-CN.md", WORDS["zh"])
LANGUAGES = (ENGLISH, CHINESE)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def shown(say: Language, path: Path, part: Callable[[Language, Any], str]) -> str:
    """What `part` makes of the file, nothing where there is none."""
    if not path.is_file():
        return ""
    try:
        return part(say, json.loads(path.read_text(encoding="utf-8")))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ReadmeError(f"{path}: not what makes it, see the top of this tool ({error!r})") from error
