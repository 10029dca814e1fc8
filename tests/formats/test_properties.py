"""Properties that hold for every cast, on inputs that hypothesis chooses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat
from qwen_quantize.formats.tables import E4M3FN, E8M0, FORMATS, FP32

ELEMENT_FORMATS = [fmt for fmt in FORMATS.values() if fmt not in (E8M0, FP32)]
DETERMINISTIC = [r for r in Rounding if r not in (Rounding.STOCHASTIC, Rounding.HYBRID)]
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
formats = st.sampled_from(ELEMENT_FORMATS)
roundings = st.sampled_from(DETERMINISTIC)


def saturating(rounding: Rounding) -> CastRule:
    return CastRule(rounding, Overflow.SATURATE, Subnormals.KEEP)


def scaled(values: list[float], fmt: Format) -> torch.Tensor:
    """Hypothesis likes huge and tiny floats: fold some of them into the format's own range as well."""
    x = torch.tensor(values, dtype=torch.float32)
    return torch.cat((x, torch.remainder(x.double(), 2 * fmt.beyond_max).float(), x.sign() * fmt.max / 3))


@settings(deadline=None)
@given(st.lists(singles, min_size=1, max_size=20), formats, roundings)
def test_round_trip_idempotent_monotone(values: list[float], fmt: Format, rounding: Rounding) -> None:
    rule = saturating(rounding)
    x = scaled(values, fmt).sort().values
    once = quantize_values(x, fmt, rule)
    assert torch.equal(once, decode(encode(x, fmt, rule), fmt))
    assert torch.equal(quantize_values(once, fmt, rule), once)
    if (
        rounding is not Rounding.ODD
    ):  # to odd, a tie between two odd neighbours has none to prefer: still monotone
        assert bool((once.diff() >= 0).all())
    assert bool((once.abs() <= max(fmt.max, -getattr(fmt, "minimum", 0))).all())


@settings(deadline=None)
@given(st.lists(singles, min_size=1, max_size=20), formats)
def test_signs(values: list[float], fmt: Format) -> None:
    x = scaled(values, fmt)
    if isinstance(fmt, IntFormat):
        x = x.clamp(-fmt.max, fmt.max)  # there is one more negative integer
    for rounding in (Rounding.RNE, Rounding.RNA, Rounding.RTZ, Rounding.ODD):
        assert torch.equal(
            quantize_values(-x, fmt, saturating(rounding)), -quantize_values(x, fmt, saturating(rounding))
        )
    floor, ceil = (quantize_values(x, fmt, saturating(r)) for r in (Rounding.FLOOR, Rounding.CEIL))
    assert torch.equal(floor, -quantize_values(-x, fmt, saturating(Rounding.CEIL)))
    inside = x.abs() <= fmt.max
    assert bool((floor <= x)[inside].all())
    assert bool((ceil >= x)[inside].all())
    toward_zero = quantize_values(x, fmt, saturating(Rounding.RTZ))
    assert torch.equal(toward_zero, torch.where(x > 0, floor, ceil))


@settings(deadline=None)
@given(st.lists(singles, min_size=1, max_size=20), formats)
def test_error_bounds(values: list[float], fmt: Format) -> None:
    """Nearest is as near as floor and ceil are, and their gap is one step: half a step at most."""
    x = scaled(values, fmt)
    x = x[x.abs() <= fmt.max]
    floor, ceil, nearest, odd = (
        quantize_values(x, fmt, saturating(r)).double()
        for r in (Rounding.FLOOR, Rounding.CEIL, Rounding.RNE, Rounding.ODD)
    )
    exact = x.double()
    assert bool(((nearest - exact).abs() <= (ceil - floor) / 2).all())
    assert torch.equal((nearest - exact).abs(), torch.minimum(exact - floor, ceil - exact))
    assert bool((((odd == floor) | (odd == ceil)) & ((odd - exact).abs() <= ceil - floor)).all())
    if isinstance(fmt, FloatFormat):
        step = torch.clamp(exact.abs(), min=fmt.min_normal) * 2.0**-fmt.mantissa_bits
        assert bool((ceil - floor <= step).all())


@pytest.mark.parametrize("fmt", ELEMENT_FORMATS, ids=lambda fmt: fmt.name)
def test_stochastic_mean_and_neighbours(fmt: Format) -> None:
    """The mean over many draws is the value: within five standard errors, and never another neighbour."""
    low = quantize_values(torch.tensor([fmt.max / 3]), fmt, saturating(Rounding.RTZ)).double()
    high = quantize_values((low * (1 + 1e-6)).float() + 1e-30, fmt, saturating(Rounding.CEIL)).double()
    draws = 40_000
    for part in (0.0625, 0.5, 0.8125):
        value = float(low + (high - low) * part)
        x = torch.full((draws,), value)
        rounded = quantize_values(
            x, fmt, saturating(Rounding.STOCHASTIC), generator=torch.Generator().manual_seed(17)
        ).double()
        assert set(rounded.tolist()) == {float(low), float(high)}
        up = float((rounded == high).double().mean())
        assert abs(up - part) < 5 * math.sqrt(part * (1 - part) / draws)


def test_stochastic_of_tiny_values_is_rare_and_fair() -> None:
    """2^-12 is an eighth of E4M3FN's smallest value; 2^-40 must practically never become it."""
    rule = saturating(Rounding.STOCHASTIC)
    generator = torch.Generator().manual_seed(1)
    some = quantize_values(torch.full((80_000,), 2.0**-12), E4M3FN, rule, generator=generator)
    assert abs(float((some > 0).double().mean()) - 0.125) < 0.006
    none = quantize_values(torch.full((80_000,), 2.0**-40), E4M3FN, rule, generator=generator)
    assert int((none > 0).sum()) == 0
    first, second = (encode(torch.full((64,), 1.03), E4M3FN, rule, generator=generator) for _ in range(2))
    assert not torch.equal(first, second), "each call draws a new seed"
