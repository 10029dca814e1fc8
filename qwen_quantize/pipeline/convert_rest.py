"""Whatever calibration does not solve is converted: without data everything, else what no layer runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.pipeline.convert import (
    CopyTensor,
    DecodeLinear,
    Finished,
    Job,
    QuantizeLinear,
    Target,
    convert_tensors,
)
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.output_files import is_reordered
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.stream import Progress
from qwen_quantize.pipeline.tensors import Action, TensorPlan

_UNIT = "tensors"


def convert_rest(
    plan: Plan, source: CheckpointSource, folder: OutputFolder, journal: Journal, progress: Progress
) -> None:
    """Convert every tensor that no finished unit of the journal has written; durable in batches."""
    solved = journal.linears()
    batches = [record for unit, record in journal.units.items() if unit.startswith(f"{_UNIT}.")]
    done = {name for record in batches for name in record["names"]}
    converted = {linear["name"] for record in batches for linear in record["linears"]}
    changed = {name for record in journal.units.values() for name in record.get("tensors", ())}
    jobs = [
        job_of(tensor)
        for tensor in plan.tensors
        if tensor.action is not Action.DROP
        and tensor.module not in solved - converted
        and tensor.name not in changed
        and not is_reordered(plan.layout, tensor)
    ]
    count = len(batches)

    def finished(batch: Sequence[Finished]) -> None:
        nonlocal count
        linears = [asdict(one.linear) for one in batch if one.linear is not None]
        journal.finish(f"{_UNIT}.{count}", {"names": [one.name for one in batch], "linears": linears})
        count += 1

    target = Target(plan.block, plan.arithmetic.weight_cast)
    convert_tensors(jobs, LinearReader(source.read_once()), folder, target, finished, progress, skip=done)


def job_of(tensor: TensorPlan) -> Job:
    """What becomes of a tensor, as a job of the converter."""
    if tensor.action is Action.QUANTIZE:
        assert tensor.module is not None
        weight, scale = tensor.outputs
        return QuantizeLinear(tensor.module, weight, scale)
    (output,) = tensor.outputs
    return CopyTensor(tensor.name, output) if tensor.module is None else DecodeLinear(tensor.module, output)
