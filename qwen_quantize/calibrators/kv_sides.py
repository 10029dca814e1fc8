"""What mixed precision in the key-value cache decides on: groups of channels in each layer's keys, values or latents.

Groups lie within one head, a multiple of eight channels wide; of keys they are made of the pairs that rotary embedding
turns together. A width is a format and how many values share a scale: INT4 with fewer of them lies between INT4 and
INT8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_plans import require_even, require_rotated
from qwen_quantize.calibrators.kv_statistics import KvStatistics, TokenSample
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_plan import KvPart, KvTensor
from qwen_quantize.formats.kv_scheme import GROUP_SIZES, KvElement, KvScaling, KvScheme, widened
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import FP16, INT4, INT8
from qwen_quantize.models.config import ModelConfig

WIDTHS: tuple[Format, ...] = (INT4, INT8, FP16)
_UNIT, _MOST_UNIT = 8, 32  # channels


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


def turned_channels(scheme: KvScheme, config: ModelConfig) -> int:
    """How many of a stored key's channels rotary embedding has turned, and ties in pairs; none of a latent's."""
    if config.latent is not None or scheme.unrotated:
        return 0
    return config.rope.rotary_dim(config.rotary_head_dim)


def channel_units(damage: Tensor, pairs: int) -> ChannelUnits:
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


def _order(cost: Tensor, pairs: int) -> Tensor:
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

    order: int64 [width], how channels follow each other wherever neighbours share a scale. sample: some of the tokens
    that were seen, where a channel's error depends on who its neighbours are.
    """

    layer: int
    keys: bool
    width: int
    elements: tuple[KvElement, ...]
    units: ChannelUnits
    order: Tensor
    sample: TokenSample | None = None

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
    turned = turned_channels(scheme, config)
    for layer, seen in sorted(statistics.items()):
        for keys, every, found in zip((True, False), elements, (seen.keys, seen.values), strict=True):
            if found is None:
                continue
            damage = torch.stack(found.damages)
            units = channel_units(damage, turned if keys else 0)
            order = torch.arange(damage[0].numel())
            if every[0].scaling is KvScaling.SLICE:
                order = (
                    found.order + found.order.shape[1] * torch.arange(len(found.order))[:, None]
                ).flatten()
            sides.append(MixedSide(layer, keys, damage[0].numel(), tuple(every), units, order, found.sample))
    return sides


def total_bits(sides: list[MixedSide], chosen: list[Tensor]) -> float:
    """Bits of one token over all layers."""
    return sum(side.bits(side.counts(widths)) for side, widths in zip(sides, chosen, strict=True))
