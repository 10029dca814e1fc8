"""How the keys and values of each layer of one model are stored, to the channel, and what that takes.

The keys (or values) of a layer are one row of channels per token, head by head. They are stored in up to five
dense parts, one for each width; the parts' channel numbers, taken one after the other, are a permutation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule
from qwen_quantize.formats.kv_codec import PackedPart, empty_part, pack, rows_of, store, unpack
from qwen_quantize.formats.kv_scheme import KEPT_BITS, KvElement, KvScheme, effective_bits


@dataclass(frozen=True, slots=True, eq=False)
class KvPart:
    """Channels stored alike.

    channels: int64, in the order in which they are stored; None: all. scale: float32 [channels] of a static element.
    """

    element: KvElement
    count: int
    channels: Tensor | None = None
    scale: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KvTensor:
    """The keys or the values of one layer; width: its channels, over all heads."""

    width: int
    parts: tuple[KvPart, ...]

    @property
    def bits_per_token(self) -> float:
        return sum(part.element.bits_per_token(part.count) for part in self.parts)

    def pack(self, x: Tensor, rule: CastRule = RNE_SATURATE) -> list[PackedPart]:
        """x: float32 [..., tokens, width], tokens a multiple of every part's `element.tokens`."""
        return [
            pack(x if part.channels is None else x[..., part.channels], part.element, part.scale, rule)
            for part in self.parts
        ]

    def unpack(self, packed: list[PackedPart]) -> Tensor:
        """float32 [..., tokens, width] of what `pack` made."""
        values = [unpack(one, part.element, part.scale) for part, one in zip(self.parts, packed, strict=True)]
        if self.parts[0].channels is None:
            return values[0]
        whole = values[0].new_empty(*values[0].shape[:-1], self.width)
        for part, one in zip(self.parts, values, strict=True):
            whole[..., part.channels] = one
        return whole

    def empty(self, batch: int, tokens: int) -> list[PackedPart]:
        """Room for `tokens` of a batch."""
        return [empty_part(part.element, (batch,), tokens, part.count) for part in self.parts]

    def rows(self, room: list[PackedPart], begin: int, end: int) -> list[PackedPart]:
        """Views of tokens begin .. end - 1 of `empty`."""
        return [rows_of(one, part.element, begin, end) for part, one in zip(self.parts, room, strict=True)]


def store_rows(room: list[PackedPart], packed: list[PackedPart]) -> None:
    """Copy packed tokens over views of their places."""
    for kept, new in zip(room, packed, strict=True):
        store(kept, new)


@dataclass(frozen=True, slots=True, eq=False)
class KvLayer:
    """One attention layer. With latent attention `keys` is the latent and `values` what carries the position."""

    keys: KvTensor
    values: KvTensor

    @property
    def width(self) -> int:
        return self.keys.width + self.values.width

    @property
    def bits_per_token(self) -> float:
        return self.keys.bits_per_token + self.values.bits_per_token


@dataclass(frozen=True, slots=True, eq=False)
class KvPlan:
    """Every layer of a model; None for layers without attention. notes: what to say to the user.

    latent: whether `keys` are latents. A token is quantized when it is no sink and it and all tokens that share
    its scales have left the window.
    """

    scheme: KvScheme
    layers: tuple[KvLayer | None, ...]
    latent: bool = False
    rule: CastRule = RNE_SATURATE
    notes: tuple[str, ...] = ()

    @property
    def attention_layers(self) -> list[KvLayer]:
        return [layer for layer in self.layers if layer is not None]

    @property
    def step(self) -> int:
        """Tokens that are quantized together."""
        tensors = [tensor for layer in self.attention_layers for tensor in (layer.keys, layer.values)]
        return max((part.element.tokens for tensor in tensors for part in tensor.parts), default=1)

    def quantized(self, tokens: Tensor) -> Tensor:
        """How many of the first `tokens` (int64) are quantized for a query that is the last of them."""
        step = self.step
        rest = (tokens - self.scheme.window - self.scheme.sinks).clamp(min=0)
        return torch.div(rest, step, rounding_mode="floor") * step

    def quantized_count(self, tokens: int) -> int:
        """`quantized` of one number."""
        rest = max(0, tokens - self.scheme.window - self.scheme.sinks)
        return rest // self.step * self.step

    @property
    def tail(self) -> int:
        """The most tokens behind the quantized ones, and room for one more."""
        return self.scheme.window + self.step

    @property
    def bits(self) -> float:
        """Bits of a quantized value in the mean over all layers, scales included."""
        layers = self.attention_layers
        return sum(layer.bits_per_token for layer in layers) / sum(layer.width for layer in layers)

    def bits_at(self, tokens: int) -> float:
        """Bits of a value in the mean of a context of `tokens`, window and sinks included."""
        return effective_bits(self.bits, tokens, tokens - self.quantized_count(tokens))

    def bytes_at(self, batch: int, capacity: int) -> float:
        """What a cache for `capacity` tokens holds: packed tokens, sinks and the tail, as they are allocated."""
        quantized = self.quantized_count(capacity)
        kept = self.scheme.sinks + self.tail if self.keeps_tail else 0
        return sum(
            batch * (quantized * layer.bits_per_token + kept * KEPT_BITS * layer.width) / 8
            for layer in self.attention_layers
        )

    @property
    def keeps_tail(self) -> bool:
        """Whether any token is kept back; without, each is packed as it comes."""
        return self.scheme.window > 0 or self.scheme.sinks > 0 or self.step > 1
