"""Key-value caches in few bits: one that holds packed tokens, and one that only shows what packing costs.

Both answer a query the same way, whatever else is in the same call: tokens that were quantized when a decoder
reached the query's place count quantized, the newer ones and the sinks in 16 bits. So the logits of a text do not
depend on how it is cut into chunks, and a measurement over whole windows is that of a decoder going through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.engine.kv_cache import Columns, Context, TokenCache
from qwen_quantize.formats.kv_codec import PackedPart, to_half
from qwen_quantize.formats.kv_plan import KvPlan, KvTensor, store_rows
from qwen_quantize.models.config import ModelConfig


class _PackedTensor:
    """The keys or the values of one layer: packed rows, the sinks, and the tail that is not packed yet."""

    def __init__(self, plan: KvPlan, tensor: KvTensor, batch: int, capacity: int) -> None:
        self._plan, self._tensor = plan, tensor
        self._room = tensor.empty(batch, plan.quantized_count(capacity))
        kept = plan.keeps_tail
        self._sinks = torch.zeros(batch, plan.scheme.sinks, tensor.width, dtype=torch.float16)
        self._tail = torch.zeros(batch, plan.tail if kept else 0, tensor.width, dtype=torch.float16)

    @property
    def nbytes(self) -> int:
        packed = sum(part.nbytes for part in self._room)
        return packed + self._sinks.nbytes + self._tail.nbytes

    def append(self, x: Tensor, start: int) -> Tensor:
        """Store x [B, T, width] as tokens start ..; returns float32 [B, S, width] in the order of `_columns`."""
        plan, end = self._plan, start + x.shape[1]
        if not plan.keeps_tail:
            store_rows(self._rows(start, end), self._tensor.pack(x, plan.rule))
            return self._tensor.unpack(self._rows(0, end))
        sinks = plan.scheme.sinks
        stored, first = plan.quantized_count(start), plan.quantized_count(start + 1)
        last = plan.quantized_count(end)
        half = to_half(x)
        if start < sinks:
            self._sinks[:, start : min(end, sinks)] = half[:, : sinks - start]
            half = half[:, sinks - start :]
        fresh = self._behind_tail(half, max(0, start - sinks - stored))
        if last > stored:
            packed = self._tensor.pack(fresh[:, : last - stored].float(), plan.rule)
            store_rows(self._rows(stored, last), packed)
        parts = [self._sinks[:, : min(end, sinks)].float()]
        if last:
            parts.append(self._tensor.unpack(self._rows(0, last)))
        parts.append(fresh[:, first - stored :].float())
        rest = fresh[:, last - stored :]
        if last > stored or rest.data_ptr() != self._tail.data_ptr():
            self._tail[:, : rest.shape[1]] = rest.clone()
        return torch.cat(parts, dim=1)

    def _rows(self, begin: int, end: int) -> list[PackedPart]:
        return self._tensor.rows(self._room, begin, end)

    def _behind_tail(self, half: Tensor, length: int) -> Tensor:
        """The tail's `length` tokens and the new ones behind them; in the tail itself where there is room."""
        end = length + half.shape[1]
        if end > self._tail.shape[1]:
            return torch.cat((self._tail[:, :length], half), dim=1)
        self._tail[:, length:end] = half
        return self._tail[:, :end]


class PackedKVCache(TokenCache):
    """A batch's keys and values as `plan` says, packed. Attention reads them dequantized, a layer at a time."""

    def __init__(self, config: ModelConfig, plan: KvPlan, batch: int, capacity: int) -> None:
        super().__init__(config, batch, capacity)
        self._plan = plan
        self._layers = [
            None
            if layer is None
            else tuple(_PackedTensor(plan, tensor, batch, capacity) for tensor in (layer.keys, layer.values))
            for layer in plan.layers
        ]

    @property
    def keeps_latents(self) -> bool:
        return self._plan.latent

    @property
    def keeps_unrotated(self) -> bool:
        return self._plan.scheme.unrotated

    @property
    def nbytes(self) -> int:
        return self.packed_bytes + self.side_bytes

    @property
    def packed_bytes(self) -> int:
        """Of keys and values alone, which `KvPlan.bytes_at` foretells."""
        return sum(tensor.nbytes for layer in self._layers if layer is not None for tensor in layer)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> Context:
        stored = self._layers[layer]
        if stored is None:
            raise ValueError(f"layer {layer} has no keys to remember")
        heads, length = keys.shape[1:3]
        self.end_after(length)
        rows = [
            tensor.append(flat_heads(x), self.length)
            for tensor, x in zip(stored, (keys, values), strict=True)
        ]
        columns = _columns(self._plan, self.length, length) if self._plan.keeps_tail else None
        return Context(split_heads(rows[0], heads), split_heads(rows[1], heads), columns)


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
        return Context(split_heads(rows[0], heads), split_heads(rows[1], heads), columns)

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
