"""The embedded DeepSeek-V3-style model: its files, and that all of its parts have been trained."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM

from qwen_quantize.embedded import embedded_model_path, embedded_moe_path, heldout_text_path


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((embedded_moe_path() / "config.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def windows() -> torch.Tensor:
    """Held-out token ids [8, 512]."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(embedded_moe_path() / "tokenizer.json"))
    ids = tokenizer.encode(heldout_text_path().read_text(encoding="utf-8")).ids
    return torch.tensor(ids[: 8 * 512]).view(8, 512)


def unigram_loss(ids: torch.Tensor) -> float:
    """Nats per token of the frequencies of `ids` itself: no unigram model does better on it."""
    shares = torch.bincount(ids.flatten()).double() / ids.numel()
    return -float((shares * shares.clamp_min(1e-12).log()).sum())


# --- the files ---


def test_the_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in embedded_moe_path().iterdir()}
    assert set(sizes) == {path.name for path in embedded_model_path().iterdir()}
    assert sum(sizes.values()) < 11_000_000


def test_the_tokenizer_is_that_of_the_dense_model() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (embedded_moe_path() / name).read_bytes() == (embedded_model_path() / name).read_bytes()


def test_the_config_asks_for_every_part_of_the_architecture(config: dict[str, Any]) -> None:
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")
    assert (config["n_routed_experts"], config["n_shared_experts"]) == (16, 1)
    assert (config["n_group"], config["topk_group"], config["num_experts_per_tok"]) == (4, 2, 4)
    assert (config["first_k_dense_replace"], config["num_nextn_predict_layers"]) == (1, 1)
    assert config["routed_scaling_factor"] != 1
    assert config["norm_topk_prob"] is True
    assert config["tie_word_embeddings"] is False
    assert config["q_lora_rank"]
    assert config["kv_lora_rank"]
    # A reader that takes one head width for the other must fail.
    assert config["qk_nope_head_dim"] != config["v_head_dim"]


def decoder_layer_shapes(config: dict[str, Any], dense: bool) -> dict[str, list[int]]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    queries, latent = config["q_lora_rank"], config["kv_lora_rank"]
    shapes = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_a_proj.weight": [queries, hidden],
        "self_attn.q_a_layernorm.weight": [queries],
        "self_attn.q_b_proj.weight": [heads * (nope + rope), queries],
        "self_attn.kv_a_proj_with_mqa.weight": [latent + rope, hidden],
        "self_attn.kv_a_layernorm.weight": [latent],
        "self_attn.kv_b_proj.weight": [heads * (nope + value), latent],
        "self_attn.o_proj.weight": [hidden, heads * value],
    }
    inner = {"mlp": config["intermediate_size"]}
    if not dense:
        experts = config["n_routed_experts"]
        shapes |= {"mlp.gate.weight": [experts, hidden], "mlp.gate.e_score_correction_bias": [experts]}
        inner = {f"mlp.experts.{expert}": config["moe_intermediate_size"] for expert in range(experts)}
        inner["mlp.shared_experts"] = config["n_shared_experts"] * config["moe_intermediate_size"]
    for path, width in inner.items():
        shapes[f"{path}.gate_proj.weight"] = shapes[f"{path}.up_proj.weight"] = [width, hidden]
        shapes[f"{path}.down_proj.weight"] = [hidden, width]
    return shapes


def test_config_and_tensors_agree(config: dict[str, Any]) -> None:
    hidden, layers, table = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
    expected = {
        "model.embed_tokens.weight": [table, hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [table, hidden],
    }
    for layer in range(layers + 1):
        parts = decoder_layer_shapes(config, dense=layer < config["first_k_dense_replace"])
        if layer == layers:
            parts |= {
                "embed_tokens.weight": [table, hidden],
                "enorm.weight": [hidden],
                "hnorm.weight": [hidden],
                "eh_proj.weight": [hidden, 2 * hidden],
                "shared_head.norm.weight": [hidden],
                "shared_head.head.weight": [table, hidden],
            }
        expected |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    with safe_open(embedded_moe_path() / "model.safetensors", framework="pt") as weights:
        found = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (no mapping)
        assert {name: part.get_shape() for name, part in found.items()} == expected
        for name, part in found.items():
            assert part.get_dtype() == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name
            if len(part.get_shape()) == 2 and not name.endswith("mlp.gate.weight"):
                assert all(size % 64 == 0 for size in part.get_shape()), name  # whole blocks for every reader


def test_embedding_and_head_of_the_mtp_layer_repeat_those_of_the_model(config: dict[str, Any]) -> None:
    weights = load_file(embedded_moe_path() / "model.safetensors")
    layer = f"model.layers.{config['num_hidden_layers']}"
    assert torch.equal(weights[f"{layer}.embed_tokens.weight"], weights["model.embed_tokens.weight"])
    assert torch.equal(weights[f"{layer}.shared_head.head.weight"], weights["lm_head.weight"])
    assert not torch.equal(weights["model.embed_tokens.weight"], weights["lm_head.weight"])


# --- the model ---


@pytest.fixture(scope="module")
def loaded() -> tuple[nn.Module, dict[str, Any]]:
    """The model in float32 and what transformers says about the loading."""
    model, info = AutoModelForCausalLM.from_pretrained(
        embedded_moe_path(), dtype=torch.float32, output_loading_info=True
    )
    return model.eval(), info


def test_transformers_misses_nothing_and_leaves_only_the_mtp_layer(
    loaded: tuple[nn.Module, dict[str, Any]], config: dict[str, Any]
) -> None:
    _, info = loaded
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    unexpected = set(info["unexpected_keys"])
    assert unexpected
    assert all(name.startswith(f"model.layers.{config['num_hidden_layers']}.") for name in unexpected)


def test_the_model_predicts_heldout_text_far_better_than_token_frequencies(
    loaded: tuple[nn.Module, dict[str, Any]], windows: torch.Tensor
) -> None:
    with torch.inference_mode():
        loss = float(loaded[0](input_ids=windows, labels=windows).loss)
    assert loss < unigram_loss(windows) - 1.8  # nats per token: a factor of 6 in perplexity


def test_every_expert_is_alive(
    loaded: tuple[nn.Module, dict[str, Any]], windows: torch.Tensor, config: dict[str, Any]
) -> None:
    model, _ = loaded
    experts = config["n_routed_experts"]
    counts: list[torch.Tensor] = []

    def count(_part: nn.Module, _inputs: object, routed: tuple[torch.Tensor, ...]) -> None:
        counts.append(torch.bincount(routed[2].flatten(), minlength=experts))

    routers = [part for name, part in model.named_modules() if name.endswith("mlp.gate")]
    hooks = [router.register_forward_hook(count) for router in routers]
    with torch.inference_mode():
        model(input_ids=windows)
    for hook in hooks:
        hook.remove()
    assert len(counts) == config["num_hidden_layers"] - config["first_k_dense_replace"]
    for tokens in counts:
        assert tokens.min() >= 0.003 * tokens.sum()


def test_the_mtp_layer_predicts_the_token_after_the_next(
    windows: torch.Tensor, config: dict[str, Any]
) -> None:
    """Better than frequencies by far, and the order of its two inputs is that of DeepSeek-V3."""
    # With one layer more in the config, transformers reads the decoder layer inside the MTP layer as its last.
    model = AutoModelForCausalLM.from_pretrained(
        embedded_moe_path(), dtype=torch.float32, num_hidden_layers=config["num_hidden_layers"] + 1
    ).eval()
    block = model.model.layers[-1]
    del model.model.layers[-1]
    weights = load_file(embedded_moe_path() / "model.safetensors")
    prefix = f"model.layers.{config['num_hidden_layers']}."
    own = {name.removeprefix(prefix): value.float() for name, value in weights.items() if prefix in name}

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, config["rms_norm_eps"])

    with torch.inference_mode():
        hidden = normed(model.model(windows[:, :-2]).last_hidden_state, own["hnorm.weight"])
        embedded = normed(own["embed_tokens.weight"][windows[:, 1:-1]], own["enorm.weight"])
        rotary = model.model.rotary_emb(embedded, torch.arange(embedded.shape[1])[None])
        losses = []
        for inputs in ((embedded, hidden), (hidden, embedded)):
            joined = linear(torch.cat(inputs, dim=-1), own["eh_proj.weight"])
            last = normed(block(joined, position_embeddings=rotary), own["shared_head.norm.weight"])
            logits = linear(last, own["shared_head.head.weight"])
            losses.append(float(cross_entropy(logits.flatten(0, 1), windows[:, 2:].flatten())))
    assert losses[0] < unigram_loss(windows) - 1  # nats per token
    assert losses[0] < losses[1] - 1
