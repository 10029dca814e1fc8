"""Linears that no layer of the forward pass runs, or all of them without data: solved whole, one after another."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch

from qwen_quantize.calibrators.problem import LayerProblem
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.pipeline.fused_scales import FusedScales
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.solving import require_finite, write_linear
from qwen_quantize.pipeline.stream import Progress

_UNIT = "rest"
_SYNC_SECONDS = 2.0  # finished linears are made durable and put on record this often


@torch.inference_mode()
def solve_rest(
    plan: Plan, source: CheckpointSource, folder: OutputFolder, journal: Journal, progress: Progress
) -> None:
    """Solve every quantized linear that no finished unit of the journal has; memory holds one at a time."""
    solved = journal.linears()
    left = [module for module in plan.selection.quantized if module not in solved]
    linears = LinearReader(source.read_once())
    scales = FusedScales(plan, linears)
    count = sum(unit.startswith(f"{_UNIT}.") for unit in journal.units)
    batch: list[dict[str, Any]] = []
    last = time.monotonic()
    for number, module in enumerate(left, start=1):
        weight = linears.read(module)
        require_finite(source.path, f"{module}.weight", weight)
        choice = plan.choice_of(module)
        problem = LayerProblem(
            module, weight, choice.scheme, choice.arithmetic.weight_cast, tensor_scale=scales.of(module)
        )
        batch.append(asdict(write_linear(plan, folder, module, choice.method.solve(problem))))
        if number == len(left) or time.monotonic() - last > _SYNC_SECONDS:
            folder.sync()
            journal.finish(f"{_UNIT}.{count}", {"linears": batch})
            count, batch, last = count + 1, [], time.monotonic()
            progress("linears", number, len(left))
