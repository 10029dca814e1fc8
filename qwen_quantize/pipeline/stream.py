"""The layer loop: load a layer, observe, solve, write, run the quantized layer, free it, go on.

Calibration inputs of a layer come from the quantized layers before it, as they will on the chip. Memory
holds one layer; hidden states between layers live in a file.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.block_fp8 import exact_scale
from qwen_quantize.calibrators.hessian import factorize, hessian_of
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics, residual_weight
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.engine.linear import EmulatedGroup, LinearGroup, ObservedGroup, PlainGroup, WatchedGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.model import Layer, run_layer
from qwen_quantize.errors import UserError
from qwen_quantize.formats.block_kernels import dequantize_blocks
from qwen_quantize.models.blueprint import RESIDUAL_WRITERS, LinearSite, Stream
from qwen_quantize.pipeline.hidden import HiddenStates
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.plan import Action, Plan, TensorPlan

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LinearRecord:
    """What the report says of one quantized linear; errors are relative and squared."""

    name: str
    shape: tuple[int, int]
    error: float
    baseline_error: float
    weight_sqnr_db: float
    searched_blocks: int
    zero_blocks: int
    partial_blocks: int
    exponents: dict[str, int]  # E8M0 exponent -> number of blocks
    sha256: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """What calibration saw at one input stream of a layer."""

    stream: str
    tokens: int
    amax: float
    rms: float
    outlier_ratio: float  # the largest amax / rms of a feature
    exponents: dict[str, int]  # float32 exponent -> count


def quantize_layers(
    plan: Plan,
    reader: ModelReader,
    folder: OutputFolder,
    journal: Journal,
    tokens: Tensor | None,
    progress: Progress,
) -> None:
    """Run the loop from the first unfinished layer on; every finished layer is on disk and in the journal.

    tokens: [windows, T] int64 calibration windows, or None to quantize without data.
    """
    config = plan.blueprint.config
    states = None
    start = journal.next_layer()
    _check_written(plan, folder, start)
    if tokens is not None:
        states = HiddenStates(folder.staging / "work", tokens.shape[0], tokens.shape[1], config.hidden_size)
        if start == 0:  # whatever lies there may come from another request
            _embed(plan, reader, states, tokens)
        for layer in range(start):
            states.remove(layer)
    for layer in range(start, config.num_layers):
        if states is not None and not states.is_complete(layer):
            raise UserError(
                f"{states.path(layer)} is missing, so layer {layer} cannot go on; start again with --overwrite"
            )
        record = _quantize_layer(plan, reader, folder, layer, states)
        folder.sync()
        journal.finish_layer(layer, record)
        if states is not None:
            states.remove(layer)
        progress("layers", layer + 1, config.num_layers)
    if states is not None:
        states.remove(config.num_layers)


def _check_written(plan: Plan, folder: OutputFolder, layers: int) -> None:
    """Every tensor of the finished layers must be on record as written."""
    finished = tuple(plan.blueprint.layer_name(layer, "") for layer in range(layers))
    for tensor in plan.tensors:
        if not tensor.name.startswith(finished):
            continue
        for output in tensor.outputs:
            if not folder.is_written(output.name):
                raise UserError(
                    f"{folder.staging}: {output.name!r} should be written but is not on record; start again with "
                    "--overwrite"
                )


def _embed(plan: Plan, reader: ModelReader, states: HiddenStates, tokens: Tensor) -> None:
    embedding = reader.source.read(plan.blueprint.family.embedding)
    writer = states.begin(0)
    for begin in range(0, tokens.shape[0], plan.batch_windows):
        writer.append(embedding[tokens[begin : begin + plan.batch_windows]].float())
    writer.finish()


@torch.inference_mode()
def _quantize_layer(
    plan: Plan, reader: ModelReader, folder: OutputFolder, index: int, states: HiddenStates | None
) -> dict[str, Any]:
    blueprint = plan.blueprint
    layer = reader.read_layer(index)
    _check_finite(plan, reader, index, layer)
    observers: dict[Stream, InputObserver] = {}
    if states is not None:
        observers = _observe(plan, reader, layer, index, states)
    chosen = set(plan.selection.quantized)
    groups: dict[Stream, LinearGroup] = {}
    linears: list[dict[str, Any]] = []
    streams: list[dict[str, Any]] = []
    for stream, sites in blueprint.streams().items():
        plain = layer.groups[stream]
        assert isinstance(plain, PlainGroup)
        observer = observers.get(stream)
        statistics = observer.statistics() if observer is not None else None
        if statistics is not None:
            streams.append(asdict(_stream_record(stream, statistics)))
        if blueprint.layer_name(index, sites[0].path) not in chosen:
            groups[stream] = plain
            continue
        solved = _solve_group(plan, index, sites, plain, statistics)
        observers.pop(stream, None)  # its second moments are the largest thing in memory
        for name, solution in solved.items():
            linears.append(asdict(_write_linear(plan, folder, name, solution)))
        groups[stream] = _quantized_group(plan, plain, list(solved.values()))
    for tensor in plan.tensors:
        if tensor.action is Action.KEEP and tensor.name.startswith(blueprint.layer_name(index, "")):
            _write_kept(reader, folder, tensor)
    if states is not None and index + 1 < blueprint.config.num_layers:
        _propagate(plan, reader, Layer(groups, layer.norms), index, states)
    return {"linears": linears, "streams": streams}


def _observe(
    plan: Plan, reader: ModelReader, layer: Layer, index: int, states: HiddenStates
) -> dict[Stream, InputObserver]:
    cast = plan.activation_cast()
    observers: dict[Stream, InputObserver] = {}
    groups: dict[Stream, LinearGroup] = {}
    residual = _Residual()
    for stream, group in layer.groups.items():
        assert isinstance(group, PlainGroup)
        observer = InputObserver(group.weight.shape[1], cast, plan.method.uses_second_moments)
        observers[stream] = observer
        observe = _observing(observer, stream, group, residual)
        # The layer's output is not used here: the quantized layer's is what the next one will see.
        last = stream is Stream.MLP_HIDDEN
        groups[stream] = WatchedGroup(group, observe) if last else ObservedGroup(group, observe)
    observed = Layer(groups, layer.norms)
    for begin in range(0, states.shape[0], plan.batch_windows):
        end = min(begin + plan.batch_windows, states.shape[0])
        residual.hidden = states.read(index, begin, end)
        run_layer(residual.hidden, observed, index, plan.blueprint, reader.rotary)
    for stream, observer in observers.items():
        if not bool(observer.amax.isfinite().all()):
            raise UserError(
                f"{reader.source.path}: the activations at {stream.value} of layer {index} are not finite; the "
                "model's weights or its config.json (rope, norms) are damaged"
            )
    return observers


class _Residual:
    """The residual as it entered the layer, for the observers of one batch."""

    hidden: Tensor


def _observing(
    observer: InputObserver, stream: Stream, group: PlainGroup, residual: _Residual
) -> Callable[[Tensor], None]:
    def observe(x: Tensor) -> None:
        x, weight = x.flatten(0, -2), None
        if stream in RESIDUAL_WRITERS:
            weight = residual_weight(residual.hidden.flatten(0, 1), x, group.weight)
        observer.observe(x, weight)

    return observe


def _propagate(plan: Plan, reader: ModelReader, layer: Layer, index: int, states: HiddenStates) -> None:
    writer = states.begin(index + 1)
    for begin in range(0, states.shape[0], plan.batch_windows):
        end = min(begin + plan.batch_windows, states.shape[0])
        hidden = states.read(index, begin, end)
        writer.append(run_layer(hidden, layer, index, plan.blueprint, reader.rotary))
    writer.finish()


def _solve_group(
    plan: Plan,
    index: int,
    sites: Sequence[LinearSite],
    plain: PlainGroup,
    statistics: InputStatistics | None,
) -> dict[str, LayerSolution]:
    factor = None
    if statistics is not None and statistics.second_moment is not None:
        factor = factorize(hessian_of(statistics))
    solutions = {}
    for site, weight in zip(sites, torch.split(plain.weight, list(plain.sizes)), strict=True):
        name = plan.blueprint.layer_name(index, site.path)
        problem = LayerProblem(
            name=name,
            weight=weight.contiguous(),
            scheme=plan.scheme,
            weight_cast=plan.arithmetic.weight_cast,
            statistics=statistics,
            factor=factor,
        )
        solutions[name] = plan.method.solve(problem)
    return solutions


def _quantized_group(plan: Plan, plain: PlainGroup, solutions: Sequence[LayerSolution]) -> EmulatedGroup:
    weights = [
        dequantize_blocks(s.codes, exact_scale(s.exponents), plan.scheme.weight.format, *plan.block)
        for s in solutions
    ]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return EmulatedGroup(PlainGroup(weight, plain.bias, plain.sizes), plan.activation_cast())


def _write_linear(plan: Plan, folder: OutputFolder, name: str, solution: LayerSolution) -> LinearRecord:
    codes = solution.codes.view(torch.float8_e4m3fn)
    folder.write(plan.layout.weight_name(name), codes)
    folder.write(plan.layout.scale_name(name), exact_scale(solution.exponents))
    values, counts = torch.unique(solution.exponents, return_counts=True)
    return LinearRecord(
        name=name,
        shape=(codes.shape[0], codes.shape[1]),
        error=solution.error,
        baseline_error=solution.baseline_error,
        weight_sqnr_db=solution.weight_sqnr_db if math.isfinite(solution.weight_sqnr_db) else 999.0,
        searched_blocks=solution.searched_blocks,
        zero_blocks=solution.zero_blocks,
        partial_blocks=solution.partial_blocks,
        exponents={str(int(v)): int(c) for v, c in zip(values, counts, strict=True)},
        sha256=hashlib.sha256(solution.codes.numpy().tobytes()).hexdigest(),
        notes=solution.notes,
    )


def _stream_record(stream: Stream, statistics: InputStatistics) -> StreamRecord:
    by_exponent = statistics.histogram.sum(dim=1)
    return StreamRecord(
        stream=stream.value,
        tokens=statistics.tokens,
        amax=float(statistics.amax.max()),
        rms=float(statistics.mean_square().mean().sqrt()),
        outlier_ratio=statistics.outlier_ratio(),
        exponents={str(int(e) - 127): int(by_exponent[e]) for e in by_exponent.nonzero().flatten()},
    )


def _check_finite(plan: Plan, reader: ModelReader, index: int, layer: Layer) -> None:
    """Raise for a NaN or infinity in the layer, naming the tensor; quick when there is none."""
    blueprint = plan.blueprint
    for stream, sites in blueprint.streams().items():
        group = layer.groups[stream]
        assert isinstance(group, PlainGroup)
        if bool(group.weight.sum().isfinite()) and (group.bias is None or bool(group.bias.sum().isfinite())):
            continue
        for site in sites:
            module = blueprint.layer_name(index, site.path)
            require_finite(reader, f"{module}.weight", reader.read_linear(module))
            if blueprint.has_bias(site):
                require_finite(reader, f"{module}.bias", reader.read(f"{module}.bias"))
    for suffix, tensor in layer.norms.items():
        require_finite(reader, blueprint.layer_name(index, suffix), tensor)


def require_finite(reader: ModelReader, name: str, tensor: Tensor) -> None:
    """UserError naming the tensor and the first place where it is NaN or infinite."""
    bad = ~torch.isfinite(tensor)
    if not bool(bad.any()):
        return
    place = bad.nonzero()[0].tolist()
    raise UserError(
        f"{reader.source.path}: tensor {name!r} holds {float(tensor[tuple(place)])} at {place} "
        f"({int(bad.sum())} such values); repair the checkpoint, a quantized copy would be wrong everywhere"
    )


def _write_kept(reader: ModelReader, folder: OutputFolder, tensor: TensorPlan) -> None:
    (output,) = tensor.outputs
    value = reader.source.read(tensor.name)
    if tensor.name.endswith(".weight") and value.dtype in (torch.float8_e4m3fn,):
        value = reader.read_linear(tensor.name.removesuffix(".weight"))
    wanted = DTYPES[output.dtype].torch
    if value.is_floating_point() and wanted is not None:
        value = value.to(wanted)
        require_finite(reader, tensor.name, value.float())
    folder.write(output.name, value)


def write_rest(plan: Plan, reader: ModelReader, folder: OutputFolder) -> list[LinearRecord]:
    """Embedding, norm, head and whatever else is not inside a layer; a quantized head is solved without data."""
    records = []
    inside = tuple(plan.blueprint.layer_name(layer, "") for layer in range(plan.blueprint.config.num_layers))
    for tensor in plan.tensors:
        if tensor.name.startswith(inside):
            continue
        if tensor.action is Action.KEEP:
            _write_kept(reader, folder, tensor)
        elif tensor.action is Action.QUANTIZE:
            module = tensor.name.removesuffix(".weight")
            weight = reader.read_linear(module)
            require_finite(reader, tensor.name, weight)
            problem = LayerProblem(module, weight, plan.scheme, plan.arithmetic.weight_cast)
            records.append(_write_linear(plan, folder, module, plan.method.solve(problem)))
    return records
