"""Mixtral: Mistral's attention, eight experts in every layer, two of them for each token."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Family, LinearSite, Stream
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.moe import parse_mixtral_moe
from qwen_quantize.models.windows import windows_where_given

MIXTRAL = Family(
    name="mixtral",
    architectures=("MixtralForCausalLM",),
    linears=(
        LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT),
    ),
    experts=(
        # w1 is the gate, w3 what it gates, w2 the way back.
        LinearSite("block_sparse_moe.experts.{expert}.w1", Stream.EXPERT_INPUT),
        LinearSite("block_sparse_moe.experts.{expert}.w3", Stream.EXPERT_INPUT),
        LinearSite("block_sparse_moe.experts.{expert}.w2", Stream.EXPERT_HIDDEN),
    ),
    router="block_sparse_moe.gate.weight",
    rules=ConfigRules(
        windows=windows_where_given,
        moe=parse_mixtral_moe,
        defaults={
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
    ),
)
