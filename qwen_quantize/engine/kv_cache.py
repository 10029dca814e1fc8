"""The key-value cache of one running batch: allocated once, filled in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from qwen_quantize.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Columns:
    """Which tokens the keys of a context belong to, where they do not just stand in order.

    positions: int64 [S]. A token may be there twice, quantized and in full: `quantized` [S] tells which, and
    `bounds` [T] how far the quantized ones count for each query. The first `sinks` tokens are never quantized.
    start: the position of the first query.
    """

    positions: Tensor
    quantized: Tensor
    bounds: Tensor
    sinks: int
    start: int

    def visible(self, window: int | None) -> Tensor | None:
        """[T, S] bool: what each query sees, of at most `window` tokens; None if that is everything."""
        length = self.bounds.shape[0]
        if length == 1 and window is None:
            return None
        rows = torch.arange(self.start, self.start + length).unsqueeze(1)
        behind = self.positions < self.bounds.unsqueeze(1)
        mask = torch.where(self.quantized, behind, ~behind | (self.positions < self.sinks))
        mask &= self.positions <= rows
        if window is not None:
            mask &= self.positions > rows - window
        return mask


@dataclass(frozen=True, slots=True)
class Context:
    """What attention reads: keys [B, kv_heads, S, key_dim], values [B, kv_heads, S, value_dim], float32.

    columns None: the S tokens stand in order, and the queries are the last of them.
    """

    keys: Tensor
    values: Tensor
    columns: Columns | None = None


class AttentionCache(Protocol):
    """What attention asks of a cache. keeps_latents: latent attention gives it latents in the place of keys."""

    @property
    def length(self) -> int:
        """Tokens from before this step."""
        ...

    @property
    def keeps_latents(self) -> bool: ...

    @property
    def keeps_unrotated(self) -> bool:
        """Whether grouped attention gives it keys that are not rotated yet, and rotates what it returns."""
        ...

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Context:
        """Store [B, kv_heads, T, key_dim or value_dim] behind what is there and return all of the layer's so far."""
        ...

    def append_index(self, layer: int, keys: Tensor, /) -> Tensor:
        """As `append`, for the keys of an indexer: [B, T, index_dim] -> [B, all of them, index_dim]."""
        ...


class TokenCache:
    """A batch of at most `capacity` tokens, and what layers remember of it beside keys and values, float32.

    Where an indexer picks tokens, its keys [layers, batch, capacity, index_dim]. Delta-net layers remember as
    much of any text: the last inputs of their convolution and one matrix per head.

    `length` moves only in `advance`, once every layer of a step has stored its part.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int) -> None:
        delta, indexer = config.delta, config.indexer
        layers = range(config.num_layers)
        # Rows of keys, and of the states, by the number of the layer.
        self._rows = {layer: row for row, layer in enumerate(i for i in layers if not config.is_delta(i))}
        self._states = {layer: row for row, layer in enumerate(i for i in layers if config.is_delta(i))}
        index_dim = 0 if indexer is None else indexer.head_dim
        self._index_keys = torch.zeros(len(self._rows), batch, capacity, index_dim)
        self._inputs = torch.empty(0)
        self._memories = torch.empty(0)
        if delta is not None:
            states = len(self._states)
            self._inputs = torch.zeros(states, batch, delta.taps - 1, delta.mixed_size)
            self._memories = torch.zeros(states, batch, delta.value_heads, delta.key_dim, delta.value_dim)
        self.capacity = capacity
        self.length = 0

    @property
    def side_bytes(self) -> int:
        """Of all but keys and values."""
        return sum(tensor.nbytes for tensor in (self._index_keys, self._inputs, self._memories))

    def append_index(self, layer: int, keys: Tensor) -> Tensor:
        row, end = self._rows[layer], self.length + keys.shape[1]
        self._index_keys[row, :, self.length : end] = keys
        return self._index_keys[row, :, :end]

    def delta_state(self, layer: int) -> tuple[Tensor, Tensor]:
        """(the convolution's last inputs [B, taps - 1, channels], memory [B, heads, key_dim, value_dim])."""
        row = self._states[layer]
        return self._inputs[row], self._memories[row]

    def store_delta(self, layer: int, inputs: Tensor, memory: Tensor) -> None:
        """Replace a delta-net layer's state by the one behind the tokens just seen."""
        row = self._states[layer]
        self._inputs[row] = inputs
        self._memories[row] = memory

    def advance(self, tokens: int) -> None:
        self.length += tokens

    def end_after(self, tokens: int) -> int:
        """The length with `tokens` more; ValueError if there is no room."""
        end = self.length + tokens
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} are needed")
        return end


class KVCache(TokenCache):
    """Keys [layers, batch, kv_heads, capacity, key_dim] and values [..., value_dim] in float32."""

    keeps_latents = False
    keeps_unrotated = False

    def __init__(self, config: ModelConfig, batch: int, capacity: int) -> None:
        super().__init__(config, batch, capacity)
        shape = (len(self._rows), batch, config.num_kv_heads, capacity)
        self.keys = torch.zeros(*shape, config.head_dim)
        self.values = torch.zeros(*shape, config.value_dim)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.side_bytes

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Context:
        end, row = self.end_after(keys.shape[2]), self._rows[layer]
        self.keys[row, :, :, self.length : end] = keys
        self.values[row, :, :, self.length : end] = values
        return Context(self.keys[row, :, :, :end], self.values[row, :, :, :end])
