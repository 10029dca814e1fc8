"""The layer loop: for half a layer at a time load, observe, solve, write, run the quantized half, free it.

Calibration inputs of a half come from everything quantized before it, as they will on the chip. Memory holds
half a layer, and of routed experts one; hidden states between halves live in a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import InputObserver, InputStatistics, residual_weight
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import LinearGroup, ObservedGroup, PlainGroup, WatchedGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.model import run_attention, run_mlp
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import RESIDUAL_WRITERS, Blueprint, Half, LinearSite, Stream
from qwen_quantize.pipeline.hidden import HiddenStates
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.memory import moment_ranges
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.solving import (
    check_finite_group,
    check_finite_tensors,
    factors_of,
    quantized_group,
    solve_group,
    stream_record,
    write_linear,
)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What every step of a calibrated run works with."""

    plan: Plan
    blueprint: Blueprint
    reader: ModelReader
    folder: OutputFolder
    journal: Journal
    states: HiddenStates

    def batches(self) -> list[tuple[int, int]]:
        """Ranges of windows that run together."""
        windows, step = self.states.shape[0], self.plan.memory.windows
        return [(begin, min(begin + step, windows)) for begin in range(0, windows, step)]

    def observer(self, features: int) -> InputObserver:
        ranges = moment_ranges(features, self.plan.memory.most_features)
        return InputObserver(
            features, self.plan.activation_cast(), ranges if self.plan.method.uses_second_moments else ()
        )

    def is_last(self, layer: int) -> bool:
        """Whether nobody reads the layer's output."""
        return layer + 1 == self.blueprint.num_layers

    def modules(self, layer: int, sites: Sequence[LinearSite]) -> list[str]:
        return [self.blueprint.module_name(layer, site) for site in sites]


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


def embed(run: Calibration, tokens: Tensor) -> None:
    """Write the states that the first layer reads. tokens: [windows, T] int64."""
    with run.states.writing(0) as writer:
        for begin, end in run.batches():
            writer.append(run.reader.embed(tokens[begin:end]))


def require_states(run: Calibration, layer: int, half: Half) -> None:
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
                name = run.plan.layout.weight_name(module)
                if module in run.plan.selection.quantized and not run.folder.is_written(name):
                    raise UserError(
                        f"{run.folder.staging}: {name!r} should be written but is not on record; start again "
                        "with --overwrite"
                    )


@torch.inference_mode()
def quantize_half(run: Calibration, index: int, half: Half) -> dict[str, Any]:
    """Half a layer without routed experts; returns its records."""
    blueprint = run.blueprint
    layer = run.reader.read_half(index, half)
    check_half(run, index, half, layer)
    observers = _observe(run, layer, index, half)
    tensors, plain_groups = layer.tensors, dict(layer.groups)
    del layer  # so that each group is freed once it is quantized
    groups: dict[Stream, LinearGroup] = {}
    linears: list[dict[str, Any]] = []
    streams: list[dict[str, Any]] = []
    for stream, sites in blueprint.streams(index, half).items():
        plain = plain_groups.pop(stream)
        assert isinstance(plain, PlainGroup)
        statistics = observers.pop(stream).statistics()  # its second moments are the largest thing in memory
        streams.append(asdict(stream_record(stream.value, statistics)))
        group, records = solve_and_write(run, run.modules(index, sites), plain, statistics)
        groups[stream] = group
        linears += records
    if not (run.is_last(index) and half is Half.MLP):
        _propagate(run, Layer(groups, tensors, None), index, half)
    return {"linears": linears, "streams": streams}


def solve_and_write(
    run: Calibration, modules: Sequence[str], plain: PlainGroup, statistics: InputStatistics | None
) -> tuple[LinearGroup, list[dict[str, Any]]]:
    """(the group that runs on, records); a group that the patterns keep stays as it is."""
    if modules[0] not in run.plan.selection.quantized:
        return plain, []
    solved = solve_group(run.plan, modules, plain, statistics, factors_of(statistics))
    records = [
        asdict(write_linear(run.plan, run.folder, name, solution)) for name, solution in solved.items()
    ]
    return quantized_group(run.plan, plain, list(solved.values())), records


def check_half(run: Calibration, index: int, half: Half, layer: Layer) -> None:
    """UserError naming the first tensor of the half that is not finite."""
    for stream, sites in run.blueprint.streams(index, half).items():
        check_finite_group(run.reader, run.modules(index, sites), layer.groups[stream])
    check_finite_tensors(run.reader, run.blueprint.layer_name(index, ""), layer.tensors)


def run_half(run: Calibration, hidden: Tensor, layer: Layer, index: int, half: Half) -> Tensor:
    if half is Half.ATTENTION:
        return run_attention(hidden, layer, index, run.blueprint, run.reader.rotary)
    return run_mlp(hidden, layer, index, run.blueprint)


def _observe(run: Calibration, layer: Layer, index: int, half: Half) -> dict[Stream, InputObserver]:
    observers: dict[Stream, InputObserver] = {}
    groups: dict[Stream, LinearGroup] = {}
    residual = Residual()
    for stream, group in layer.groups.items():
        assert isinstance(group, PlainGroup)
        observer = run.observer(group.weight.shape[1])
        observers[stream] = observer
        observe = observing(observer, stream, group, residual)
        # The half's output is not used here: the quantized half's is what comes next will see.
        writes = stream in RESIDUAL_WRITERS
        groups[stream] = WatchedGroup(group, observe) if writes else ObservedGroup(group, observe)
    observed = Layer(groups, layer.tensors, None)
    for begin, end in run.batches():
        residual.hidden = run.states.read(half_step(index, half), begin, end).flatten(0, 1)
        run_half(run, residual.hidden.view(end - begin, *run.states.shape[1:]), observed, index, half)
    for stream, observer in observers.items():
        require_finite_input(run, observer, stream, index)
    return observers


def require_finite_input(run: Calibration, observer: InputObserver, stream: Stream, index: int) -> None:
    if not bool(observer.amax.isfinite().all()):
        raise UserError(
            f"{run.reader.source.path}: the activations at {stream.value} of layer {index} are not finite; the "
            "model's weights or its config.json (rope, norms) are damaged"
        )


class Residual:
    """The residual as it entered the half, [tokens, hidden], for the observers of one batch."""

    hidden: Tensor


def observing(
    observer: InputObserver,
    stream: Stream,
    group: PlainGroup,
    residual: Residual,
    importance: Tensor | None = None,
) -> Callable[[Tensor], None]:
    """What an observed group shows its input to. importance: [tokens] weight of a squared error, or None."""

    def observe(x: Tensor) -> None:
        x, weight = x.flatten(0, -2), importance
        if stream in RESIDUAL_WRITERS:
            relative = residual_weight(residual.hidden, x, group.weight)
            weight = relative if weight is None else relative * weight
        observer.observe(x, weight)

    return observe


def _propagate(run: Calibration, layer: Layer, index: int, half: Half) -> None:
    step = half_step(index, half)
    with run.states.writing(step + 1) as writer:
        for begin, end in run.batches():
            writer.append(run_half(run, run.states.read(step, begin, end), layer, index, half))
