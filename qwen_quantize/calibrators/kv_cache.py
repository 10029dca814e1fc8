"""Mixed precision in the key-value cache: every group of channels gets the width that its bits buy most with.

Groups lie within one head, a multiple of eight channels wide; of keys they are made of the pairs that rotary embedding
turns together. Costs are additive, so the best choice under a budget is that of some price per bit: the price is
found by bisection, and what the budget then has left is spent on the steps that gain most per bit. Bits are counted
exactly, scales included, for all layers together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_plans import require_attention, require_even
from qwen_quantize.calibrators.kv_statistics import KvStatistics
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule
from qwen_quantize.formats.kv_plan import KvLayer, KvPart, KvPlan, KvTensor
from qwen_quantize.formats.kv_scheme import KvElement, KvScheme, mixed_bits, widened
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import FP16, INT4, INT8
from qwen_quantize.models.config import ModelConfig

WIDTHS: tuple[Format, ...] = (INT4, INT8, FP16)
_UNIT = 8  # channels; an eighth of a head where that is more
_BISECTIONS = 80


def mixed_elements(scheme: KvScheme, config: ModelConfig) -> tuple[list[KvElement], list[KvElement]]:
    """The elements of all widths but the last, for keys and for values: FP16 costs nothing that counts."""
    key, value = scheme.key_element(config.head_dim), scheme.value_element(config.value_dim)
    return [widened(key, fmt) for fmt in WIDTHS[:-1]], [widened(value, fmt) for fmt in WIDTHS[:-1]]


@dataclass(frozen=True, slots=True, eq=False)
class ChannelUnits:
    """The groups of one layer's keys or values that are decided together.

    channels: int64 [units, size], numbers in the layer's row of channels. costs: float64 [units, widths].
    """

    channels: Tensor
    costs: Tensor


def channel_units(damage: Tensor, pairs: int | None) -> ChannelUnits:
    """damage: [widths, heads, dim], what each width costs at each channel. pairs: rotated channels of a key.

    Within a head, pairs (or channels) are sorted by what the lowest width costs and taken in that order.
    """
    heads, dim = damage.shape[1:]
    size = unit_size(dim)
    order = torch.stack([_order(damage[0, head], pairs) for head in range(heads)])
    grouped = order.view(heads, dim // size, size)
    numbers = grouped + dim * torch.arange(heads).view(-1, 1, 1)
    costs = torch.gather(damage.double(), 2, order.expand(damage.shape[0], -1, -1))
    costs = costs.view(damage.shape[0], heads, dim // size, size).sum(dim=-1)
    return ChannelUnits(numbers.flatten(0, 1), costs.flatten(1).T)


def unit_size(dim: int) -> int:
    """Channels that are decided together: an eighth of a head, eight at least, a divisor of its size."""
    size = max(_UNIT, dim // 8)
    while dim % size or size % 2:
        size += 1
        if size > dim:
            raise UserError(
                f"--kv-cache mixed: heads of {dim} channels, an odd number, do not split into pairs"
            )
    return size


def _order(cost: Tensor, pairs: int | None) -> Tensor:
    """Channels of one head by falling cost; the halves of the first `pairs` channels two by two."""
    if not pairs:
        return cost.argsort(descending=True, stable=True)
    half = pairs // 2
    couples = torch.stack((torch.arange(half), torch.arange(half) + half), dim=1)
    rest = torch.arange(pairs, cost.shape[0])
    if rest.shape[0] % 2:
        raise UserError(f"--kv-cache mixed: heads of {cost.shape[0]} channels do not split into pairs")
    couples = torch.cat((couples, rest.view(-1, 2)))
    return couples[cost[couples].sum(dim=1).argsort(descending=True, stable=True)].flatten()


@dataclass(frozen=True, slots=True, eq=False)
class MixedSide:
    """One layer's keys or values to decide on. elements: of each width."""

    layer: int
    keys: bool
    width: int
    elements: tuple[KvElement, ...]
    units: ChannelUnits

    def bits(self, counts: Tensor) -> float:
        """Bits of one token with so many channels of each width."""
        return sum(
            element.bits_per_token(int(count))
            for element, count in zip(self.elements, counts, strict=True)
            if count
        )

    def counts(self, chosen: Tensor) -> Tensor:
        """Channels of each width."""
        return torch.bincount(chosen, minlength=len(self.elements)) * self.units.channels.shape[1]

    def tensor(self, chosen: Tensor) -> KvTensor:
        """Up to one part for each width; channels ascend in each, so that a head's lie together."""
        parts = []
        for width, element in enumerate(self.elements):
            channels = self.units.channels[chosen == width].flatten().sort().values
            if channels.numel():
                require_even(element, channels.numel())
                parts.append(KvPart(element, channels.numel(), channels))
        if len(parts) == 1:
            parts = [KvPart(parts[0].element, self.width)]
        return KvTensor(self.width, tuple(parts))


def mixed_sides(
    scheme: KvScheme, config: ModelConfig, statistics: Mapping[int, KvStatistics]
) -> list[MixedSide]:
    """Keys and values of every layer with attention, with what each width costs there."""
    sides = []
    key, value = mixed_elements(scheme, config)
    rotated = config.rope.rotary_dim(config.rotary_head_dim)
    for layer, seen in sorted(statistics.items()):
        for keys, elements, errors, factor in (
            (True, key, seen.key_errors, seen.key_importance),
            (False, value, seen.value_errors, seen.value_importance),
        ):
            damage = torch.stack([*(error * factor for error in errors), torch.zeros_like(factor)])
            units = channel_units(damage, rotated if keys else None)
            every = (*elements, KvElement(FP16))
            sides.append(MixedSide(layer, keys, factor.numel(), every, units))
    return sides


def allocate(sides: list[MixedSide], budget: float) -> list[Tensor]:
    """Each unit's width, an index into `elements`, such that all cost least for `budget` bits of a value in the mean.

    UserError where even the lowest width of everything takes more.
    """
    limit = budget * sum(side.width for side in sides) + 1e-9
    low, high = 0.0, 1.0
    lowest = [torch.zeros(side.units.costs.shape[0], dtype=torch.int64) for side in sides]
    least = total_bits(sides, lowest)
    if least > limit:
        width = sum(side.width for side in sides)
        raise UserError(
            f"--kv-cache mixed:{budget:g} is below what INT4 alone takes here with its scales, "
            f"{least / width:.3f} bits of a value"
        )
    high = max(float(side.units.costs.max()) for side in sides) + 1e-300
    best = lowest
    for _ in range(_BISECTIONS):
        price = math.sqrt(max(low, high * 1e-30) * high)
        chosen = [_cheapest(side, price) for side in sides]
        if total_bits(sides, chosen) <= limit:
            best, high = chosen, price
        else:
            low = price
    return _spend(sides, best, limit)


def _cheapest(side: MixedSide, price: float) -> Tensor:
    """The width of each unit that is least in cost and bits times their price."""
    size = side.units.channels.shape[1]
    bits = torch.tensor([element.bits_per_token(side.width) / side.width for element in side.elements])
    return (side.units.costs + price * size * bits.double()).argmin(dim=1)


def total_bits(sides: list[MixedSide], chosen: list[Tensor]) -> float:
    """Bits of one token over all layers."""
    return sum(side.bits(side.counts(widths)) for side, widths in zip(sides, chosen, strict=True))


def _spend(sides: list[MixedSide], chosen: list[Tensor], limit: float) -> list[Tensor]:
    """Widen single units by falling gain per bit while the budget lasts."""
    chosen = [widths.clone() for widths in chosen]
    steps = []
    for number, (side, widths) in enumerate(zip(sides, chosen, strict=True)):
        for unit, width in enumerate(widths.tolist()):
            for wider in range(width + 1, len(side.elements)):
                more = side.elements[wider].format.bits - side.elements[width].format.bits
                gain = float(side.units.costs[unit, width] - side.units.costs[unit, wider])
                steps.append((-gain / more, number, unit, wider))
    used = total_bits(sides, chosen)
    for _, number, unit, wider in sorted(steps):
        side, widths = sides[number], chosen[number]
        before = int(widths[unit])
        if wider <= before:
            continue
        was = side.bits(side.counts(widths))
        widths[unit] = wider
        now = side.bits(side.counts(widths))
        if used + now - was > limit:
            widths[unit] = before
        else:
            used += now - was
    return chosen


def mixed_plan(
    scheme: KvScheme,
    config: ModelConfig,
    statistics: Mapping[int, KvStatistics],
    rule: CastRule = RNE_SATURATE,
) -> KvPlan:
    """The plan of `mixed:BITS` for a model whose layers were observed."""
    if scheme.bits is None:
        raise ValueError(f"{scheme.name} has no budget of bits")
    sides = mixed_sides(scheme, config, statistics)
    if not sides:
        require_attention(())
    chosen = allocate(sides, scheme.bits)
    return plan_of_choice(scheme, config, sides, chosen, rule)


def plan_of_choice(
    scheme: KvScheme,
    config: ModelConfig,
    sides: list[MixedSide],
    chosen: list[Tensor],
    rule: CastRule = RNE_SATURATE,
) -> KvPlan:
    """The plan that gives each unit of `sides` the width of `chosen`."""
    tensors: dict[tuple[int, bool], KvTensor] = {
        (side.layer, side.keys): side.tensor(widths) for side, widths in zip(sides, chosen, strict=True)
    }
    layers = tuple(
        KvLayer(tensors[layer, True], tensors[layer, False]) if (layer, True) in tensors else None
        for layer in range(config.num_layers)
    )
    return KvPlan(scheme, layers, rule=rule, notes=tuple(arithmetic_lines(sides, chosen)))


def shares(sides: list[MixedSide], chosen: list[Tensor]) -> list[tuple[str, float]]:
    """(width, share of all channels), widest first."""
    counts = sum((side.counts(widths) for side, widths in zip(sides, chosen, strict=True)), torch.zeros(3))
    return [(fmt.name, float(counts[place] / counts.sum())) for place, fmt in reversed([*enumerate(WIDTHS)])]


def arithmetic_lines(sides: list[MixedSide], chosen: list[Tensor]) -> list[str]:
    """The sum that gives the bits of a value, and what a plain 30 to 70 would give."""
    width = sum(side.width for side in sides)
    exact = total_bits(sides, chosen) / width
    parts = [(name, share) for name, share in shares(sides, chosen) if share]
    bits = {fmt.name: fmt.bits for fmt in WIDTHS}
    codes = sum(share * bits[name] for name, share in parts)
    terms = " + ".join(f"{100 * share:.1f} % x {bits[name]}" for name, share in parts)
    return [
        f"key-value cache: {terms} = {codes:.2f} bits, with scales {exact:.2f}: "
        f"{exact / 16:.3f} of FP16, so 1.2 GB becomes {1.2 * exact / 16:.2f} GB",
        plain_line(),
    ]


def budget_line(bits: float) -> str:
    """What a budget means before any channel is chosen."""
    low, high = KvElement(INT4).format.bits, KvElement(FP16).format.bits
    share = (bits - low) / (high - low)
    return (
        f"key-value cache: mixed:{bits:g} is what {100 * share:.1f} % of the channels in FP16 and the rest in INT4 "
        f"take before any scale, {bits / 16:.3f} of FP16: 1.2 GB becomes {1.2 * bits / 16:.2f} GB; {plain_line()}"
    )


def plain_line() -> str:
    """The sum that the trade press gets wrong."""
    plain = mixed_bits(((0.3, KvElement(FP16), 128), (0.7, KvElement(INT4), 128)))
    return (
        f"for comparison, 30 % of the channels in FP16 and 70 % in INT4 are {plain:.2f} bits before any scale: "
        f"1.2 GB becomes {1.2 * plain / 16:.2f} GB"
    )
