"""A layer's routed experts, one in memory at a time: each is calibrated on the tokens that are routed to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from qwen_quantize.pipeline.calibration import Batch, Calibration, ObservedRun
from qwen_quantize.pipeline.hidden import HiddenWriter
from qwen_quantize.pipeline.records import ExpertRecord
from qwen_quantize.pipeline.solving import check_finite_group, stream_record, written_group
from qwen_quantize.pipeline.stream import (
    check_half,
    half_step,
    observing,
    require_finite_input,
    solve_and_write,
)
from qwen_quantize.pipeline.transform import Move, Moved, follow_move, move_expert, move_half

_TOKENS_PER_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Routed:
    """The tokens of one expert: positions [n] ascending, and what its output is multiplied with."""

    tokens: Tensor
    gates: Tensor

    def chunks(self) -> list[Routed]:
        return [
            Routed(
                self.tokens[first : first + _TOKENS_PER_CHUNK], self.gates[first : first + _TOKENS_PER_CHUNK]
            )
            for first in range(0, self.tokens.numel(), _TOKENS_PER_CHUNK)
        ]


def expert_unit(layer: int, expert: int) -> str:
    """The name under which the journal knows a routed expert."""
    return f"layers.{layer}.experts.{expert}"


def routed_to(routing: Routing, expert: int) -> Routed:
    tokens, slot = (routing.indices == expert).nonzero(as_tuple=True)
    return Routed(tokens, routing.weights[tokens, slot])


def spread_tokens(routing: Routing, count: int) -> Routed:
    """So many of all tokens, evenly spread, as if the router had sent them here."""
    spread = evenly_spread(routing.indices.shape[0], count)
    return Routed(spread, torch.ones(spread.numel()))


@torch.inference_mode()
def quantize_experts_half(run: Calibration, index: int) -> dict[str, Any]:
    """The MLP half of a layer with routed experts; returns its records, the experts' are in the journal."""
    layer = run.reader.read_half(index, Half.MLP)
    check_half(run, index, Half.MLP, layer)
    routing, observers = observe_everyone(run, layer, index)
    seen = {stream: observer.statistics() for stream, observer in observers.items()}
    observers.clear()
    moved = move_half(run, index, Half.MLP, layer, seen)
    layer, everyone = moved.layer, moved.statistics[Stream.EXPERT_INPUT]
    groups, record = solve_shared(run, index, moved)
    step = half_step(index, Half.MLP)
    with nullcontext() if run.is_last(index) else run.states.writing(step + 1) as writer:
        if writer is not None:
            write_without_experts(run, Layer(groups, layer.tensors, None), index, writer)
        experts = [
            _quantize_expert(run, layer, index, expert, routing, everyone, moved.expert_move, writer)
            for expert in range(run.blueprint.num_experts(index))
        ]
    return {**record, "experts": experts}


def solve_shared(
    run: Calibration, index: int, moved: Moved
) -> tuple[dict[Stream, LinearGroup], dict[str, Any]]:
    """(what every token visits, as the chip runs it; the half's records without its routed experts)."""
    layer, everyone = moved.layer, moved.statistics[Stream.EXPERT_INPUT]
    groups: dict[Stream, LinearGroup] = {}
    linears: list[dict[str, Any]] = []
    streams = [asdict(stream_record(Stream.EXPERT_INPUT.value, everyone))]
    for stream, sites in run.blueprint.streams(index, Half.MLP).items():
        plain = layer.groups[stream]
        assert isinstance(plain, PlainGroup)
        # A shared expert reads what every routed expert reads.
        statistics = everyone if stream is Stream.SHARED_INPUT else moved.statistics.pop(stream)
        if stream is not Stream.SHARED_INPUT:
            streams.append(asdict(stream_record(stream.value, statistics)))
        groups[stream], records = solve_and_write(run, run.modules(index, sites), plain, statistics)
        linears += records
    return groups, {
        "linears": linears,
        "streams": streams,
        "moves": list(moved.records),
        "tensors": list(moved.written),
    }


def observe_everyone(
    run: ObservedRun, layer: Layer, index: int
) -> tuple[Routing, dict[Stream, InputObserver]]:
    """(routing of every token, observers of what all experts read and of what is inside the shared expert)."""
    step, width = half_step(index, Half.MLP), run.blueprint.config.hidden_size
    batch, length = Batch(), run.states.shape[1]
    routed = run.blueprint.module_name(index, run.blueprint.expert_sites(index)[0], 0)
    everyone = run.observer(width, batch, routed)
    observers = {Stream.EXPERT_INPUT: everyone}
    groups: dict[Stream, LinearGroup] = {}
    for stream, group in layer.groups.items():
        assert isinstance(group, PlainGroup)
        groups[stream] = group
        if stream is Stream.SHARED_HIDDEN:
            module = run.blueprint.module_name(index, run.blueprint.streams(index, Half.MLP)[stream][0])
            observers[stream] = run.observer(group.weight.shape[1], batch, module)
            groups[stream] = WatchedGroup(group, observing(observers[stream], stream, group, batch))
    observed = Layer(groups, layer.tensors, None)
    routings = []
    for begin, end in run.batches():
        batch.hidden = run.states.read(step, begin, end).flatten(0, 1)
        batch.tokens = torch.arange(begin * length, end * length)
        x = mlp_input(batch.hidden, layer, run.blueprint)
        routings.append(route(x, layer, index, run.blueprint))
        everyone.observe(x)
        if len(observers) > 1:
            shared_expert(x, observed, run.blueprint)
    for stream, observer in observers.items():
        require_finite_input(run, observer, stream, index)
    indices = torch.cat([routing.indices for routing in routings])
    weights = torch.cat([routing.weights for routing in routings])
    return Routing(indices, weights), observers


def write_without_experts(run: ObservedRun, layer: Layer, index: int, writer: HiddenWriter) -> None:
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
    move: Move | None,
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
    groups = follow_move(run, index, expert, groups, move)
    routed = routed_to(routing, expert)
    unit = expert_unit(index, expert)
    quantized: dict[Stream, LinearGroup] = {}
    if unit in run.journal.units:
        for stream, names in modules.items():
            plain = groups[stream]
            assert isinstance(plain, PlainGroup)
            chosen = names[0] in run.plan.selection.quantized
            quantized[stream] = run.as_it_runs(
                written_group(run.plan, run.folder, names, plain) if chosen else plain, names[0]
            )
    else:
        inputs = _inputs_of(run, layer, index, groups, routed, routing)
        coverage, statistics = expert_statistics(
            run.plan.recipe.expert_policy, expert, groups, everyone, inputs
        )
        quantized = solve_expert(run, index, expert, groups, coverage, statistics)
    if writer is not None:
        for part in routed.chunks():
            x = mlp_input(run.states.gather(half_step(index, Half.MLP), part.tokens), layer, run.blueprint)
            y = run_expert(x, quantized, run.blueprint.config.activation)
            writer.add(part.tokens, y * part.gates.unsqueeze(1))
    found: dict[str, Any] = run.journal.units[unit]["coverage"]
    return found


def solve_expert(
    run: Calibration,
    index: int,
    expert: int,
    groups: Mapping[Stream, LinearGroup],
    coverage: ExpertRecord,
    statistics: dict[Stream, InputStatistics | None],
) -> dict[Stream, LinearGroup]:
    """Move, solve, write and put on record one expert; returns it as the chip runs it."""
    groups, statistics = move_expert(run, index, expert, groups, statistics)
    quantized: dict[Stream, LinearGroup] = {}
    linears: list[dict[str, Any]] = []
    for stream, sites in run.blueprint.expert_streams(index).items():
        plain = groups[stream]
        assert isinstance(plain, PlainGroup)
        names = [run.blueprint.module_name(index, site, expert) for site in sites]
        quantized[stream], records = solve_and_write(run, names, plain, statistics.pop(stream))
        linears += records
    run.folder.sync()
    run.journal.finish(expert_unit(index, expert), {"linears": linears, "coverage": asdict(coverage)})
    return quantized


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """What can be known of one expert's inputs. tokens: how many are routed to it.

    own: the statistics of both its inputs over those; forced: over so many of all tokens, spread evenly, as if the
    router had sent them here, each with weight 1; anyone: of these the second input's alone.
    """

    tokens: int
    own: Callable[[], dict[Stream, InputStatistics]]
    forced: Callable[[int], dict[Stream, InputStatistics]]
    anyone: Callable[[int], InputStatistics]


def expert_statistics(
    policy: ExpertPolicy,
    expert: int,
    groups: Mapping[Stream, LinearGroup],
    everyone: InputStatistics,
    inputs: ExpertInputs,
) -> tuple[ExpertRecord, dict[Stream, InputStatistics | None]]:
    """What the expert's two inputs are calibrated on under a policy."""
    features = {stream: _features(group) for stream, group in groups.items()}
    needed = max(needed_tokens(width) for width in features.values())
    own = inputs.tokens
    starved = own < needed
    record = ExpertRecord(
        expert, own, needed, policy.value if starved or policy is ExpertPolicy.FORCED else "own"
    )
    if policy is ExpertPolicy.ROUND and starved:
        return record, dict.fromkeys(groups)
    if policy is ExpertPolicy.FORCED:
        return record, dict(inputs.forced(needed))
    statistics = inputs.own()
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
        hidden = inputs.anyone(inside)
        blended[Stream.EXPERT_HIDDEN] = shrunk(statistics[Stream.EXPERT_HIDDEN], hidden, inside)
    return record, blended


def _inputs_of(
    run: Calibration,
    layer: Layer,
    index: int,
    groups: Mapping[Stream, LinearGroup],
    routed: Routed,
    routing: Routing,
) -> ExpertInputs:
    def statistics(routed: Routed, only_hidden: bool = False) -> dict[Stream, InputStatistics]:
        found = observe_expert(run, layer, index, groups, routed, only_hidden=only_hidden)
        return {stream: observer.statistics() for stream, observer in found.items()}

    return ExpertInputs(
        routed.tokens.numel(),
        lambda: statistics(routed),
        lambda count: statistics(spread_tokens(routing, count)),
        lambda count: statistics(spread_tokens(routing, count), only_hidden=True)[Stream.EXPERT_HIDDEN],
    )


def _features(group: LinearGroup) -> int:
    assert isinstance(group, PlainGroup)
    return group.weight.shape[1]


def observe_expert(
    run: ObservedRun,
    layer: Layer,
    index: int,
    groups: Mapping[Stream, LinearGroup],
    routed: Routed,
    *,
    only_hidden: bool = False,
    writer: HiddenWriter | None = None,
) -> dict[Stream, InputObserver]:
    """Run `routed` through the expert, an observer at its inputs; an error counts with the square of its gate.

    writer: gets the expert's share of the next states; without one its output is not computed.
    """
    batch = Batch()
    streams = run.blueprint.expert_streams(index)  # every expert of a layer becomes the same
    observers = {
        stream: run.observer(_features(group), batch, run.blueprint.module_name(index, streams[stream][0], 0))
        for stream, group in groups.items()
        if stream is Stream.EXPERT_HIDDEN or not only_hidden
    }
    for part in routed.chunks():
        batch.hidden = run.states.gather(half_step(index, Half.MLP), part.tokens)
        batch.tokens = part.tokens
        x = mlp_input(batch.hidden, layer, run.blueprint)
        observed: dict[Stream, LinearGroup] = {}
        for stream, group in groups.items():
            assert isinstance(group, PlainGroup)
            if stream not in observers:
                observed[stream] = group
                continue
            observe = observing(observers[stream], stream, group, batch, part.gates.square())
            last = stream is Stream.EXPERT_HIDDEN and writer is None
            runs = run.as_it_runs(group, run.blueprint.module_name(index, streams[stream][0], 0))
            observed[stream] = WatchedGroup(group, observe) if last else ObservedGroup(runs, observe)
        y = run_expert(x, observed, run.blueprint.config.activation)
        if writer is not None:
            writer.add(part.tokens, y * part.gates.unsqueeze(1))
    return observers
