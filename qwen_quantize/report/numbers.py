"""Numbers as people read them: bytes, percents, significant digits, durations."""

from __future__ import annotations

import math

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COUNT_UNITS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
NOT_MEASURED = "n/a"  # stands for None and NaN


def human_bytes(count: int | float) -> str:
    """1536 -> '1.50 KiB': three significant digits in powers of 1024; whole numbers below 1 KiB."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    value, unit = float(count), 0
    # 1023.6 KiB would print as 1024 KiB: what rounds up to a full unit is shown in the next one.
    while abs(value) >= 1023.5 and unit + 1 < len(_BYTE_UNITS):
        value, unit = value / 1024, unit + 1
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f} {_BYTE_UNITS[unit]}"


def human_count(count: int) -> str:
    """3300000 -> '3.30 million'; below a million every digit, with thousands separators."""
    for size, word in _COUNT_UNITS:
        if count >= size:
            return f"{significant(count / size, 3)} {word}"
    return f"{count:,}"


def percent(fraction: float | None, decimals: int = 2, *, signed: bool = False) -> str:
    """0.0129 -> '1.29%'. Digits are added, up to eight, before something small would print as nothing.

    The same holds close to 100%: 0.99999 is '99.999%', never '100.00%'.
    """
    if fraction is None or math.isnan(fraction):
        return NOT_MEASURED
    value = 100 * fraction
    if math.isinf(value):
        return ("+∞" if signed else "∞") if value > 0 else "-∞"
    while decimals < 8 and abs(value) not in (0.0, 100.0) and round(abs(value), decimals) in (0.0, 100.0):
        decimals += 1
    return f"{value:+.{decimals}f}%" if signed else f"{value:.{decimals}f}%"


def significant(x: float | None, digits: int = 3) -> str:
    """Fixed notation from 0.001 to 999999, else '1.20e-4'; None and NaN are 'n/a', infinity is '∞'."""
    if x is None or math.isnan(x):
        return NOT_MEASURED
    if math.isinf(x):
        return "∞" if x > 0 else "-∞"
    if x == 0:
        return "0"
    mantissa, exponent = f"{x:.{digits - 1}e}".split("e")  # the exponent after rounding, without a logarithm
    power = int(exponent)
    if -3 <= power < 6:
        return f"{x:.{max(0, digits - 1 - power)}f}"
    return f"{mantissa}e{power}"


def scientific(x: float | None, digits: int = 3) -> str:
    """0.00318 -> '3.18e-3': one notation for a whole column of errors."""
    if x is None or not math.isfinite(x) or x == 0:
        return significant(x, digits)
    mantissa, exponent = f"{x:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def decibels(value: float | None, decimals: int = 1, *, unit: bool = False) -> str:
    """A ratio in dB; 'exact' for infinity: no noise at all."""
    if value is None or math.isnan(value):
        return NOT_MEASURED
    return "exact" if value == math.inf else f"{value:.{decimals}f}{' dB' if unit else ''}"


def duration(seconds: float) -> str:
    """0.42 -> '0.42 s', 185 -> '3 min 05 s', 7500 -> '2 h 05 min'."""
    if not math.isfinite(seconds):
        return NOT_MEASURED
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"
