"""Mixed precision in the key-value cache: every group of channels gets the width that its bits buy most with.

Groups lie within one head, a multiple of eight channels wide; of keys they are made of the pairs that rotary embedding
turns together. A width is a format and how many values share a scale: INT4 with fewer of them lies between INT4 and
INT8. Costs are additive, so the best choice under a budget is that of some price per bit: the price is found by
bisection, and what the budget then has left is spent on the steps that gain most per bit. Bits are counted exactly,
scales included, for all layers together. Of latent attention the latent is chosen for, and counts; the few channels
that carry the position stay in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_plans import (
    positional_tensor,
    require_attention,
    require_even,
    require_rotated,
)
from qwen_quantize.calibrators.kv_statistics import KvStatistics
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule
from qwen_quantize.formats.kv_plan import KvLayer, KvPart, KvPlan, KvTensor
from qwen_quantize.formats.kv_scheme import GROUP_SIZES, KvElement, KvScaling, KvScheme, mixed_bits, widened
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import FP16, INT4, INT8
from qwen_quantize.models.config import ModelConfig

WIDTHS: tuple[Format, ...] = (INT4, INT8, FP16)
_UNIT, _MOST_UNIT = 8, 32  # channels
_BISECTIONS = 80


def mixed_elements(scheme: KvScheme, config: ModelConfig) -> tuple[list[KvElement], list[KvElement]]:
    """What is chosen among for keys and for values, by rising bits; for latents and for nothing."""
    if config.latent is not None:
        require_rotated(scheme)
        return _ladder(scheme.latent_element(config.latent.key_value_rank)), []
    return _ladder(scheme.key_element(config.head_dim)), _ladder(scheme.value_element(config.value_dim))


def _ladder(narrow: KvElement) -> list[KvElement]:
    """INT4 with the scheme's group and the smaller ones, then INT8 and FP16."""
    groups = [narrow.group, *(size for size in reversed(GROUP_SIZES) if size < narrow.group)]
    return [
        *(KvElement(narrow.format, narrow.scaling, group) for group in groups),
        *(widened(narrow, fmt) for fmt in WIDTHS[1:]),
    ]


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
    """Channels that are decided together: an eighth of a head, 8 at least and 32 at most, a divisor of its size."""
    size = min(max(_UNIT, dim // 8), _MOST_UNIT)
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
    """One layer's keys (or latents) or values to decide on. elements: of each width.

    order: int64 [width], how channels follow each other wherever neighbours share a scale.
    """

    layer: int
    keys: bool
    width: int
    elements: tuple[KvElement, ...]
    units: ChannelUnits
    order: Tensor

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

    @property
    def rates(self) -> list[float]:
        """Bits of a value at each width, if all of them had it."""
        return [element.bits_per_token(self.width) / self.width for element in self.elements]

    def tensor(self, chosen: Tensor) -> KvTensor:
        """Up to one part for each width, a head's channels together in each, in the side's order."""
        parts = []
        widths = torch.empty(self.width, dtype=torch.int64)
        widths[self.units.channels] = chosen.unsqueeze(1)
        for width, element in enumerate(self.elements):
            channels = self.order[widths[self.order] == width]
            if channels.numel():
                require_even(element, channels.numel())
                parts.append(KvPart(element, channels.numel(), channels))
        if len(parts) == 1 and torch.equal(self.order, torch.arange(self.width)):
            parts = [KvPart(parts[0].element, self.width)]
        return KvTensor(self.width, tuple(parts))


def mixed_sides(
    scheme: KvScheme, config: ModelConfig, statistics: Mapping[int, KvStatistics]
) -> list[MixedSide]:
    """Keys and values of every layer with attention, with what each width costs there."""
    sides = []
    elements = mixed_elements(scheme, config)
    turned = (
        config.latent is None and not scheme.unrotated
    )  # as they are stored, rotation ties channels in pairs
    rotated = config.rope.rotary_dim(config.rotary_head_dim) if turned else None
    for layer, seen in sorted(statistics.items()):
        for keys, every, found in zip((True, False), elements, (seen.keys, seen.values), strict=True):
            if found is None:
                continue
            damage = torch.stack(found.damages)
            units = channel_units(damage, rotated if keys else None)
            order = torch.arange(damage[0].numel())
            if every[0].scaling is KvScaling.SLICE:
                order = (
                    found.order + found.order.shape[1] * torch.arange(len(found.order))[:, None]
                ).flatten()
            sides.append(MixedSide(layer, keys, damage[0].numel(), tuple(every), units, order))
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
    bits = torch.tensor(side.rates, dtype=torch.float64)
    return (side.units.costs + price * size * bits).argmin(dim=1)


def total_bits(sides: list[MixedSide], chosen: list[Tensor]) -> float:
    """Bits of one token over all layers."""
    return sum(side.bits(side.counts(widths)) for side, widths in zip(sides, chosen, strict=True))


def _spend(sides: list[MixedSide], chosen: list[Tensor], limit: float) -> list[Tensor]:
    """Widen single units by falling gain per bit while the budget lasts."""
    chosen = [widths.clone() for widths in chosen]
    steps = []
    for number, (side, widths) in enumerate(zip(sides, chosen, strict=True)):
        rates = side.rates
        for unit, width in enumerate(widths.tolist()):
            for wider in range(width + 1, len(side.elements)):
                more = rates[wider] - rates[width]
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
    notes = tuple(arithmetic_lines(sides, chosen))
    positional = None
    if config.latent is not None:
        positional = positional_tensor(config.latent.rotary_dim)
        notes += (
            "key-value cache: these are the bits of latents; what carries the position stays in 16 bits",
        )
    layers = tuple(
        KvLayer(tensors[layer, True], positional or tensors[layer, False])
        if (layer, True) in tensors
        else None
        for layer in range(config.num_layers)
    )
    return KvPlan(scheme, layers, positional is not None, rule, notes)


def shares(sides: list[MixedSide], chosen: list[Tensor]) -> list[tuple[str, float]]:
    """(width, share of all channels), widest first."""
    counts = dict.fromkeys((fmt.name for fmt in reversed(WIDTHS)), 0)
    for side, widths in zip(sides, chosen, strict=True):
        for element, count in zip(side.elements, side.counts(widths).tolist(), strict=True):
            counts[element.format.name] += count
    return [(name, count / sum(counts.values())) for name, count in counts.items()]


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
