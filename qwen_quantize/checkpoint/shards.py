"""Where every tensor of an output will stand, decided before the first is written."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qwen_quantize.checkpoint.safetensors_header import LENGTH_BYTES
from qwen_quantize.checkpoint.tensor_info import DTYPES, storage_bits

DEFAULT_SHARD_BYTES = 4_500_000_000
DEFAULT_STEM = "model"

_RANK = {dtype: rank for rank, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written; dtype is the safetensors name, shape the logical shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return storage_bits(self.dtype, self.shape) // 8


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """One file: its name, its header bytes (length field and padding included) and its tensors' places.

    offsets: tensor name to its first byte, counted from the start of the file; in file order.
    """

    file: str
    header: bytes
    tensors: Mapping[str, OutputTensor]
    offsets: Mapping[str, int] = field(repr=False)
    nbytes: int


def plan_shards(
    tensors: Sequence[OutputTensor], max_shard_bytes: int = DEFAULT_SHARD_BYTES, stem: str = DEFAULT_STEM
) -> tuple[ShardPlan, ...]:
    """Distribute tensors over files of at most `max_shard_bytes` of data, in the order given.

    A larger tensor gets a file of its own. Within a file the order is the safetensors library's: dtypes from
    wide to narrow, then names. stem: what the names of the files begin with. Raises ValueError for a name given
    twice, an unknown dtype or half a byte.
    """
    groups: list[list[OutputTensor]] = [[]]
    filled = 0
    seen: set[str] = set()
    for tensor in tensors:
        _check(tensor, seen)
        if groups[-1] and filled + tensor.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.nbytes
    count = len(groups)
    names = (
        [f"{stem}.safetensors"]
        if count == 1
        else [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    return tuple(_plan_shard(name, group) for name, group in zip(names, groups, strict=True))


def _check(tensor: OutputTensor, seen: set[str]) -> None:
    if tensor.name in seen or tensor.name == "__metadata__":
        raise ValueError(f"the tensor name {tensor.name!r} is taken")
    seen.add(tensor.name)
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor {tensor.name!r} has the unknown dtype {tensor.dtype!r}")
    if storage_bits(tensor.dtype, tensor.shape) % 8 or any(size < 0 for size in tensor.shape):
        raise ValueError(f"tensor {tensor.name!r} of {tensor.dtype} {tensor.shape} is no whole bytes")


def _plan_shard(file: str, tensors: Sequence[OutputTensor]) -> ShardPlan:
    # Wide dtypes first keeps each tensor aligned to its element, which torch's views demand of readers.
    ordered = sorted(tensors, key=lambda tensor: (-_RANK[tensor.dtype], tensor.name.encode()))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    position = 0
    for tensor in ordered:
        end = position + tensor.nbytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        begins[tensor.name] = position
        position = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return ShardPlan(
        file=file,
        header=header,
        tensors={tensor.name: tensor for tensor in ordered},
        offsets={name: len(header) + begin for name, begin in begins.items()},
        nbytes=len(header) + position,
    )


def index_name(plan: Sequence[ShardPlan]) -> str:
    """The name of the index beside a plan's files."""
    first = plan[0].file.removesuffix(".safetensors")
    stem = first if len(plan) == 1 else first.rsplit("-", 3)[0]
    return f"{stem}.safetensors.index.json"


def index_bytes(plan: Sequence[ShardPlan]) -> bytes:
    """The index of a plan, `model.safetensors.index.json` by its usual name."""
    weight_map = {name: shard.file for shard in plan for name in shard.tensors}
    total = sum(tensor.nbytes for shard in plan for tensor in shard.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
