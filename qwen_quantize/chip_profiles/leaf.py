"""One stated fact: a value, or the reason why there is none, with its confidence and its sources."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class Confidence(StrEnum):
    """How well a fact is supported, from the vendor's own words down to nothing."""

    VENDOR_DOC = "vendor-doc"  # documentation, configuration or code comments of the vendor
    PUBLIC_CODE = "public-code"  # behaviour read from a public repository
    MEASURED = "measured"  # found by experiment, with the script or paper named
    PRESS = "press"  # press, surveys, forums, data sheets quoted second-hand
    MEMORY = "memory"  # well known, but not looked up again
    CLAIM = "claim"  # stated only by a trade article; lives in an overlay that is off by default
    UNKNOWN = "unknown"


# What may decide bits: a press report may fill a data sheet, but not a rounding mode.
DECIDES_BITS = frozenset({Confidence.VENDOR_DOC, Confidence.PUBLIC_CODE, Confidence.MEASURED})


class Absent(Enum):
    """Why a leaf has no value. Truth-testing one raises TypeError, so that a reader has to branch."""

    UNKNOWN = "unknown"  # looked for, nothing public found (or nobody looked: see the source code)
    NOT_APPLICABLE = "not_applicable"  # the question makes no sense for this chip
    NOT_SUPPORTED = "not_supported"  # a document says that the chip does not do this
    DISPUTED = "disputed"  # public sources disagree; the alternatives say how

    def __bool__(self) -> bool:
        raise TypeError(
            f"this fact is {self.value}, which is neither true nor false: test `isinstance(x, Absent)`"
        )


class Status(StrEnum):
    """`known`, or the reason why there is no value."""

    KNOWN = "known"
    UNKNOWN = "unknown"
    NOT_APPLICABLE = "not_applicable"
    NOT_SUPPORTED = "not_supported"
    DISPUTED = "disputed"


Value = bool | int | float | str | tuple[str, ...] | tuple[int, ...]


class LeafKind(StrEnum):
    """The type a leaf's value must have."""

    FLAG = "true or false"
    INTEGER = "a whole number"
    NUMBER = "a number"
    TEXT = "a string"
    TEXTS = "a list of strings"
    INTEGERS = "a list of whole numbers"


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """What a leaf at one place of the profile may hold; `units` lists the allowed ones, the default first."""

    kind: LeafKind
    units: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Alternative:
    """A value that another source gives for the same fact."""

    value: Value
    sources: tuple[str, ...]
    confidence: Confidence = Confidence.UNKNOWN
    note: str = ""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One fact: `value` is an `Absent` member unless `status` is known; `sources` are table codes."""

    value: Value | Absent
    status: Status
    confidence: Confidence
    sources: tuple[str, ...]
    unit: str = ""
    note: str = ""
    alternatives: tuple[Alternative, ...] = ()
    applies_to: str = ""

    def __post_init__(self) -> None:
        expected = Status(self.value.value) if isinstance(self.value, Absent) else Status.KNOWN
        if expected is not self.status:
            raise ValueError(f"leaf with status {self.status} has the value {self.value!r}")

    @property
    def known(self) -> bool:
        """Whether there is a value."""
        return self.status is Status.KNOWN

    def flag(self) -> bool | Absent:
        """The value as a truth value; TypeError when it has another type."""
        if isinstance(self.value, bool | Absent):
            return self.value
        raise TypeError(f"leaf holds {self.value!r}, not true or false")

    def integer(self) -> int | Absent:
        """The value as a whole number; TypeError when it has another type."""
        if isinstance(self.value, Absent) or (
            isinstance(self.value, int) and not isinstance(self.value, bool)
        ):
            return self.value
        raise TypeError(f"leaf holds {self.value!r}, not a whole number")

    def number(self) -> float | Absent:
        """The value as a number in `unit`; TypeError when it has another type."""
        if isinstance(self.value, Absent):
            return self.value
        if isinstance(self.value, int | float) and not isinstance(self.value, bool):
            return float(self.value)
        raise TypeError(f"leaf holds {self.value!r}, not a number")

    def text(self) -> str | Absent:
        """The value as a string; TypeError when it has another type."""
        if isinstance(self.value, str | Absent):
            return self.value
        raise TypeError(f"leaf holds {self.value!r}, not a string")

    def texts(self) -> tuple[str, ...] | Absent:
        """The value as strings; TypeError when it has another type."""
        if isinstance(self.value, Absent):
            return self.value
        if isinstance(self.value, tuple):
            return tuple(str(item) for item in self.value)
        raise TypeError(f"leaf holds {self.value!r}, not a list of strings")

    def integers(self) -> tuple[int, ...] | Absent:
        """The value as whole numbers; TypeError when it has another type."""
        if isinstance(self.value, Absent):
            return self.value
        if isinstance(self.value, tuple):
            return tuple(int(item) for item in self.value)
        raise TypeError(f"leaf holds {self.value!r}, not a list of whole numbers")


def absent(reason: Absent, *, sources: tuple[str, ...], note: str = "") -> Leaf:
    """A leaf without a value."""
    return Leaf(reason, Status(reason.value), Confidence.UNKNOWN, sources, note=note)


UNSTATED = absent(Absent.UNKNOWN, sources=("NONE",))
