"""Mixed precision: a scheme for every linear so that the model loses least under a budget of bits, or the reverse.

What each candidate does to each linear comes from collected statistics (`sensitivity`), what that does to the model's
predictions from quantizing some linears at a time and running a little text (`mixed_effects`). The result is a recipe
with one rule for each linear, which can be run again without any of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from qwen_quantize.calibrators.allocation import Allocation, Option, fewest_bits, least_loss
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.candidates import KEPT
from qwen_quantize.pipeline.choosable import Choosable, MixedRequest
from qwen_quantize.pipeline.mixed_effects import EffectMeter, effects_of, noise_of
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.sensitivity import Sensitivity, StreamSolver, measure_sensitivity
from qwen_quantize.pipeline.solved import SolvedStore
from qwen_quantize.pipeline.statistics_folder import StatisticsFolder
from qwen_quantize.pipeline.stream import Progress

_ROUNDS = 3  # of choosing and measuring what was chosen


@dataclass(frozen=True, slots=True)
class MixedText:
    """What choices are measured on. windows: [n, T] int64 calibration text.

    folder: for the linears solved for sensitivity, which are the ones measured; may be deleted afterwards.
    """

    windows: Tensor
    folder: Path


@dataclass(frozen=True, slots=True)
class MixedChoice:
    """recipe: the request with a rule for each linear. record: what the manifest says of the choice.

    peak_memory_bytes: expected, of making the choice.
    """

    recipe: Recipe
    record: dict[str, Any]
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class _Unit:
    """Linears that become the same. options: bits and predicted loss (KL in nats) by candidate."""

    modules: tuple[str, ...]
    options: dict[str, Option]


def choose_mixed(
    recipe: Recipe,
    request: MixedRequest,
    choosable: Choosable,
    reader: ModelReader,
    statistics: StatisticsFolder,
    text: MixedText | None,
    progress: Progress,
) -> MixedChoice:
    """Choose. text: None where there is none, and every error counts as its share of the residual.

    UserError for a loss that no choice stays under, with what comes nearest, and for a ceiling of memory under which
    effects cannot be measured.
    """
    store = None if text is None else SolvedStore(text.folder)
    solver = StreamSolver(reader, statistics, choosable.plans, store)
    solving = max((plan.memory.peak for plan in choosable.plans.values()), default=0)
    meter = None if text is None else EffectMeter(solver, text.windows, recipe.max_memory, solving, progress)
    found = measure_sensitivity(choosable.fitting, solver, progress)
    effects = effects_of(choosable, found, meter)
    table = [
        _Unit(
            unit,
            {
                name: Option(size, effects[unit[0]] * noise_of(found, unit, name))
                for name, size in by_name.items()
            },
        )
        for unit, by_name in zip(choosable.units, choosable.bits, strict=True)
    ]
    chosen, measured = _allocate(request, table, choosable, meter)
    rules = tuple(
        rule
        for unit, name in zip(table, chosen, strict=True)
        for rule in choosable.named[name].rules(unit.modules)
    )
    record = _record(request, table, chosen, found, choosable, measured)
    peak = max(solving, 0 if meter is None else meter.peak_memory_bytes)
    return MixedChoice(replace(recipe, rules=(*rules, *recipe.rules)), record, peak)


def _allocate(
    request: MixedRequest, table: Sequence[_Unit], choosable: Choosable, meter: EffectMeter | None
) -> tuple[list[str], dict[str, float]]:
    """(the candidate of each unit, predicted and, with text, measured KL of the whole choice)."""
    names = [list(unit.options) for unit in table]
    options = [list(unit.options.values()) for unit in table]
    if request.max_loss is None:
        assert request.target_bits is not None
        most = math.floor(request.target_bits * choosable.weights) - choosable.fixed_bits
        found = least_loss(options, most)
        assert found is not None  # reachable, as was checked
        return _result(names, found, None if meter is None else _measure(table, names, found, meter))
    assert meter is not None  # a loss is asked for only with text
    found, loss = _under_loss(request.max_loss, table, names, options, KEPT in choosable.named, meter)
    return _result(names, found, loss)


def _under_loss(
    max_loss: float,
    table: Sequence[_Unit],
    names: Sequence[Sequence[str]],
    options: Sequence[Sequence[Option]],
    may_stay: bool,
    meter: EffectMeter,
) -> tuple[Allocation, float]:
    """(the fewest bits that were found to lose no more, what they lose); UserError where nothing does."""
    limit = math.log1p(max_loss)
    budget = limit
    best: tuple[Allocation, float] | None = None
    lowest = math.inf
    for _ in range(_ROUNDS):
        found = fewest_bits(options, budget)
        if found is None:
            break
        loss = _measure(table, names, found, meter)
        lowest = min(lowest, loss)
        if loss <= limit and (best is None or found.bits < best[0].bits):
            best = found, loss
        if loss <= limit and loss >= 0.9 * limit:
            break
        # What was measured is what counts: errors add up a little otherwise than one by one.
        budget = found.loss * limit / loss if loss > 0 else budget
        if loss <= limit and budget <= found.loss:
            break
    if best is None:  # predictions led astray, or nothing is within them: what errs least has the last word
        most = sum(max(option.bits for option in unit) for unit in options)
        found = least_loss(options, most)
        assert found is not None
        loss = _measure(table, names, found, meter)
        if loss <= limit:
            return found, loss
        rise = 100 * math.expm1(min(lowest, loss))
        raise UserError(
            f"--max-loss {100 * max_loss:g}%: the best choice among the candidates raises perplexity by {rise:.3g} % "
            f"on the calibration text; allow that much, or name finer --candidates{'' if may_stay else f', or {KEPT}'}"
        )
    return best


def _result(
    names: Sequence[Sequence[str]], found: Allocation, measured: float | None
) -> tuple[list[str], dict[str, float]]:
    chosen = [unit[number] for unit, number in zip(names, found.chosen, strict=True)]
    numbers = {"sum": found.loss, "bound": found.bound}
    return chosen, numbers if measured is None else {**numbers, "measured": measured}


def _measure(
    table: Sequence[_Unit], names: Sequence[Sequence[str]], found: Allocation, meter: EffectMeter
) -> float:
    """KL of the model with all linears as chosen, on the calibration text."""
    chosen = {
        module: choices[number]
        for unit, choices, number in zip(table, names, found.chosen, strict=True)
        if choices[number] != KEPT
        for module in unit.modules
    }
    return meter.divergences([chosen])[0]


def _record(
    request: MixedRequest,
    table: Sequence[_Unit],
    chosen: Sequence[str],
    found: Sensitivity,
    choosable: Choosable,
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """The choice in numbers. Losses are KL in nats; a rise of perplexity is exp(KL) - 1."""
    fixed_bits, total = choosable.fixed_bits, choosable.weights
    bits = fixed_bits + sum(unit.options[name].bits for unit, name in zip(table, chosen, strict=True))
    loss = measured.get("measured", measured["sum"])
    uniform = []
    for name in choosable.named:
        if all(name in unit.options for unit in table):
            size = fixed_bits + sum(unit.options[name].bits for unit in table)
            kl = math.fsum(unit.options[name].loss for unit in table)
            uniform.append({"candidate": name, "bits_per_weight": size / total, "predicted_kl": kl})
    shapes = choosable.base.selection.quantized
    return {
        "target_bits": request.target_bits,
        "max_loss": request.max_loss,
        "candidates": list(choosable.named),
        "left_out": dict(choosable.left_out),
        "weights": total,
        "bits": bits,
        "bits_per_weight": bits / total,
        "predicted_kl": loss,
        "predicted_rise": math.expm1(loss) if "measured" in measured else None,
        "sum_of_losses": measured["sum"],
        "uniform": uniform,
        "fixed": list(choosable.fixed),
        "linears": [
            {
                "name": module,
                "candidate": name,
                "bits_per_weight": unit.options[name].bits
                / sum(shapes[one][0] * shapes[one][1] for one in unit.modules),
                "predicted_error": 0.0 if name == KEPT else found.relative[module][name],
            }
            for unit, name in zip(table, chosen, strict=True)
            for module in unit.modules
        ],
        "units": [
            {
                "linears": len(unit.modules),
                "first": unit.modules[0],
                "candidate": name,
                "bits": unit.options[name].bits,
                "predicted_kl": unit.options[name].loss,
            }
            for unit, name in zip(table, chosen, strict=True)
        ],
    }
