"""Gemma 2 and Gemma 3 (text): norms around both halves, weights stored as distance from one, capped logits."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Bias, Family, LinearSite, Stream
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.windows import windows_of_gemma2, windows_of_gemma3

_LINEARS = (
    LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
    LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
    LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
    LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT, Bias.ATTENTION_FLAG),
    LinearSite("mlp.gate_proj", Stream.MLP_INPUT),
    LinearSite("mlp.up_proj", Stream.MLP_INPUT),
    LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
)
_DEFAULTS = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "tie_word_embeddings": True,
}

GEMMA2 = Family(
    name="gemma2",
    architectures=("Gemma2ForCausalLM",),
    linears=_LINEARS,
    mlp_norm="pre_feedforward_layernorm.weight",
    attention_output_norm="post_attention_layernorm.weight",
    mlp_output_norm="post_feedforward_layernorm.weight",
    zero_centred_norms=True,
    scaled_embedding=True,
    rules=ConfigRules(
        windows=windows_of_gemma2,
        activation_keys=("hidden_activation",),
        capped_logits=(50.0, 30.0),
        query_scalar=True,
        defaults={**_DEFAULTS, "max_position_embeddings": 8192},
    ),
)

GEMMA3 = Family(
    name="gemma3_text",
    architectures=("Gemma3ForCausalLM",),
    linears=_LINEARS,
    mlp_norm="pre_feedforward_layernorm.weight",
    query_norm="self_attn.q_norm.weight",
    key_norm="self_attn.k_norm.weight",
    attention_output_norm="post_attention_layernorm.weight",
    mlp_output_norm="post_feedforward_layernorm.weight",
    zero_centred_norms=True,
    scaled_embedding=True,
    rules=ConfigRules(
        windows=windows_of_gemma3,
        activation_keys=("hidden_activation",),
        # transformers reads attn_logit_softcapping here too, and uses it nowhere.
        capped_logits=(None, None),
        query_scalar=True,
        local_rope=True,
        defaults={
            **_DEFAULTS,
            "max_position_embeddings": 131072,
            "rope_local_base_freq": 10000.0,
            "rope_theta": 1e6,
        },
    ),
)
