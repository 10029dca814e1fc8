"""Soft-capped logits, as Gemma has them: cap * tanh(x / cap) keeps values inside (-cap, cap)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.engine.linear import LinearGroup


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), elementwise."""
    return torch.tanh(x / cap) * cap


@dataclass(frozen=True, slots=True)
class CappedGroup:
    """A head whose logits are capped."""

    inner: LinearGroup
    cap: float

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(soft_cap(output, self.cap) for output in self.inner(x))


def attend_capped(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, cap: float
) -> Tensor:
    """Attention whose logits are capped before the softmax. Returns [B, heads, T, V].

    query: [B, heads, T, D]; keys: [B, kv_heads, S, D]; values: [B, kv_heads, S, V]; visible: bool,
    broadcastable to [T, S]. No fused kernel has the cap, so the logits of one key head are written out at a
    time.
    """
    batch, heads, length, _ = query.shape
    shared = heads // keys.shape[1]
    mixed = query.new_empty(batch, heads, length, values.shape[-1])
    for head in range(keys.shape[1]):
        part = slice(head * shared, (head + 1) * shared)
        logits = query[:, part] @ keys[:, head : head + 1].transpose(-1, -2)
        logits = soft_cap(logits.mul_(scale), cap).masked_fill_(~visible, float("-inf"))
        mixed[:, part] = logits.softmax(dim=-1) @ values[:, head : head + 1]
    return mixed
