"""Mixed precision in the key-value cache: every group of channels gets the width that its bits buy most with.

Costs are first taken to be additive, so the best choice under a budget is that of some price per bit: the price is
found by bisection, and what the budget then has left is spent on the steps that gain most per bit. Exchanges then see
to what is not additive. Bits are counted exactly, scales included, for all layers together. Of latent attention the
latent is chosen for, and counts; the few channels that carry the position stay in 16 bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_exchange import exchanged
from qwen_quantize.calibrators.kv_plans import positional_tensor, require_attention
from qwen_quantize.calibrators.kv_sides import WIDTHS, MixedSide, mixed_sides, total_bits
from qwen_quantize.calibrators.kv_statistics import KvStatistics
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule
from qwen_quantize.formats.kv_plan import KvLayer, KvPlan, KvTensor
from qwen_quantize.formats.kv_scheme import KvElement, KvScheme, mixed_bits
from qwen_quantize.formats.tables import FP16, INT4
from qwen_quantize.models.config import ModelConfig

_BISECTIONS = 80


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
    return exchanged(sides, _spend(sides, best, limit), limit)


def _cheapest(side: MixedSide, price: float) -> Tensor:
    """The width of each unit that is least in cost and bits times their price."""
    size = side.units.channels.shape[1]
    bits = torch.tensor(side.rates, dtype=torch.float64)
    return (side.units.costs + price * size * bits).argmin(dim=1)


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
