"""The key-value caches that benchmarks/kv_cache.py sets beside each other, from the words of a row or contest."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_cache import allocate, plan_of_choice
from qwen_quantize.calibrators.kv_exchange import expected_damage
from qwen_quantize.calibrators.kv_plans import KvFindings, KvRange, uniform_plan
from qwen_quantize.calibrators.kv_sides import MixedSide, mixed_sides
from qwen_quantize.calibrators.kv_statistics import KvStatistics
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import KvKind, KvScheme, parse_kv_scheme
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.pipeline.kv_gradient import observe_gradient
from qwen_quantize.pipeline.kv_observe import observe


class Statistics:
    """What calibration text says of one model, looked at once for each window and sinks."""

    def __init__(self, reader: ModelReader, calibration: Tensor) -> None:
        self._reader, self._calibration = reader, calibration
        self._known: dict[KvScheme, dict[int, KvStatistics]] = {}

    def of(self, scheme: KvScheme) -> dict[int, KvStatistics]:
        key = replace(scheme, bits=16.0)
        if key not in self._known:
            look = observe_gradient if scheme.gradient else observe
            self._known[key] = look(self._reader, self._calibration, scheme)
        return self._known[key]


def plan_for(text: str, config: ModelConfig, statistics: Statistics) -> KvPlan:
    """The plan of a row's words."""
    ignorant = text.startswith("blind")
    scheme = parse_kv_scheme(text.replace("blind", "mixed"))
    if scheme.kind is KvKind.MIXED:
        mixed, blind_plan, _ = mixed_and_blind(scheme, config, statistics)
        return blind_plan if ignorant else mixed
    findings = KvFindings()
    if scheme.needs_scales and config.latent is None:
        seen = statistics.of(parse_kv_scheme("mixed"))
        ranges = {
            n: KvRange(s.keys.largest, s.values.largest) for n, s in seen.items() if s.values is not None
        }
        findings = KvFindings(ranges)
    return uniform_plan(scheme, config, findings)


def mixed_and_blind(
    scheme: KvScheme, config: ModelConfig, statistics: Statistics
) -> tuple[KvPlan, KvPlan, float]:
    """(the allocation's plan, the blind one, the damage that the first expects)."""
    sides = mixed_sides(scheme, config, statistics.of(scheme))
    assert scheme.bits is not None
    chosen = allocate(sides, scheme.bits)
    damage = expected_damage(sides, chosen)
    plans = [plan_of_choice(scheme, config, sides, one) for one in (chosen, blind(sides, chosen))]
    return plans[0], plans[1], damage


def blind(sides: list[MixedSide], chosen: list[Tensor]) -> list[Tensor]:
    """As many units of each width in each side as chosen, by the numbers of their channels."""
    places = []
    for side, widths in zip(sides, chosen, strict=True):
        order = side.units.channels[:, 0].argsort()
        scattered = widths.sort(descending=True).values
        # Spread evenly over the heads: a step that is prime to the count visits every unit once.
        count = len(order)
        step = next(step for step in range(count // 2 + 1, count + 2) if math.gcd(step, count) == 1)
        visited = order[(torch.arange(count) * step) % count]
        given = torch.empty_like(widths)
        given[visited] = scattered
        places.append(given)
    return places


def contest_plans(
    group: int, rest: str, config: ModelConfig, statistics: Statistics
) -> dict[str, tuple[str, KvPlan]]:
    """(words, plan) of the three caches of one contest. rest: the mixed scheme's words after its budget."""
    uniform = uniform_plan(parse_kv_scheme(f"int4:{group}"), config)
    bits = uniform.bits
    if config.latent is not None:  # the budget is the latents'
        keys = uniform.attention_layers[0].keys
        bits = keys.bits_per_token / keys.width
    text = f"mixed:{bits:g}{rest}"
    scheme = parse_kv_scheme(text)
    mixed, ignorant, damage = mixed_and_blind(scheme, config, statistics)
    window = scheme.window + mixed.step - uniform.step
    words = f"int4:{group},window={window},sinks={scheme.sinks}"
    words += ",keys=pre-rope" if scheme.unrotated else ""
    found = {
        "uniform": (words, uniform_plan(parse_kv_scheme(words), config)),
        "blind": (text.replace("mixed", "blind"), ignorant),
        "mixed": (text, mixed),
    }
    if scheme.gradient:
        found["mixed"] = (text, replace(mixed, notes=(f"{damage / 2!r}",)))
    return found
