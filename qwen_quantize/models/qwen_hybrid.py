"""Qwen3-Next and Qwen3.5 (text): three gated delta-net layers to each layer of gated attention."""

from __future__ import annotations

from dataclasses import replace

from qwen_quantize.models.blueprint import Bias, DeltaNames, Family, LinearSite, Stream, When
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.delta import parse_delta
from qwen_quantize.models.moe import parse_qwen2_moe, parse_qwen35_moe
from qwen_quantize.models.windows import no_windows

_ATTENTION = (
    LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG, When.ATTENTION_LAYER),
    LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG, When.ATTENTION_LAYER),
    LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG, When.ATTENTION_LAYER),
    LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT, Bias.ATTENTION_FLAG, When.ATTENTION_LAYER),
)
_OUT = LinearSite("linear_attn.out_proj", Stream.ATTENTION_OUTPUT, when=When.DELTA_LAYER)
_MLP = (
    LinearSite("mlp.gate_proj", Stream.MLP_INPUT),
    LinearSite("mlp.up_proj", Stream.MLP_INPUT),
    LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
)
_SHARED = (
    LinearSite("mlp.shared_expert.gate_proj", Stream.SHARED_INPUT),
    LinearSite("mlp.shared_expert.up_proj", Stream.SHARED_INPUT),
    LinearSite("mlp.shared_expert.down_proj", Stream.SHARED_HIDDEN),
)
_EXPERTS = (
    LinearSite("mlp.experts.{expert}.gate_proj", Stream.EXPERT_INPUT),
    LinearSite("mlp.experts.{expert}.up_proj", Stream.EXPERT_INPUT),
    LinearSite("mlp.experts.{expert}.down_proj", Stream.EXPERT_HIDDEN),
)
_DEFAULTS = {"head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25}

# The projections to rates and steps have as many rows as heads: they are gates, and the Qwen team's own FP8
# checkpoints leave them as they are.
QWEN3_NEXT = Family(
    name="qwen3_next",
    architectures=("Qwen3NextForCausalLM",),
    linears=(
        *_ATTENTION,
        LinearSite("linear_attn.in_proj_qkvz", Stream.ATTENTION_INPUT, when=When.DELTA_LAYER),
        _OUT,
        *_MLP,
    ),
    shared=_SHARED,
    experts=_EXPERTS,
    shared_gate="mlp.shared_expert_gate.weight",
    query_norm="self_attn.q_norm.weight",
    key_norm="self_attn.k_norm.weight",
    delta=DeltaNames(gates=("linear_attn.in_proj_ba.weight",)),
    zero_centred_norms=True,
    rules=ConfigRules(
        windows=no_windows,
        moe=parse_qwen2_moe,
        delta=parse_delta,
        output_gate=True,
        defaults={**_DEFAULTS, "norm_topk_prob": True, "num_key_value_heads": 2},
    ),
)

QWEN35 = replace(
    QWEN3_NEXT,
    name="qwen3_5",
    architectures=("Qwen3_5ForCausalLM",),
    linears=(
        *_ATTENTION,
        LinearSite("linear_attn.in_proj_qkv", Stream.ATTENTION_INPUT, when=When.DELTA_LAYER),
        LinearSite("linear_attn.in_proj_z", Stream.ATTENTION_INPUT, when=When.DELTA_LAYER),
        _OUT,
        *_MLP,
    ),
    shared=(),
    experts=(),
    shared_gate=None,
    delta=DeltaNames(gates=("linear_attn.in_proj_b.weight", "linear_attn.in_proj_a.weight")),
    rules=ConfigRules(
        windows=no_windows,
        delta=parse_delta,
        output_gate=True,
        defaults={**_DEFAULTS, "num_key_value_heads": 4},
    ),
)

# As the releases come: the text model inside one that also sees. Its vision tower is kept as it is.
QWEN35_VISION = replace(
    QWEN35,
    architectures=("Qwen3_5ForConditionalGeneration",),
    embedding="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
    layer_prefix="model.language_model.layers.{layer}.",
    rules=replace(QWEN35.rules, nested="text_config"),
)

# Only with one tensor per expert: releases that also see stack all experts of a layer in one tensor.
QWEN35_MOE = replace(
    QWEN35,
    name="qwen3_5_moe",
    architectures=("Qwen3_5MoeForCausalLM",),
    shared=_SHARED,
    experts=_EXPERTS,
    shared_gate="mlp.shared_expert_gate.weight",
    rules=ConfigRules(
        windows=no_windows,
        moe=parse_qwen35_moe,
        delta=parse_delta,
        output_gate=True,
        defaults={**_DEFAULTS, "num_key_value_heads": 2},
    ),
)
