"""The layer loop: for half a layer at a time load, observe, solve, write, run the quantized half, free it.

Calibration inputs of a half come from everything quantized before it, as they will on the chip. Memory holds
half a layer, and of routed experts one; hidden states between halves live in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputObserver, InputStatistics, residual_weight
from qwen_quantize.calibrators.problem import LayerSolution
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import LinearGroup, ObservedGroup, PlainGroup, WatchedGroup
from qwen_quantize.engine.model import run_attention, run_mlp
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import RESIDUAL_WRITERS, Blueprint, Half, Stream
from qwen_quantize.pipeline.calibration import Batch, Calibration, ObservedRun
from qwen_quantize.pipeline.hidden import HiddenWriter
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.solving import (
    check_finite_group,
    check_finite_tensors,
    factors_of,
    quantized_group,
    solve_group,
    stream_record,
    write_linear,
)
from qwen_quantize.pipeline.transform import Moved, move_half

Progress = Callable[[str, int, int], None]


def half_unit(layer: int, half: Half) -> str:
    """The name under which the journal knows half a layer."""
    return f"layers.{layer}.{half.value}"


def half_step(layer: int, half: Half) -> int:
    """The number of the hidden states that half a layer reads."""
    return 2 * layer + (half is Half.MLP)


def unfinished_halves(blueprint: Blueprint, journal: Journal) -> list[tuple[int, Half]]:
    """In order, from the first that is not in the journal on."""
    halves = [(layer, half) for layer in range(blueprint.num_layers) for half in Half]
    done = 0
    while done < len(halves) and half_unit(*halves[done]) in journal.units:
        done += 1
    return halves[done:]


def embed(run: ObservedRun, tokens: Tensor) -> None:
    """Write the states that the first layer reads. tokens: [windows, T] int64."""
    with run.states.writing(0) as writer:
        for begin, end in run.batches():
            writer.append(run.reader.embed(tokens[begin:end]))


def require_states(run: ObservedRun, layer: int, half: Half) -> None:
    """UserError where the states that a resumed run goes on from are gone."""
    step = half_step(layer, half)
    if not run.states.is_complete(step):
        raise UserError(
            f"{run.states.path(step)} is missing, so layer {layer} cannot go on; start again with --overwrite"
        )


def check_written(run: Calibration, rest: Sequence[tuple[int, Half]]) -> None:
    """Every linear of the finished halves must be on record as written."""
    unfinished = set(rest)
    for layer in range(run.blueprint.num_layers):
        for half in Half:
            if (layer, half) in unfinished:
                return
            for module in run.modules(layer, run.blueprint.sites(layer, half)):
                shape = run.plan.selection.quantized.get(module)
                outputs = (
                    ()
                    if shape is None
                    else run.plan.layout.outputs(module, shape, run.plan.scheme_of(module))
                )
                missing = [output.name for output in outputs if not run.folder.is_written(output.name)]
                if missing:
                    raise UserError(
                        f"{run.folder.staging}: {missing[0]!r} should be written but is not on record; start again "
                        "with --overwrite"
                    )


@torch.inference_mode()
def quantize_half(run: Calibration, index: int, half: Half) -> dict[str, Any]:
    """Half a layer without routed experts; returns its records."""
    layer, record = solve_moved(run, index, half, _observed_and_moved(run, index, half))
    if not (run.is_last(index) and half is Half.MLP):
        _propagate(run, layer, index, half)
    return record


def _observed_and_moved(run: Calibration, index: int, half: Half) -> Moved:
    layer = run.reader.read_half(index, half)
    check_half(run, index, half, layer)
    observers = observe_half(run, layer, index, half)
    return move_half(run, index, half, layer, {s: o.statistics() for s, o in observers.items()})


def solve_moved(run: Calibration, index: int, half: Half, moved: Moved) -> tuple[Layer, dict[str, Any]]:
    """(half a layer as the chip runs it, its records), solved and written group by group."""
    tensors, plain_groups, statistics_of = moved.layer.tensors, dict(moved.layer.groups), moved.statistics
    written, moves = moved.written, moved.records
    del moved  # so that each group is freed once it is quantized
    groups: dict[Stream, LinearGroup] = {}
    linears: list[dict[str, Any]] = []
    streams: list[dict[str, Any]] = []
    for stream, sites in run.blueprint.streams(index, half).items():
        plain = plain_groups.pop(stream)
        assert isinstance(plain, PlainGroup)
        statistics = statistics_of.pop(stream)  # its second moments are the largest thing in memory
        streams.append(asdict(stream_record(stream.value, statistics)))
        group, records = solve_and_write(run, run.modules(index, sites), plain, statistics)
        groups[stream] = group
        linears += records
    record = {"linears": linears, "streams": streams, "moves": list(moves), "tensors": list(written)}
    return Layer(groups, tensors, None), record


def solve_and_write(
    run: Calibration, modules: Sequence[str], plain: PlainGroup, statistics: InputStatistics | None
) -> tuple[LinearGroup, list[dict[str, Any]]]:
    """(the group that runs on, records); a group that the patterns keep, or that will not run, stays as it is."""
    solved = solve(run, modules, plain, statistics)
    records = write_solved(run, plain, solved, statistics)
    return running_group(run, modules, plain, solved, statistics) if run.propagates else plain, records


def solve(
    run: Calibration, modules: Sequence[str], plain: PlainGroup, statistics: InputStatistics | None
) -> dict[str, LayerSolution]:
    """The group's linears by name; none of a group that the patterns keep."""
    if modules[0] not in run.plan.selection.quantized:
        return {}
    choice = run.plan.choice_of(modules[0])
    return solve_group(choice, modules, plain, statistics, factors_of(choice.method, statistics))


def write_solved(
    run: Calibration,
    plain: PlainGroup,
    solved: Mapping[str, LayerSolution],
    statistics: InputStatistics | None,
) -> list[dict[str, Any]]:
    """Put a solved group into the output folder; its records."""
    if not solved:
        return []
    biases = [None] * len(solved) if plain.bias is None else torch.split(plain.bias, list(plain.sizes))
    return [
        asdict(write_linear(run.plan, run.folder, name, solution, _amax(statistics), bias))
        for (name, solution), bias in zip(solved.items(), biases, strict=True)
    ]


def running_group(
    run: Calibration,
    modules: Sequence[str],
    plain: PlainGroup,
    solved: Mapping[str, LayerSolution],
    statistics: InputStatistics | None,
) -> LinearGroup:
    """The solved group as the chip will run it."""
    if not solved:
        return run.as_it_runs(plain, modules[0])
    weights = {name: solution.quantized for name, solution in solved.items()}
    group = quantized_group(run.plan.choice_of(modules[0]), plain, weights, _amax(statistics))
    return run.as_it_runs(group, modules[0])


def _amax(statistics: InputStatistics | None) -> float | None:
    return None if statistics is None else float(statistics.amax.max())


def check_half(run: ObservedRun, index: int, half: Half, layer: Layer) -> None:
    """UserError naming the first tensor of the half that is not finite."""
    for stream, sites in run.blueprint.streams(index, half).items():
        modules = [run.blueprint.module_name(index, site) for site in sites]
        check_finite_group(run.reader, modules, layer.groups[stream])
    check_finite_tensors(run.reader, run.blueprint.layer_name(index, ""), layer.tensors)


def run_half(run: ObservedRun, hidden: Tensor, layer: Layer, index: int, half: Half) -> Tensor:
    if half is Half.ATTENTION:
        return run_attention(hidden, layer, index, run.blueprint, run.reader.rotary)
    return run_mlp(hidden, layer, index, run.blueprint)


def observe_half(
    run: ObservedRun, layer: Layer, index: int, half: Half, writer: HiddenWriter | None = None
) -> dict[Stream, InputObserver]:
    """Run all tokens through half a layer without routed experts, an observer at each stream.

    writer: gets what comes out, the states that the next half reads; without one that is not computed.
    """
    observers: dict[Stream, InputObserver] = {}
    groups: dict[Stream, LinearGroup] = {}
    batch = Batch()
    length = run.states.shape[1]
    for stream, group in layer.groups.items():
        assert isinstance(group, PlainGroup)
        module = run.blueprint.module_name(index, run.blueprint.streams(index, half)[stream][0])
        observer = run.observer(group.weight.shape[1], batch, module)
        observers[stream] = observer
        observe = observing(observer, stream, group, batch)
        writes = stream in RESIDUAL_WRITERS and writer is None
        runs = run.as_it_runs(group, module)
        groups[stream] = WatchedGroup(group, observe) if writes else ObservedGroup(runs, observe)
    observed = Layer(groups, layer.tensors, None)
    for begin, end in run.batches():
        hidden = run.states.read(half_step(index, half), begin, end)
        batch.hidden, batch.tokens = hidden.flatten(0, 1), torch.arange(begin * length, end * length)
        states = run_half(run, hidden, observed, index, half)
        if writer is not None:
            writer.append(states)
    for stream, observer in observers.items():
        require_finite_input(run, observer, stream, index)
    return observers


def require_finite_input(run: ObservedRun, observer: InputObserver, stream: Stream, index: int) -> None:
    if not bool(observer.amax.isfinite().all()):
        raise UserError(
            f"{run.reader.source.path}: the activations at {stream.value} of layer {index} are not finite; the "
            "model's weights or its config.json (rope, norms) are damaged"
        )


def observing(
    observer: InputObserver,
    stream: Stream,
    group: PlainGroup,
    batch: Batch,
    importance: Tensor | None = None,
) -> Callable[[Tensor], None]:
    """What an observed group shows its input to. importance: [tokens] weight of a squared error, or None."""

    def observe(x: Tensor) -> None:
        x, weight = x.flatten(0, -2), importance
        if stream in RESIDUAL_WRITERS:
            relative = residual_weight(batch.hidden, x, group.weight)
            weight = relative if weight is None else relative * weight
        observer.observe(x, weight)

    return observe


def _propagate(run: Calibration, layer: Layer, index: int, half: Half) -> None:
    step = half_step(index, half)
    with run.states.writing(step + 1) as writer:
        for begin, end in run.batches():
            writer.append(run_half(run, run.states.read(step, begin, end), layer, index, half))
