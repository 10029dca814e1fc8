"""Formatting of numbers: where units and notations change."""

from __future__ import annotations

import math

import pytest

from qwen_quantize.report.numbers import (
    decibels,
    duration,
    human_bytes,
    human_count,
    percent,
    scientific,
    significant,
)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (10 * 2**20, "10.0 MiB"),
        (100 * 2**20, "100 MiB"),
        (2**30 - 1, "1.00 GiB"),  # not 1024 MiB
        (8 * 2**30, "8.00 GiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_bytes(count: int, expected: str) -> None:
    assert human_bytes(count) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0"), (999_999, "999,999"), (3_300_000, "3.30 million"), (671 * 10**9, "671 billion")],
)
def test_counts(count: int, expected: str) -> None:
    assert human_count(count) == expected


@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.0129, "1.29%"),
        (0.0, "0.00%"),
        (1.0, "100.00%"),
        (0.99999, "99.999%"),  # never rounded up to all
        (0.000004, "0.0004%"),  # never rounded down to none
        (None, "n/a"),
        (math.nan, "n/a"),
        (math.inf, "∞"),
    ],
)
def test_percent(fraction: float | None, expected: str) -> None:
    assert percent(fraction) == expected


def test_signed_percent() -> None:
    assert percent(0.0129, signed=True) == "+1.29%"
    assert percent(-0.0129, signed=True) == "-1.29%"
    assert percent(-0.5, 0) == "-50%"


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (31.4172839, "31.4"),
        (0.0042131, "0.00421"),
        (0.001, "0.00100"),
        (0.00099999, "0.00100"),
        (0.000999, "9.99e-4"),
        (-1234.5, "-1234"),
        (1e7, "1.00e7"),
        (0.0, "0"),
        (math.inf, "∞"),
        (-math.inf, "-∞"),
        (math.nan, "n/a"),
        (None, "n/a"),
    ],
)
def test_significant(x: float | None, expected: str) -> None:
    assert significant(x) == expected


def test_scientific_and_decibels() -> None:
    assert [scientific(x) for x in (0.00318, 12.0, 0.0, None)] == ["3.18e-3", "1.20e1", "0", "n/a"]
    assert [decibels(x) for x in (31.25, math.inf, None)] == ["31.2", "exact", "n/a"]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.424, "0.42 s"),
        (12.34, "12.3 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7500, "2 h 05 min"),
        (math.inf, "n/a"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    assert duration(seconds) == expected
