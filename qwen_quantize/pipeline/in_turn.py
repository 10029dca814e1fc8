"""Half a layer whose last linear is calibrated behind the quantized ones before it: every linear runs once.

What the first linears read comes from the norm in front of them, so they are rounded before anything runs. Tokens
then run through them, what reaches the last linear is observed and put aside, and the last linear runs on that. Factors
that move into the last linear divide rows of one before it, which is rounded by then: it keeps its codes, and the
scales of those rows are divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputObserver, InputStatistics
from qwen_quantize.calibrators.pair_scaling import expand_tied, tie_of
from qwen_quantize.calibrators.problem import LayerSolution
from qwen_quantize.calibrators.range_search import stored_scale
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import PlainGroup, WatchedGroup
from qwen_quantize.engine.model import attention_input, attention_output, mlp_input, mlp_output
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.models.scale_pairs import RowsProducer
from qwen_quantize.pipeline.calibration import Batch, Calibration
from qwen_quantize.pipeline.hidden import HeldInputs
from qwen_quantize.pipeline.memory import HALF_ENDS, last_inputs
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.solving import stream_record
from qwen_quantize.pipeline.stream import (
    check_half,
    half_step,
    observing,
    require_finite_input,
    run_half,
    running_group,
    solve,
    write_solved,
)
from qwen_quantize.pipeline.transform import Move, move_half


def runs_in_turn(plan: Plan, blueprint: Blueprint, index: int, half: Half) -> bool:
    """Whether the half is linears of one input and then a last one, each of a method and scheme that allow it.

    Codes can stay when a row is divided only where integers have scales of their own in each row.
    """
    if last_inputs(blueprint, index, half) is None:
        return False
    modules = [blueprint.module_name(index, site) for site in blueprint.sites(index, half)]
    return all(
        choice.method.in_turn
        and isinstance(choice.scheme.weight.format, IntFormat)
        and choice.scheme.weight.granularity.block_shape((2, 1))[0] == 1
        for choice in map(plan.choice_of, modules)
    )


@torch.inference_mode()
def quantize_in_turn(run: Calibration, index: int, half: Half) -> dict[str, Any]:
    """Half a layer for which `runs_in_turn`; returns its records."""
    with run.states.holding() as held:
        return _quantize(run, index, half, held)


def _quantize(run: Calibration, index: int, half: Half, held: HeldInputs) -> dict[str, Any]:
    (first, first_sites), (last, last_sites) = run.blueprint.streams(index, half).items()
    first_modules, last_modules = run.modules(index, first_sites), run.modules(index, last_sites)
    layer = run.reader.read_half(index, half)
    check_half(run, index, half, layer)
    moved = move_half(run, index, half, layer, {first: _observe_input(run, layer, index, half)})
    layer, seen, written, records = moved.layer, moved.statistics[first], moved.written, moved.records
    plain = layer.groups[first]
    assert isinstance(plain, PlainGroup)
    solved = solve(run, first_modules, plain, seen)
    running = Layer(
        {**layer.groups, first: running_group(run, first_modules, plain, solved, seen)}, layer.tensors
    )
    behind = _observe_last(run, running, index, half, held)
    del running

    moved = move_half(run, index, half, layer, {last: behind})
    layer = moved.layer
    plain, end = layer.groups[first], layer.groups[last]
    assert isinstance(plain, PlainGroup)
    assert isinstance(end, PlainGroup)
    factors = None
    for move in moved.moves:
        factors = expand_tied(move.scale, tie_of(move.pair))
        if isinstance(move.pair.producer, RowsProducer):
            solved = _divided(run, index, solved, move) or solve(run, first_modules, plain, seen)
    linears = write_solved(run, plain, solved, seen)
    behind = moved.statistics[last]
    solved = solve(run, last_modules, end, behind)
    linears += write_solved(run, end, solved, behind)
    if not (run.is_last(index) and half is Half.MLP):
        group = running_group(run, last_modules, end, solved, behind)
        _run_last(run, Layer({last: group}, layer.tensors), index, half, held, factors)
    return {
        "linears": linears,
        "streams": [
            asdict(stream_record(stream.value, one)) for stream, one in ((first, seen), (last, behind))
        ],
        "moves": [*records, *moved.records],
        "tensors": [*written, *moved.written],
    }


def _observer(run: Calibration, layer: Layer, index: int, half: Half, stream: Stream) -> InputObserver:
    group = layer.groups[stream]
    assert isinstance(group, PlainGroup)
    module = run.blueprint.module_name(index, run.blueprint.streams(index, half)[stream][0])
    return run.observer(group.weight.shape[1], Batch(), module)


def _observe_input(run: Calibration, layer: Layer, index: int, half: Half) -> InputStatistics:
    """Of the norm in front of the half, which no linear has to run for."""
    first, step = HALF_ENDS[half][0], half_step(index, half)
    observer = _observer(run, layer, index, half, first)
    normed = attention_input if half is Half.ATTENTION else mlp_input
    for begin, end in run.batches():
        observer.observe(normed(run.states.read(step, begin, end), layer, run.blueprint).flatten(0, 1))
    require_finite_input(run, observer, first, index)
    return observer.statistics()


def _observe_last(
    run: Calibration, layer: Layer, index: int, half: Half, held: HeldInputs
) -> InputStatistics:
    """Run all tokens up to the last linear. held: gets what it will read, batch by batch."""
    last, step = HALF_ENDS[half][1], half_step(index, half)
    observer, group, batch = _observer(run, layer, index, half, last), layer.groups[last], Batch()
    assert isinstance(group, PlainGroup)
    observe = observing(observer, last, group, batch)

    def keep(x: Tensor) -> None:
        observe(x)
        held.append(x)

    watched = Layer({**layer.groups, last: WatchedGroup(group, keep)}, layer.tensors)
    for begin, end in run.batches():
        hidden = run.states.read(step, begin, end)
        batch.hidden = hidden.flatten(0, 1)
        run_half(run, hidden, watched, index, half)
    require_finite_input(run, observer, last, index)
    return observer.statistics()


def _divided(
    run: Calibration, index: int, solved: Mapping[str, LayerSolution], move: Move
) -> dict[str, LayerSolution] | None:
    """The first linears once `move` has divided rows of one of them; None where they are better solved anew."""
    producer = move.pair.producer
    assert isinstance(producer, RowsProducer)
    name = run.blueprint.module_name(index, producer.site)
    if name not in solved:
        return dict(solved)
    scale_format = run.plan.choice_of(name).scheme.weight.scale_format
    divided = divided_solution(solved[name], torch.tensor(producer.rows()), move.scale, scale_format)
    return None if divided is None else {**solved, name: divided}


def divided_solution(
    solution: LayerSolution, rows: Tensor, divisor: Tensor, scale_format: Format
) -> LayerSolution | None:
    """`rows` [n] int64 of a solved linear divided by `divisor` [n]: the same codes under other scales.

    Scales are rounded to `scale_format`; the errors on record are those of the undivided rows. None where a scale
    becomes so small that its type holds it in few bits: other codes may then do better.
    """
    scale = solution.quantized.scale.clone()
    scale[rows] = stored_scale(scale[rows] / divisor.unsqueeze(1), scale_format)
    if isinstance(scale_format, FloatFormat) and bool((scale[rows].abs() < scale_format.min_normal).any()):
        return None
    return replace(solution, quantized=replace(solution.quantized, scale=scale))


def _run_last(
    run: Calibration, layer: Layer, index: int, half: Half, held: HeldInputs, factors: Tensor | None
) -> None:
    """Write what the next half reads. factors: [columns] that were moved into the last linear since `held`."""
    step = half_step(index, half)
    output = attention_output if half is Half.ATTENTION else mlp_output
    with run.states.writing(step + 1) as writer:
        for (begin, end), inner in zip(run.batches(), held.read(), strict=True):
            if factors is not None:
                inner /= factors
            writer.append(run.states.read(step, begin, end) + output(inner, layer, run.blueprint))
