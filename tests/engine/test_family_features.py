"""What families have beyond Llama's layers, each against transformers: caches, windows, caps, hybrids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.generate import greedy_tokens
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Half
from tests.tiny_models import BASE, DELTA, FAMILIES, IDS, SHARED, make_tiny

NEW = [
    "deepseek-v3.2",
    "gemma2",
    "gemma3",
    "glm",
    "glm4",
    "mistral",
    "phi3",
    "qwen3-next",
    "qwen3.5",
    "qwen3.5-moe",
]


@pytest.mark.parametrize("family", NEW)
def test_cached_steps_equal_one_pass(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, family)
    model = load_model(ModelReader(open_source(tmp_path)))
    tokens = torch.randint(160, (2, 31), generator=torch.Generator().manual_seed(2))
    whole = model.forward(tokens)
    cache = model.new_cache(2, 31)
    cuts = ((0, 9), (9, 10), (10, 12), (12, 24), (24, 31))
    parts = [model.forward(tokens[:, a:b], cache) for a, b in cuts]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", NEW)
def test_greedy_generation_equals_transformers(family: str, tmp_path: Path) -> None:
    oracle = make_tiny(tmp_path, family)
    model = load_model(ModelReader(open_source(tmp_path)))
    prompt = [3, 17, 99, 4, 150]
    expected = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(greedy_tokens(model, prompt, 12)) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen3-next", "deepseek-v3.2"])
def test_streamed_model_equals_resident_model(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, family)
    reader = ModelReader(open_source(tmp_path))
    tokens = torch.randint(160, (2, 20), generator=torch.Generator().manual_seed(3))
    expected = load_model(reader).forward(tokens).log_softmax(dim=-1)
    streamed = StreamedModel(reader)
    hidden = streamed.embed(tokens)
    for index in range(streamed.num_layers):
        streamed.open_layer(index)
        hidden = streamed.run_layer(hidden)
    streamed.open_head()
    torch.testing.assert_close(streamed.log_probabilities(hidden[0]), expected[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [32, 33])
def test_longrope_changes_factors_with_the_length(tokens: int, tmp_path: Path) -> None:
    """Up to `original_max_position_embeddings` (32 here) tokens the short factors, from then on the long ones."""
    oracle = make_tiny(tmp_path, "phi3-longrope")
    model = load_model(ModelReader(open_source(tmp_path)))
    text = torch.randint(160, (1, tokens), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        expected = oracle(text).logits
    torch.testing.assert_close(model.forward(text), expected, rtol=2e-4, atol=2e-4)


def test_the_indexer_leaves_tokens_out(tmp_path: Path) -> None:
    """The same weights without a limit give other logits from the first token on that sees too many, not before."""
    make_tiny(tmp_path, "deepseek-v3.2")
    tokens = torch.randint(160, (1, 24), generator=torch.Generator().manual_seed(5))
    sparse = load_model(ModelReader(open_source(tmp_path))).forward(tokens)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "index_topk": 2048}))
    dense = load_model(ModelReader(open_source(tmp_path))).forward(tokens)
    torch.testing.assert_close(sparse[:, :10], dense[:, :10], rtol=1e-5, atol=1e-5)
    assert (sparse[:, 10:] - dense[:, 10:]).abs().max() > 1e-2


def test_norms_are_read_with_their_offset_and_the_file_is_not(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3-next")
    reader = ModelReader(open_source(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    delta, attention = (reader.read_half(layer, Half.ATTENTION).tensors for layer in (0, 3))
    prefix = "model.layers.{}."
    for layer, tensors, suffix, offset in (
        (0, delta, "input_layernorm.weight", 1),
        (0, delta, "linear_attn.norm.weight", 0),
        (0, delta, "linear_attn.dt_bias", 0),
        (3, attention, "self_attn.q_norm.weight", 1),
    ):
        assert torch.equal(tensors[suffix], stored[prefix.format(layer) + suffix] + offset)
    assert torch.equal(reader.read_head()[0], stored["model.norm.weight"] + 1)


def test_a_cache_of_a_hybrid_counts_what_it_holds(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3.5")
    cache = load_model(ModelReader(open_source(tmp_path))).new_cache(2, 50)
    attention = 2 * 2 * 50 * 2 * 32  # one layer: keys and values, batch, tokens, heads, size
    states = 2 * 2 * (3 * (2 * 16 + 48) + 4 * 8 * 12)  # two layers, batch: convolution inputs, memory
    cache.reserve(50)
    assert cache.nbytes == cache.planned.total == 4 * (attention + states)


def qwen35_that_sees(folder: Path) -> Any:
    """A tiny Qwen3.5 as it is released, text model and vision tower; returns transformers' model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text = {**BASE, **FAMILIES["qwen3.5"], **IDS}
    del text["model_type"]
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
    torch.manual_seed(6)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() == 2:
                parameter.mul_(3)
    model.save_pretrained(folder)
    return model


def test_the_text_model_inside_one_that_sees(tmp_path: Path) -> None:
    oracle = qwen35_that_sees(tmp_path)
    model = load_model(ModelReader(open_source(tmp_path)))
    tokens = torch.randint(3, 160, (2, 40), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode():
        expected = oracle(tokens).logits
    assert expected.abs().max() > 0.5
    torch.testing.assert_close(model.forward(tokens), expected, rtol=2e-4, atol=2e-4)


def test_stacked_experts_are_named_in_the_error(tmp_path: Path) -> None:
    """Some releases hold all experts of a layer in one tensor, which no linear of the blueprint is."""
    make_tiny(tmp_path, "qwen3.5-moe")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    experts = SHARED["num_experts"]
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            kind: [tensors.pop(f"{prefix}{expert}.{kind}_proj.weight") for expert in range(experts)]
            for kind in ("gate", "up", "down")
        }
        tensors[prefix + "down_proj"] = torch.stack(parts["down"])
        pairs = zip(parts["gate"], parts["up"], strict=True)
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"'model\.layers\.\d\.mlp\.experts\.\w+' stacks all experts"):
        ModelReader(open_source(tmp_path))


def test_delta_sizes_that_do_not_share_heads_are_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3.5")
    path = tmp_path / "config.json"
    heads = DELTA["linear_num_value_heads"] + 1
    path.write_text(json.dumps({**json.loads(path.read_text()), "linear_num_value_heads": heads}))
    with pytest.raises(UserError, match=r"'linear_num_value_heads' must be a multiple of .* found 5"):
        ModelReader(open_source(tmp_path))
