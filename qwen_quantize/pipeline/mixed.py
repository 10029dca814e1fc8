"""Mixed precision: a scheme for every linear so that the model loses least under a budget of bits, or the reverse.

What each candidate does to each linear comes from collected statistics (`sensitivity`), what that does to the model's
predictions from quantizing some linears at a time and running a little text (`perturbation`). The result is a recipe
with one rule for each linear, which can be run again without any of this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from qwen_quantize.calibrators.allocation import Allocation, Option, fewest_bits, least_loss
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.pipeline.candidates import (
    KEPT,
    Candidate,
    candidate_plan,
    candidates_for,
    held_together,
    kept_bits,
    linear_bits,
    own_first,
    with_own_group,
)
from qwen_quantize.pipeline.choices import units_of
from qwen_quantize.pipeline.perturbation import PerturbedReader, measure_divergence
from qwen_quantize.pipeline.plan import Plan, make_plan
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.rules import settings_of
from qwen_quantize.pipeline.sensitivity import Sensitivity, StreamSolver, measure_sensitivity, places
from qwen_quantize.pipeline.statistics_folder import StatisticsFolder
from qwen_quantize.pipeline.stream import Progress

_DEPTHS = 4  # parts of the layers behind the first whose linears of one kind share an effect
_TOKENS = 1024  # of text that the effect is measured on
_ROUNDS = 3  # of choosing and measuring what was chosen


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """One of target_bits (for each weight, scales included) and max_loss (rise of perplexity, 0.005 for 0.5 %).

    candidates: names as in `--candidates`, () for those beside the scheme that is asked for.
    """

    target_bits: float | None
    max_loss: float | None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MixedChoice:
    """recipe: the request with a rule for each linear. record: what the manifest says of the choice."""

    recipe: Recipe
    record: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Unit:
    """Linears that become the same. options: bits and predicted loss (KL in nats) by candidate."""

    modules: tuple[str, ...]
    options: dict[str, Option]


@dataclass(frozen=True, slots=True)
class Candidates:
    """What there is to choose, known before anything runs.

    units: linears that become the same; bits: of each unit by candidate. plans: by candidate, with it for the linears
    in `fitting`. fixed: linears that stay as the request says, which take fixed_bits. weights: in all. left_out: of
    the candidates by default, those that the layout cannot hold, each with the reason.
    """

    base: Plan
    named: Mapping[str, Candidate]
    units: tuple[tuple[str, ...], ...]
    bits: tuple[Mapping[str, int], ...]
    plans: Mapping[str, Plan]
    fitting: Mapping[str, frozenset[str]]
    fixed: tuple[str, ...]
    fixed_bits: int
    weights: int
    left_out: Mapping[str, str] = field(default_factory=dict)


def weigh_request(recipe: Recipe, request: MixedRequest, source: CheckpointSource) -> Candidates:
    """What can be chosen; UserError for what cannot, and for a target that no choice reaches."""
    base = make_plan(recipe, source)
    blueprint = base.blueprint
    flag = "--target-bits" if request.max_loss is None else "--max-loss"
    if blueprint is None or not recipe.calibrates:
        raise UserError(
            f"{flag} weighs each linear by what its inputs are like: give --calibration-dataset or --from-statistics"
        )
    if request.max_loss is not None and recipe.dataset is None:
        raise UserError(
            "--max-loss measures the loss on text, which --from-statistics has none of; give --calibration-dataset, "
            "or --target-bits"
        )
    candidates = candidates_for(recipe, base, request.candidates)
    units, fixed = _units(recipe, base, blueprint, candidates)
    plans: dict[str, Plan] = {}
    fitting: dict[str, frozenset[str]] = {}
    left_out: dict[str, str] = {}
    held = list(dict.fromkeys(base.scheme_of(module) for module in fixed))
    for one in own_first(candidates, base):
        if one.scheme is None:
            continue
        try:
            plan, first = candidate_plan(recipe, source, one, units, base)
            if not request.candidates and first:
                held = held_together(plan, next(iter(first)), held)
        except UserError as error:
            if request.candidates:
                raise
            left_out[one.name] = str(error)
            continue
        plans[one.name] = plan
        fitting[one.name] = frozenset(m for unit in units if unit[0] in first for m in unit)
    candidates = tuple(one for one in candidates if one.name not in left_out)
    if left_out and len(candidates) < 2:
        name, why = next(iter(left_out.items()))
        raise UserError(
            f"{flag}: of what it chooses from by default, layout {base.layout.name} leaves "
            f"{candidates[0].name if candidates else 'nothing'} ({name} cannot be: {why}); name what to choose from "
            "with --candidates"
        )
    named = {one.name: with_own_group(one, plans.get(one.name), units, fitting) for one in candidates}
    bits = _bits(source, base, plans, fitting, units, KEPT in named)
    total = sum(rows * columns for rows, columns in base.selection.quantized.values())
    fixed_bits = sum(linear_bits(base, module) for module in fixed)
    _check_reachable(request, bits, fixed_bits, total)
    return Candidates(
        base, named, tuple(units), tuple(bits), plans, fitting, tuple(fixed), fixed_bits, total, left_out
    )


def choose_mixed(
    recipe: Recipe,
    request: MixedRequest,
    candidates: Candidates,
    reader: ModelReader,
    statistics: StatisticsFolder,
    windows: Tensor | None,
    progress: Progress,
) -> MixedChoice:
    """Choose. windows: [n, T] int64 calibration text; None: every error counts as its share of the residual.

    UserError for a loss that no choice stays under, with what comes nearest.
    """
    solver = StreamSolver(reader, statistics)
    found = measure_sensitivity(candidates.plans, candidates.fitting, solver, progress)
    effects = _effects(candidates, found, solver, windows, progress)
    table = [
        _Unit(
            unit,
            {
                name: Option(size, effects[unit[0]] * _noise(found, unit, name))
                for name, size in by_name.items()
            },
        )
        for unit, by_name in zip(candidates.units, candidates.bits, strict=True)
    ]
    chosen, measured = _allocate(request, table, candidates, solver, windows, progress)
    rules = tuple(
        rule
        for unit, name in zip(table, chosen, strict=True)
        for rule in candidates.named[name].rules(unit.modules)
    )
    record = _record(request, table, chosen, found, candidates, measured)
    return MixedChoice(replace(recipe, rules=(*rules, *recipe.rules)), record)


def _units(
    recipe: Recipe, base: Plan, blueprint: Blueprint, candidates: Sequence[Candidate]
) -> tuple[list[tuple[str, ...]], list[str]]:
    """(what is chosen for, the linears that stay as the request says: with rules of their own, or seen by no text)."""
    settings = settings_of(recipe, list(base.selection.quantized) + list(base.selection.kept))
    seen = set(blueprint.linear_modules())
    together: dict[str, list[str]] = {}
    fixed: list[str] = []
    several = len({one.method for one in candidates if one.scheme is not None}) > 1
    for unit in units_of(list(base.selection.quantized), blueprint):
        if not set(unit) <= seen or any(not settings[module].is_default for module in unit):
            fixed += unit
            continue
        together.setdefault(_joined(unit, blueprint) if several else unit[0], []).extend(unit)
    return [tuple(unit) for unit in together.values()], fixed


def _joined(unit: Sequence[str], blueprint: Blueprint) -> str:
    """A name for the unit; shared and routed experts, whose input is observed once, have one."""
    for layer in range(blueprint.num_layers):
        if not unit[0].startswith(blueprint.layer_name(layer, "")) or not blueprint.num_experts(layer):
            continue
        shared = blueprint.streams(layer, Half.MLP).get(Stream.SHARED_INPUT, ())
        names = [blueprint.module_name(layer, site) for site in shared]
        names.append(blueprint.module_name(layer, blueprint.expert_sites(layer)[0], 0))
        if unit[0] in names:
            return blueprint.layer_name(layer, "experts")
    return unit[0]


def _bits(
    source: CheckpointSource,
    base: Plan,
    plans: Mapping[str, Plan],
    fitting: Mapping[str, frozenset[str]],
    units: Sequence[Sequence[str]],
    may_stay: bool,
) -> list[dict[str, int]]:
    """What each unit takes on disk, by candidate."""
    linears = LinearReader(source)
    shapes, found = base.selection.quantized, []
    for unit in units:
        sizes = {
            name: sum(linear_bits(plan, module) for module in unit)
            for name, plan in plans.items()
            if unit[0] in fitting[name]
        }
        if may_stay:
            sizes[KEPT] = sum(kept_bits(source, linears, module, shapes[module]) for module in unit)
        if not sizes:
            raise UserError(
                f"no candidate fits {unit[0]!r}, whose {shapes[unit[0]][1]} input features no group divides; name "
                "others with --candidates"
            )
        found.append(sizes)
    return found


def _check_reachable(
    request: MixedRequest, bits: Sequence[Mapping[str, int]], fixed: int, total: int
) -> None:
    if request.target_bits is None:
        return
    least = (sum(min(unit.values()) for unit in bits) + fixed) / total
    if request.target_bits < least:
        smallest = ", ".join(dict.fromkeys(min(unit, key=lambda name: unit[name]) for unit in bits))
        raise UserError(
            f"--target-bits {request.target_bits:g}: the smallest choice ({smallest}) takes {least:.4f} bits for each "
            f"of {total} weights, its scales and what stays included; ask for that much, or name smaller --candidates"
        )


def _noise(found: Sensitivity, unit: Sequence[str], name: str) -> float:
    return 0.0 if name == KEPT else math.fsum(found.noise[module][name] for module in unit)


def _effects(
    candidates: Candidates,
    found: Sensitivity,
    solver: StreamSolver,
    windows: Tensor | None,
    progress: Progress,
) -> dict[str, float]:
    """KL of the predictions for each unit of noise, by the first linear of each choice: measured for the linears of
    one kind in neighbouring layers together, each as the candidate that errs most has it."""
    units, plans, fitting = candidates.units, candidates.plans, candidates.fitting
    if windows is None:
        return {unit[0]: 1.0 for unit in units}
    kinds = _kinds(solver.reader)
    groups: dict[tuple[str, str, int], list[tuple[str, ...]]] = {}
    for unit in units:
        names = [name for name in plans if unit[0] in fitting[name]]
        if names:
            worst = max(names, key=lambda name: _noise(found, unit, name))
            groups.setdefault((worst, *kinds[unit[0]]), []).append(unit)
    variants = [
        PerturbedReader(solver, plans[name], frozenset(module for unit in members for module in unit))
        for (name, _, _), members in groups.items()
    ]
    effects = {unit[0]: 0.0 for unit in units}
    divergences = measure_divergence(solver.reader, variants, _few(windows), progress)
    for ((name, _, _), members), divergence in zip(groups.items(), divergences, strict=True):
        noise = math.fsum(_noise(found, unit, name) for unit in members)
        effects |= dict.fromkeys((unit[0] for unit in members), divergence / noise if noise > 0 else 0.0)
    return effects


def _kinds(reader: ModelReader) -> dict[str, tuple[str, int]]:
    """(stream, part of the depth) of each linear; the first layer is a part of its own, since its residual is not yet
    what the others add to."""
    layers, found = reader.blueprint.num_layers, {}
    for layer in range(layers):
        part = 0 if layer == 0 else 1 + (layer - 1) * _DEPTHS // max(layers - 1, 1)
        for place in places(reader, layer):
            for site in place.sites:
                name = reader.blueprint.module_name(layer, site, place.expert)
                found[name] = (place.stream.value, part)
    return found


def _few(windows: Tensor) -> Tensor:
    """A few windows, or the beginnings of some."""
    length = min(windows.shape[1], _TOKENS // 2)
    return windows[: max(1, _TOKENS // length), :length]


def _allocate(
    request: MixedRequest,
    table: Sequence[_Unit],
    candidates: Candidates,
    solver: StreamSolver,
    windows: Tensor | None,
    progress: Progress,
) -> tuple[list[str], dict[str, float]]:
    """(the candidate of each unit, predicted and, with text, measured KL of the whole choice)."""
    names = [list(unit.options) for unit in table]
    options = [list(unit.options.values()) for unit in table]

    def measured(found: Allocation) -> float | None:
        return (
            None
            if windows is None
            else _measure(table, names, found, candidates.plans, solver, windows, progress)
        )

    if request.max_loss is None:
        assert request.target_bits is not None
        found = least_loss(
            options, math.floor(request.target_bits * candidates.weights) - candidates.fixed_bits
        )
        assert found is not None  # reachable, as was checked
        return _result(names, found, measured(found))
    limit = math.log1p(request.max_loss)
    budget = limit
    best: tuple[Allocation, float] | None = None
    lowest = math.inf
    for _ in range(_ROUNDS):
        found = fewest_bits(options, budget)
        if found is None:
            break
        loss = measured(found)
        assert loss is not None
        lowest = min(lowest, loss)
        if loss <= limit and (best is None or found.bits < best[0].bits):
            best = found, loss
        if loss <= limit and loss >= 0.9 * limit:
            break
        # What was measured is what counts: errors add up a little otherwise than one by one.
        budget = found.loss * limit / loss if loss > 0 else budget
        if loss <= limit and budget <= found.loss:
            break
    if best is None:
        least = math.fsum(min(option.loss for option in unit) for unit in options)
        raise UserError(
            f"--max-loss {100 * request.max_loss:g}%: the best choice among the candidates is predicted to raise "
            f"perplexity by {100 * math.expm1(min(lowest, least) if lowest < math.inf else least):.3g} %; allow that "
            f"much, or add {KEPT} to --candidates"
        )
    return _result(names, *best)


def _result(
    names: Sequence[Sequence[str]], found: Allocation, measured: float | None
) -> tuple[list[str], dict[str, float]]:
    chosen = [unit[number] for unit, number in zip(names, found.chosen, strict=True)]
    numbers = {"sum": found.loss, "bound": found.bound}
    return chosen, numbers if measured is None else {**numbers, "measured": measured}


def _measure(
    table: Sequence[_Unit],
    names: Sequence[Sequence[str]],
    found: Allocation,
    plans: Mapping[str, Plan],
    solver: StreamSolver,
    windows: Tensor,
    progress: Progress,
) -> float:
    """KL of the model with all linears as chosen, on the calibration text."""
    modules: dict[str, list[str]] = {}
    for unit, choices, number in zip(table, names, found.chosen, strict=True):
        if choices[number] != KEPT:
            modules.setdefault(choices[number], []).extend(unit.modules)
    by_module = {module: plans[name] for name, members in modules.items() for module in members}
    variant = PerturbedReader(solver, by_module, frozenset(by_module))
    return measure_divergence(solver.reader, [variant], _few(windows), progress)[0]


def _record(
    request: MixedRequest,
    table: Sequence[_Unit],
    chosen: Sequence[str],
    found: Sensitivity,
    candidates: Candidates,
    measured: Mapping[str, float],
) -> dict[str, Any]:
    """The choice in numbers. Losses are KL in nats; a rise of perplexity is exp(KL) - 1."""
    fixed_bits, total = candidates.fixed_bits, candidates.weights
    bits = fixed_bits + sum(unit.options[name].bits for unit, name in zip(table, chosen, strict=True))
    loss = measured.get("measured", measured["sum"])
    uniform = []
    for name in candidates.named:
        if all(name in unit.options for unit in table):
            size = fixed_bits + sum(unit.options[name].bits for unit in table)
            kl = math.fsum(unit.options[name].loss for unit in table)
            uniform.append({"candidate": name, "bits_per_weight": size / total, "predicted_kl": kl})
    shapes = candidates.base.selection.quantized
    return {
        "target_bits": request.target_bits,
        "max_loss": request.max_loss,
        "candidates": list(candidates.named),
        "left_out": dict(candidates.left_out),
        "weights": total,
        "bits": bits,
        "bits_per_weight": bits / total,
        "predicted_kl": loss,
        "predicted_rise": math.expm1(loss) if "measured" in measured else None,
        "sum_of_losses": measured["sum"],
        "uniform": uniform,
        "fixed": list(candidates.fixed),
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
