"""How long a plan will take on this machine: counted operations over rates that are measured for a moment."""

from __future__ import annotations

import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from qwen_quantize.calibrators.block_convert import quantize_rows
from qwen_quantize.calibrators.problem import Effort, LayerProblem
from qwen_quantize.calibrators.thorough import ROUNDS, SWEEPS
from qwen_quantize.checkpoint.disk import free_bytes
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.models.blueprint import Blueprint, Half
from qwen_quantize.pipeline.choices import LinearChoice
from qwen_quantize.pipeline.in_turn import runs_in_turn
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.tensors import Action

_PRODUCT_SIZE = 768
_SAMPLE_SHAPE = (512, 4096)
_WRITTEN_BYTES = 64 << 20
# Over all columns of a weight after its compensated rounding: two sweeps, a refit, one more sweep.
_PASSES = 4


@dataclass(frozen=True, slots=True)
class Rates:
    """products: float32 operations per second of a matrix product; elements: weights quantized per second
    without data, of each of the plan's distinct choices in order; disk: bytes per second written durably."""

    products: float
    elements: tuple[float, ...]
    disk: float


def measure_rates(plan: Plan, folder: Path) -> Rates:
    """About a second of work for each choice; folder: where the output will go, or a parent of it that exists."""
    elements = tuple(_element_rate(plan, choice) for choice in plan.distinct_choices)
    return Rates(_product_rate(), elements, _disk_rate(folder))


def _product_rate() -> float:
    a = torch.ones(_PRODUCT_SIZE, _PRODUCT_SIZE)
    a @ a
    begin = time.perf_counter()
    for _ in range(4):
        a @ a
    return 4 * 2 * _PRODUCT_SIZE**3 / (time.perf_counter() - begin)


def _element_rate(plan: Plan, choice: LinearChoice) -> float:
    weight = torch.randn(_SAMPLE_SHAPE, generator=torch.Generator().manual_seed(0))

    def quantize() -> None:
        if plan.converts_by_pieces:
            quantize_rows(weight.bfloat16(), choice.block, choice.arithmetic.weight_cast)
        else:
            cast = choice.arithmetic.weight_cast
            choice.method.solve(LayerProblem("sample", weight, choice.scheme, cast))

    quantize()
    begin = time.perf_counter()
    quantize()
    return weight.numel() / (time.perf_counter() - begin)


def _disk_rate(folder: Path) -> float:
    existing = folder.absolute()
    while not existing.is_dir():
        existing = existing.parent
    if free_bytes(existing) < 4 * _WRITTEN_BYTES or not os.access(existing, os.W_OK):
        return 0.25e9
    data = os.urandom(1 << 20)
    with tempfile.TemporaryFile(dir=existing) as file:
        begin = time.perf_counter()
        for _ in range(_WRITTEN_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return _WRITTEN_BYTES / (time.perf_counter() - begin)


def estimate_seconds(plan: Plan, source: CheckpointSource, rates: Rates) -> float:
    """Seconds from the first read to the last written byte, without validation."""
    rounding = 0.0
    for choice, rate in zip(plan.distinct_choices, rates.elements, strict=True):
        modules = [module for module, one in plan.choices.items() if one is choice]
        rounding += sum(math.prod(plan.selection.quantized[module]) for module in modules) / rate
    read = sum(source.info(tensor.name).nbytes for tensor in plan.tensors if tensor.action is not Action.DROP)
    moved = plan.output_bytes / rates.disk + read / (4 * rates.disk)
    if not plan.recipe.calibrates or plan.blueprint is None:
        return max(moved, rounding)
    return moved + rounding + _operations(plan, plan.blueprint) / rates.products


def _operations(plan: Plan, blueprint: Blueprint) -> float:
    """Forward passes, second moments, factorizations and compensated rounding, each by its choice."""
    tokens = 0 if plan.recipe.statistics is not None else plan.recipe.samples * plan.recipe.length
    total = 0.0
    for layer in range(blueprint.num_layers):
        for half in Half:
            runs = 1 if runs_in_turn(plan, blueprint, layer, half) else 2
            for sites in blueprint.streams(layer, half).values():
                shapes = [blueprint.linear_shape(site, layer) for site in sites]
                choice = plan.choices.get(blueprint.module_name(layer, sites[0]))
                total += _group_operations(shapes, tokens, choice, runs)
        experts = blueprint.num_experts(layer)
        if not experts:
            continue
        moe = blueprint.config.moe
        share = tokens * (moe.experts_per_token if moe is not None else 1) / experts
        for sites in blueprint.expert_streams(layer).values():
            shapes = [blueprint.linear_shape(site, layer) for site in sites]
            choice = plan.choices.get(blueprint.module_name(layer, sites[0], 0))
            total += experts * _group_operations(shapes, int(share), choice, 2)
    return total


def _group_operations(
    shapes: list[tuple[int, int]], tokens: int, choice: LinearChoice | None, runs: int
) -> float:
    """Of one group that shares an input; float64 work counts double. choice: None for a group that stays.

    runs: how often all tokens run through it.
    """
    columns = shapes[0][1]
    rows = sum(shape[0] for shape in shapes)
    forward = runs * 2 * tokens * rows * columns
    if choice is None:
        return forward
    moments = tokens * columns**2 if choice.method.uses_second_moments else 0
    if not choice.method.compensates:
        return forward + moments
    factor = 2 * (columns**3 / 3 + columns**3 / 3)
    passes = _PASSES + (ROUNDS * (SWEEPS + _PASSES) if choice.effort is Effort.HIGH else 0)
    return forward + moments + factor + (1 + passes) * rows * columns**2
