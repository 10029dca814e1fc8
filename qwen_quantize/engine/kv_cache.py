"""The key-value cache of one running batch: allocated once, filled in place."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.models.config import ModelConfig


class KVCache:
    """What the layers of a model remember of a batch, float32, for at most `capacity` tokens.

    Layers with attention: keys [layers, batch, kv_heads, capacity, key_dim], values [..., value_dim] and, where
    an indexer picks tokens, its keys [layers, batch, capacity, index_dim]. Delta-net layers remember as much
    of any text: the last inputs of their convolution and one matrix per head.
    """

    def __init__(self, config: ModelConfig, batch: int, capacity: int) -> None:
        delta, indexer = config.delta, config.indexer
        layers = range(config.num_layers)
        # Rows of `keys` and `values`, and of the states, by the number of the layer.
        self._rows = {layer: row for row, layer in enumerate(i for i in layers if not config.is_delta(i))}
        self._states = {layer: row for row, layer in enumerate(i for i in layers if config.is_delta(i))}
        shape = (len(self._rows), batch, config.num_kv_heads, capacity)
        self.keys = torch.zeros(*shape, config.head_dim)
        self.values = torch.zeros(*shape, config.value_dim)
        index_dim = 0 if indexer is None else indexer.head_dim
        self._index_keys = torch.zeros(len(self._rows), batch, capacity, index_dim)
        self._inputs = torch.empty(0)
        self._memories = torch.empty(0)
        if delta is not None:
            states = len(self._states)
            self._inputs = torch.zeros(states, batch, delta.taps - 1, delta.mixed_size)
            self._memories = torch.zeros(states, batch, delta.value_heads, delta.key_dim, delta.value_dim)
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        kept = (self.keys, self.values, self._index_keys, self._inputs, self._memories)
        return sum(tensor.nbytes for tensor in kept)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, kv_heads, T, key_dim or value_dim] behind what is there and return all of the layer's so far.

        `length` moves only in `advance`, once every layer of a step has stored its part.
        """
        end = self.length + keys.shape[2]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, {end} are needed")
        row = self._rows[layer]
        self.keys[row, :, :, self.length : end] = keys
        self.values[row, :, :, self.length : end] = values
        return self.keys[row, :, :, :end], self.values[row, :, :, :end]

    def append_index(self, layer: int, keys: Tensor) -> Tensor:
        """As `append`, for the keys of an indexer: [B, T, index_dim] -> [B, all of them, index_dim]."""
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
