"""The native decoding step and packed linears against the engine's general path."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.session import ChipQuestion, folder_chip
from qwen_quantize.engine.decode_step import decode_step
from qwen_quantize.engine.fast_linear import FastGroup, Input, native_library
from qwen_quantize.engine.fast_load import FastOptions, HeadForm, load_fast
from qwen_quantize.engine.generate import greedy_tokens
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.models.blueprint import Stream
from tests.engine.stored_schemes import store
from tests.tiny_models import make_tiny

PLAIN = [
    *("llama", "llama-biased", "llama3-rope", "llama-yarn", "qwen2", "qwen2-sliding", "qwen3", "qwen3-tied"),
    *("qwen3-biased", "gemma2", "gemma3", "phi3"),
]
# Largest difference of logits over the largest logit: float32 sums, and inputs of 15 bits as well.
FLOAT_TOLERANCE, INT16_TOLERANCE = 3e-6, 1e-3
needs_compiler = pytest.mark.skipif(native_library() is None, reason="no C compiler")


def prompt(batch: int, length: int) -> Tensor:
    return torch.randint(3, 160, (batch, length), generator=torch.Generator().manual_seed(1))


def worst(slow: Model, fast: Model, batch: int = 2, length: int = 11, steps: int = 20) -> float:
    """Of all steps that follow a prompt, under the tokens that the general path finds best."""
    tokens = prompt(batch, length)
    caches = slow.new_cache(batch, 40), fast.new_cache(batch, 40)
    logits = slow.forward(tokens, caches[0], last_only=True)
    fast.forward(tokens, caches[1], last_only=True)
    off = 0.0
    for _ in range(steps):
        tokens = logits[:, -1].argmax(dim=-1, keepdim=True)
        logits, other = slow.forward(tokens, caches[0]), fast.forward(tokens, caches[1])
        assert other.shape == logits.shape
        off = max(off, float((logits - other).abs().max() / logits.abs().max()))
    return off


@needs_compiler
@pytest.mark.parametrize("family", PLAIN)
def test_a_step_gives_the_logits_of_the_general_path(tmp_path: Path, family: str) -> None:
    make_tiny(tmp_path, family)
    fast = load_fast(open_source(tmp_path))
    assert fast.step is not None
    assert worst(load_model(ModelReader(open_source(tmp_path))), fast) < FLOAT_TOLERANCE


def quantized(folder: Path, family: str, scheme: str) -> Path:
    make_tiny(folder, family, hidden_size=128, intermediate_size=192)
    spec = SCHEMES[scheme]
    store(folder, spec.with_group(32) if scheme.startswith("w4") else spec)
    return folder


@needs_compiler
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_packed_int4_gives_the_same_tokens(tmp_path: Path, family: str) -> None:
    folder = quantized(tmp_path, family, "w4a16")
    slow = load_model(ModelReader(open_source(folder)))
    exact = load_fast(open_source(folder), None, FastOptions(Input.FLOAT))
    usual = load_fast(open_source(folder))
    groups = usual.layers[0].groups
    assert all(isinstance(group, FastGroup) for group in groups.values())
    assert groups[Stream.MLP_INPUT].nbytes < slow.layers[0].groups[Stream.MLP_INPUT].nbytes / 5
    assert worst(slow, exact) < FLOAT_TOLERANCE
    assert worst(slow, usual) < INT16_TOLERANCE
    ids = prompt(1, 9)[0].tolist()
    wanted = list(greedy_tokens(slow, ids, 24))
    assert list(greedy_tokens(exact, ids, 24)) == wanted
    assert list(greedy_tokens(usual, ids, 24)) == wanted


@pytest.mark.parametrize("scheme", ["w8a8", "fp8", "w4a8"])
def test_casts_of_inputs_are_kept(tmp_path: Path, scheme: str) -> None:
    folder = quantized(tmp_path, "qwen2", scheme)
    reader = ModelReader(open_source(folder))
    compute = folder_chip(ChipQuestion(None), None, reader).compute
    slow = load_model(reader, compute)
    fast = load_fast(reader.source, compute)
    assert any(isinstance(group, FastGroup) for group in fast.layers[0].groups.values())
    tokens = prompt(2, 12)
    wanted, found = slow.forward(tokens), fast.forward(tokens)
    assert float((wanted - found).abs().max() / wanted.abs().max()) < 0.02  # a code may fall the other way
    uncast = load_fast(reader.source, None).forward(tokens)
    assert float((wanted - found).norm()) < 0.5 * float((wanted - uncast).norm())


@needs_compiler
def test_an_int8_head_is_near_and_smaller(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3-tied")
    slow = load_model(ModelReader(open_source(tmp_path)))
    fast = load_fast(open_source(tmp_path), None, FastOptions(head=HeadForm.INT8))
    assert fast.step is not None
    assert fast.head.nbytes < slow.head.nbytes / 3
    assert 0 < worst(slow, fast) < 0.02


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next", "deepseek-v3"])
def test_other_families_take_the_general_path(tmp_path: Path, family: str) -> None:
    make_tiny(tmp_path, family)
    fast = load_fast(open_source(tmp_path))
    assert fast.step is None
    assert worst(load_model(reader_of(tmp_path)), fast, steps=3) < FLOAT_TOLERANCE


def reader_of(folder: Path) -> ModelReader:
    return ModelReader(open_source(folder))


def test_without_a_compiler_there_is_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = quantized(tmp_path, "llama", "w4a16")
    slow = load_model(reader_of(folder))
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    fast = load_fast(open_source(folder))
    assert fast.step is None
    assert worst(slow, fast, steps=4) < INT16_TOLERANCE


@needs_compiler
def test_long_contexts_are_split_and_merged(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama", max_position_embeddings=2048)
    slow, fast = load_model(reader_of(tmp_path)), load_fast(open_source(tmp_path))
    tokens = prompt(1, 1500)
    caches = slow.new_cache(1, 1600), fast.new_cache(1, 1600)
    slow.forward(tokens, caches[0])
    fast.forward(tokens, caches[1])
    for position in range(3):
        wanted, found = (
            m.forward(tokens[:, position : position + 1], c)
            for m, c in zip((slow, fast), caches, strict=True)
        )
        assert float((wanted - found).abs().max() / wanted.abs().max()) < FLOAT_TOLERANCE


@needs_compiler
def test_a_full_cache_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    fast = load_fast(open_source(tmp_path))
    cache = fast.new_cache(1, 4)
    fast.forward(prompt(1, 4), cache)
    with pytest.raises(ValueError, match="holds 4 tokens"):
        fast.forward(prompt(1, 1), cache)


def test_a_step_is_refused_for_linears_it_does_not_know(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "llama", "fp8")
    reader = ModelReader(open_source(folder))
    slow = load_model(reader, folder_chip(ChipQuestion(None), None, reader).compute)
    assert decode_step(slow.blueprint, slow.layers, slow.final_norm, slow.head, slow.rotary) is None
