"""Which tensors of an unknown architecture are linears, from their names and shapes alone.

Rounding needs no model code. Where there is no blueprint, the conventions of checkpoints decide: a matrix
`<module>.weight` inside a numbered decoder layer is a linear, unless its name or its size says otherwise.
What stays out is kept as it is, never lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# A decoder layer is numbered behind one of these: `model.layers.3.`, `transformer.h.3.`, `blocks.3.`.
_NUMBERED = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.\d+\.")

# Whole parts of a dotted name.
_KEPT_PARTS = frozenset(
    {
        # Routers and gates: few outputs, and an error there changes which expert or token is taken.
        "gate", "router", "shared_expert_gate", "shared_experts_gate", "weights_proj",
        # Decay and step sizes of linear attention and state-space layers.
        "in_proj_ba", "in_proj_a", "in_proj_b", "dt_proj", "x_proj",
        # Heads, and the projection of a next-token layer that mixes two hidden states.
        "lm_head", "head", "score", "classifier", "shared_head", "eh_proj",
        "wte", "wpe",
    }
)  # fmt: skip

# Fragments of a part: `post_attention_layernorm`, `embed_tokens`, `conv1d`, `vision_tower`.
_KEPT_FRAGMENTS = (
    "norm", "ln_", "embed", "conv", "rotary", "relative_attention", "position", "router",
    "visual", "vision", "image", "audio", "speech", "projector", "merger", "connector",
)  # fmt: skip

_LEAST = 64
_MULTIPLE = 16


def linear_modules_by_name(shapes: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, int]]:
    """Module name -> (out_features, in_features) of every linear that may be quantized, in the given order.

    shapes: tensor name -> logical shape. Left out are embeddings, heads, norms, routers and gates,
    convolutions, whatever sees or hears, tensors that stack experts in a third dimension, matrices with a
    dimension that is no multiple of 16 and those with both dimensions under 64.
    Only names speak here: a checkpoint that stores its matrices transposed (GPT-2) is not recognised.
    """
    linears = {}
    for name, shape in shapes.items():
        module = name.removesuffix(".weight")
        if module == name or len(shape) != 2 or _stays(module):
            continue
        out_features, in_features = shape
        if max(shape) < _LEAST or out_features % _MULTIPLE or in_features % _MULTIPLE or 0 in shape:
            continue
        linears[module] = (out_features, in_features)
    return linears


def _stays(module: str) -> bool:
    if _NUMBERED.search(module) is None:
        return True
    parts = module.split(".")
    return any(part in _KEPT_PARTS or any(fragment in part for fragment in _KEPT_FRAGMENTS) for part in parts)
