"""One group of linears that share an input: from statistics to solutions, to bytes on disk, to what runs on."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from qwen_quantize.calibrators.block_fp8 import exact_scale
from qwen_quantize.calibrators.gain import column_gain
from qwen_quantize.calibrators.hessian import factorize_statistics
from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.calibrators.problem import HessianFactor, LayerProblem, LayerSolution
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.engine.linear import LinearGroup, PlainGroup, emulated
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.formats.block_kernels import dequantize_blocks
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.records import EXACT_DB, LinearRecord, StreamRecord, exponent_counts


def factors_of(statistics: InputStatistics | None) -> tuple[HessianFactor, ...]:
    """The factors that all linears of one input share; () without second moments."""
    if statistics is None or not statistics.second_moments:
        return ()
    return factorize_statistics(statistics)


def solve_group(
    plan: Plan,
    modules: Sequence[str],
    plain: PlainGroup,
    statistics: InputStatistics | None,
    factors: tuple[HessianFactor, ...],
) -> dict[str, LayerSolution]:
    """Quantize the linears of one group, in order; modules: their full names."""
    solutions = {}
    gain = None if statistics is None else column_gain(statistics)
    for module, weight in zip(modules, torch.split(plain.weight, list(plain.sizes)), strict=True):
        problem = LayerProblem(
            name=module,
            weight=weight.contiguous(),
            scheme=plan.scheme,
            weight_cast=plan.arithmetic.weight_cast,
            statistics=statistics,
            factors=factors,
            gain=gain,
        )
        solutions[module] = plan.method.solve(problem)
    return solutions


def quantized_group(plan: Plan, plain: PlainGroup, solutions: Sequence[LayerSolution]) -> LinearGroup:
    """The group as the chip will run it."""
    return _decoded_group(plan, plain, [(s.codes, exact_scale(s.exponents)) for s in solutions])


def written_group(plan: Plan, folder: OutputFolder, modules: Sequence[str], plain: PlainGroup) -> LinearGroup:
    """As `quantized_group`, from what an interrupted run has written."""
    stored = [
        (
            folder.read(plan.layout.weight_name(module)).view(torch.uint8),
            folder.read(plan.layout.scale_name(module)),
        )
        for module in modules
    ]
    return _decoded_group(plan, plain, stored)


def _decoded_group(plan: Plan, plain: PlainGroup, stored: Sequence[tuple[Tensor, Tensor]]) -> LinearGroup:
    """stored: (codes [out, in] uint8, scales of its blocks float32) of each linear."""
    weights = [
        dequantize_blocks(codes, scale, plan.scheme.weight.format, *plan.block) for codes, scale in stored
    ]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    return emulated(PlainGroup(weight, plain.bias, plain.sizes), plan.chip_compute())


def write_linear(plan: Plan, folder: OutputFolder, module: str, solution: LayerSolution) -> LinearRecord:
    """Put one solved linear into the output folder."""
    codes = solution.codes.view(torch.float8_e4m3fn)
    folder.write(plan.layout.weight_name(module), codes)
    folder.write(plan.layout.scale_name(module), exact_scale(solution.exponents))
    return LinearRecord(
        name=module,
        shape=(codes.shape[0], codes.shape[1]),
        error=solution.error,
        baseline_error=solution.baseline_error,
        weight_sqnr_db=solution.weight_sqnr_db if math.isfinite(solution.weight_sqnr_db) else EXACT_DB,
        searched_blocks=solution.searched_blocks,
        zero_blocks=solution.zero_blocks,
        partial_blocks=solution.partial_blocks,
        exponents=exponent_counts(solution.exponents),
        sha256=hashlib.sha256(solution.codes.numpy().tobytes()).hexdigest(),
        notes=solution.notes,
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
