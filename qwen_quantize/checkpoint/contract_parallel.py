"""Whether a model can be cut over several devices: heads, and the blocks and groups that no shard may cut."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen_quantize.checkpoint.contract_linear import CheckedLinear
from qwen_quantize.checkpoint.finding import Finding, Severity
from qwen_quantize.models.fusion import FUSED

# By the last part of the name: cut along the outputs, or along the inputs. What is in neither stays whole.
_COLUMNS = frozenset(
    {
        "q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "w1",
        "w3", "in_proj_qkvz", "in_proj_qkv", "in_proj_z",
    }
)  # fmt: skip
_ROWS = frozenset({"o_proj", "down_proj", "w2", "out_proj"})
_KEY_VALUES = ("k_proj", "v_proj")
_MOST = 12


def check_heads(config: Mapping[str, Any], shards: int) -> list[Finding]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    found = []
    if type(heads) is int and heads % shards:
        found.append(
            _cut(
                "config.json",
                "tp-heads",
                f"{heads} attention heads cannot be shared by {shards} devices; engines stop",
                f"serve with --tp that divides {heads}",
            )
        )
    latent = type(config.get("kv_lora_rank")) is int  # one latent for all heads, which every device holds
    if not latent and type(groups) is int and groups > 0 and groups % shards and shards % groups:
        found.append(
            _cut(
                "config.json",
                "tp-heads",
                f"{groups} key-value heads can neither be shared by {shards} devices nor repeated on them; engines "
                "stop",
                f"serve with --tp that divides {groups} or is a multiple of it",
            )
        )
    return found


def check_shards(
    linears: Mapping[str, CheckedLinear], config: Mapping[str, Any], shards: int
) -> list[Finding]:
    """Each device's part of a linear must be whole blocks, groups and words."""
    found: list[Finding] = []
    for module, linear in linears.items():
        last = module.rpartition(".")[2]
        if linear.shape is None:
            continue
        rows, columns = linear.shape
        if last in _COLUMNS:
            parts = _copies(last, config, shards)
            unit = linear.region[0]
            if rows % parts or (unit > 1 and rows // parts % unit):
                rule = "tp-experts" if linear.is_expert else "tp-column"
                found.append(
                    _cut(
                        module,
                        rule,
                        f"{rows} output features over {parts} devices are {rows / parts:g} each, no multiple of "
                        f"the {unit} "
                        "that share a scale or a word; engines stop at it, or read scales of the neighbour",
                        f"serve with fewer devices, or quantize with a block that divides {rows // parts}",
                    )
                )
        elif last in _ROWS:
            unit = linear.region[1]
            whole_row = linear.group == 0 and linear.region[1] in (1, columns)
            if columns % shards or (not whole_row and columns // shards % unit):
                rule = "tp-experts" if linear.is_expert else "tp-row"
                found.append(
                    _cut(
                        module,
                        rule,
                        f"{columns} input features over {shards} devices are {columns / shards:g} each, no "
                        "multiple of the "
                        f"{unit} that share a scale; a group would be cut in two, and engines stop",
                        f"serve with fewer devices, or quantize with groups that divide {columns // shards}",
                    )
                )
    return found[:_MOST]


def _copies(last: str, config: Mapping[str, Any], shards: int) -> int:
    """Into how many different parts a linear's outputs are cut: heads of keys and values are repeated."""
    groups = config.get("num_key_value_heads")
    if last in _KEY_VALUES and type(groups) is int and 0 < groups < shards:
        return groups
    return shards


def check_merged(linears: Mapping[str, CheckedLinear]) -> list[Finding]:
    """Blocks of FP8 in linears that run as one product: but for the last, each must be whole blocks of rows."""
    found = []
    for module, linear in linears.items():
        parent, _, last = module.rpartition(".")
        for members in FUSED:  # in the order of their outputs
            if last not in members[:-1] or linear.shape is None or linear.region[0] < 2 or linear.is_expert:
                continue
            behind = [f"{parent}.{name}" for name in members[members.index(last) + 1 :]]
            if linear.shape[0] % linear.region[0] and any(name in linears for name in behind):
                found.append(
                    _cut(
                        module,
                        "merged-block",
                        f"its {linear.shape[0]} rows end inside a block of {linear.region[0]}, and {behind[0]!r} "
                        "follows in "
                        "the same product; vLLM stops at it, and a kernel would take the neighbour's scale",
                        "quantize with a block that divides its rows, such as --block-size 64 or 32",
                    )
                )
    return found[:_MOST]


def _cut(tensor: str, rule: str, message: str, remedy: str) -> Finding:
    return Finding(tensor, rule, message, remedy, Severity.ERROR)
