"""What a compressed-tensors checkpoint says of its weights in config.json.

Which linear was quantized how is read from its own tensors; this record says only which ways may occur. So
the patterns of `targets` and `ignore` need no evaluation, and a config that does not fit its tensors is
found out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.models.config_values import shown

READABLE_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
_STRATEGIES = {"int": ("tensor", "channel", "group"), "float": ("tensor", "channel", "block")}
_BITS = {"int": (4, 8), "float": (8,)}
_LARGEST_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """The weights of one config group: format is None where the file leaves it to be inferred.

    kind: "int" or "float"; strategy: "tensor", "channel", "group" or "block"; group_size: columns, only for
    "group"; block: (rows, columns), only for "block".
    """

    bits: int
    kind: str
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    format: str | None

    def describe(self) -> str:
        name = f"{'int' if self.kind == 'int' else 'fp'}{self.bits}"
        return f"{name} ({self.format})" if self.format is not None else name


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """The ways in which weights of this checkpoint may be stored."""

    weights: tuple[CompressedWeights, ...]

    def strategies(self, kind: str) -> frozenset[str]:
        return frozenset(it.strategy for it in self.weights if it.kind == kind)

    def blocks(self) -> frozenset[tuple[int, int]]:
        return frozenset(it.block for it in self.weights if it.block is not None)

    def group_sizes(self) -> frozenset[int]:
        return frozenset(it.group_size for it in self.weights if it.group_size is not None)

    def bits(self, kind: str) -> frozenset[int]:
        return frozenset(it.bits for it in self.weights if it.kind == kind)

    def describe(self) -> str:
        """The kinds of numbers in words, such as "int4 (pack-quantized) and fp8 (float-quantized)"."""
        return " and ".join(sorted({it.describe() for it in self.weights}))


def parse_compressed_tensors(found: Mapping[str, Any]) -> CompressedTensors:
    """The record of a `quantization_config` whose method is compressed-tensors; UserError where unreadable."""
    _refuse_transforms(found)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _fail("config_groups", "an object of one or more groups", groups)
    default = _format(found.get("format"), "format")
    weights = []
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise _fail(where, "an object", group)
        if group.get("weights") is None:
            continue
        weights.append(_weights(group["weights"], _format(group.get("format"), where) or default, where))
    return CompressedTensors(tuple(weights))


def _fail(key: str, wanted: str, value: object) -> UserError:
    return UserError(f"config.json: quantization_config {key!r} must be {wanted}, found {shown(value)}")


def _refuse_transforms(found: Mapping[str, Any]) -> None:
    sparsity = found.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") in (None, "dense")):
        raise UserError(
            f"config.json: sparse weights cannot be read (sparsity_config {shown(sparsity)}); take the model "
            "before it was compressed"
        )
    if found.get("transform_config"):
        raise UserError(
            "config.json: weights that compressed-tensors rotated (transform_config) cannot be read; take the "
            "model before it was rotated"
        )


def _format(value: object, where: str) -> str | None:
    if value is None or value == "mixed-precision":  # each group then states its own
        return None
    if value not in READABLE_FORMATS:
        raise UserError(
            f"config.json: the compressed-tensors format {shown(value)} at {where!r} cannot be read; "
            f"{', '.join(READABLE_FORMATS)} can; take the original model"
        )
    return str(value)


def _weights(found: object, format_: str | None, where: str) -> CompressedWeights:
    where = f"{where}.weights"
    if not isinstance(found, Mapping):
        raise _fail(where, "an object or null", found)
    bits, kind = found.get("num_bits", 8), found.get("type", "int")
    if not isinstance(kind, str) or kind not in _BITS:
        raise _fail(f"{where}.type", "'int' or 'float'", kind)
    if type(bits) is not int or bits not in _BITS[kind]:
        allowed = " or ".join(map(str, _BITS[kind]))
        raise _fail(f"{where}.num_bits", f"{allowed} for weights of type {kind!r} to be readable", bits)
    group_size = found.get("group_size")
    if group_size == -1:  # as written for one group per channel
        group_size = None
    if group_size is not None and (type(group_size) is not int or not 0 < group_size <= _LARGEST_GROUP):
        raise _fail(f"{where}.group_size", "a positive whole number, -1 or null", group_size)
    strategy = found.get("strategy")
    if strategy is None:
        strategy = "group" if group_size is not None else "tensor"
        strategy = "channel" if found.get("group_size") == -1 else strategy
    if not isinstance(strategy, str) or strategy not in _STRATEGIES[kind]:
        allowed = ", ".join(_STRATEGIES[kind])
        raise _fail(f"{where}.strategy", f"one of {allowed} for weights of type {kind!r}", strategy)
    if strategy == "group" and group_size is None:
        raise _fail(f"{where}.group_size", "a positive whole number for the strategy 'group'", None)
    if kind == "float" and "uint8" in str(found.get("scale_dtype")):
        raise UserError(
            f"config.json: MX weights ({where}.scale_dtype {shown(found['scale_dtype'])}) cannot be read; take "
            "the original model"
        )
    return CompressedWeights(
        bits=bits,
        kind=kind,
        strategy=strategy,
        group_size=group_size if strategy == "group" else None,
        block=_block(found.get("block_structure"), where) if strategy == "block" else None,
        format=format_,
    )


def _block(found: object, where: str) -> tuple[int, int]:
    if isinstance(found, str):  # older files write "128x128"
        parts = found.split("x")
        found = [int(part) if part.isascii() and part.isdigit() and len(part) < 8 else 0 for part in parts]
    if isinstance(found, list) and len(found) == 2:
        rows, columns = found
        if all(type(size) is int and 0 < size <= _LARGEST_GROUP for size in (rows, columns)):
            return rows, columns
    raise _fail(f"{where}.block_structure", "two positive whole numbers such as [128, 128]", found)
