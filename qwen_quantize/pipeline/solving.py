"""One group of linears that share an input: from statistics to solutions, to bytes on disk, to what runs on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.calibrators.gain import column_gain, input_maps
from qwen_quantize.calibrators.hessian import factorize_statistics
from qwen_quantize.calibrators.methods import Method
from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.calibrators.output_gain import half_headroom, solve_with_output_gain
from qwen_quantize.calibrators.problem import HessianFactor, LayerProblem, LayerSolution
from qwen_quantize.checkpoint.compressed_tensors import settled_tensor_scale
from qwen_quantize.checkpoint.layout_parts import static_input_scale
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.engine.linear import LinearGroup, PlainGroup, emulated
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.pipeline.choices import LinearChoice
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.records import (
    EXACT_DB,
    LinearRecord,
    StreamRecord,
    binary_exponents,
    exponent_counts,
    why_no_better,
)


def factors_of(method: Method, statistics: InputStatistics | None) -> tuple[HessianFactor, ...]:
    """The factors that all linears of one input share; () without second moments, or a solver that wants none."""
    if statistics is None or not statistics.second_moments or not method.compensates:
        return ()
    return factorize_statistics(statistics, method.damping, method.damping_floor)


def solve_group(
    choice: LinearChoice,
    modules: Sequence[str],
    plain: PlainGroup,
    statistics: InputStatistics | None,
    factors: tuple[HessianFactor, ...],
) -> dict[str, LayerSolution]:
    """Quantize the linears of one group, in order; modules: their full names."""
    solutions = {}
    gain: Tensor | None = None
    maps: tuple[Tensor, ...] = ()
    if statistics is not None and choice.sees_cast():
        gain = column_gain(statistics)
        maps = input_maps(statistics, gain)
    tensor_scale = shared_tensor_scale(choice.scheme, plain.weight)
    for module, weight in zip(modules, torch.split(plain.weight, list(plain.sizes)), strict=True):
        problem = LayerProblem(
            name=module,
            weight=weight.contiguous(),
            scheme=choice.scheme,
            weight_cast=choice.arithmetic.weight_cast,
            statistics=statistics,
            factors=factors,
            gain=gain,
            maps=maps,
            tensor_scale=tensor_scale,
            effort=choice.effort,
        )
        solutions[module] = _solve(choice, problem)
    return solutions


def shared_tensor_scale(scheme: Scheme, weight: Tensor) -> float | None:
    """The second scale of all linears that engines fuse into one; None for schemes without.

    amax / (6 * 256): then every block, the loudest too, may have 4 as its largest code (four over six).
    """
    if scheme.weight.tensor_scale_format is None:
        return None
    amax = float(weight.abs().max())
    return settled_tensor_scale(amax / (6 * 256)) if amax > 0 else 1.0


def _solve(choice: LinearChoice, problem: LayerProblem) -> LayerSolution:
    """The method's solution, made up for what a narrow accumulator loses of it where tokens were kept for that."""
    chip = choice.chip_compute()
    unit, sample = chip.unit, None if problem.statistics is None else problem.statistics.sample
    if unit is None or chip.bare or sample is None:
        return choice.method.solve(problem)
    solution = solve_with_output_gain(problem, choice.method.solve, unit, sample)
    if choice.arithmetic.accumulator.format == "fp16" and sample.inputs.shape[0]:
        group = choice.block[1] or problem.weight.shape[1]
        times = half_headroom(sample, solution.quantized, group, unit.products or group)
        if times > 1:
            note = (
                f"an fp16 register overflows unless the kernel scales codes down: their sums reach {times:.3g} "
                "times its largest number"
            )
            return replace(solution, notes=(*solution.notes, note))
    return solution


def quantized_group(
    choice: LinearChoice,
    plain: PlainGroup,
    weights: Mapping[str, QuantizedTensor],
    input_amax: float | None,
) -> LinearGroup:
    """The group as the chip will run it. weights: by module; input_amax: the largest magnitude of their input."""
    scale, scheme = None, choice.scheme
    if has_static_scale(scheme):
        assert scheme.activation is not None
        scale = float(static_input_scale(next(iter(weights)), scheme.activation, input_amax))
    return _emulated_group(choice, plain, list(weights.values()), scale)


def has_static_scale(scheme: Scheme) -> bool:
    """Whether one scale for all of a linear's input is stored."""
    return scheme.activation is not None and not scheme.dynamic


def written_group(plan: Plan, folder: OutputFolder, modules: Sequence[str], plain: PlainGroup) -> LinearGroup:
    """As `quantized_group`, from what an interrupted run has written."""
    weights = []
    for module, shape in ((module, plan.selection.quantized[module]) for module in modules):
        outputs = plan.layout.outputs(module, shape, plan.scheme_of(module))
        stored = {output.name: folder.read(output.name) for output in outputs}
        weights.append(plan.layout.unpack(module, stored, shape, plan.scheme_of(module)))
    choice = plan.choice_of(modules[0])
    scale = float(folder.read(f"{modules[0]}.input_scale")) if has_static_scale(choice.scheme) else None
    return _emulated_group(choice, plain, weights, scale)


def _emulated_group(
    choice: LinearChoice, plain: PlainGroup, quantized: Sequence[QuantizedTensor], input_scale: float | None
) -> LinearGroup:
    values = [one.dequantize() for one in quantized]
    weight = values[0] if len(values) == 1 else torch.cat(values)
    chip = choice.chip_compute(input_scale)
    rows = torch.cat([_row_scale(one) for one in quantized]) if chip.bare else None
    return emulated(PlainGroup(weight, plain.bias, plain.sizes), chip, rows)


def _row_scale(quantized: QuantizedTensor) -> Tensor:
    """[out] float32: the scales of whole rows, which a unit that adds codes leaves to its finished sums."""
    if quantized.granularity.kind is GranularityKind.CHANNEL:
        return quantized.scale[:, 0]
    return torch.full((quantized.shape[0],), quantized.tensor_scale)


def write_linear(
    plan: Plan,
    folder: OutputFolder,
    module: str,
    solution: LayerSolution,
    input_amax: float | None = None,
    bias: Tensor | None = None,
) -> LinearRecord:
    """Put one solved linear into the output folder.

    input_amax: the largest magnitude that its input had; bias: what is added to its output, where that is known.
    """
    quantized = solution.quantized
    packed = plan.layout.pack(module, quantized, plan.scheme_of(module), input_amax)
    if bias is not None:
        packed = plan.layout.with_bias(module, packed, bias)
    for name, tensor in packed.items():
        folder.write(name, tensor)
    return LinearRecord(
        name=module,
        shape=(quantized.shape[0], quantized.shape[1]),
        error=solution.error,
        baseline_error=solution.baseline_error,
        weight_sqnr_db=solution.weight_sqnr_db if math.isfinite(solution.weight_sqnr_db) else EXACT_DB,
        searched_blocks=solution.searched_blocks,
        zero_blocks=solution.zero_blocks,
        partial_blocks=solution.partial_blocks,
        exponents=exponent_counts(binary_exponents(quantized.scale)),
        sha256=hashlib.sha256(quantized.codes.numpy().tobytes()).hexdigest(),
        notes=(*solution.notes, *why_no_better(solution.error, solution.baseline_error)),
    )


def stream_record(stream: str, statistics: InputStatistics) -> StreamRecord:
    by_exponent = statistics.histogram.sum(dim=1)
    return StreamRecord(
        stream=stream,
        tokens=statistics.tokens,
        amax=float(statistics.amax.max()),
        rms=float(statistics.mean_square().mean().sqrt()),
        outlier_ratio=statistics.outlier_ratio(),
        exponents={str(int(e) - 127): int(by_exponent[e]) for e in by_exponent.nonzero().flatten()},
    )


def check_finite_group(reader: ModelReader, modules: Sequence[str], group: LinearGroup) -> None:
    """UserError naming the tensor for a NaN or infinity in a group; quick when there is none."""
    assert isinstance(group, PlainGroup)
    if bool(group.weight.sum().isfinite()) and (group.bias is None or bool(group.bias.sum().isfinite())):
        return
    for module in modules:
        require_finite(reader.source.path, f"{module}.weight", reader.read_linear(module))
        if f"{module}.bias" in reader.names:
            require_finite(reader.source.path, f"{module}.bias", reader.read(f"{module}.bias"))


def check_finite_tensors(reader: ModelReader, prefix: str, tensors: Mapping[str, Tensor]) -> None:
    for suffix, tensor in tensors.items():
        require_finite(reader.source.path, prefix + suffix, tensor)


def require_finite(path: Path, name: str, tensor: Tensor, first_row: int = 0) -> None:
    """UserError naming the tensor and the first place where it is NaN or infinite; rows count from first_row."""
    bad = ~torch.isfinite(tensor)
    if not bool(bad.any()):
        return
    place = bad.nonzero()[0].tolist()
    value = float(tensor[tuple(place)])
    if place:
        place[0] += first_row
    raise UserError(
        f"{path}: tensor {name!r} holds {value} at {place} ({int(bad.sum())} such values); repair the checkpoint, "
        "a quantized copy would be wrong everywhere"
    )
