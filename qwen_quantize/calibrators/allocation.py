"""One option for each unit so that the sum of their costs is least under a budget: multiple-choice knapsack.

The Lagrangian relaxation gives a bound and a start (Sinha and Zoltners, 1979): each unit walks along the lower convex
hull of its options, the best ratio of cost won to budget spent first. What the gap between bound and start leaves
open is settled by merging the units' remaining options, dominated sums left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_SUMS = 20_000  # of merged options that are held at a time


@dataclass(frozen=True, slots=True)
class Option:
    """bits: exactly what the unit takes; loss: what it is predicted to cost. Neither is negative."""

    bits: int
    loss: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """chosen: the number of each unit's option. bound: no choice within the budget costs less than this.

    exact: nothing within the budget costs less than this choice.
    """

    chosen: tuple[int, ...]
    bits: int
    loss: float
    bound: float
    exact: bool


def least_loss(table: Sequence[Sequence[Option]], most_bits: int) -> Allocation | None:
    """The choice with the least summed loss that takes at most so many bits; None where none does."""
    costs = [[option.loss for option in options] for options in table]
    spent = [[float(option.bits) for option in options] for options in table]
    return _allocated(table, _solve(costs, spent, float(most_bits)))


def fewest_bits(table: Sequence[Sequence[Option]], most_loss: float) -> Allocation | None:
    """The choice with the fewest bits whose summed loss is at most this; None where there is none."""
    costs = [[float(option.bits) for option in options] for options in table]
    spent = [[option.loss for option in options] for options in table]
    return _allocated(table, _solve(costs, spent, most_loss))


def _allocated(
    table: Sequence[Sequence[Option]], found: tuple[list[int], float, bool] | None
) -> Allocation | None:
    if found is None:
        return None
    chosen, bound, exact = found
    options = [unit[number] for unit, number in zip(table, chosen, strict=True)]
    bits, loss = sum(option.bits for option in options), _total(option.loss for option in options)
    return Allocation(tuple(chosen), bits, loss, bound, exact)


def _total(values: object) -> float:
    return float(math.fsum(values))  # type: ignore[arg-type]


def _hull(costs: Sequence[float], spent: Sequence[float]) -> list[int]:
    """The options on the lower convex hull of cost over what is spent, by what they spend."""
    order = sorted(range(len(costs)), key=lambda i: (spent[i], costs[i], i))
    hull: list[int] = []
    for i in order:
        if hull and costs[i] >= costs[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            left = (costs[a] - costs[b]) * (spent[i] - spent[b])
            if left > (costs[b] - costs[i]) * (spent[b] - spent[a]):
                break
            hull.pop()
        hull.append(i)
    return hull


def _solve(
    costs: list[list[float]], spent: list[list[float]], most: float
) -> tuple[list[int], float, bool] | None:
    """(chosen, bound, exact), or None where even the options that spend least spend too much."""
    hulls = [_hull(*unit) for unit in zip(costs, spent, strict=True)]
    chosen = [hull[0] for hull in hulls]
    if _spends(chosen, spent) > most:
        return None
    steps = []
    for unit, hull in enumerate(hulls):
        for before, after in itertools.pairwise(hull):
            won = costs[unit][before] - costs[unit][after]
            steps.append((-won / (spent[unit][after] - spent[unit][before]), unit, after))
    steps.sort(key=lambda step: step[0])  # stable: a unit's own steps stay in order
    price, stopped = 0.0, set()
    for ratio, unit, after in steps:
        if unit in stopped:
            continue
        before, chosen[unit] = chosen[unit], after
        if _spends(chosen, spent) > most:
            chosen[unit] = before
            stopped.add(unit)
            price = price or -ratio
    reduced = [
        [cost + price * takes for cost, takes in zip(*unit, strict=True)]
        for unit in zip(costs, spent, strict=True)
    ]
    least = [min(unit) for unit in reduced]
    bound = _total(least) - price * most
    best = _total(costs[unit][number] for unit, number in enumerate(chosen))
    if price == 0.0:  # nothing was refused: every unit has its best
        return chosen, best, True
    slack = 1e-9 * max(abs(best), abs(_total(least)))
    kept = [
        [number for number, value in enumerate(unit) if value - floor <= best - bound + slack]
        for unit, floor in zip(reduced, least, strict=True)
    ]
    merged, exact = _merge(kept, costs, spent, most, reduced, least, best + price * most + slack)
    if merged is not None and _total(costs[u][n] for u, n in enumerate(merged)) < best:
        chosen = merged
    return chosen, bound, exact


def _spends(chosen: Sequence[int], spent: list[list[float]]) -> float:
    return _total(spent[unit][number] for unit, number in enumerate(chosen))


def _merge(
    kept: list[list[int]],
    costs: list[list[float]],
    spent: list[list[float]],
    most: float,
    reduced: list[list[float]],
    least: list[float],
    limit: float,
) -> tuple[list[int] | None, bool]:
    """(the best choice among the kept options, whether none was left out for want of room).

    limit: of the sum of reduced costs, above which a choice is no better than what is known.
    """
    rest = [0.0]
    for value in reversed(least):
        rest.append(rest[-1] + value)
    rest.reverse()  # rest[u]: the least that units from u on add
    floor = [0.0]
    for unit, numbers in reversed(list(enumerate(kept))):
        floor.append(floor[-1] + min(spent[unit][number] for number in numbers))
    floor.reverse()
    sums: list[tuple[float, float, float, tuple[int, ...] | tuple[object, ...]]] = [(0.0, 0.0, 0.0, ())]
    exact = True
    room = most * (1 + 1e-12)
    for unit, numbers in enumerate(kept):
        grown = []
        for takes, cost, value, trail in sums:
            for number in numbers:
                now, worth = takes + spent[unit][number], value + reduced[unit][number]
                if now + floor[unit + 1] <= room and worth + rest[unit + 1] <= limit:
                    grown.append((now, cost + costs[unit][number], worth, (trail, number)))
        grown.sort(key=lambda one: (one[0], one[1]))
        sums = []
        for one in grown:
            if not sums or one[1] < sums[-1][1]:
                sums.append(one)
        if len(sums) > _MOST_SUMS:
            exact = False
            sums = sorted(sorted(sums, key=lambda one: one[2])[:_MOST_SUMS], key=lambda one: one[0])
    for _, _, _, trail in sorted(sums, key=lambda one: one[1]):
        chosen: list[int] = []
        while trail:
            trail, number = trail  # type: ignore[assignment]
            chosen.append(number)
        chosen.reverse()
        if _spends(chosen, spent) <= most:
            return chosen, exact
    return None, exact
