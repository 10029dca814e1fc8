"""Comparing the version strings of vendors: 8.0.RC1, V1.2, 3.8.0.3-c600u, 9.1.0.alpha002."""

from __future__ import annotations

import re
from functools import total_ordering

_PRE_RELEASE = {"dev": -4, "alpha": -3, "a": -3, "beta": -2, "b": -2, "rc": -1}
_RELEASE = 1  # orders after every pre-release
_PART = re.compile(r"(?P<number>\d+)|(?P<word>[a-z]+)(?P<serial>\d*)")
_CLAUSE = re.compile(r"\s*(?P<sign>==|>=|<=|>|<)?\s*(?P<version>[^\s,<>=]+)\s*")


@total_ordering
class Version:
    """A version that compares as people read it; ValueError when the string has no number in front.

    Numbers compare as numbers and missing ones count as 0, so 1.2 equals 1.2.0. dev < alpha < beta < rc < the
    release. A word after `-` or `+` that is none of these names a build (`-c600u`, `+br2xx`): it is kept for
    printing and does not order.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        body = text.strip().lower().removeprefix("v").split("+")[0]
        parts: list[tuple[int, int]] = []
        for piece in re.split(r"[.\-_]", body):
            match = _PART.match(piece)
            if match is None:
                raise ValueError(f"version {text!r} has the unreadable part {piece!r}")
            if not parts and match["number"] is None:
                raise ValueError(f"version {text!r} does not begin with a number")
            while match is not None:
                if match["number"] is not None:
                    parts.append((_RELEASE, int(match["number"])))
                elif match["word"] in _PRE_RELEASE:
                    parts.append((_PRE_RELEASE[match["word"]], int(match["serial"] or 0)))
                else:
                    break
                end = match.end()
                match = _PART.match(piece, end)
            if match is not None:
                break  # a build name; whatever follows it does not order
        # 7.0.0.alpha1 and 7.0.RC1 are both before 7.0, so the zeros that end the numbers must not count.
        tail = next((index for index, part in enumerate(parts) if part[0] != _RELEASE), len(parts))
        numbers = parts[:tail]
        while numbers and numbers[-1][1] == 0:
            numbers.pop()
        self._numbers = tuple(number for _, number in numbers)
        self._tail = tuple(parts[tail:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self._key() == other._key()

    def __lt__(self, other: Version) -> bool:
        return self._key() < other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Version({self.text!r})"

    def _key(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        # The end of the tail is a release: 8.0.RC1.alpha2 < 8.0.RC1 < 8.0.
        return self._numbers, (*self._tail, (_RELEASE, 0))


def in_range(version: str, versions: str) -> bool:
    """Whether `version` satisfies each clause of `versions` (">=8.0.RC1,<9.0"); ValueError if malformed."""
    have = Version(version)
    return all(_holds(have, sign, Version(wanted)) for sign, wanted in range_clauses(versions))


def range_clauses(versions: str) -> tuple[tuple[str, str], ...]:
    """The (sign, version) pairs of a range; no sign means ==. ValueError if malformed or empty."""
    clauses = []
    for text in versions.split(","):
        match = _CLAUSE.fullmatch(text)
        if match is None:
            raise ValueError(f"version range {versions!r} has the unreadable clause {text!r}")
        Version(match["version"])
        clauses.append((match["sign"] or "==", match["version"]))
    return tuple(clauses)


def _holds(have: Version, sign: str, wanted: Version) -> bool:
    match sign:
        case ">=":
            return have >= wanted
        case "<=":
            return have <= wanted
        case ">":
            return have > wanted
        case "<":
            return have < wanted
        case _:
            return have == wanted
