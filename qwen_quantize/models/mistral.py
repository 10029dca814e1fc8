"""Mistral: Llama's layers, every one with the sliding window that config.json names."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Family, LinearSite, Stream
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.windows import windows_of_mistral

MISTRAL = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    linears=(
        LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT),
        LinearSite("mlp.gate_proj", Stream.MLP_INPUT),
        LinearSite("mlp.up_proj", Stream.MLP_INPUT),
        LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
    ),
    rules=ConfigRules(
        windows=windows_of_mistral,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8},
    ),
)
