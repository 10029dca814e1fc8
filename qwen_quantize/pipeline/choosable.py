"""What mixed precision has to choose from, known before anything runs: units, their bits, and plans of candidates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
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
from qwen_quantize.pipeline.plan import Plan, make_plan
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.rules import settings_of


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """One of target_bits (for each weight, scales included) and max_loss (rise of perplexity, 0.005 for 0.5 %).

    candidates: names as in `--candidates`, () for those beside the scheme that is asked for.
    """

    target_bits: float | None
    max_loss: float | None
    candidates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Choosable:
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


def weigh_request(recipe: Recipe, request: MixedRequest, source: CheckpointSource) -> Choosable:
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
    return Choosable(
        base, named, tuple(units), tuple(bits), plans, fitting, tuple(fixed), fixed_bits, total, left_out
    )


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
