"""The streamed model: the same numbers as the resident one, and each expert read once per layer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine import streamed
from qwen_quantize.engine.experts import route
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import mlp_input, run_attention
from qwen_quantize.engine.streamed import StreamedModel
from tests.tiny_models import make_tiny


def windows(count: int, length: int) -> Tensor:
    return torch.randint(160, (count, length), generator=torch.Generator().manual_seed(3))


def run(model: StreamedModel, tokens: Tensor) -> Tensor:
    hidden = model.embed(tokens)
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
    return hidden


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "qwen2-moe-sparse-step", "deepseek-v3"])
def test_streamed_model_equals_resident_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, family)
    reader = ModelReader(open_source(tmp_path))
    tokens = windows(7, 20)
    expected = load_model(reader).forward(tokens).log_softmax(dim=-1)
    whole = run(StreamedModel(reader), tokens)
    monkeypatch.setattr(streamed, "_TOKENS_PER_BATCH", 45)  # two windows at a time, and one at the end
    model = StreamedModel(reader)
    hidden = run(model, tokens)
    torch.testing.assert_close(hidden, whole, rtol=1e-5, atol=1e-5)
    model.open_head()
    torch.testing.assert_close(model.log_probabilities(hidden), expected, rtol=1e-5, atol=1e-4)


def test_windows_do_not_see_each_other(tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek-v3")
    model = StreamedModel(ModelReader(open_source(tmp_path)))
    tokens = windows(3, 16)
    together = run(model, tokens)
    alone = torch.cat([run(model, tokens[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


def test_each_expert_is_read_once_per_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path, "deepseek-v3")
    monkeypatch.setattr(streamed, "_TOKENS_PER_BATCH", 45)
    reader = ModelReader(open_source(tmp_path))
    reads: Counter[str] = Counter()

    class Counting(ModelReader):
        def read_linear(self, module: str) -> Tensor:
            reads[module] += 1
            return super().read_linear(module)

    run(StreamedModel(Counting(reader.source)), windows(12, 20))
    experts = {name for name in reader.blueprint.linear_modules() if ".experts." in name}
    assert set(reads) & experts == experts, "240 tokens leave no expert of this model without one"
    assert set(reads.values()) == {1}


def test_last_routing_is_that_of_the_open_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_tiny(tmp_path, "deepseek-v3")
    monkeypatch.setattr(streamed, "_TOKENS_PER_BATCH", 45)
    reader = ModelReader(open_source(tmp_path))
    model = StreamedModel(reader)
    hidden = model.embed(windows(5, 20))
    for index in range(model.num_layers):
        before = hidden
        model.open_layer(index)
        assert model.last_routing is None
        hidden = model.run_layer(before)
        if reader.blueprint.num_experts(index) == 0:
            assert model.last_routing is None
            continue
        layer = reader.read_layer(index)
        attended = run_attention(before, layer, index, reader.blueprint, reader.rotary)
        chosen = route(
            mlp_input(attended, layer, reader.blueprint).flatten(0, 1), layer, index, reader.blueprint
        )
        found = model.last_routing
        assert found is not None
        assert found.dtype == torch.int64
        assert found.shape == (100, 3)
        assert (found.diff(dim=1) > 0).all(), "sorted, and no expert twice"
        assert torch.equal(found, chosen.indices.sort(dim=1).values)
    model.open_head()
    assert model.last_routing is None


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_tokens_visit_the_experts_that_were_given(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another text's run, sent to this text's experts and back again by its own."""
    make_tiny(tmp_path, family)
    monkeypatch.setattr(streamed, "_TOKENS_PER_BATCH", 45)  # two windows at a time, and one at the end
    reader = ModelReader(open_source(tmp_path))
    tokens = windows(7, 20)
    other = tokens.flip(0)

    def visits(text: Tensor, experts: dict[int, Tensor] | None) -> tuple[Tensor, dict[int, Tensor]]:
        model, visited = StreamedModel(reader, experts=experts), {}
        hidden = model.embed(text)
        for index in range(model.num_layers):
            model.open_layer(index)
            hidden = model.run_layer(hidden)
            if model.last_routing is not None:
                visited[index] = model.last_routing
        return hidden, visited

    exact, own = visits(tokens, None)
    sent, visited = visits(other, own)
    assert visited.keys() == own.keys()
    assert all(torch.equal(visited[index], own[index]) for index in own)
    free, elsewhere = visits(other, None)
    assert any(not torch.equal(elsewhere[index], own[index]) for index in own)
    assert (sent - free).abs().max() > 1e-3
    torch.testing.assert_close(visits(tokens, own)[0], exact, rtol=1e-5, atol=1e-5)
    # Without batches the same tokens come to the same places.
    monkeypatch.setattr(streamed, "_TOKENS_PER_BATCH", 4096)
    torch.testing.assert_close(visits(other, own)[0], sent, rtol=1e-5, atol=1e-5)
