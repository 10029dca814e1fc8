"""Greedy text generation with a key-value cache, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.engine.cache_pages import IN_MEMORY, CacheOptions
from qwen_quantize.engine.model import Model
from qwen_quantize.formats.kv_plan import KvPlan


def greedy_tokens(
    model: Model,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Sequence[int] = (),
    kv_plan: KvPlan | None = None,
    cache_options: CacheOptions = IN_MEMORY,
) -> Iterator[int]:
    """The most likely continuation of `prompt`, token by token; ends after a token of `stop`."""
    if not prompt:
        raise ValueError("generation needs at least one prompt token")
    cache = model.new_cache(1, len(prompt) + max_new_tokens, kv_plan, cache_options)
    step = torch.tensor([list(prompt)], dtype=torch.int64)
    for _ in range(max_new_tokens):
        token = int(model.prefill(step, cache)[0, -1].argmax())
        yield token
        if token in stop:
            return
        step = torch.tensor([[token]], dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one load ran, and the bytes that its weights and cache take.

    step_seconds: of each decoding step, in order. step_bytes: of the weights that a step reads; cache_file_bytes: what
    of the cache lay in a file. Tokens per second count those of all texts of the batch.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    step_seconds: tuple[float, ...]
    weight_bytes: int
    step_bytes: int
    cache_bytes: int
    cache_file_bytes: int = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.batch * self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        return self.batch * len(self.step_seconds) / sum(self.step_seconds)

    def percentile(self, share: float) -> float:
        """Seconds that the share of decoding steps, 0 .. 1, took at most."""
        ordered = sorted(self.step_seconds)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def warm_up(
    model: Model, batch: int, tokens: int = 32, steps: int = 4, kv_plan: KvPlan | None = None
) -> None:
    """A short run that compiles kernels, starts threads and touches every weight once."""
    cache = model.new_cache(batch, tokens + steps, kv_plan)
    model.forward(torch.zeros(batch, tokens, dtype=torch.int64), cache, last_only=True)
    for _ in range(steps):
        model.forward(torch.zeros(batch, 1, dtype=torch.int64), cache, last_only=True)


def measure_speed(
    model: Model,
    prompt: Tensor,
    new_tokens: int,
    kv_plan: KvPlan | None = None,
    cache_options: CacheOptions = IN_MEMORY,
) -> Speed:
    """Time one prefill and `new_tokens` greedy steps of prompt int64 [B, T], after a short run that warms up."""
    if new_tokens < 1:
        raise ValueError("speed needs at least one new token")
    batch, length = prompt.shape
    warm_up(model, batch, min(length, 32), kv_plan=kv_plan)
    cache = model.new_cache(batch, length + new_tokens, kv_plan, cache_options)
    steps = []
    begin = time.perf_counter()
    logits = model.prefill(prompt, cache)
    prefilled = before = time.perf_counter()
    for _ in range(new_tokens):
        logits = model.forward(logits[:, -1].argmax(dim=-1, keepdim=True), cache, last_only=True)
        after = time.perf_counter()
        steps.append(after - before)
        before = after
    return Speed(
        batch=batch,
        prompt_tokens=length,
        new_tokens=new_tokens,
        prefill_seconds=prefilled - begin,
        step_seconds=tuple(steps),
        weight_bytes=model.nbytes,
        step_bytes=model.step_bytes,
        cache_bytes=cache.nbytes,
        cache_file_bytes=cache.file_bytes,
    )
