"""Qwen2, Qwen2.5 (biased q/k/v) and Qwen3 (dense, with norms on queries and keys)."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Bias, Family, LinearSite, Stream

_MLP = (
    LinearSite("mlp.gate_proj", Stream.MLP_INPUT),
    LinearSite("mlp.up_proj", Stream.MLP_INPUT),
    LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
)

QWEN2 = Family(
    name="qwen2",
    architectures=("Qwen2ForCausalLM",),
    linears=(
        LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.ALWAYS),
        LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.ALWAYS),
        LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.ALWAYS),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT),
        *_MLP,
    ),
)

QWEN3 = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    linears=(
        LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT, Bias.ATTENTION_FLAG),
        *_MLP,
    ),
    query_norm="self_attn.q_norm.weight",
    key_norm="self_attn.k_norm.weight",
)
