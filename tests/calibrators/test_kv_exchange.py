"""Choices of widths judged by whole rows of channels: exact damages, budgets, and what sharing a scale hides."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_exchange import SideDamage, exchanged, expected_damage
from qwen_quantize.calibrators.kv_sides import MixedSide, channel_units, total_bits
from qwen_quantize.calibrators.kv_statistics import SideObserver, SideStatistics
from qwen_quantize.formats.kv_scheme import KvElement, KvScaling
from qwen_quantize.formats.tables import FP16, INT4, INT8

SLICES = (
    KvElement(INT4, KvScaling.SLICE, 32),
    KvElement(INT8, KvScaling.SLICE, 32),
    KvElement(FP16),
)


def observed(x: Tensor, derivative: Tensor) -> SideStatistics:
    observer = SideObserver(SLICES)
    for window in range(x.shape[0]):
        observer.add(x[window : window + 1], derivative[window : window + 1])
    return observer.statistics(1.0)


def side_of(x: Tensor, derivative: Tensor, layer: int = 0) -> MixedSide:
    """x, derivative: [windows, heads, tokens, channels]."""
    found = observed(x, derivative)
    heads, dim = found.order.shape
    order = (found.order + dim * torch.arange(heads)[:, None]).flatten()
    units = channel_units(torch.stack(found.damages), 0)
    return MixedSide(layer, False, heads * dim, SLICES, units, order, found.sample)


def random_side(seed: int, size: float = 1.0, layer: int = 0) -> tuple[MixedSide, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 1, 48, 32, generator=generator) * torch.rand(32, generator=generator) * 8
    derivative = size * torch.randn(2, 1, 48, 32, generator=generator) * torch.rand(32, generator=generator)
    return side_of(x, derivative, layer), x, derivative


def reference(x: Tensor, group: int, bits: int) -> Tensor:
    """What INT4 or INT8 in groups of [tokens, channels] leaves of them, in float64, scale and offset in float16."""
    found = torch.empty_like(x)
    for row, into in zip(x.double(), found, strict=True):
        for begin in range(0, len(row), group):
            part = row[begin : begin + group]
            offset = part.min().half().double()
            scale = ((part.max() - offset) / (2**bits - 1)).half().double()
            codes = ((part - offset) / scale).round().clamp(0, 2**bits - 1)
            into[begin : begin + group] = codes * scale + offset
    return found


@pytest.mark.parametrize("choice", [(0, 0, 0, 0), (1, 0, 0, 1), (0, 2, 1, 0), (1, 1, 1, 0), (2, 2, 2, 2)])
def test_the_damage_is_that_of_the_row_as_it_is_stored(choice: tuple[int, ...]) -> None:
    side, x, derivative = random_side(3)
    rows = x[:, 0].flatten(0, 1).half().double()
    left = rows.clone()
    widths = torch.tensor(choice)
    for width, bits in ((0, 4), (1, 8)):
        inside = set(side.units.channels[widths == width].flatten().tolist())
        channels = [channel for channel in side.order.tolist() if channel in inside]
        if channels:
            left[:, channels] = reference(rows[:, channels], 32, bits)
    squares = derivative[:, 0].flatten(0, 1).double().square()
    expected = float((squares * (left - rows).square()).sum(dim=1).mean())
    # A value in the middle between two codes may go either way in float32.
    assert SideDamage(side).of(widths) == pytest.approx(expected, rel=5e-3, abs=1e-12)


def test_a_sample_is_brought_to_the_size_of_all_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    x, derivative = (torch.randn(3, 1, 4096, 32, generator=generator) for _ in range(2))
    side = side_of(x, derivative)
    assert side.sample is not None
    assert side.sample.values.shape == (4096, 32)  # a third of the tokens
    found = SideDamage(side)
    for width in range(2):
        every = float(side.units.costs[:, width].sum())
        exactly = {"rel": 1e-9} if width == 0 else {"rel": 0.05}
        assert found.of(torch.full((4,), width)) == pytest.approx(every, **exactly)


def test_all_windows_are_drawn_from_alike() -> None:
    x = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 1, 4096, 32)
    sample = observed(x, torch.ones_like(x)).sample
    assert sample is not None
    for window in range(4):
        assert float((sample.values[:, 0] == window).double().mean()) == pytest.approx(0.25, abs=0.04)


def test_loud_channels_leave_where_their_neighbours_matter() -> None:
    """Alone, the important group gains most by INT8; with the loud one gone, all others are much finer."""
    generator = torch.Generator().manual_seed(2)
    x, derivative = (torch.randn(2, 1, 64, 32, generator=generator) for _ in range(2))
    loud, important = slice(8, 16), slice(24, 32)
    x[..., loud] *= 20
    derivative[..., loud] *= 0.5
    derivative[..., important] *= 1.5
    side = side_of(x, derivative)
    alone = torch.zeros(4, dtype=torch.int64)
    alone[(side.units.costs[:, 0] - side.units.costs[:, 1]).argmax()] = 1
    limit = side.bits(side.counts(alone))
    (found,) = exchanged([side], [alone], limit)
    wide = side.units.channels[found > 0].flatten().tolist()
    assert sorted(wide) == list(range(8, 16))
    assert expected_damage([side], [found]) < 0.3 * expected_damage([side], [alone])
    assert side.bits(side.counts(found)) <= limit


@pytest.mark.parametrize("seed", range(4))
def test_exchanges_come_near_to_what_trying_everything_finds(seed: int) -> None:
    """Two rows of four groups in three widths: all 6561 choices within the budget."""
    sides = [random_side(seed, 1.0, 0)[0], random_side(seed + 10, 3.0, 1)[0]]
    limit = 2 * 32 * 8.0
    start = [torch.zeros(4, dtype=torch.int64) for _ in sides]
    found = exchanged(sides, start, limit)
    assert total_bits(sides, found) <= limit
    every = []
    for side in sides:
        damage = SideDamage(side)
        choices = [torch.tensor(choice) for choice in itertools.product(range(3), repeat=4)]
        every.append([(damage.of(one), side.bits(side.counts(one))) for one in choices])
    best = min(a + b for a, left in every[0] for b, right in every[1] if left + right <= limit)
    assert best <= expected_damage(sides, found) * (1 + 1e-9)
    assert expected_damage(sides, found) <= 1.25 * best
    assert expected_damage(sides, found) < 0.5 * expected_damage(sides, start)


def test_what_shares_no_scale_stays_as_it_was_chosen() -> None:
    elements = tuple(KvElement(fmt) for fmt in (INT4, INT8, FP16))
    costs = (
        torch.rand(3, 1, 32, generator=torch.Generator().manual_seed(4)).sort(dim=0, descending=True).values
    )
    side = MixedSide(0, False, 32, elements, channel_units(costs, 0), torch.arange(32))
    chosen = [torch.tensor([2, 0, 1, 0])]
    assert exchanged([side], chosen, 32 * 16.0) == chosen
    assert SideDamage(side).of(chosen[0]) == pytest.approx(
        sum(float(side.units.costs[unit, width]) for unit, width in enumerate((2, 0, 1, 0)))
    )
