"""Greedy text generation with a key-value cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qwen_quantize.engine.model import Model
from qwen_quantize.formats.kv_plan import KvPlan


def greedy_tokens(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Sequence[int] = (),
    kv_plan: KvPlan | None = None,
) -> Iterator[int]:
    """The most likely continuation of `prompt`, token by token; ends after a token of `stop`."""
    if not prompt:
        raise ValueError("generation needs at least one prompt token")
    cache = model.new_cache(1, len(prompt) + max_new_tokens, kv_plan)
    step = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(max_new_tokens):
        token = int(model.prefill(step, cache)[0, -1].argmax())
        yield token
        if token in stop:
            return
        step = torch.tensor([[token]], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of one batch-1 run, and the bytes that its weights and cache take."""

    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    weight_bytes: int
    cache_bytes: int
    prompt_tokens: int
    new_tokens: int


def measure_speed(
    model: Model, prompt: Sequence[int], new_tokens: int, kv_plan: KvPlan | None = None
) -> Speed:
    """Time one prefill and `new_tokens` greedy steps, after a short run that warms everything up."""
    if new_tokens < 1:
        raise ValueError("speed needs at least one new token")
    tokens = torch.tensor([list(prompt)], dtype=torch.int64)
    warm = model.new_cache(1, len(prompt) + 1, kv_plan)
    model.prefill(tokens, warm)
    cache = model.new_cache(1, len(prompt) + new_tokens, kv_plan)
    begin = time.perf_counter()
    logits = model.prefill(tokens, cache)
    prefilled = time.perf_counter()
    for _ in range(new_tokens):
        token = logits[:, -1].argmax(dim=-1, keepdim=True)
        logits = model.forward(token, cache, last_only=True)
    end = time.perf_counter()
    return Speed(
        prefill_tokens_per_second=len(prompt) / (prefilled - begin),
        decode_tokens_per_second=new_tokens / (end - prefilled),
        weight_bytes=model.nbytes,
        cache_bytes=cache.nbytes,
        prompt_tokens=len(prompt),
        new_tokens=new_tokens,
    )
