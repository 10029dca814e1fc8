"""Make the small task set of the package from its held-out text.

    python tools/local_tasks.py [--check]

Writes three JSON-lines files into `qwen_quantize/embedded/tasks`, each item with the passage it is from as its
`document`; with --check only says whether they are what would be written. The same text gives the same bytes.

Each shows up to 64 words before the answer.

- `heldout_cloze`: the last word of a clause, which has occurred in those words before.
- `heldout_word`: which of four words stands in a gap at the end; the three wrong ones end alike and are as frequent.
- `heldout_sentence`: which of four sentences follows; the three wrong ones are of the same novel and about as long.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EMBEDDED = Path(__file__).resolve().parent.parent / "qwen_quantize" / "embedded"
FOLDER = EMBEDDED / "tasks"

PASSAGE_WORDS = 150
CONTEXT_WORDS = 64
ITEMS_PER_PASSAGE = 3
CHOICES = 4

_SENTENCE_END = re.compile(r"(?<=[.!?])[\"']?\s+(?=[\"']?[A-Z])")
_WORD = re.compile(r"[A-Za-z]+")
_SHORTEST_CLOZE = 2  # letters; a single one is too easily guessed
_SHORTEST_GAP = 5
_SHORTEST_CONTEXT = 40  # words before the answer
_SENTENCE_WORDS = range(8, 31)
_FREQUENCY_RATIO = 4.0  # a wrong word is at most this much more or less frequent than the right one

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Passage:
    """Whole paragraphs of one chapter, as one line of text, and where its sentences begin."""

    name: str
    text: str
    sentence_starts: tuple[int, ...]

    def sentence(self, number: int) -> str:
        ends = (*self.sentence_starts[1:], len(self.text))
        return self.text[self.sentence_starts[number] : ends[number]].strip()


def passages(novel: str) -> list[Passage]:
    """Consecutive paragraphs, strung together until there are `PASSAGE_WORDS`; what is left of a chapter is dropped."""
    found: list[Passage] = []
    chapter, waiting = 0, ""
    for paragraph in novel.split("\n\n"):
        line = " ".join(paragraph.split())
        if re.fullmatch(r"Chapter \d+", line):
            chapter, waiting = int(line.split()[1]), ""
            continue
        waiting = f"{waiting} {line}".strip()
        if len(waiting.split()) >= PASSAGE_WORDS:
            starts = (0, *(match.end() for match in _SENTENCE_END.finditer(waiting)))
            found.append(Passage(f"chapter-{chapter}/{len(found):03d}", waiting, starts))
            waiting = ""
    return found


def cloze(all_passages: Sequence[Passage]) -> Iterable[Item]:
    for passage in all_passages:
        candidates = []
        for match in re.finditer(r" ([a-z]+)(?=[.!?;:,])", passage.text):
            before, word = _context(passage, match.start()), match[1]
            known = {found.lower() for found in _WORD.findall(before)}
            if len(word) >= _SHORTEST_CLOZE and word in known and len(before.split()) >= _SHORTEST_CONTEXT:
                candidates.append({"context": before, "target": f" {word}"})
        yield from _kept(passage, "cloze", candidates)


def word_choice(all_passages: Sequence[Passage]) -> Iterable[Item]:
    counts = Counter(word for passage in all_passages for word in re.findall(r" ([a-z]+)\b", passage.text))
    by_ending: dict[str, list[str]] = {}
    for word in sorted(counts):
        if len(word) >= _SHORTEST_GAP:
            by_ending.setdefault(word[-2:], []).append(word)
    for passage in all_passages:
        candidates = []
        for match in re.finditer(r" ([a-z]+)\b", passage.text):
            before, word = _context(passage, match.start()), match[1]
            if len(word) < _SHORTEST_GAP or len(before.split()) < _SHORTEST_CONTEXT:
                continue
            others = [
                other
                for other in by_ending[word[-2:]]
                if other != word and 1 / _FREQUENCY_RATIO <= counts[other] / counts[word] <= _FREQUENCY_RATIO
            ]
            if len(others) >= CHOICES - 1:
                place = f"{passage.name}/word/{match.start()}"
                candidates.append(_choice(before, f" {word}", [f" {other}" for other in others], place))
        yield from _kept(passage, "word", candidates)


def sentence_choice(all_passages: Sequence[Passage]) -> Iterable[Item]:
    every = [
        (passage.name, passage.sentence(number))
        for passage in all_passages
        for number in range(len(passage.sentence_starts))
    ]
    for passage in all_passages:
        candidates = []
        for number, start in enumerate(passage.sentence_starts):
            before, right = _context(passage, start), passage.sentence(number)
            size = len(right.split())
            if size not in _SENTENCE_WORDS or len(before.split()) < _SHORTEST_CONTEXT:
                continue
            others = [
                f" {text}"
                for name, text in every
                if name != passage.name and text != right and abs(len(text) - len(right)) <= len(right) // 10
            ]
            if len(others) >= CHOICES - 1:
                candidates.append(_choice(before, f" {right}", others, f"{passage.name}/sentence/{start}"))
        yield from _kept(passage, "sentence", candidates)


def _context(passage: Passage, end: int) -> str:
    return " ".join(passage.text[:end].split(" ")[-CONTEXT_WORDS:]).rstrip()


def _kept(passage: Passage, task: str, candidates: list[Item]) -> Iterable[Item]:
    """A few of a passage's candidates, picked by a hash of what they are, in the order of the text."""
    picked = sorted(range(len(candidates)), key=lambda i: _draw(f"{passage.name}/{task}/{i}"))
    for index, place in enumerate(sorted(picked[:ITEMS_PER_PASSAGE])):
        yield {"id": f"{passage.name}/{index}", "document": passage.name, **candidates[place]}


def _choice(context: str, right: str, wrong: list[str], place: str) -> Item:
    drawn = sorted(dict.fromkeys(wrong), key=lambda text: _draw(f"{place}/{text}"))[: CHOICES - 1]
    return {"context": context, "choices": [right, *drawn], "answer": 0}


def _spread(items: Iterable[Item]) -> Iterable[Item]:
    """The right answer stands first, second, third, fourth, and first again."""
    for number, item in enumerate(items):
        if "answer" not in item:
            yield item
            continue
        right, *wrong = item["choices"]
        answer = number % CHOICES
        yield {**item, "choices": [*wrong[:answer], right, *wrong[answer:]], "answer": answer}


def _draw(text: str) -> bytes:
    """A random order that no version of Python changes."""
    return hashlib.sha256(text.encode()).digest()


def files() -> dict[str, str]:
    """The content of every file, by name."""
    found = passages((EMBEDDED / "heldout.txt").read_text(encoding="utf-8"))
    tasks = {"heldout_cloze": cloze, "heldout_word": word_choice, "heldout_sentence": sentence_choice}
    return {
        f"{name}.jsonl": "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in _spread(make(found)))
        for name, make in tasks.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 where a file is stale"
    )
    check = parser.parse_args(arguments).check
    stale = [
        name
        for name, text in files().items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    for name in stale:
        sys.stderr.write(f"{'stale' if check else 'written'}: {FOLDER / name}\n")
        if not check:
            (FOLDER / name).write_text(files()[name], encoding="utf-8")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
