"""Llama 2/3, SmolLM and others with the architecture `LlamaForCausalLM`."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Bias, Family, LinearSite, Stream

LLAMA = Family(
    name="llama",
    architectures=("LlamaForCausalLM",),
    linears=(
        LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT, Bias.ATTENTION_FLAG),
        LinearSite("mlp.gate_proj", Stream.MLP_INPUT, Bias.MLP_FLAG),
        LinearSite("mlp.up_proj", Stream.MLP_INPUT, Bias.MLP_FLAG),
        LinearSite("mlp.down_proj", Stream.MLP_HIDDEN, Bias.MLP_FLAG),
    ),
)
