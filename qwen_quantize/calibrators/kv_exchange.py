"""Widths of channel groups once more, where the error of one group depends on the widths of others.

Channels of a token that share a scale share its range too: taking a loud one out makes all that stay finer, so that
what a group of channels gains at another width is not its own gain alone. Here choices are judged by the errors that
the whole row of channels really makes on a sample of tokens. From a choice within a budget, single groups change
width, whole rows do, and pairs of such changes in different rows pay for each other, for as long as any of that makes
less damage in the sum and the bits, counted exactly, stay within the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_sides import MixedSide, total_bits
from qwen_quantize.formats.kv_codec import requantized

_ROUNDS_PER_SIDE = 4
_BEST = 4  # groups up and down that are tried as pairs within one row
_SMALLEST_GAIN = 1e-6  # of the whole damage


class SideDamage:
    """What any choice of widths costs on one side; remembers parts that were measured.

    The sum over a sample is brought to the size that all tokens gave for the lowest width of everything, for which
    costs are exact.
    """

    def __init__(self, side: MixedSide) -> None:
        self.side = side
        self._known: dict[tuple[int, bytes], float] = {}
        self._unit = torch.empty(side.width, dtype=torch.int64)  # each channel's
        self._unit[side.units.channels] = torch.arange(side.units.channels.shape[0]).unsqueeze(1)
        self._scale = 1.0
        if side.sample is not None:
            lowest = torch.zeros(side.units.channels.shape[0], dtype=torch.int64)
            found = self.of(lowest)
            self._scale = float(side.units.costs[:, 0].sum()) / found if found > 0 else 1.0

    def of(self, widths: Tensor) -> float:
        """widths: int64 [units], indices into the side's elements."""
        if self.side.sample is None:
            return float(self.side.units.costs.gather(1, widths.unsqueeze(1)).sum())
        return self._scale * sum(self._part(width, widths == width) for width in set(widths.tolist()))

    def _part(self, width: int, units: Tensor) -> float:
        key = (width, units.numpy().tobytes())
        if key not in self._known:
            sample, order = self.side.sample, self.side.order
            assert sample is not None
            channels = order[units[self._unit[order]]]
            values = sample.values[:, channels].float()
            errors = requantized(values, self.side.elements[width]) - values
            self._known[key] = float((sample.squares[:, channels] * errors.square()).sum(dtype=torch.float64))
        return self._known[key]


def expected_damage(sides: Sequence[MixedSide], chosen: Sequence[Tensor]) -> float:
    """What a choice costs over all sides."""
    return sum(SideDamage(side).of(widths) for side, widths in zip(sides, chosen, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A side's other choice, and by how much damage and bits change with it."""

    side: int
    damage: float
    bits: float
    widths: Tensor


def exchanged(sides: Sequence[MixedSide], chosen: Sequence[Tensor], limit: float) -> list[Tensor]:
    """A choice of no more than `limit` bits of one token that costs no more than `chosen`, which keeps to them."""
    chosen = list(chosen)
    if all(side.sample is None for side in sides):
        return chosen
    damages = [SideDamage(side) for side in sides]
    whole = sum(damage.of(widths) for damage, widths in zip(damages, chosen, strict=True))
    moves = [_moves(number, damage, chosen[number]) for number, damage in enumerate(damages)]
    for _ in range(_ROUNDS_PER_SIDE * len(sides)):
        best = _best(moves, limit - total_bits(list(sides), chosen))
        if sum(move.damage for move in best) >= -_SMALLEST_GAIN * whole:
            break
        for move in best:
            chosen[move.side] = move.widths
            moves[move.side] = _moves(move.side, damages[move.side], move.widths)
    return chosen


def _best(moves: Sequence[Sequence[_Move]], left: float) -> tuple[_Move, ...]:
    """The move, or the two moves of different sides, that cost least together for `left` more bits."""
    flat = [move for of_side in moves for move in of_side]
    if not flat:
        return ()
    # The last row stands for no move.
    damage = torch.tensor([move.damage for move in flat] + [0.0], dtype=torch.float64)
    bits = torch.tensor([move.bits for move in flat] + [0.0], dtype=torch.float64)
    side = torch.tensor([move.side for move in flat] + [-1])
    refused = (bits.unsqueeze(1) + bits > left) | (side.unsqueeze(1) == side)
    together = (damage.unsqueeze(1) + damage).masked_fill(refused, float("inf"))
    pair = divmod(int(together.argmin()), len(side))
    return tuple(flat[number] for number in pair if number < len(flat)) if together.min() < 0 else ()


def _moves(number: int, damage: SideDamage, now: Tensor) -> list[_Move]:
    """Of each change of bits the choice that costs least."""
    side = damage.side
    base, bits = damage.of(now), side.bits(side.counts(now))
    found: dict[float, _Move] = {}

    def look(widths: Tensor) -> float:
        move = _Move(number, damage.of(widths) - base, side.bits(side.counts(widths)) - bits, widths)
        if move.bits not in found or move.damage < found[move.bits].damage:
            found[move.bits] = move
        return move.damage

    singles = []
    for unit, own in enumerate(now.tolist()):
        for width in range(len(side.elements)):
            if width != own:
                widths = now.clone()
                widths[unit] = width
                singles.append((look(widths), unit, own, width))
    for width in range(len(side.elements)):
        look(torch.full_like(now, width))
    rising = sorted(one for one in singles if one[3] > one[2])[:_BEST]
    falling = sorted(one for one in singles if one[3] < one[2])[:_BEST]
    for _, up, _, wider in rising:
        for _, down, _, narrower in falling:
            if up != down:
                widths = now.clone()
                widths[up], widths[down] = wider, narrower
                look(widths)
    return [move for move in found.values() if move.damage < 0 or move.bits < 0]
