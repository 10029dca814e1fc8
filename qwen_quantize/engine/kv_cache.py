"""The key-value cache of one running batch: pages of tokens, filled in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from qwen_quantize.engine.cache_pages import (
    IN_MEMORY,
    CacheLayout,
    CacheOptions,
    CachePlan,
    Pages,
    plan_pages,
    tiers_of,
)
from qwen_quantize.models.config import ModelConfig

LINE = 16  # float32 values in a cache line


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

    def part(self, begin: int, end: int) -> Columns:
        """Columns begin .. end - 1 of them."""
        return replace(self, positions=self.positions[begin:end], quantized=self.quantized[begin:end])

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
    """What attention reads, a block at a time: `read(i)` gives keys [B, kv_heads, n, key_dim] and values
    [B, kv_heads, n, value_dim], float32, of the columns begin .. end - 1 that `spans[i]` names.

    Which blocks there are depends on the positions of the queries alone. columns None: the columns are tokens in
    order, and the queries are the last of them.
    """

    spans: tuple[tuple[int, int], ...]
    read: Callable[[int], tuple[Tensor, Tensor]]
    columns: Columns | None = None

    @classmethod
    def whole(cls, keys: Tensor, values: Tensor, columns: Columns | None = None) -> Context:
        """One block, which is there already."""
        return cls(((0, keys.shape[2]),), lambda _: (keys, values), columns)


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


def planned_side_bytes(config: ModelConfig, batch: int, capacity: int) -> int:
    """`TokenCache.side_bytes`, before there is one."""
    delta, indexer = config.delta, config.indexer
    states = sum(config.is_delta(layer) for layer in range(config.num_layers))
    index = 0 if indexer is None else (config.num_layers - states) * capacity * indexer.head_dim
    state = 0
    if delta is not None:
        state = (delta.taps - 1) * delta.mixed_size + delta.value_heads * delta.key_dim * delta.value_dim
    return 4 * batch * (index + states * state)


def plan_float_cache(config: ModelConfig, batch: int, capacity: int, options: CacheOptions) -> CachePlan:
    """Bytes of a full `KVCache`."""
    layers = sum(not config.is_delta(layer) for layer in range(config.num_layers))
    step = LINE if options.layout is CacheLayout.INTERLEAVED else 1

    def sizes(tokens: int) -> tuple[int, int]:
        width = 4 * batch * config.num_kv_heads
        return width * -(-tokens // step) * step * config.head_dim, width * tokens * config.value_dim

    full, rest = divmod(capacity, options.page_tokens)
    page, last = layers * sum(sizes(options.page_tokens)), layers * sum(sizes(rest))
    side = planned_side_bytes(config, batch, capacity)
    return plan_pages(full * page + last, page, side, full + (rest > 0), options)


class KVCache(TokenCache):
    """Keys and values in float32: of each layer that has them pages of keys, in the layout that `options` names
    (head-major by default), and pages of values [batch, kv_heads, tokens, value_dim].
    """

    keeps_latents = False
    keeps_unrotated = False

    def __init__(
        self, config: ModelConfig, batch: int, capacity: int, options: CacheOptions = IN_MEMORY
    ) -> None:
        super().__init__(config, batch, capacity)
        self.planned = plan_float_cache(config, batch, capacity, options)
        self.page_tokens = options.page_tokens
        self.interleaved = options.layout is CacheLayout.INTERLEAVED
        heads, key_dim, value_dim = config.num_kv_heads, config.head_dim, config.value_dim
        if self.interleaved and options.page_tokens % LINE:
            raise ValueError(f"pages of {options.page_tokens} tokens do not divide into lines of {LINE}")

        def keys(tokens: int) -> Tensor:
            if self.interleaved:
                return torch.zeros(batch, heads, -(-tokens // LINE), key_dim, LINE)
            return torch.zeros(batch, heads, tokens, key_dim)

        def values(tokens: int) -> Tensor:
            return torch.zeros(batch, heads, tokens, value_dim)

        each = [4 * batch * heads * options.page_tokens * dim for dim in (key_dim, value_dim)]
        stride, layers = sum(each) * len(self._rows), range(len(self._rows))
        self.tiers = tiers_of(self.planned, stride, options)

        def pages(make: Callable[[int], Tensor], place: int) -> Pages[Tensor]:
            return Pages(make, lambda room: [room], capacity, options.page_tokens, self.tiers, place)

        self.keys = [pages(keys, layer * sum(each)) for layer in layers]
        self.values = [pages(values, layer * sum(each) + each[0]) for layer in layers]

    @property
    def nbytes(self) -> int:
        """Of what it holds now, in memory and in the file."""
        return self.memory_bytes + self.file_bytes

    @property
    def memory_bytes(self) -> int:
        return sum(pages.memory_bytes for pages in (*self.keys, *self.values)) + self.side_bytes

    @property
    def file_bytes(self) -> int:
        return sum(pages.file_bytes for pages in (*self.keys, *self.values))

    def reserve(self, tokens: int) -> None:
        """Make the pages of the next tokens; ValueError if there is no room."""
        end = self.end_after(tokens)
        for pages in (*self.keys, *self.values):
            pages.writable((end - 1) // self.page_tokens)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Context:
        end, row = self.end_after(keys.shape[2]), self._rows[layer]
        begin, step = self.length, self.page_tokens
        stored = self.keys[row], self.values[row]
        for page, first, last in stored[0].spans(begin, end):
            new = slice(page * step + first - begin, page * step + last - begin)
            self._store_keys(stored[0].writable(page), keys[:, :, new], first)
            stored[1].writable(page)[:, :, first:last] = values[:, :, new]
        spans = tuple((at, min(at + step, end)) for at in range(0, end, step))

        def read(block: int) -> tuple[Tensor, Tensor]:
            tokens = spans[block][1] - spans[block][0]
            return self._read_keys(stored[0].read(block), tokens), stored[1].read(block)[:, :, :tokens]

        return Context(spans, read)

    def _store_keys(self, room: Tensor, keys: Tensor, first: int) -> None:
        """keys [B, heads, n, dim], as tokens `first` .. of a page."""
        end = first + keys.shape[2]
        if self.interleaved:
            tokens = torch.arange(first, end)
            room[:, :, tokens // LINE, :, tokens % LINE] = keys.permute(2, 0, 1, 3)
        else:
            room[:, :, first:end] = keys

    def _read_keys(self, room: Tensor, tokens: int) -> Tensor:
        """[B, heads, tokens, dim] of a page's first tokens."""
        if self.interleaved:
            lines = room[:, :, : -(-tokens // LINE)].transpose(-1, -2)
            room = lines.reshape(*room.shape[:2], -1, room.shape[3])
        return room[:, :, :tokens]
