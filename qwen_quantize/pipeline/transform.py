"""Factors moved from producers to readers before half a layer is rounded; what it computes stays the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.awq import ScaleChoice, scaled_statistics, search_awq
from qwen_quantize.calibrators.clipped_rounding import clipped_error, clipped_rounding
from qwen_quantize.calibrators.grid_weights import compensated_weight
from qwen_quantize.calibrators.methods import Transform
from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.calibrators.pair_scaling import (
    LayerTensors,
    divide_producer,
    expand_tied,
    multiply_expert_readers,
    multiply_readers,
    storable_scale,
    tie_of,
)
from qwen_quantize.calibrators.range_search import rounds_to_nearest
from qwen_quantize.calibrators.smoothquant import search_smoothing
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import LinearGroup, PlainGroup, fuse
from qwen_quantize.models.blueprint import Blueprint, Half, LinearSite, Stream
from qwen_quantize.models.scale_pairs import (
    NormProducer,
    RowsProducer,
    ScalePair,
    expert_scale_pairs,
    scale_pairs,
)
from qwen_quantize.pipeline.calibration import Calibration
from qwen_quantize.pipeline.choices import LinearChoice
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.solving import factors_of

_EXPERTS_SEARCHED = 8  # of a layer, evenly spread: what all of them share is searched on these


@dataclass(frozen=True, slots=True)
class Move:
    """A pair and the factors that were found for it; scale: [pair.features] float32."""

    pair: ScalePair
    scale: Tensor
    choice: ScaleChoice

    def record(self) -> dict[str, Any]:
        """What the manifest says of it; errors are relative and squared."""
        return {
            "stream": self.pair.stream.value,
            "exponent": self.choice.exponent,
            "weight_exponent": self.choice.weight_exponent,
            "error": self.choice.loss,
            "error_without": self.choice.identity_loss,
        }


def tensors_of(
    blueprint: Blueprint, groups: Mapping[Stream, Sequence[LinearSite]], layer: Mapping[Stream, LinearGroup]
) -> LayerTensors:
    """The linears of plain groups by path; a linear without a bias has none here either."""
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    for stream, sites in groups.items():
        plain = layer[stream]
        assert isinstance(plain, PlainGroup)
        sizes = list(plain.sizes)
        for site, weight in zip(sites, torch.split(plain.weight, sizes), strict=True):
            weights[site.path] = weight
        if plain.bias is not None:
            for site, bias in zip(sites, torch.split(plain.bias, sizes), strict=True):
                if blueprint.has_bias(site):
                    biases[site.path] = bias
    return LayerTensors(weights, biases)


def groups_of(
    groups: Mapping[Stream, Sequence[LinearSite]], tensors: LayerTensors
) -> dict[Stream, LinearGroup]:
    """The inverse of `tensors_of`."""
    return {
        stream: fuse(
            [tensors.weights[site.path] for site in sites], [tensors.biases.get(site.path) for site in sites]
        )
        for stream, sites in groups.items()
    }


def _moves_nothing(plan: Plan) -> bool:
    return all(choice.method.transform is Transform.NONE for choice in plan.distinct_choices)


def _choice(plan: Plan, blueprint: Blueprint, layer: int, pair: ScalePair) -> LinearChoice:
    """What becomes of the pair's readers; of routed experts the first stands for all."""
    reader = next((site for site in pair.readers if "{expert}" in site.path), pair.readers[0])
    return plan.choice_of(blueprint.module_name(layer, reader, 0))


def can_move(plan: Plan, blueprint: Blueprint, layer: int, pair: ScalePair) -> bool:
    """Whether the readers' method moves factors, and everything that the pair changes is written anew.

    A linear that stays has to stay as it is.
    """
    if _choice(plan, blueprint, layer, pair).method.transform is Transform.NONE:
        return False
    changed = list(pair.readers)
    if isinstance(pair.producer, RowsProducer):
        changed.append(pair.producer.site)
    count = blueprint.num_experts(layer)
    modules = [
        blueprint.module_name(layer, site, expert)
        for site in changed
        for expert in (range(count) if "{expert}" in site.path else (None,))
    ]
    return all(module in plan.selection.quantized for module in modules)


def find_move(
    run: Calibration, layer: int, pair: ScalePair, weights: Sequence[Tensor], statistics: InputStatistics
) -> Move | None:
    """The factors under which the readers `weights` lose least; None where none are better than ones."""
    own = _choice(run.plan, run.blueprint, layer, pair)
    spec, cast = own.scheme.weight, own.arithmetic.weight_cast

    def rounded(weight: Tensor, squares: Tensor) -> Tensor:
        return clipped_rounding(weight, squares, spec, cast)

    if own.method.transform is Transform.AWQ:
        factors = factors_of(own.method, statistics)
        remaining = compensated_weight(factors) if factors else None
        alone = rounds_to_nearest(spec.format, cast) and spec.granularity.block_shape((2, 1))[0] == 1
        choice = search_awq(
            weights,
            statistics,
            rounded,
            tie_of(pair),
            remaining=remaining,
            rounding_error=partial(clipped_error, spec=spec) if alone else None,
        )
    else:
        activation = own.scheme.activation
        assert activation is not None
        choice = search_smoothing(
            weights,
            statistics,
            activation,
            rounded,
            own.chip_compute().cast,
            statistics.sample,
            tie_of(pair),
        )
    if choice.is_identity:
        return None
    scale = choice.scale
    if pair.tensor_readers:
        # Routers and gates stay in 16 bits: only powers of two change none of their values.
        scale = torch.exp2(scale.log2().round())
    elif isinstance(pair.producer, NormProducer):
        norm = run.blueprint.layer_name(layer, pair.producer.suffix)
        dtype = _kept_type(run, norm)
        scale = storable_scale(run.reader.source.read(norm).float(), scale, dtype, pair.producer.offset)
    return Move(pair, scale, choice)


def moved_statistics(statistics: InputStatistics, move: Move) -> InputStatistics:
    """What the readers will see."""
    return scaled_statistics(statistics, expand_tied(move.scale, tie_of(move.pair)))


def apply_move(
    run: Calibration, layer: int, move: Move, tensors: LayerTensors
) -> tuple[LayerTensors, tuple[str, ...]]:
    """(the layer's tensors after it, names of what was written); readers in routed experts have their own turn.

    Norms, biases, routers and gates are written here, and go on as they were written.
    """
    pair = replace(
        move.pair, readers=tuple(site for site in move.pair.readers if "{expert}" not in site.path)
    )
    changed = divide_producer(tensors, pair, move.scale)
    changed = changed.changed(multiply_readers(tensors.changed(changed), pair, move.scale))
    kept = {suffix: _keep(run, layer, suffix, values) for suffix, values in changed.tensors.items()}
    biases = {path: _keep(run, layer, f"{path}.bias", bias) for path, bias in changed.biases.items()}
    names = (*kept, *(f"{path}.bias" for path in biases))
    written = tuple(run.blueprint.layer_name(layer, name) for name in names)
    return tensors.changed(LayerTensors(changed.weights, biases, kept)), written


def _keep(run: Calibration, layer: int, suffix: str, values: Tensor) -> Tensor:
    """Write a tensor that stays in high precision; returns it as the engine will multiply with it."""
    name, offset = run.blueprint.layer_name(layer, suffix), run.blueprint.norm_offset(suffix)
    stored = (values - offset).to(_kept_type(run, name))
    run.folder.write(name, stored)
    return stored.float() + offset


def _kept_type(run: Calibration, name: str) -> torch.dtype:
    dtype = DTYPES[run.kept_dtypes[name]].torch
    assert dtype is not None
    return dtype


@dataclass(frozen=True, slots=True)
class Moved:
    """Half a layer with its factors moved. written: names of tensors in the output; moves: all that were made.

    expert_move: what routed experts have to follow when it is their turn.
    """

    layer: Layer
    statistics: dict[Stream, InputStatistics]
    written: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    expert_move: Move | None = None

    @property
    def records(self) -> tuple[dict[str, Any], ...]:
        """For the manifest."""
        return tuple(move.record() for move in self.moves)


def move_half(
    run: Calibration,
    index: int,
    half: Half,
    layer: Layer,
    statistics: dict[Stream, InputStatistics],
) -> Moved:
    """Find and make the moves of half a layer, each where it lowers the error.

    statistics: by stream; what moves is replaced in it, so that no second moments are held twice. With routed
    experts, those of EXPERT_INPUT count for the shared expert's input too.
    """
    if _moves_nothing(run.plan):
        return Moved(layer, statistics)
    blueprint = run.blueprint
    groups = blueprint.streams(index, half)
    tensors = tensors_of(blueprint, groups, layer.groups)
    tensors = LayerTensors(tensors.weights, tensors.biases, dict(layer.tensors))
    found = statistics
    written: list[str] = []
    moves: list[Move] = []
    expert_move = None
    for pair in scale_pairs(blueprint, index, half):
        if pair.stream not in found or not can_move(run.plan, blueprint, index, pair):
            continue
        weights = _readers(run, index, layer, pair, tensors)
        move = find_move(run, index, pair, weights, found[pair.stream])
        if move is None:
            continue
        tensors, names = apply_move(run, index, move, tensors)
        written += names
        moves.append(move)
        found[pair.stream] = moved_statistics(found[pair.stream], move)
        if any("{expert}" in site.path for site in pair.readers):
            expert_move = move
    moved = Layer(groups_of(groups, tensors), tensors.tensors, layer.experts)
    return Moved(moved, found, tuple(written), tuple(moves), expert_move)


def _readers(
    run: Calibration, index: int, layer: Layer, pair: ScalePair, tensors: LayerTensors
) -> list[Tensor]:
    """The weights that a pair's factors multiply; of routed experts, some."""
    weights = [tensors.weights[site.path] for site in pair.readers if "{expert}" not in site.path]
    sites = [site for site in pair.readers if "{expert}" in site.path]
    if not sites:
        return weights
    assert layer.experts is not None
    count = run.blueprint.num_experts(index)
    step = max(1, count // _EXPERTS_SEARCHED)
    for expert in range(0, count, step):
        streams = run.blueprint.expert_streams(index)
        read = tensors_of(run.blueprint, streams, layer.experts(expert))
        weights += [read.weights[site.path] for site in sites]
    return weights


def follow_move(
    run: Calibration, index: int, expert: int, groups: Mapping[Stream, LinearGroup], move: Move | None
) -> Mapping[Stream, LinearGroup]:
    """A routed expert as it reads what a move has changed for all experts."""
    if move is None:
        return groups
    streams = _expert_streams(run.blueprint, index, expert)
    tensors = tensors_of(run.blueprint, streams, groups)
    return groups_of(
        streams, tensors.changed(multiply_expert_readers(tensors, move.pair, move.scale, expert))
    )


def move_expert(
    run: Calibration,
    index: int,
    expert: int,
    groups: Mapping[Stream, LinearGroup],
    statistics: dict[Stream, InputStatistics | None],
) -> tuple[Mapping[Stream, LinearGroup], dict[Stream, InputStatistics | None]]:
    """The moves inside one routed expert."""
    if _moves_nothing(run.plan):
        return groups, statistics
    streams = _expert_streams(run.blueprint, index, expert)
    tensors = tensors_of(run.blueprint, streams, groups)
    found = dict(statistics)
    for pair in (pair.for_expert(expert) for pair in expert_scale_pairs(run.blueprint, index)):
        seen = found[pair.stream]
        if seen is None or not can_move(run.plan, run.blueprint, index, pair):
            continue
        move = find_move(run, index, pair, [tensors.weights[site.path] for site in pair.readers], seen)
        if move is not None:
            tensors, _ = apply_move(run, index, move, tensors)
            found[pair.stream] = moved_statistics(seen, move)
    return groups_of(streams, tensors), found


def _expert_streams(blueprint: Blueprint, index: int, expert: int) -> dict[Stream, tuple[LinearSite, ...]]:
    """A routed expert's linears with its number in their paths."""
    return {
        stream: tuple(replace(site, path=site.path.replace("{expert}", str(expert))) for site in sites)
        for stream, sites in blueprint.expert_streams(index).items()
    }
