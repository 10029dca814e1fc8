"""Phi-3, Phi-3.5 and Phi-4-mini: Llama's layers with query, key and value in one matrix, gate and up too."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Family, LinearSite, Stream
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.windows import windows_where_given

PHI3 = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    linears=(
        LinearSite("self_attn.qkv_proj", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT),
        LinearSite("mlp.gate_up_proj", Stream.MLP_INPUT),
        LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
    ),
    rules=ConfigRules(
        windows=windows_where_given,
        # Early releases call LongRoPE so, and mean the same.
        rope_names={"su": "longrope", "yarn": "longrope"},
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
    ),
)
