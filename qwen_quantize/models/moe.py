"""What a `config.json` says about mixtures of experts: which layers have one, and how tokens are routed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.models.config_values import (
    MOST_ELEMENTS,
    MOST_LAYERS,
    Interval,
    choice,
    number,
    shown,
    switch,
    whole,
    wrong,
)

MOST_EXPERTS = 100_000
MOST_EXPERTS_IN_ALL = 1_000_000  # of one model; the largest known have about 50,000

_SCALE = Interval(0.0, 1e6, above=True)


class Router(StrEnum):
    """How a router's logits become scores, and what a group of experts is worth.

    SOFTMAX: over all experts; a group counts as much as its best expert. SIGMOID: each expert on its own, a
    correction bias is added for the choice only; a group counts as much as its two best together.
    """

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes and routing of the sparse layers; `sparse_layers` has one flag per layer, MTP layers included.

    A token goes to the `experts_per_token` best experts, chosen within its `groups_per_token` best of
    `groups` equal groups. The weights are the scores, divided by their sum if `normalise`, times `scale`.
    shared_size: intermediate size of the expert that every token visits, 0 without one.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    sparse_layers: tuple[bool, ...]
    router: Router = Router.SOFTMAX
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    shared_size: int = 0


def parse_mixtral_moe(config: Mapping[str, Any], layers: int) -> MoeConfig:
    """Mixtral: every layer is sparse, weights are renormalised, experts have the size of a dense MLP."""
    experts, chosen = _experts(config, "num_local_experts")
    return _checked(
        MoeConfig(
            num_experts=experts,
            experts_per_token=chosen,
            expert_size=whole(config, "intermediate_size", MOST_ELEMENTS),
            sparse_layers=(True,) * layers,
        )
    )


def parse_qwen_moe(config: Mapping[str, Any], layers: int) -> MoeConfig:
    """Qwen2-MoE (with a shared expert) and Qwen3-MoE: a sparse layer every `decoder_sparse_step` layers."""
    # transformers 5 writes Qwen3-MoE's number of experts under Mixtral's key.
    key = "num_experts" if config.get("num_local_experts") is None else "num_local_experts"
    experts, chosen = _experts(config, key)
    step = whole(config, "decoder_sparse_step", MOST_LAYERS, 1)
    dense = _layer_numbers(config, "mlp_only_layers", layers)
    return _checked(
        MoeConfig(
            num_experts=experts,
            experts_per_token=chosen,
            expert_size=whole(config, "moe_intermediate_size", MOST_ELEMENTS),
            sparse_layers=tuple((layer + 1) % step == 0 and layer not in dense for layer in range(layers)),
            normalise=switch(config, "norm_topk_prob", False),
        )
    )


def parse_qwen2_moe(config: Mapping[str, Any], layers: int) -> MoeConfig:
    """As `parse_qwen_moe`, with the shared expert of Qwen2-MoE."""
    plain = parse_qwen_moe(config, layers)
    size = whole(config, "shared_expert_intermediate_size", MOST_ELEMENTS)
    return replace(plain, shared_size=size)


def parse_qwen35_moe(config: Mapping[str, Any], layers: int) -> MoeConfig:
    """Qwen3.5: as Qwen2-MoE, with experts in every layer and weights that always sum to one."""
    fixed = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": None}
    return parse_qwen2_moe({**config, **fixed}, layers)


def parse_deepseek_v2_moe(config: Mapping[str, Any], layers: int) -> MoeConfig:
    """DeepSeek-V2: softmax scores, chosen from all experts or from the best groups (`topk_method`)."""
    choice(config, ("scoring_func",), ("softmax",), "softmax")
    method = choice(config, ("topk_method",), ("greedy", "group_limited_greedy"), "greedy")
    grouped = method == "group_limited_greedy"
    if switch(config, "norm_topk_prob", False):
        # The published model code then drops routed_scaling_factor, transformers ignores the key.
        raise UserError(
            "config.json: 'norm_topk_prob' must be false for DeepSeek-V2, whose implementations disagree on "
            "what true would mean, found True"
        )
    return _deepseek(
        config,
        layers,
        first_sparse=whole(config, "first_k_dense_replace", MOST_LAYERS, 0, least=0),
        router=Router.SOFTMAX,
        normalise=False,
        scale=number(config, "routed_scaling_factor", _SCALE, 1.0),
        groups=whole(config, "n_group", MOST_EXPERTS) if grouped else 1,
        groups_per_token=whole(config, "topk_group", MOST_EXPERTS) if grouped else 1,
    )


def parse_deepseek_v3_moe(config: Mapping[str, Any], layers: int) -> MoeConfig:
    """DeepSeek-V3, V3.1 and R1: sigmoid scores, a correction bias for the choice, groups by their two best."""
    choice(config, ("scoring_func",), ("sigmoid",), "sigmoid")
    choice(config, ("topk_method",), ("noaux_tc",), "noaux_tc")
    return _deepseek(
        config,
        layers,
        first_sparse=whole(config, "first_k_dense_replace", MOST_LAYERS, 3, least=0),
        router=Router.SIGMOID,
        normalise=switch(config, "norm_topk_prob", True),
        scale=number(config, "routed_scaling_factor", _SCALE, 2.5),
        groups=whole(config, "n_group", MOST_EXPERTS, 8),
        groups_per_token=whole(config, "topk_group", MOST_EXPERTS, 4),
    )


def parse_deepseek_v32_moe(config: Mapping[str, Any], layers: int) -> MoeConfig:
    """As `parse_deepseek_v3_moe`; `mlp_layer_types`, where it is written, says which layers are sparse."""
    moe = parse_deepseek_v3_moe(config, layers)
    kinds = config.get("mlp_layer_types")
    if kinds is None:
        return moe
    decoder = whole(config, "num_hidden_layers", MOST_LAYERS)
    if not isinstance(kinds, list) or len(kinds) != decoder:
        raise wrong("mlp_layer_types", f"a list of {decoder} names, one per layer", kinds)
    for kind in kinds:
        if kind not in ("dense", "sparse"):
            raise wrong("mlp_layer_types", "a list of 'dense' and 'sparse'", kind)
    sparse = tuple(kind == "sparse" for kind in kinds) + (True,) * (layers - decoder)
    return _checked(replace(moe, sparse_layers=sparse))


def _deepseek(
    config: Mapping[str, Any],
    layers: int,
    *,
    first_sparse: int,
    router: Router,
    normalise: bool,
    scale: float,
    groups: int,
    groups_per_token: int,
) -> MoeConfig:
    experts, chosen = _experts(config, "n_routed_experts")
    size = whole(config, "moe_intermediate_size", MOST_ELEMENTS)
    shared = whole(config, "n_shared_experts", MOST_EXPERTS, 0, least=0)
    if size * shared > MOST_ELEMENTS:
        raise wrong("n_shared_experts", f"at most {MOST_ELEMENTS // size} with experts of {size}", shared)
    step = whole(config, "moe_layer_freq", MOST_LAYERS, 1)
    return _checked(
        MoeConfig(
            num_experts=experts,
            experts_per_token=chosen,
            expert_size=size,
            sparse_layers=tuple(layer >= first_sparse and layer % step == 0 for layer in range(layers)),
            router=router,
            normalise=normalise,
            scale=scale,
            groups=groups,
            groups_per_token=groups_per_token,
            shared_size=size * shared,
        )
    )


def _experts(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    """(experts of a layer, how many of them a token visits)."""
    experts = whole(config, key, MOST_EXPERTS)
    chosen = whole(config, "num_experts_per_tok", MOST_EXPERTS)
    if chosen > experts:
        raise wrong("num_experts_per_tok", f"at most {key!r} ({experts})", chosen)
    return experts, chosen


def _layer_numbers(config: Mapping[str, Any], key: str, layers: int) -> frozenset[int]:
    found = config.get(key)
    if found is None:
        return frozenset()
    if not isinstance(found, list):
        raise wrong(key, "a list of layer numbers", found)
    for layer in found:
        if type(layer) is not int or not 0 <= layer < layers:  # True is an int too
            raise wrong(key, f"a list of layer numbers from 0 to {layers - 1}", layer)
    return frozenset(found)


def _checked(moe: MoeConfig) -> MoeConfig:
    """The rules between two sizes; each would leave a token without the experts that it needs."""
    total = moe.num_experts * sum(moe.sparse_layers)
    if total > MOST_EXPERTS_IN_ALL:
        raise UserError(
            f"config.json: {sum(moe.sparse_layers)} layers of {moe.num_experts} experts are {total}, and a "
            f"model may have at most {MOST_EXPERTS_IN_ALL}"
        )
    if moe.num_experts % moe.groups:
        raise wrong("n_group", f"a divisor of the number of experts ({moe.num_experts})", moe.groups)
    if moe.groups_per_token > moe.groups:
        raise wrong("topk_group", f"at most 'n_group' ({moe.groups})", moe.groups_per_token)
    group_size = moe.num_experts // moe.groups
    if moe.router is Router.SIGMOID and group_size < 2:
        raise wrong(
            "n_group",
            f"at most half the number of experts ({moe.num_experts}), for a group is judged by two",
            moe.groups,
        )
    if moe.experts_per_token > moe.groups_per_token * group_size:
        raise UserError(
            f"config.json: 'num_experts_per_tok' must be at most {moe.groups_per_token * group_size}, the "
            f"experts of {moe.groups_per_token} groups of {group_size}, found {shown(moe.experts_per_token)}"
        )
    return moe
