"""The choice of options under a budget, against all of them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.calibrators.allocation import Option, fewest_bits, least_loss

options = st.lists(
    st.builds(Option, st.integers(0, 40), st.floats(0, 10, allow_subnormal=False)), min_size=1, max_size=4
)
tables = st.lists(options, min_size=1, max_size=5)


def every(table: list[list[Option]]) -> list[tuple[int, float]]:
    return [
        (sum(one.bits for one in choice), math.fsum(one.loss for one in choice))
        for choice in itertools.product(*table)
    ]


@settings(max_examples=200, deadline=None)
@given(tables, st.integers(0, 120))
def test_least_loss_is_that_of_all_choices(table: list[list[Option]], most: int) -> None:
    fitting = [loss for bits, loss in every(table) if bits <= most]
    found = least_loss(table, most)
    if not fitting:
        assert found is None
        return
    assert found is not None
    assert found.exact
    assert found.bits <= most
    assert found.loss == pytest.approx(min(fitting), rel=1e-9, abs=1e-9)
    assert found.bound <= min(fitting) + 1e-6
    chosen = [unit[number] for unit, number in zip(table, found.chosen, strict=True)]
    assert found.bits == sum(one.bits for one in chosen)


@settings(max_examples=200, deadline=None)
@given(tables, st.floats(0, 30))
def test_fewest_bits_are_those_of_all_choices(table: list[list[Option]], most: float) -> None:
    fitting = [bits for bits, loss in every(table) if loss <= most]
    found = fewest_bits(table, most)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found.loss <= most
        assert found.bits == min(fitting)


def test_the_last_step_is_settled_exactly() -> None:
    """The best ratio comes first in the relaxation, and then the other two together do not fit."""
    table = [
        [Option(0, 7.0), Option(6, 0.0)],
        [Option(0, 5.0), Option(5, 0.0)],
        [Option(0, 5.0), Option(5, 0.0)],
    ]
    found = least_loss(table, 10)
    assert found is not None
    assert (found.chosen, found.bits, found.loss) == ((0, 1, 1), 10, 7.0)


def test_many_units_are_quick_and_the_same_every_time() -> None:
    table = [
        [Option(bits * size, 2.0 ** (-2 * bits) * size * (1 + unit % 7) ** 2) for bits in (4, 5, 8, 16)]
        for unit, size in enumerate((64, 96, 160, 224) * 60)
    ]
    most = 5 * sum(unit[0].bits // 4 for unit in table)
    found = least_loss(table, most)
    assert found is not None
    assert found == least_loss(table, most)
    uniform = [unit[1] for unit in table]
    assert sum(one.bits for one in uniform) == most
    assert found.loss < math.fsum(one.loss for one in uniform)
    assert found.loss - found.bound < 1e-3 * found.loss
