"""Key-value caches in few bits: one that holds packed tokens, and one that only shows what packing costs.

Both answer a query the same way, whatever else is in the same call: tokens that were quantized when a decoder
reached the query's place count quantized, the newer ones and the sinks in 16 bits. So the logits of a text do not
depend on how it is cut into chunks, and a measurement over whole windows is that of a decoder going through them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qwen_quantize.engine.cache_pages import (
    IN_MEMORY,
    CacheOptions,
    CachePlan,
    Pages,
    plan_pages,
    tiers_of,
)
from qwen_quantize.engine.kv_cache import Columns, Context, TokenCache, planned_side_bytes
from qwen_quantize.formats.kv_codec import PackedPart, to_half
from qwen_quantize.formats.kv_plan import KvPlan, KvTensor, store_rows
from qwen_quantize.models.config import ModelConfig


class _PackedTensor:
    """The keys or the values of one layer: pages of packed rows, the sinks, and the tail that is not packed yet."""

    def __init__(self, plan: KvPlan, tensor: KvTensor, batch: int, pages: Pages[list[PackedPart]]) -> None:
        self._plan, self._tensor, self._pages = plan, tensor, pages
        kept = plan.keeps_tail
        self._sinks = torch.zeros(batch, plan.scheme.sinks, tensor.width, dtype=torch.float16)
        self._tail = torch.zeros(batch, plan.tail if kept else 0, tensor.width, dtype=torch.float16)

    @property
    def memory_bytes(self) -> int:
        return self._pages.memory_bytes + self._sinks.nbytes + self._tail.nbytes

    @property
    def file_bytes(self) -> int:
        return self._pages.file_bytes

    def reserve(self, quantized: int) -> None:
        if quantized:
            self._pages.writable((quantized - 1) // self._pages.tokens)

    def append(self, x: Tensor, start: int) -> Tensor:
        """Store x [B, T, width] as tokens start ..; returns those of them and of the tail that are read in full.

        float32 [B, n, width]: tokens that are not quantized for the first query, without sinks.
        """
        plan, end = self._plan, start + x.shape[1]
        if not plan.keeps_tail:
            self._store(x, start)
            return x[:, :0]
        sinks = plan.scheme.sinks
        stored, first = plan.quantized_count(start), plan.quantized_count(start + 1)
        last = plan.quantized_count(end)
        half = to_half(x)
        if start < sinks:
            self._sinks[:, start : min(end, sinks)] = half[:, : sinks - start]
            half = half[:, sinks - start :]
        fresh = self._behind_tail(half, max(0, start - sinks - stored))
        if last > stored:
            self._store(fresh[:, : last - stored].float(), stored)
        full = fresh[:, first - stored :].float()
        rest = fresh[:, last - stored :]
        if last > stored or rest.data_ptr() != self._tail.data_ptr():
            self._tail[:, : rest.shape[1]] = rest.clone()
        return full

    def sinks(self, end: int) -> Tensor:
        """float32 [B, n, width] of the sinks among the first `end` tokens."""
        return self._sinks[:, : min(end, self._plan.scheme.sinks)].float()

    def quantized(self, page: int, tokens: int) -> Tensor:
        """float32 [B, tokens, width] of a page's first tokens."""
        return self._tensor.unpack(self._tensor.rows(self._pages.read(page), 0, tokens))

    def _store(self, x: Tensor, start: int) -> None:
        """Pack x [B, n, width] as quantized tokens start .. ."""
        packed, step = self._tensor.pack(x, self._plan.rule), self._pages.tokens
        for page, first, last in self._pages.spans(start, start + x.shape[1]):
            rows = self._tensor.rows(self._pages.writable(page), first, last)
            begin = page * step + first - start
            store_rows(rows, self._tensor.rows(packed, begin, begin + last - first))

    def _behind_tail(self, half: Tensor, length: int) -> Tensor:
        """The tail's `length` tokens and the new ones behind them; in the tail itself where there is room."""
        end = length + half.shape[1]
        if end > self._tail.shape[1]:
            return torch.cat((self._tail[:, :length], half), dim=1)
        self._tail[:, length:end] = half
        return self._tail[:, :end]


def _tensors_of(room: list[PackedPart]) -> list[Tensor]:
    parts = [tensor for part in room for tensor in (part.codes, part.scale, part.offset)]
    return [tensor for tensor in parts if tensor is not None]


def plan_packed_cache(
    config: ModelConfig, plan: KvPlan, batch: int, capacity: int, options: CacheOptions
) -> CachePlan:
    """Bytes of a full `PackedKVCache`."""
    if options.page_tokens % plan.step:
        raise ValueError(f"pages of {options.page_tokens} tokens cut groups of {plan.step}")
    tokens = plan.quantized_count(capacity)
    bits = sum(layer.bits_per_token for layer in plan.attention_layers)
    whole, page = (round(batch * count * bits / 8) for count in (tokens, options.page_tokens))
    fixed = round(plan.bytes_at(batch, capacity)) - whole + planned_side_bytes(config, batch, capacity)
    return plan_pages(whole, page, fixed, -(-tokens // options.page_tokens), options)


class PackedKVCache(TokenCache):
    """A batch's keys and values as `plan` says, packed. Attention reads them dequantized, a page at a time."""

    def __init__(
        self,
        config: ModelConfig,
        plan: KvPlan,
        batch: int,
        capacity: int,
        options: CacheOptions = IN_MEMORY,
    ) -> None:
        super().__init__(config, batch, capacity)
        self._plan, self._page_tokens = plan, options.page_tokens
        self.planned = plan_packed_cache(config, plan, batch, capacity, options)
        tokens = plan.quantized_count(capacity)
        tensors = [tensor for layer in plan.attention_layers for tensor in (layer.keys, layer.values)]
        sizes = [sum(part.nbytes for part in tensor.empty(batch, options.page_tokens)) for tensor in tensors]
        tiers = tiers_of(self.planned, sum(sizes), options)
        places = iter([sum(sizes[:before]) for before in range(len(sizes))])

        def packed(tensor: KvTensor) -> _PackedTensor:
            pages = Pages(
                partial(tensor.empty, batch), _tensors_of, tokens, options.page_tokens, tiers, next(places)
            )
            return _PackedTensor(plan, tensor, batch, pages)

        self._layers = [
            None if layer is None else (packed(layer.keys), packed(layer.values)) for layer in plan.layers
        ]

    @property
    def keeps_latents(self) -> bool:
        return self._plan.latent

    @property
    def keeps_unrotated(self) -> bool:
        return self._plan.scheme.unrotated

    @property
    def nbytes(self) -> int:
        """Of what it holds now, in memory and in the file."""
        return self.memory_bytes + self.file_bytes

    @property
    def memory_bytes(self) -> int:
        return sum(tensor.memory_bytes for tensor in self._tensors()) + self.side_bytes

    @property
    def file_bytes(self) -> int:
        return sum(tensor.file_bytes for tensor in self._tensors())

    @property
    def packed_bytes(self) -> int:
        """Of keys and values alone; of a full cache `KvPlan.bytes_at` foretells it."""
        return self.nbytes - self.side_bytes

    def reserve(self, tokens: int) -> None:
        """Make the pages of the next tokens; ValueError if there is no room."""
        quantized = self._plan.quantized_count(self.end_after(tokens))
        for tensor in self._tensors():
            tensor.reserve(quantized)

    def _tensors(self) -> list[_PackedTensor]:
        return [tensor for layer in self._layers if layer is not None for tensor in layer]

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Context:
        stored, plan = self._layers[layer], self._plan
        if stored is None:
            raise ValueError(f"layer {layer} has no keys to remember")
        heads, length = keys.shape[1:3]
        start, end = self.length, self.end_after(length)
        full = [tensor.append(flat_heads(x), start) for tensor, x in zip(stored, (keys, values), strict=True)]
        columns = _columns(plan, start, length) if plan.keeps_tail else None
        sinks = min(plan.scheme.sinks, end) if plan.keeps_tail else 0
        last = plan.quantized_count(end)
        blocks = _blocks(sinks, last, full[0].shape[1], self._page_tokens)

        def rows(side: int, block: _Block) -> Tensor:
            parts = [stored[side].sinks(end)] if block.sinks else []
            parts += [stored[side].quantized(*page) for page in block.pages]
            parts += [full[side]] if block.full else []
            return split_heads(parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), heads)

        def read(index: int) -> tuple[Tensor, Tensor]:
            return rows(0, blocks[index]), rows(1, blocks[index])

        return Context(tuple(block.span for block in blocks), read, columns)


@dataclass(frozen=True, slots=True)
class _Block:
    """Columns that attention reads together. pages: (number, tokens of it) of quantized tokens.

    sinks, full: whether the sinks stand before them, and the tokens in full behind.
    """

    span: tuple[int, int]
    pages: tuple[tuple[int, int], ...]
    sinks: bool = False
    full: bool = False


def _blocks(sinks: int, quantized: int, full: int, page_tokens: int) -> list[_Block]:
    """One block while all columns fit into a page; else a block for each page, and one for the tokens in full."""
    pages = [
        (page, min(page_tokens, quantized - page * page_tokens))
        for page in range(-(-quantized // page_tokens))
    ]
    end = sinks + quantized + full
    if end <= page_tokens or not pages:
        return [_Block((0, end), tuple(pages), sinks > 0, full > 0)]
    found, begin = [], 0
    for page, tokens in pages:
        behind = sinks + page * page_tokens + tokens
        found.append(_Block((begin, behind), ((page, tokens),), page == 0 and sinks > 0))
        begin = behind
    if full:
        found.append(_Block((begin, end), (), full=True))
    return found


class SimulatedCache:
    """What a packed cache would answer to windows that are run whole, each from its start; it keeps nothing."""

    length = 0

    def __init__(self, plan: KvPlan) -> None:
        self._plan = plan

    @property
    def keeps_latents(self) -> bool:
        return self._plan.latent

    @property
    def keeps_unrotated(self) -> bool:
        return self._plan.scheme.unrotated

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Context:
        stored = self._plan.layers[layer]
        if stored is None:
            raise ValueError(f"layer {layer} has no keys to remember")
        heads, length = keys.shape[1:3]
        rows = [
            self._seen(tensor, flat_heads(x))
            for tensor, x in zip((stored.keys, stored.values), (keys, values), strict=True)
        ]
        columns = _columns(self._plan, 0, length) if self._plan.keeps_tail else None
        return Context.whole(split_heads(rows[0], heads), split_heads(rows[1], heads), columns)

    def _seen(self, tensor: KvTensor, x: Tensor) -> Tensor:
        plan = self._plan
        if not plan.keeps_tail:
            return tensor.unpack(tensor.pack(x, plan.rule))
        half, sinks = to_half(x).float(), plan.scheme.sinks
        last = plan.quantized_count(x.shape[1])
        if last == 0:
            return half
        packed = tensor.pack(half[:, sinks : sinks + last].contiguous(), plan.rule)
        return torch.cat((half[:, :sinks], tensor.unpack(packed), half[:, sinks:]), dim=1)

    def append_index(self, _layer: int, keys: Tensor) -> Tensor:
        return keys


def flat_heads(x: Tensor) -> Tensor:
    """[B, heads, T, D] -> [B, T, heads * D], contiguous."""
    return x.transpose(1, 2).flatten(2).contiguous()


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, S, heads * D] -> [B, heads, S, D]."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def _columns(plan: KvPlan, start: int, length: int) -> Columns:
    """Sinks, quantized tokens, then those that are in full for at least the first of `length` queries."""
    sinks, end = plan.scheme.sinks, start + length
    first, last = plan.quantized_count(start + 1), plan.quantized_count(end)
    head = min(sinks, end)
    positions = torch.cat(
        (
            torch.arange(head),
            torch.arange(sinks, sinks + last),
            torch.arange(min(sinks + first, end), end) if end > sinks else torch.arange(0),
        )
    )
    quantized = torch.zeros(positions.shape[0], dtype=torch.bool)
    quantized[head : head + last] = True
    bounds = sinks + plan.quantized(torch.arange(start + 1, end + 1))
    return Columns(positions, quantized, bounds, sinks, start)
