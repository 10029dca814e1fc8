"""What a compressed-tensors checkpoint says of its weights in config.json.

Which linear was quantized how is read from its own tensors; this record says only which ways may occur. So
`ignore` needs no evaluation, and a config that does not fit its tensors is found out. What becomes of a
linear's input is in no tensor: where several groups fit a linear, their `targets` decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from qwen_quantize.checkpoint.compressed_inputs import (
    fail,
    integer_in,
    parse_inputs,
    parse_targets,
    rank_of_match,
)
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.models.config_values import shown

READABLE_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized",
    "mxfp6-pack-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "dense",
)  # fmt: skip
_GROUPS = ("group", "tensor_group")
_STRATEGIES = {
    ("int", 4): ("tensor", "channel", "group"),
    ("int", 8): ("tensor", "channel", "group"),
    ("float", 8): ("tensor", "channel", "block", "group"),
    ("float", 6): ("group",),
    ("float", 4): _GROUPS,
}
_BITS = {"int": (4, 8), "float": (4, 6, 8)}
_LARGEST_GROUP = 1 << 20


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """The weights of one config group: format is None where the file leaves it to be inferred.

    kind: "int" or "float"; strategy: "tensor", "channel", "group", "tensor_group" (a group under a scale of the
    whole tensor) or "block"; group_size: columns, only for groups; block: (rows, columns), only for "block".
    targets: names, patterns after "re:" and classes of modules. inputs: what becomes of a linear's input, without
    the names of tensors; None where it stays.
    """

    bits: int
    kind: str
    strategy: str
    group_size: int | None
    block: tuple[int, int] | None
    format: str | None
    targets: tuple[str, ...] = ()
    inputs: ActivationForm | None = None

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

    def group_sizes(self, kind: str, bits: int | None = None) -> frozenset[int]:
        """Columns in a group, of all weights of a kind or those of one width."""
        return frozenset(
            it.group_size
            for it in self.weights
            if it.group_size is not None and it.kind == kind and bits in (None, it.bits)
        )

    def bits(self, kind: str) -> frozenset[int]:
        return frozenset(it.bits for it in self.weights if it.kind == kind)

    def inputs_of(self, module: str, kind: str, bits: tuple[int, ...]) -> ActivationForm | None:
        """What becomes of the input of a linear whose weight is of this kind and one of these widths.

        UserError where groups that fit the weight differ and none of their targets is the module.
        """
        fitting = [it for it in self.weights if it.kind == kind and it.bits in bits]
        if len({it.inputs for it in fitting}) < 2:
            return fitting[0].inputs if fitting else None
        ranked = [(rank_of_match(module, it.targets), it) for it in fitting]
        matching = [(rank, it) for rank, it in ranked if rank is not None]
        if not matching:
            raise UserError(
                f"config.json: the targets of quantization_config are none of them {module!r}, and its groups treat "
                "inputs differently"
            )
        return min(matching, key=lambda found: found[0])[1].inputs

    def describe(self) -> str:
        """In words, such as "int4 (pack-quantized) and fp8 (float-quantized) of compressed-tensors"; "" for none."""
        kinds = " and ".join(sorted({it.describe() for it in self.weights}))
        return f"{kinds} of compressed-tensors" if kinds else ""


def parse_compressed_tensors(found: Mapping[str, Any]) -> CompressedTensors:
    """The record of a `quantization_config` whose method is compressed-tensors; UserError where unreadable."""
    _refuse_transforms(found)
    groups = found.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise fail("config_groups", "an object of one or more groups", groups)
    default = _format(found.get("format"), "format")
    weights = []
    for name, group in groups.items():
        where = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise fail(where, "an object", group)
        if group.get("weights") is None:
            continue
        format_ = _format(group.get("format"), where) or default
        weights.append(
            replace(
                _weights(group["weights"], format_, where),
                targets=parse_targets(group.get("targets"), where),
                inputs=parse_inputs(group.get("input_activations"), where),
            )
        )
    return CompressedTensors(tuple(weights))


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
        raise fail(where, "an object or null", found)
    bits, kind = found.get("num_bits", 8), found.get("type", "int")
    if not isinstance(kind, str) or kind not in _BITS:
        raise fail(f"{where}.type", "'int' or 'float'", kind)
    if type(bits) is not int or bits not in _BITS[kind]:
        allowed = " or ".join(map(str, _BITS[kind]))
        raise fail(f"{where}.num_bits", f"{allowed} for weights of type {kind!r} to be readable", bits)
    group_size = integer_in(found.get("group_size"), f"{where}.group_size", _LARGEST_GROUP)
    strategy = found.get("strategy")
    if strategy is None:
        strategy = "group" if group_size is not None else "tensor"
        strategy = "channel" if found.get("group_size") == -1 else strategy
    if not isinstance(strategy, str) or strategy not in _STRATEGIES[kind, bits]:
        allowed = ", ".join(_STRATEGIES[kind, bits])
        raise fail(
            f"{where}.strategy", f"one of {allowed} for weights of type {kind!r} and {bits} bits", strategy
        )
    if strategy in _GROUPS and group_size is None:
        raise fail(f"{where}.group_size", f"a positive whole number for the strategy {strategy!r}", None)
    if "uint8" in str(found.get("scale_dtype")) and (kind != "float" or strategy != "group"):
        raise UserError(
            f"config.json: MX weights ({where}.scale_dtype {shown(found['scale_dtype'])}) have the strategy 'group' "
            f"and the type 'float', found {shown(strategy)} and {shown(kind)}"
        )
    return CompressedWeights(
        bits=bits,
        kind=kind,
        strategy=strategy,
        group_size=group_size if strategy in _GROUPS else None,
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
    raise fail(f"{where}.block_structure", "two positive whole numbers such as [128, 128]", found)
