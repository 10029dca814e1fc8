"""DeepSeek-V2, DeepSeek-V3 (with R1 and V3.1) and V3.2: latent attention, many small experts, shared ones."""

from __future__ import annotations

from dataclasses import replace

from qwen_quantize.models.blueprint import Bias, Family, IndexerNames, LinearSite, Stream, When
from qwen_quantize.models.config import ConfigRules
from qwen_quantize.models.indexer import parse_indexer
from qwen_quantize.models.latent import parse_latent
from qwen_quantize.models.moe import parse_deepseek_v2_moe, parse_deepseek_v3_moe, parse_deepseek_v32_moe
from qwen_quantize.models.windows import no_windows

_ATTENTION = (
    LinearSite("self_attn.q_proj", Stream.ATTENTION_INPUT, when=When.NO_QUERY_LATENT),
    LinearSite("self_attn.q_a_proj", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG, When.QUERY_LATENT),
    LinearSite("self_attn.kv_a_proj_with_mqa", Stream.ATTENTION_INPUT, Bias.ATTENTION_FLAG),
    LinearSite("self_attn.q_b_proj", Stream.QUERY_LATENT, when=When.QUERY_LATENT),
    LinearSite("self_attn.kv_b_proj", Stream.KEY_VALUE_LATENT),
    LinearSite("self_attn.o_proj", Stream.ATTENTION_OUTPUT, Bias.ATTENTION_FLAG),
)
_EXPERTS = (
    LinearSite("mlp.experts.{expert}.gate_proj", Stream.EXPERT_INPUT),
    LinearSite("mlp.experts.{expert}.up_proj", Stream.EXPERT_INPUT),
    LinearSite("mlp.experts.{expert}.down_proj", Stream.EXPERT_HIDDEN),
)

DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    architectures=("DeepseekV2ForCausalLM",),
    linears=(
        *_ATTENTION,
        LinearSite("mlp.gate_proj", Stream.MLP_INPUT, Bias.MLP_FLAG),
        LinearSite("mlp.up_proj", Stream.MLP_INPUT, Bias.MLP_FLAG),
        LinearSite("mlp.down_proj", Stream.MLP_HIDDEN, Bias.MLP_FLAG),
    ),
    shared=(
        LinearSite("mlp.shared_experts.gate_proj", Stream.SHARED_INPUT, Bias.MLP_FLAG),
        LinearSite("mlp.shared_experts.up_proj", Stream.SHARED_INPUT, Bias.MLP_FLAG),
        LinearSite("mlp.shared_experts.down_proj", Stream.SHARED_HIDDEN, Bias.MLP_FLAG),
    ),
    experts=_EXPERTS,
    query_latent_norm="self_attn.q_a_layernorm.weight",
    key_value_latent_norm="self_attn.kv_a_layernorm.weight",
    rules=ConfigRules(
        windows=no_windows, moe=parse_deepseek_v2_moe, latent=parse_latent, interleaved_rope=True
    ),
)

DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    architectures=("DeepseekV3ForCausalLM",),
    linears=(
        *_ATTENTION,
        LinearSite("mlp.gate_proj", Stream.MLP_INPUT),
        LinearSite("mlp.up_proj", Stream.MLP_INPUT),
        LinearSite("mlp.down_proj", Stream.MLP_HIDDEN),
    ),
    shared=(
        LinearSite("mlp.shared_experts.gate_proj", Stream.SHARED_INPUT),
        LinearSite("mlp.shared_experts.up_proj", Stream.SHARED_INPUT),
        LinearSite("mlp.shared_experts.down_proj", Stream.SHARED_HIDDEN),
    ),
    experts=_EXPERTS,
    correction_bias="mlp.gate.e_score_correction_bias",
    query_latent_norm="self_attn.q_a_layernorm.weight",
    key_value_latent_norm="self_attn.kv_a_layernorm.weight",
    rules=ConfigRules(
        windows=no_windows,
        moe=parse_deepseek_v3_moe,
        latent=parse_latent,
        interleaved_rope=None,
        defaults={"max_position_embeddings": 4096},
    ),
)

# The indexer's projection to head weights stays as it is: it decides which tokens are seen.
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    architectures=("DeepseekV32ForCausalLM",),
    linears=(
        *DEEPSEEK_V3.linears,
        LinearSite("self_attn.indexer.wk", Stream.ATTENTION_INPUT),
        LinearSite("self_attn.indexer.wq_b", Stream.QUERY_LATENT),
    ),
    indexer=IndexerNames(),
    rules=replace(
        DEEPSEEK_V3.rules,
        moe=parse_deepseek_v32_moe,
        indexer=parse_indexer,
        interleaved_rope=True,
        defaults={"max_position_embeddings": 163840, "n_shared_experts": 1},
    ),
)
