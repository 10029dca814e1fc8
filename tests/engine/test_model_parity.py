"""The engine's logits and generation against transformers, one tiny random model per family."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.generate import greedy_tokens
from qwen_quantize.engine.load import ModelReader, load_model
from tests.tiny_models import FAMILIES, make_tiny


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    oracle = make_tiny(tmp_path, family)
    model = load_model(ModelReader(open_source(tmp_path)))
    tokens = torch.randint(160, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = oracle(tokens).logits
    found = model.forward(tokens)
    assert expected.abs().max() > 0.5  # a model that says nothing proves nothing
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    "family",
    [
        "llama", "qwen2", "qwen2-sliding", "qwen3-tied", "mixtral-sliding", "qwen2-moe", "deepseek-v2-grouped",
        "deepseek-v3", "deepseek-v3-plain",
    ],
)  # fmt: skip
def test_cached_steps_equal_one_pass(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, family)
    model = load_model(ModelReader(open_source(tmp_path)))
    tokens = torch.randint(160, (2, 24), generator=torch.Generator().manual_seed(2))
    whole = model.forward(tokens)
    cache = model.new_cache(2, 24)
    parts = [model.forward(tokens[:, a:b], cache) for a, b in ((0, 9), (9, 10), (10, 17), (17, 24))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mixtral", "qwen3-moe", "deepseek-v2", "deepseek-v3"]
)
def test_greedy_generation_equals_transformers(family: str, tmp_path: Path) -> None:
    oracle = make_tiny(tmp_path, family)
    model = load_model(ModelReader(open_source(tmp_path)))
    prompt = [3, 17, 99, 4, 150]
    expected = oracle.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert list(greedy_tokens(model, prompt, 40)) == expected[0, len(prompt) :].tolist()


def test_cache_refuses_more_than_it_holds(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    model = load_model(ModelReader(open_source(tmp_path)))
    with pytest.raises(ValueError, match="holds 4 tokens, 5 are needed"):
        model.forward(torch.zeros(1, 5, dtype=torch.int64), model.new_cache(1, 4))
