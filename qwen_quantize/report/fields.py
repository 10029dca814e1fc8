"""Typed access to a JSON-like record that anybody may have edited: each refusal names the place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from qwen_quantize.errors import UserError

_LARGEST_INTEGER = 2**63 - 1


class Fields:
    """One mapping of the record and the path that leads to it, for messages."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path

    def place(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def has(self, key: str) -> bool:
        """Whether there is a value other than null."""
        return self.values.get(key) is not None

    def text(self, key: str) -> str:
        """A string, made printable on one line; missing or null is empty, numbers become words."""
        value = self.values.get(key)
        if value is None:
            return ""
        if not isinstance(value, str | int | float):
            raise self._wrong(key, "text")
        return printable(str(value))

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number in 0 .. 2**63 - 1."""
        value = self.values.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_INTEGER:
            raise self._wrong(key, "a whole number from 0 on")
        return value

    def number(self, key: str) -> float | None:
        """A float, infinities included; None for missing, null and NaN."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number")
        try:
            number = float(value)
        except OverflowError:
            raise self._wrong(key, "a number") from None
        return None if math.isnan(number) else number

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers; missing or null is empty."""
        listed = Fields(dict(enumerate_keys(self._list(key))), self.place(key))
        found = []
        for index in listed.values:
            number = listed.number(index)
            if number is None or not math.isfinite(number):
                raise listed._wrong(index, "a finite number")
            found.append(number)
        return tuple(found)

    def integers(self, key: str) -> tuple[int, ...]:
        listed = Fields(dict(enumerate_keys(self._list(key))), self.place(key))
        return tuple(listed.integer(index) for index in listed.values)

    def texts(self, key: str) -> tuple[str, ...]:
        listed = Fields(dict(enumerate_keys(self._list(key))), self.place(key))
        return tuple(listed.text(index) for index in listed.values)

    def record(self, key: str) -> Fields:
        """The mapping under a key; missing or null is an empty one."""
        value = self.values.get(key)
        if value is None:
            return Fields({}, self.place(key))
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return Fields(value, self.place(key))

    def records(self, key: str) -> list[Fields]:
        """The list of mappings under a key; missing or null is an empty one."""
        found = []
        for index, item in enumerate(self._list(key)):
            place = f"{self.place(key)}[{index}]"
            if not isinstance(item, Mapping):
                raise UserError(_sentence(place, item, "an object"))
            found.append(Fields(item, place))
        return found

    def pairs(self, key: str) -> tuple[tuple[str, str], ...]:
        """A flat mapping as sorted (name, text) pairs."""
        inner = self.record(key)
        return tuple(sorted((printable(str(name)), inner.text(name)) for name in inner.values))

    def exponents(self, key: str) -> dict[int, int]:
        """A histogram over binary exponents, in ascending order; an exponent outside -149..128 is refused."""
        inner = self.record(key)
        counts: dict[int, int] = {}
        for name in inner.values:
            try:
                exponent = int(name)
            except ValueError:
                raise inner._wrong(name, "a count under a whole exponent") from None
            if not -149 <= exponent <= 128:
                raise inner._wrong(name, "a count under an exponent in -149..128")
            counts[exponent] = counts.get(exponent, 0) + inner.integer(name)
        return dict(sorted(counts.items()))

    def _list(self, key: str) -> list[Any]:
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self._wrong(key, "a list")
        return list(value)

    def _wrong(self, key: str, expected: str) -> UserError:
        return UserError(_sentence(self.place(key), self.values.get(key), expected))


def enumerate_keys(items: list[Any]) -> list[tuple[str, Any]]:
    return [(str(index), item) for index, item in enumerate(items)]


def printable(text: str) -> str:
    """One line without control, bidirectional or surrogate characters: safe for a terminal and for UTF-8."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def _sentence(place: str, value: object, expected: str) -> str:
    shown = printable(repr(value))
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return f"{printable(place)} in the record is {shown}, expected {expected}; repair it or make it anew"
