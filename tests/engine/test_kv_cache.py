"""Packed caches: the bytes that were planned, the same tokens however a text is cut, and eval's logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_quantize.calibrators.kv_plans import KvFindings, KvRange, uniform_plan
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.engine.kv_cache import Context
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.packed_cache import PackedKVCache, SimulatedCache
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import parse_kv_scheme
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.pipeline.kv_cache import plan_kv_cache
from tests.tiny_models import make_tiny

SCHEMES = (
    "fp16",
    "bf16",
    "fp8",
    "fp8:head",
    "fp8:token",
    "int8",
    "int8:token,window=5",
    "int4:32,window=7,sinks=2",
    "int4:32,window=0,sinks=0",
)
FAMILIES = ("qwen3", "mistral", "gemma2", "qwen3-next", "deepseek-v3", "deepseek-v3.2", "phi3")


def tokens_of(count: int, batch: int = 1, seed: int = 5) -> Tensor:
    return torch.randint(160, (batch, count), generator=torch.Generator().manual_seed(seed))


def findings(config: ModelConfig) -> KvFindings:
    generator = torch.Generator().manual_seed(2)
    shape = (config.num_kv_heads, config.head_dim)
    ranges = {
        layer: KvRange(5 + torch.rand(shape, generator=generator), 9 + torch.rand(shape, generator=generator))
        for layer in range(config.num_layers)
    }
    return KvFindings(ranges)


def plan_of(text: str, config: ModelConfig) -> KvPlan:
    return uniform_plan(parse_kv_scheme(text), config, findings(config))


def reader_of(folder: Path, family: str) -> ModelReader:
    make_tiny(folder, family, seed=3)
    return ModelReader(open_source(folder))


def in_pieces(model: Model, plan: KvPlan | None, tokens: Tensor, sizes: list[int]) -> tuple[Tensor, int]:
    cache = model.new_cache(tokens.shape[0], tokens.shape[1], plan)
    parts = [model.forward(part, cache) for part in torch.split(tokens, sizes, dim=1)]
    assert cache.length == tokens.shape[1]
    return torch.cat(parts, dim=1), cache.nbytes


def streamed(reader: ModelReader, plan: KvPlan | None, tokens: Tensor) -> Tensor:
    model = StreamedModel(reader, None, plan)
    hidden = model.embed(tokens)
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
    model.open_head()
    return model.log_probabilities(hidden)


@pytest.mark.parametrize("family", FAMILIES)
def test_eval_sees_what_a_decoder_sees_however_the_text_is_cut(family: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path, family)
    model = load_model(reader)
    tokens = tokens_of(84, batch=2)
    exact = model.forward(tokens).log_softmax(-1)
    for text in ("int4:32,window=7,sinks=2", "int8:token,window=5"):
        plan = plan_of(text, reader.blueprint.config)
        expected = streamed(reader, plan, tokens)
        for sizes in ([1] * 84, [50, 1, 1, 1, 1, 30], [84], [3, 40, 41]):
            found, _ = in_pieces(model, plan, tokens, sizes)
            error = (found.log_softmax(-1) - expected).abs().mean()
            # A last bit decides here and there which of two codes, experts or tokens is taken.
            assert error < 0.02 * (expected - exact).abs().mean()


def seen_by_each_query(contexts: list[Context], sizes: list[int]) -> list[Tensor]:
    """For each query: keys and values of all positions that it sees, in their order."""
    seen = []
    for context, size in zip(contexts, sizes, strict=True):
        blocks = [torch.cat(context.read(block), dim=-1) for block in range(len(context.spans))]
        assert [block.shape[2] for block in blocks] == [end - begin for begin, end in context.spans]
        both = torch.cat(blocks, dim=2)
        columns = context.columns
        for row in range(size):
            if columns is None:
                seen.append(both[:, :, : both.shape[2] - size + row + 1])
                continue
            mask = columns.visible(None)
            chosen = torch.ones(both.shape[2], dtype=torch.bool) if mask is None else mask[row]
            places = columns.positions[chosen]
            assert sorted(places.tolist()) == list(range(columns.start + row + 1))
            seen.append(both[:, :, chosen][:, :, places.argsort()])
    return seen


@pytest.mark.parametrize("text", SCHEMES)
def test_each_query_sees_the_same_bits_however_the_text_is_cut(text: str, tmp_path: Path) -> None:
    config = reader_of(tmp_path, "qwen3").blueprint.config
    plan = plan_of(text, config)
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, config.num_kv_heads, 90, config.head_dim, generator=generator)
    values = torch.randn(2, config.num_kv_heads, 90, config.value_dim, generator=generator)
    expected = seen_by_each_query([SimulatedCache(plan).append(1, keys, values)], [90])
    assert len(expected) == 90
    for sizes in ([1] * 90, [1, 2, 40, 1, 1, 45], [89, 1], [6, 84]):
        cache, contexts, begin = PackedKVCache(config, plan, 2, 90), [], 0
        for size in sizes:
            part = slice(begin, begin + size)
            contexts.append(cache.append(1, keys[:, :, part], values[:, :, part]))
            cache.advance(size)
            begin += size
        for found, wanted in zip(seen_by_each_query(contexts, sizes), expected, strict=True):
            assert torch.equal(found, wanted)
    whole = torch.cat((keys, values), dim=-1)
    newest = plan.scheme.window
    for query, found in enumerate(expected):
        full = whole[:, :, max(0, query + 1 - newest) : query + 1]
        torch.testing.assert_close(found[:, :, found.shape[2] - full.shape[2] :], full, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", SCHEMES)
def test_every_scheme_packed_and_simulated(text: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path, "qwen3")
    model = load_model(reader)
    tokens = tokens_of(90)
    plan = plan_of(text, reader.blueprint.config)
    found, _ = in_pieces(model, plan, tokens, [40, *([1] * 50)])
    exact = model.forward(tokens).log_softmax(-1)
    expected = streamed(reader, plan, tokens)
    assert (found.log_softmax(-1) - expected).abs().mean() < 0.02 * (expected - exact).abs().mean() + 1e-5
    whole, _ = in_pieces(model, plan, tokens, [90])
    assert torch.equal(whole.argmax(-1), found.argmax(-1))


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3", "qwen3-next"])
@pytest.mark.parametrize("text", SCHEMES)
def test_measured_bytes_are_the_planned_ones(family: str, text: str, tmp_path: Path) -> None:
    config = reader_of(tmp_path, family).blueprint.config
    plan = plan_of(text, config)
    for capacity in (20, 97, 1000):
        cache = PackedKVCache(config, plan, 3, capacity)
        cache.reserve(capacity)
        assert cache.packed_bytes == pytest.approx(plan.bytes_at(3, capacity), rel=0.001)


def test_long_prompts_in_chunks_give_the_same_tokens(tmp_path: Path) -> None:
    model = load_model(reader_of(tmp_path, "qwen3"))
    tokens = tokens_of(100)
    plans = [None, *(plan_of(text, model.blueprint.config) for text in ("fp16", "int4:32,window=7,sinks=2"))]
    for plan in plans:
        last = [
            model.prefill(tokens, model.new_cache(1, 100, plan), chunk=chunk) for chunk in (1, 17, 64, 512)
        ]
        for logits in last[1:]:
            torch.testing.assert_close(logits, last[0], rtol=1e-4, atol=2e-3)
            assert torch.equal(logits.argmax(-1), last[0].argmax(-1))


def test_sixteen_bits_are_nearly_exact_and_window_holds_everything(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, "qwen3")
    tokens = tokens_of(60)
    exact = streamed(reader, None, tokens)
    for text in ("fp16", "int4:32,window=60,sinks=0", "int4:32,window=0,sinks=60"):
        found = streamed(reader, plan_of(text, reader.blueprint.config), tokens)
        torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)


def test_a_full_cache_refuses_more(tmp_path: Path) -> None:
    model = load_model(reader_of(tmp_path, "qwen3"))
    for plan in (None, plan_of("int4:32", model.blueprint.config)):
        cache = model.new_cache(1, 10, plan)
        model.forward(tokens_of(10), cache)
        with pytest.raises(ValueError, match="holds 10 tokens, 11 are needed"):
            model.forward(tokens_of(1), cache)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "glm4", "phi3"])
def test_unrotated_keys_are_turned_where_they_stood(family: str, tmp_path: Path) -> None:
    """With everything in the window the cache is FP16; with nothing in it, however a text is cut."""
    reader = reader_of(tmp_path, family)
    model = load_model(reader)
    tokens = tokens_of(84, batch=2)
    exact = model.forward(tokens).log_softmax(-1)
    kept = plan_of("int4:32,keys=pre-rope,window=84", reader.blueprint.config)
    torch.testing.assert_close(streamed(reader, kept, tokens), exact, rtol=2e-2, atol=2e-2)
    plan = plan_of("int4:32,keys=pre-rope,window=7,sinks=2", reader.blueprint.config)
    expected = streamed(reader, plan, tokens)
    error = (expected - exact).abs().mean()
    turned = plan_of("int4:32,window=7,sinks=2", reader.blueprint.config)
    assert 0 < error < 4 * (streamed(reader, turned, tokens) - exact).abs().mean()
    for sizes in ([1] * 84, [50, 1, 1, 1, 1, 30], [84]):
        found, _ = in_pieces(model, plan, tokens, sizes)
        assert (found.log_softmax(-1) - expected).abs().mean() < 0.02 * error


def test_key_channels_of_fixed_size_lose_less_before_rotation(tmp_path: Path) -> None:
    """A large offset in a channel is the same for all tokens before rotation, and turns with the place after it."""
    make_tiny(tmp_path, "qwen2", head_dim=16, seed=9)
    weights = load_file(tmp_path / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("k_proj.bias"):
            tensor[::5] = 20.0
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    reader = ModelReader(open_source(tmp_path))
    tokens = tokens_of(96, batch=4)
    exact = streamed(reader, None, tokens)
    errors = [
        float((streamed(reader, plan_of(text, reader.blueprint.config), tokens) - exact).abs().mean())
        for text in ("int4:32,keys=pre-rope,window=0,sinks=0", "int4:32,window=0,sinks=0")
    ]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize(
    ("family", "text"),
    [("deepseek-v3", "mixed:6"), ("qwen3", "mixed:6,keys=pre-rope"), ("qwen3-next", "mixed:6:32")],
)
def test_mixed_plans_run_packed_and_simulated(family: str, text: str, tmp_path: Path) -> None:
    reader = reader_of(tmp_path, family)
    tokens = tokens_of(90, batch=2)
    plan = plan_kv_cache(parse_kv_scheme(f"{text},window=6,sinks=2"), reader, load_profile("cpu"), tokens)
    latent = reader.blueprint.config.latent
    assert plan.latent == (latent is not None)
    if latent is None:
        assert 5 < plan.bits <= 6
    exact, expected = streamed(reader, None, tokens), streamed(reader, plan, tokens)
    found, _ = in_pieces(load_model(reader), plan, tokens, [60, *([1] * 30)])
    error = (expected - exact).abs().mean()
    assert 0 < error < 0.2
    assert (found.log_softmax(-1) - expected).abs().mean() < 0.02 * error
    cache = PackedKVCache(reader.blueprint.config, plan, 3, 97)
    cache.reserve(97)
    assert cache.packed_bytes == pytest.approx(plan.bytes_at(3, 97), rel=0.001)
