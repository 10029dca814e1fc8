"""Reading single values of a `config.json`: each is within its bounds or refused in one sentence that names it.

A key with the value null counts as absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.errors import UserError

# Far above every model that exists; they stop a damaged file before it sizes an allocation or a loop.
MOST_LAYERS = 10_000
MOST_ELEMENTS = 10_000_000
MOST_POSITIONS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Interval:
    """Allowed numbers: low..high, without `low` itself where `above` is set."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: float) -> bool:
        # Compared, never converted: JSON may hold whole numbers that no float can hold. NaN is outside.
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        if self.above:
            return f"a number above {self.low:g} and at most {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"


def shown(value: object) -> str:
    """A value of a JSON file for an error message: one line of at most 80 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print whole numbers of more than 4300 digits
        return "a whole number of more than 4300 digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def wrong(key: str, allowed: str, value: object) -> UserError:
    """The error for a key whose value is not what it must be; None means that the key is missing."""
    found = "no such key" if value is None else shown(value)
    return UserError(f"config.json: {key!r} must be {allowed}, found {found}")


def whole(
    config: Mapping[str, Any], key: str, most: int, default: int | None = None, *, least: int = 1
) -> int:
    """A whole number from `least` to `most`."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        kind = "positive whole number" if least == 1 else f"whole number from {least}"
        raise wrong(key, f"a {kind} up to {most}", value)
    return value


def number(config: Mapping[str, Any], key: str, allowed: Interval, default: float | None) -> float:
    """A number within an interval."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or value not in allowed:
        raise wrong(key, str(allowed), value)
    return float(value)


def switch(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """True or false, and nothing that merely counts as one of them."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):  # the string "false" would count as true
        raise wrong(key, "true or false", value)
    return value


def choice(config: Mapping[str, Any], keys: tuple[str, ...], choices: tuple[str, ...], default: str) -> str:
    """The first of `keys` that is set; older names of a key come last. A prefix `torch.` is dropped."""
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or value.removeprefix("torch.") not in choices:
            raise UserError(
                f"config.json: {key!r} is {shown(value)}, which is not implemented; "
                f"these are: {', '.join(choices)}"
            )
        return value.removeprefix("torch.")
    return default
