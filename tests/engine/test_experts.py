"""Routing by hand, experts one by one, and what of a sparse layer is cast."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.experts import Routing, route, run_expert, run_experts
from qwen_quantize.engine.layer import Layer, ResidentExperts
from qwen_quantize.engine.linear import (
    ChipCompute,
    EmulatedGroup,
    LinearGroup,
    MixedGroup,
    PlainGroup,
    fuse,
)
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_cast import GroupCast
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.tables import E4M3FN
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.models.lookup import require_blueprint
from qwen_quantize.models.moe import MoeConfig
from tests.tiny_models import make_tiny

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 0,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.0,
}


def blueprint(**changes: Any) -> Blueprint:
    found = require_blueprint(V3)
    moe = found.config.moe
    assert moe is not None
    return Blueprint(found.family, replace(found.config, moe=replace(moe, **changes)))


def logits_as_input(logits: Tensor, bias: Tensor) -> tuple[Tensor, Layer]:
    """With the identity as router, the input is the logits."""
    tensors = {"mlp.gate.weight": torch.eye(4), "mlp.gate.e_score_correction_bias": bias}
    return logits, Layer({}, tensors)


def test_sigmoid_routing_by_hand() -> None:
    # Scores 0.9 0.1 | 0.6 0.5: the second group wins with 1.1 over 1.0, though the best expert is in the first.
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5]])
    x, layer = logits_as_input(scores.logit(), torch.zeros(4))
    found = route(x, layer, 0, blueprint())
    assert found.indices.tolist() == [[2, 3]]
    torch.testing.assert_close(found.weights, torch.tensor([[2 * 0.6 / 1.1, 2 * 0.5 / 1.1]]))
    # The correction bias turns the choice, and leaves the weights alone.
    x, layer = logits_as_input(scores.logit(), torch.tensor([0.0, 0.2, 0.0, 0.0]))
    found = route(x, layer, 0, blueprint(normalise=False))
    assert found.indices.tolist() == [[0, 1]]
    torch.testing.assert_close(found.weights, torch.tensor([[1.8, 0.2]]))


def groups_of(weights: Tensor) -> dict[Stream, LinearGroup]:
    return {
        Stream.EXPERT_INPUT: fuse([weights[0], weights[1]], [None, None]),
        Stream.EXPERT_HIDDEN: fuse([weights[2].T.contiguous()], [None]),
    }


def test_experts_are_asked_for_once_and_only_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_quantize.engine.experts._TOKENS_AT_ONCE", 3)
    generator = torch.Generator().manual_seed(0)
    members = [groups_of(torch.randn(3, 6, 5, generator=generator)) for _ in range(6)]
    x = torch.randn(11, 5, generator=generator)
    # Expert 4 is nobody's.
    allowed = torch.tensor([0, 1, 2, 3, 5])
    picks = [allowed[torch.randperm(5, generator=generator)[:2]] for _ in range(11)]
    routing = Routing(torch.stack(picks), torch.rand(11, 2, generator=generator))
    asked: list[int] = []

    def experts(expert: int) -> dict[Stream, LinearGroup]:
        asked.append(expert)
        return members[expert]

    found = run_experts(x * 2, routing, experts, "silu", prepare=lambda rows: rows / 2)
    assert asked == [0, 1, 2, 3, 5]
    for token in range(11):
        expected = sum(
            weight * run_expert(x[token : token + 1], members[int(expert)], "silu")[0]
            for expert, weight in zip(routing.indices[token], routing.weights[token], strict=True)
        )
        torch.testing.assert_close(found[token], expected)


def test_resident_experts_count_their_bytes(tmp_path: Path) -> None:
    make_tiny(tmp_path, "mixtral")
    reader = ModelReader(open_source(tmp_path))
    model = load_model(reader)
    assert all(isinstance(layer.experts, ResidentExperts) for layer in model.layers)
    shapes = reader.blueprint.linear_modules().values()
    assert model.nbytes == 4 * (sum(out * inner for out, inner in shapes) + 2 * 160 * 64)


def store_as_block_fp8(folder: Path, kept: tuple[str, ...] = ()) -> None:
    """Every linear of the decoder layers but `kept` as E4M3 with one scale of 2^-4 per 32 x 32 block."""
    modules = ModelReader(open_source(folder)).blueprint.linear_modules()
    tensors = load_file(folder / "model.safetensors")
    for module, (rows, columns) in modules.items():
        if module in kept:
            continue
        tensors[module + ".weight"] = (tensors[module + ".weight"] * 16).to(torch.float8_e4m3fn)
        tensors[module + ".weight_scale_inv"] = torch.full((-(-rows // 32), -(-columns // 32)), 2.0**-4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (folder / "config.json").write_text(json.dumps(config))


CAST = ChipCompute(GroupCast(E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 32))


def test_casts_reach_latents_and_experts_and_spare_the_router(tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek-v3")
    kept = "model.layers.1.mlp.experts.5.up_proj"
    store_as_block_fp8(tmp_path, (kept,))
    reader = ModelReader(open_source(tmp_path))
    attention, mlp = reader.read_half(1, Half.ATTENTION, CAST), reader.read_half(1, Half.MLP, CAST)
    assert set(attention.groups) == {
        Stream.ATTENTION_INPUT,
        Stream.QUERY_LATENT,
        Stream.KEY_VALUE_LATENT,
        Stream.ATTENTION_OUTPUT,
    }
    assert set(mlp.groups) == {Stream.SHARED_INPUT, Stream.SHARED_HIDDEN}
    for group in (*attention.groups.values(), *mlp.groups.values(), *reader.read_expert(1, 4, CAST).values()):
        assert isinstance(group, EmulatedGroup)
    assert attention.experts is None
    assert set(attention.tensors) | set(mlp.tensors) == set(reader.blueprint.layer_tensors(1))
    assert not set(attention.tensors) & set(mlp.tensors)
    mixed = reader.read_expert(1, 5, CAST)[Stream.EXPERT_INPUT]
    assert isinstance(mixed, MixedGroup)
    assert [type(part) for part in mixed.parts] == [EmulatedGroup, PlainGroup]

    tokens = torch.randint(160, (2, 16), generator=torch.Generator().manual_seed(1))
    plain = load_model(reader).forward(tokens)
    cast = load_model(reader, CAST).forward(tokens)
    assert 1e-3 < (cast - plain).abs().max() / plain.abs().max() < 0.5
    streamed = StreamedModel(reader, CAST)
    hidden = streamed.embed(tokens)
    for index in range(streamed.num_layers):
        streamed.open_layer(index)
        hidden = streamed.run_layer(hidden)
    streamed.open_head()
    expected = cast.log_softmax(dim=-1)
    torch.testing.assert_close(streamed.log_probabilities(hidden), expected, rtol=1e-4, atol=1e-4)


def test_a_quantized_router_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, "mixtral")
    store_as_block_fp8(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.gate"
    tensors[name + ".weight"] = tensors[name + ".weight"].to(torch.float8_e4m3fn)
    tensors[name + ".weight_scale_inv"] = torch.ones(1, 2)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"gate\.weight. is F8_E4M3; only linears may be quantized"):
        ModelReader(open_source(tmp_path))


def test_the_choice_within_groups_ignores_everything_outside() -> None:
    moe = MoeConfig(8, 2, 4, (True,), groups=4, groups_per_token=1)
    found = Blueprint(require_blueprint(V3).family, replace(require_blueprint(V3).config, moe=moe))
    layer = Layer({}, {"mlp.gate.weight": torch.eye(8), "mlp.gate.e_score_correction_bias": torch.zeros(8)})
    logits = torch.tensor([[0.0, 5.0, 4.9, 4.8, 1.0, 0.0, 2.0, -9.0]])
    # Softmax groups count by their best: expert 1's group, then both of its members, however poor the other.
    assert route(logits, layer, 0, found).indices.tolist() == [[1, 0]]
