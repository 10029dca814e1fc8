"""What AWQ and GPTQ checkpoints say alike in config.json, and where AutoRound says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.models.config_values import shown

_LARGEST_GROUP = 1 << 20
_PACKINGS = {
    "auto_round": "gptq",  # the packing where none is named
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}


def group_size_of(found: Mapping[str, Any], other_name: str | None = None) -> int | None:
    """Columns that share a scale, None for the whole row (-1); UserError for anything else."""
    size = found.get("group_size", found.get(other_name) if other_name is not None else None)
    if type(size) is int and (size == -1 or 0 < size <= _LARGEST_GROUP):
        return None if size == -1 else size
    raise UserError(
        f"config.json: quantization_config 'group_size' must be a positive whole number or -1, found {shown(size)}"
    )


def words_kept(found: Mapping[str, Any]) -> None:
    """UserError where some modules are packed otherwise than the rest: only one way for all can be read."""
    for key in ("dynamic", "extra_config"):
        entries = found.get(key)
        if not entries:
            continue
        if not isinstance(entries, Mapping):
            raise UserError(
                f"config.json: quantization_config {key!r} must be an object, found {shown(entries)}"
            )
        for name, changes in entries.items():
            if str(name).startswith("-:"):  # GPTQ's way to say that a module is not quantized
                continue
            if not isinstance(changes, Mapping):
                raise UserError(
                    f"config.json: quantization_config {key!r} must hold objects, found {shown(changes)}"
                )
            bits = changes.get("bits")
            if type(bits) is int and bits >= 16:  # AutoRound's way
                continue
            for setting in ("bits", "group_size", "sym"):
                if setting in changes and changes[setting] not in (None, found.get(setting)):
                    raise UserError(
                        f"config.json: {key} gives {shown(name)} the {setting} {shown(changes[setting])}; weights that "
                        "are packed in several ways cannot be read"
                    )


def auto_round_packing(found: Mapping[str, Any]) -> str:
    """The method whose packing an AutoRound checkpoint has, "gptq" or "awq"; UserError for another."""
    packing = found.get("packing_format", "auto_round")
    if isinstance(packing, str) and packing in _PACKINGS:
        return _PACKINGS[packing]
    raise UserError(
        f"config.json: AutoRound's packing_format {shown(packing)} cannot be read; 'auto_round:auto_gptq' and "
        "'auto_round:auto_awq' can"
    )
