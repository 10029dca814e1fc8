"""The tensors of a multi-token-prediction layer beyond those of a decoder layer, under DeepSeek-V3's names."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Blueprint

JOINING_LINEAR = "eh_proj.weight"  # of the token's embedding and the hidden state: no decoder layer has it


def next_token_tensors(blueprint: Blueprint, layer: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of whatever a complete layer must hold besides its linears."""
    hidden = blueprint.config.hidden_size
    own = {
        JOINING_LINEAR: (hidden, 2 * hidden),
        "enorm.weight": (hidden,),
        "hnorm.weight": (hidden,),
        "shared_head.norm.weight": (hidden,),
    }
    return {
        blueprint.layer_name(layer, suffix): shape
        for suffix, shape in (blueprint.layer_tensors(layer) | own).items()
    }


def repeated_tensors(blueprint: Blueprint, layer: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of copies of embedding and head, which some publishers leave out."""
    shape = (blueprint.config.vocab_size, blueprint.config.hidden_size)
    return {
        blueprint.layer_name(layer, suffix): shape
        for suffix in ("embed_tokens.weight", "shared_head.head.weight")
    }
