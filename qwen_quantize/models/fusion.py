"""Which linears of a layer engines run as one product, so that they must be quantized alike."""

from __future__ import annotations

import re

# By the last part of their names.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
_FUSED_WITH = {name: names[0] for names in FUSED for name in names}
_EXPERT = re.compile(r"\.experts\.\d+\.")


def product_of(module: str) -> str | None:
    """The one matrix that a linear is a part of, by a name that its siblings share; None for one by itself.

    In a mixture of experts each expert has its own.
    """
    parent, _, last = module.rpartition(".")
    return f"{parent}:{_FUSED_WITH[last]}" if last in _FUSED_WITH else None


def fusion_of(module: str) -> str | None:
    """What must be quantized alike: as `product_of`, but all experts of a layer are one."""
    expert = _EXPERT.search(module)
    return product_of(module) if expert is None else module[: expert.start()] + ".experts"
