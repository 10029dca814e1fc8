"""Whether one engine loads what a folder holds, by the engines' tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qwen_quantize.checkpoint.contract_engines import REFUSED_BY_ALL, Engine, Reads
from qwen_quantize.checkpoint.contract_linear import CheckedLinear
from qwen_quantize.checkpoint.contract_parallel import check_merged
from qwen_quantize.checkpoint.finding import Finding, Severity, warning

_MOST = 12


def check_support(
    engine: Engine, layout: str, linears: Mapping[str, CheckedLinear], chip: str | None, family: str | None
) -> list[Finding]:
    """chip, family: of the device that the folder will be served on, None for any."""
    found = []
    if family is not None and engine.families and family not in engine.families:
        found.append(
            Finding(
                family,
                "engine-device",
                f"{engine.name} {engine.tested} was found to run on {', '.join(engine.families)} and not on {chip}",
                "name the engine of that chip, such as vllm-ascend for Ascend",
            )
        )
    by_kind: dict[str, list[CheckedLinear]] = {}
    for linear in linears.values():
        by_kind.setdefault(linear.kind, []).append(linear)
    if not linears:
        kind = "gguf" if layout == "gguf" else "plain"
        by_kind = {kind: []} if kind in (*engine.refuses, *engine.reads) else {}
    for kind, members in by_kind.items():
        found += _check_kind(engine, layout, kind, members, chip, family)
    if engine.fused_blocks:
        found += check_merged(
            {m: one for m, one in linears.items() if one.kind in ("block-fp8", "ct-block-fp8")}
        )
    if engine.name == "transformers":
        found += _partial_blocks(linears)
    return [replace(finding, engine=engine.name) for finding in found]


def _check_kind(
    engine: Engine, layout: str, kind: str, members: list[CheckedLinear], chip: str | None, family: str | None
) -> list[Finding]:
    first = members[0].module if members else layout
    reads = engine.reads.get(kind)
    if reads is None:
        return [_refused(engine, layout, kind, first)]
    found = []
    if reads.experts_only:
        dense = next((one for one in members if not one.is_expert), None)
        if dense is not None:
            found.append(
                Finding(
                    dense.module,
                    "engine-scheme",
                    f"{engine.name} {engine.tested} has this scheme ({kind}) for experts only and stops at a "
                    "linear outside "
                    "them",
                    "keep such linears in high precision or quantize them otherwise, or serve with another engine",
                )
            )
    if reads.chips and chip is not None and not {chip, family} & set(reads.chips):
        found.append(
            Finding(
                first,
                "engine-device",
                f"{engine.name} {engine.tested} runs this scheme ({kind}) on {', '.join(reads.chips)}, not on {chip}",
                "quantize with a scheme of that chip",
            )
        )
    found += _check_sizes(engine, reads, members)
    return found


def _check_sizes(engine: Engine, reads: Reads, members: list[CheckedLinear]) -> list[Finding]:
    found = []
    for one in members:
        if reads.groups and one.group not in reads.groups:
            sizes = ", ".join("the whole row" if size == 0 else str(size) for size in reads.groups)
            found.append(
                Finding(
                    one.module,
                    "engine-group",
                    f"{engine.name} {engine.tested} has kernels for groups of {sizes}, and this linear has groups of "
                    f"{one.group or 'the whole row'}; it stops at load",
                    "quantize with --group-size that it knows",
                )
            )
        if reads.symmetric and not one.symmetric:
            found.append(
                Finding(
                    one.module,
                    "engine-scheme",
                    f"{engine.name} {engine.tested} takes this scheme without zero points only, and stops or "
                    "ignores them",
                    "quantize symmetrically, or take the layout awq",
                )
            )
        if one.kind == "block-fp8" and engine.block_sizes and one.region not in engine.block_sizes:
            found.append(
                Finding(
                    one.module,
                    "engine-group",
                    f"{engine.name} {engine.tested} takes blocks of {list(engine.block_sizes[0])}, and this linear "
                    "has "
                    f"{list(one.region)}",
                    "quantize with --block-size 128",
                )
            )
        if found:
            break
    return found[:_MOST]


def _refused(engine: Engine, layout: str, kind: str, first: str) -> Finding:
    why = engine.refuses.get(kind, REFUSED_BY_ALL.get(kind))
    if why is not None:
        return Finding(
            first,
            "engine-scheme",
            f"{engine.name} {engine.tested} does not load {kind} (layout {layout}): {why}",
            "choose a --layout and a scheme that it reads, or another engine",
        )
    return warning(
        first,
        "engine-unknown",
        f"whether {engine.name} loads {kind} (layout {layout}) is not known: no loader was found in {engine.tested}",
        "try it before you rely on it, or choose another --layout",
    )


def _partial_blocks(linears: Mapping[str, CheckedLinear]) -> list[Finding]:
    """transformers on a CPU divides a weight's shape by the grid of its scales to find the block."""
    for one in linears.values():
        if one.kind != "block-fp8" or one.shape is None:
            continue
        if one.shape[0] % one.region[0] or one.shape[1] % one.region[1]:
            return [
                Finding(
                    one.module,
                    "partial-block",
                    f"its {list(one.shape)} end inside a block of {list(one.region)}; transformers without FP8 "
                    "units finds "
                    "the block by dividing shapes, so that it stops or takes a smaller one",
                    "quantize with --block-size 64 or 32, or serve with vLLM or SGLang",
                    Severity.WARNING,
                )
            ]
    return []
