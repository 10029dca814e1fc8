"""A plan of a hundred thousand tensors in a page: tensors that share a fate, a line each."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.tensors import Action

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Tensors that differ in layer or expert alone. becomes: the written dtypes; sizes in bytes."""

    pattern: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    action: str
    becomes: str
    why: str
    source_bytes: int
    output_bytes: int


def tensor_groups(plan: Plan, source: CheckpointSource) -> list[TensorGroup]:
    """In order of first appearance; scales that a quantized source weight brings along count with the dropped."""
    found: dict[tuple[str, tuple[int, ...], str, str, str, str], list[int]] = {}
    for tensor in plan.tensors:
        info = source.info(tensor.name)
        becomes = " + ".join(output.dtype for output in tensor.outputs) or "-"
        dropped = tensor.action is Action.DROP
        key = (
            "*." + tensor.name.rpartition(".")[2] if dropped else _NUMBER.sub("*", tensor.name),
            () if dropped else tuple(info.shape),
            info.dtype,
            tensor.action.value,
            becomes,
            tensor.why,
        )
        sums = found.setdefault(key, [0, 0, 0])
        sums[0] += 1
        sums[1] += info.nbytes
        sums[2] += sum(output.nbytes for output in tensor.outputs)
    return [
        TensorGroup(pattern, count, shape, dtype, action, becomes, why, source_bytes, output_bytes)
        for (pattern, shape, dtype, action, becomes, why), (
            count,
            source_bytes,
            output_bytes,
        ) in found.items()
    ]
