"""GLM-4 (dense): rotation of neighbours in half of each head, gate and up in one matrix.

The later release (`Glm4ForCausalLM`) also norms what attention and MLP add.
"""

from __future__ import annotations

from dataclasses import replace

from qwen_quantize.models.blueprint import Bias, Family, LinearSite, Stream
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.windows import no_windows

GLM = Family(
    name="glm",
    architectures=("GlmForCausalLM",),
    linears=(
        LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT),
        LinearSite("mlp.gate_up_proj", Stream.MLP_INPUT),
        LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
    ),
    rules=ConfigRules(
        windows=no_windows,
        interleaved_rope=True,
        defaults={
            "attention_bias": True,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 2,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1.5625e-07,
        },
    ),
)

GLM4 = replace(
    GLM,
    name="glm4",
    architectures=("Glm4ForCausalLM",),
    attention_output_norm="post_self_attn_layernorm.weight",
    mlp_output_norm="post_mlp_layernorm.weight",
)
