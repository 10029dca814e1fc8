"""Qwen2, Qwen2.5 (biased q/k/v) and Qwen3 (norms on queries and keys), dense and with experts."""

from __future__ import annotations

from qwen_quantize.models.blueprint import Bias, Family, LinearSite, Stream
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.moe import parse_qwen2_moe, parse_qwen_moe
from qwen_quantize.models.windows import windows_on_all_layers, windows_on_alternate_layers

_MLP = (
    LinearSite("mlp.gate_proj", Stream.MLP_INPUT),
    LinearSite("mlp.up_proj", Stream.MLP_INPUT),
    LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
)
_EXPERTS = (
    LinearSite("mlp.experts.{expert}.gate_proj", Stream.EXPERT_INPUT),
    LinearSite("mlp.experts.{expert}.up_proj", Stream.EXPERT_INPUT),
    LinearSite("mlp.experts.{expert}.down_proj", Stream.EXPERT_HIDDEN),
)
_QWEN3_ATTENTION = (
    LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
    LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
    LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
    LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT, Bias.ATTENTION_FLAG),
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
    linears=(*_QWEN3_ATTENTION, *_MLP),
    query_norm="self_attn.q_norm.weight",
    key_norm="self_attn.k_norm.weight",
)

QWEN2_MOE = Family(
    name="qwen2_moe",
    architectures=("Qwen2MoeForCausalLM",),
    linears=(
        LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, Bias.QKV_FLAG),
        LinearSite("self_attn.k_proj", Stream.ATTENTION_INPUT, Bias.QKV_FLAG),
        LinearSite("self_attn.v_proj", Stream.ATTENTION_INPUT, Bias.QKV_FLAG),
        LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT),
        *_MLP,
    ),
    shared=(
        LinearSite("mlp.shared_expert.gate_proj", Stream.SHARED_INPUT),
        LinearSite("mlp.shared_expert.up_proj", Stream.SHARED_INPUT),
        LinearSite("mlp.shared_expert.down_proj", Stream.SHARED_HIDDEN),
    ),
    experts=_EXPERTS,
    shared_gate="mlp.shared_expert_gate.weight",
    rules=ConfigRules(
        windows=windows_on_alternate_layers,
        moe=parse_qwen2_moe,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 16},
    ),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    architectures=("Qwen3MoeForCausalLM",),
    linears=(*_QWEN3_ATTENTION, *_MLP),
    experts=_EXPERTS,
    query_norm="self_attn.q_norm.weight",
    key_norm="self_attn.k_norm.weight",
    rules=ConfigRules(
        windows=windows_on_all_layers,
        moe=parse_qwen_moe,
        defaults={"max_position_embeddings": 32768, "num_key_value_heads": 4},
    ),
)
