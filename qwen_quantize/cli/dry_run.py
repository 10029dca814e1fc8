"""What a run would do, for people in a page and as JSON in full: the plan, before any weight is read."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from qwen_quantize.checkpoint.disk import free_bytes
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.pipeline.estimate import estimate_seconds, measure_rates
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.summary import TensorGroup
from qwen_quantize.report.numbers import human_bytes


def dry_run_record(
    plan: Plan, source: CheckpointSource, target: Path, groups: list[TensorGroup]
) -> dict[str, Any]:
    """The plan as JSON; `seconds` from a short measurement of this machine, `fits` whether the disk has room."""
    free = free_bytes(target.parent)
    return {
        "chip": plan.resolution.profile.name,
        "method": plan.method.name,
        "layout": plan.layout.name,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "disk_bytes": plan.disk_bytes,
        "output_bytes": plan.output_bytes,
        "free_bytes": free,
        "fits": free >= plan.disk_bytes,
        "seconds": estimate_seconds(plan, source, measure_rates(plan, target)),
        "assumptions": [asdict(assumption) for assumption in plan.assumptions],
        "notes": list(plan.notes),
        "groups": [asdict(group) for group in groups],
        "tensors": [
            {
                "name": tensor.name,
                "action": tensor.action.value,
                "why": tensor.why,
                "outputs": [
                    {"name": o.name, "dtype": o.dtype, "shape": list(o.shape)} for o in tensor.outputs
                ],
            }
            for tensor in plan.tensors
        ],
    }


def group_tables(groups: list[TensorGroup]) -> list[Table]:
    table = Table(title="What becomes of every tensor")
    for column, justify in (("tensor", "left"), ("count", "right"), ("shape", "right"), ("from", "left"),
                            ("to", "left"), ("why", "left"), ("written", "right")):  # fmt: skip
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for group in groups:
        table.add_row(
            group.pattern,
            str(group.count),
            _shape(group.shape),
            group.dtype,
            group.becomes,
            group.why,
            human_bytes(group.output_bytes),
        )
    return [table]


def group_lines(groups: list[TensorGroup]) -> list[str]:
    return [
        f"{group.action}: {group.count} x {group.pattern} {_shape(group.shape)} {group.dtype} -> {group.becomes} "
        f"({group.why}; {human_bytes(group.output_bytes)})"
        for group in groups
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "-"
