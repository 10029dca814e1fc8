"""The key-value cache of one running batch: allocated once, filled in place."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer: [layers, batch, kv_heads, capacity, head_dim] float32 each."""

    def __init__(self, layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int) -> None:
        shape = (layers, batch, kv_heads, capacity, head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, kv_heads, T, head_dim] behind what is there and return all of the layer's so far.

        `length` moves only in `advance`, once every layer of a step has stored its part.
        """
        end = self.length + keys.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} are needed")
        self.keys[layer, :, :, self.length : end] = keys
        self.values[layer, :, :, self.length : end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        self.length += tokens
