"""A layer's routed experts, one in memory at a time: each is calibrated on the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.experts import ExpertPolicy, evenly_spread, needed_tokens, shrunk
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics
from qwen_quantize.engine.experts import Routing, route, run_expert, shared_expert
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import LinearGroup, ObservedGroup, PlainGroup, WatchedGroup
from qwen_quantize.engine.model import mlp_input
from qwen_quantize.models.blueprint import Half, Stream
from qwen_quantize.pipeline.hidden import HiddenWriter
from qwen_quantize.pipeline.records import ExpertRecord
from qwen_quantize.pipeline.solving import check_finite_group, stream_record, written_group
from qwen_quantize.pipeline.stream import (
    Calibration,
    Residual,
    check_half,
    half_step,
    observing,
    require_finite_input,
    solve_and_write,
)

_TOKENS_PER_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class _Routed:
    """The tokens of one expert: positions [n] ascending, and what its output is multiplied with."""

    tokens: Tensor
    gates: Tensor

    def chunks(self) -> list[_Routed]:
        return [
            _Routed(
                self.tokens[first : first + _TOKENS_PER_CHUNK], self.gates[first : first + _TOKENS_PER_CHUNK]
            )
            for first in range(0, self.tokens.numel(), _TOKENS_PER_CHUNK)
        ]


def _routed_to(routing: Routing, expert: int) -> _Routed:
    tokens, slot = (routing.indices == expert).nonzero(as_tuple=True)
    return _Routed(tokens, routing.weights[tokens, slot])


@torch.inference_mode()
def quantize_experts_half(run: Calibration, index: int) -> dict[str, Any]:
    """The MLP half of a layer with routed experts; returns its records, the experts' are in the journal."""
    layer = run.reader.read_half(index, Half.MLP)
    check_half(run, index, Half.MLP, layer)
    routing, everyone, shared = _observe_everyone(run, layer, index)
    groups: dict[Stream, LinearGroup] = {}
    linears: list[dict[str, Any]] = []
    streams = [asdict(stream_record(Stream.EXPERT_INPUT.value, everyone))]
    for stream, sites in run.blueprint.streams(index, Half.MLP).items():
        plain = layer.groups[stream]
        assert isinstance(plain, PlainGroup)
        # A shared expert reads what every routed expert reads.
        statistics = everyone if stream is Stream.SHARED_INPUT else shared[stream].statistics()
        if stream is not Stream.SHARED_INPUT:
            streams.append(asdict(stream_record(stream.value, statistics)))
        groups[stream], records = solve_and_write(run, run.modules(index, sites), plain, statistics)
        linears += records
    shared.clear()
    step = half_step(index, Half.MLP)
    with nullcontext() if run.is_last(index) else run.states.writing(step + 1) as writer:
        if writer is not None:
            _write_without_experts(run, Layer(groups, layer.tensors, None), index, writer)
        experts = [
            _quantize_expert(run, layer, index, expert, routing, everyone, writer)
            for expert in range(run.blueprint.num_experts(index))
        ]
    return {"linears": linears, "streams": streams, "experts": experts}


def _observe_everyone(
    run: Calibration, layer: Layer, index: int
) -> tuple[Routing, InputStatistics, dict[Stream, InputObserver]]:
    """(routing of every token, statistics of what all experts read, observers inside the shared expert)."""
    step, width = half_step(index, Half.MLP), run.blueprint.config.hidden_size
    everyone = run.observer(width)
    shared: dict[Stream, InputObserver] = {}
    groups: dict[Stream, LinearGroup] = {}
    residual = Residual()
    for stream, group in layer.groups.items():
        assert isinstance(group, PlainGroup)
        groups[stream] = group
        if stream is Stream.SHARED_HIDDEN:
            shared[stream] = run.observer(group.weight.shape[1])
            groups[stream] = WatchedGroup(group, observing(shared[stream], stream, group, residual))
    observed = Layer(groups, layer.tensors, None)
    routings = []
    for begin, end in run.batches():
        residual.hidden = run.states.read(step, begin, end).flatten(0, 1)
        x = mlp_input(residual.hidden, layer, run.blueprint)
        routings.append(route(x, layer, index, run.blueprint))
        everyone.observe(x)
        if shared:
            shared_expert(x, observed, run.blueprint)
    require_finite_input(run, everyone, Stream.EXPERT_INPUT, index)
    for stream, observer in shared.items():
        require_finite_input(run, observer, stream, index)
    indices = torch.cat([routing.indices for routing in routings])
    weights = torch.cat([routing.weights for routing in routings])
    return Routing(indices, weights), everyone.statistics(), shared


def _write_without_experts(run: Calibration, layer: Layer, index: int, writer: HiddenWriter) -> None:
    """The next states without the routed experts' share: the residual and the shared expert."""
    step = half_step(index, Half.MLP)
    for begin, end in run.batches():
        hidden = run.states.read(step, begin, end)
        if layer.groups:
            flat = hidden.flatten(0, 1)
            flat += shared_expert(mlp_input(flat, layer, run.blueprint), layer, run.blueprint)
        writer.append(hidden)


def _quantize_expert(
    run: Calibration,
    layer: Layer,
    index: int,
    expert: int,
    routing: Routing,
    everyone: InputStatistics,
    writer: HiddenWriter | None,
) -> dict[str, Any]:
    """Solve and write one expert, then add its share of the next states; returns its coverage."""
    assert layer.experts is not None
    groups = layer.experts(expert)
    modules = {
        stream: [run.blueprint.module_name(index, site, expert) for site in sites]
        for stream, sites in run.blueprint.expert_streams(index).items()
    }
    for stream, names in modules.items():
        check_finite_group(run.reader, names, groups[stream])
    routed = _routed_to(routing, expert)
    unit = f"layers.{index}.experts.{expert}"
    quantized: dict[Stream, LinearGroup] = {}
    if unit in run.journal.units:
        for stream, names in modules.items():
            plain = groups[stream]
            assert isinstance(plain, PlainGroup)
            chosen = names[0] in run.plan.selection.quantized
            quantized[stream] = written_group(run.plan, run.folder, names, plain) if chosen else plain
    else:
        coverage, statistics = _expert_statistics(
            run, layer, index, expert, groups, routed, routing, everyone
        )
        linears: list[dict[str, Any]] = []
        for stream, names in modules.items():
            plain = groups[stream]
            assert isinstance(plain, PlainGroup)
            quantized[stream], records = solve_and_write(run, names, plain, statistics.pop(stream))
            linears += records
        run.folder.sync()
        run.journal.finish(unit, {"linears": linears, "coverage": asdict(coverage)})
    if writer is not None:
        for part in routed.chunks():
            x = mlp_input(run.states.gather(half_step(index, Half.MLP), part.tokens), layer, run.blueprint)
            y = run_expert(x, quantized, run.blueprint.config.activation)
            writer.add(part.tokens, y * part.gates.unsqueeze(1))
    found: dict[str, Any] = run.journal.units[unit]["coverage"]
    return found


def _expert_statistics(
    run: Calibration,
    layer: Layer,
    index: int,
    expert: int,
    groups: Mapping[Stream, LinearGroup],
    routed: _Routed,
    routing: Routing,
    everyone: InputStatistics,
) -> tuple[ExpertRecord, dict[Stream, InputStatistics | None]]:
    """What the expert's two inputs are calibrated on, under the policy of the recipe."""
    policy = run.plan.recipe.expert_policy
    features = {stream: _features(group) for stream, group in groups.items()}
    needed = max(needed_tokens(width) for width in features.values())
    own = routed.tokens.numel()
    starved = own < needed
    record = ExpertRecord(
        expert, own, needed, policy.value if starved or policy is ExpertPolicy.FORCED else "own"
    )
    if policy is ExpertPolicy.ROUND and starved:
        return record, dict.fromkeys(groups)
    if policy is ExpertPolicy.FORCED:
        spread = evenly_spread(routing.indices.shape[0], needed)
        forced = _Routed(spread, torch.ones(spread.numel()))
        return record, dict(_observe_expert(run, layer, index, groups, forced))
    statistics = _observe_expert(run, layer, index, groups, routed)
    if not starved:
        return record, dict(statistics)
    inside = needed_tokens(features[Stream.EXPERT_HIDDEN])
    blended: dict[Stream, InputStatistics | None] = {
        Stream.EXPERT_INPUT: shrunk(
            statistics[Stream.EXPERT_INPUT], everyone, needed_tokens(features[Stream.EXPERT_INPUT])
        ),
        Stream.EXPERT_HIDDEN: statistics[Stream.EXPERT_HIDDEN],
    }
    if own < inside:
        # What the average token would look like inside this expert, if it came here.
        spread = evenly_spread(routing.indices.shape[0], inside)
        anyone = _Routed(spread, torch.ones(spread.numel()))
        hidden = _observe_expert(run, layer, index, groups, anyone, only_hidden=True)[Stream.EXPERT_HIDDEN]
        blended[Stream.EXPERT_HIDDEN] = shrunk(statistics[Stream.EXPERT_HIDDEN], hidden, inside)
    return record, blended


def _features(group: LinearGroup) -> int:
    assert isinstance(group, PlainGroup)
    return group.weight.shape[1]


def _observe_expert(
    run: Calibration,
    layer: Layer,
    index: int,
    groups: Mapping[Stream, LinearGroup],
    routed: _Routed,
    *,
    only_hidden: bool = False,
) -> dict[Stream, InputStatistics]:
    """Statistics at the expert's inputs over `routed`; an error counts with the square of its gate."""
    observers = {
        stream: run.observer(_features(group))
        for stream, group in groups.items()
        if stream is Stream.EXPERT_HIDDEN or not only_hidden
    }
    for part in routed.chunks():
        residual = Residual()
        residual.hidden = run.states.gather(half_step(index, Half.MLP), part.tokens)
        x = mlp_input(residual.hidden, layer, run.blueprint)
        observed: dict[Stream, LinearGroup] = {}
        for stream, group in groups.items():
            assert isinstance(group, PlainGroup)
            if stream not in observers:
                observed[stream] = group
                continue
            observe = observing(observers[stream], stream, group, residual, part.gates.square())
            hidden = stream is Stream.EXPERT_HIDDEN
            observed[stream] = WatchedGroup(group, observe) if hidden else ObservedGroup(group, observe)
        run_expert(x, observed, run.blueprint.config.activation)
    return {stream: observer.statistics() for stream, observer in observers.items()}
