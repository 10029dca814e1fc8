"""What quantizing a layer's keys and values would cost, channel by channel, from text that runs through it.

An error e of stored values moves the layer's output by J e, with J the derivative of attention. For a random
direction z of independent elements of size one, the squares of g = J^T z are in the mean the squared norms of J's
columns, over all heads that read the stored value and all queries that find it quantized: one pass backwards says
what an error of each stored value costs. Errors of different values count as independent, so that sum_c g_c^2 e_c^2
is what the output's second moment grows by; e is the error that a width really makes at that token and channel.
Along the gradient of the model's loss in the place of z, the sum is twice what the loss itself grows by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.kv_codec import requantized, to_half
from qwen_quantize.formats.kv_scheme import KvElement, KvScaling

_SAMPLED = 1 << 17  # values of a layer's keys or values that are kept


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What queries see. seen: bool [T, T]; quantized: those of the keys that a cache would have quantized.

    scale: of the scores; cap: their soft bound. projection: [hidden, heads * V], the output's weight.
    """

    seen: Tensor
    quantized: Tensor
    scale: float
    cap: float | None
    projection: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSample:
    """Queries [B, heads, T, D], keys [B, kv_heads, T, D] and values [B, kv_heads, T, V] of whole windows.

    gate: [B, T, heads, V], the sigmoid of which multiplies the mixture, where a model has that.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sight: Sight
    gate: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LatentSample:
    """Queries [B, heads, T, D], latents [B, T, rank] and the keys' positional part [B, T, R] of whole windows.

    expansion: [heads, D - R + V, rank], from latents to each head's keys and values.
    """

    query: Tensor
    latent: Tensor
    positional: Tensor
    expansion: Tensor
    sight: Sight


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """Tokens drawn at random, [n, heads * channels] each.

    values: float16, as they would be kept in full. squares: float32, of derivatives by them.
    """

    values: Tensor
    squares: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SideStatistics:
    """Of one layer's keys, values or latents, means over tokens, [heads, channels] each.

    damages: what each element that was tried costs, in their order. largest: magnitudes, of rotated channels at
    any position. order: each head's channels by rising size, the order in which those of like size can share scales;
    int64 [heads, channels]. sample: where channels of a token share scales.
    """

    damages: tuple[Tensor, ...]
    largest: Tensor
    order: Tensor
    sample: TokenSample | None = None


@dataclass(frozen=True, slots=True, eq=False)
class KvStatistics:
    """Of one layer. values is None where `keys` are latents.

    Damages are parts of the second moment of the stream that attention adds to, or of the loss, whichever way was
    looked at.
    """

    keys: SideStatistics
    values: SideStatistics | None


class SideObserver:
    """Sums over the windows of a text for keys, values or latents. elements: what is tried on them.

    turned: how many of each head's channels rotary embedding has turned, its two halves together. Many of these turn
    so slowly that a text shows a part of the way only: later positions bring to each channel what its partner holds
    now, so that its largest magnitude is the pair's length.

    The order of channels is that of the first window, so that all damages are those of the same groups.
    """

    def __init__(self, elements: Sequence[KvElement], turned: int = 0) -> None:
        self._elements = tuple(elements)
        self._turned = turned
        self._damages = [torch.zeros(())] * len(self._elements)
        self._largest = torch.zeros(())
        self._order = torch.zeros(0, dtype=torch.int64)
        self._windows = 0
        self._shares = any(element.scaling is KvScaling.SLICE for element in self._elements)
        self._sample: TokenSample | None = None
        self._lots = torch.zeros(0)
        self._generator = torch.Generator().manual_seed(0)

    def add(self, x: Tensor, derivative: Tensor) -> None:
        """x: stored values [B, heads, T, channels]; derivative: along a direction, by each of them."""
        squares = derivative.square()
        if self._windows == 0:
            self._order = x.square().mean(dim=(0, 2)).argsort(dim=-1, stable=True)
        self._largest = torch.maximum(self._largest, self._magnitudes(x))
        for number, element in enumerate(self._elements):
            found = x.shape[0] * self._damage(x, squares, element)
            self._damages[number] = self._damages[number] + found
        self._windows += x.shape[0]
        if self._shares:
            self._draw(x, squares)

    def _magnitudes(self, x: Tensor) -> Tensor:
        """[heads, channels]: the largest |x| [B, heads, T, channels], of rotated channels the longest pair's length."""
        found = x.abs().amax(dim=(0, 2))
        if self._turned:
            half = self._turned // 2
            lengths = torch.hypot(x[..., :half], x[..., half : self._turned]).amax(dim=(0, 2))
            found[:, : self._turned] = lengths.repeat(1, 2)
        return found

    def _draw(self, x: Tensor, squares: Tensor) -> None:
        """Every token draws a lot, and the smallest ones stay: all tokens are as likely, however many there are."""
        values, squares = (part.transpose(1, 2).flatten(2).flatten(0, 1) for part in (to_half(x), squares))
        lots = torch.cat((self._lots, torch.rand(values.shape[0], generator=self._generator)))
        if self._sample is not None:
            values = torch.cat((self._sample.values, values))
            squares = torch.cat((self._sample.squares, squares))
        count = min(lots.shape[0], max(1, _SAMPLED // values.shape[1]))
        self._lots, kept = lots.topk(count, largest=False)
        self._sample = TokenSample(values[kept], squares[kept])

    def _damage(self, x: Tensor, squares: Tensor, element: KvElement) -> Tensor:
        if element.scaling is not KvScaling.SLICE:
            return damage(x, squares, element)
        order = self._order[:, None].expand_as(x)
        found = damage(x.gather(-1, order), squares.gather(-1, order), element)
        return torch.empty_like(found).scatter_(-1, self._order, found)

    def statistics(self, unit: float) -> SideStatistics:
        """unit: the mean of what damages are parts of. ValueError before any window was seen."""
        if self._windows == 0:
            raise ValueError("no text was seen")
        part = max(unit, 1e-30) * self._windows
        damages = tuple(found / part for found in self._damages)
        return SideStatistics(damages, self._largest, self._order, self._sample)


def damage(x: Tensor, squares: Tensor, element: KvElement) -> Tensor:
    """Mean over windows and tokens of squares times the squared error of `element`, [heads, channels].

    x, squares: [B, heads, T, channels]. Spans of tokens that do not divide the text leave its end out, and shrink to
    a text that is shorter.
    """
    if element.scaling is KvScaling.SPAN:
        span = min(element.group, x.shape[2])
        element = KvElement(element.format, element.scaling, span)
        whole = x.shape[2] // span * span
        x, squares = x[:, :, :whole], squares[:, :, :whole]
    kept = to_half(x).float()
    return (squares * (requantized(kept, element) - kept).square()).mean(dim=(0, 2))


def derivatives(sample: AttentionSample, direction: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of the output along `direction` [B, T, hidden] by (keys, values), shaped as they are.

    Memory holds the scores of one head at a time.
    """
    shared, wide = sample.query.shape[1] // sample.key.shape[1], sample.value.shape[-1]
    keys, values = torch.empty_like(sample.key), torch.empty_like(sample.value)
    for head in range(sample.key.shape[1]):
        key, value = (x[:, head].clone().requires_grad_() for x in (sample.key, sample.value))
        for number in range(head * shared, (head + 1) * shared):
            along = direction @ sample.sight.projection[:, number * wide : (number + 1) * wide]
            if sample.gate is not None:
                along *= sample.gate[:, :, number].sigmoid()
            with torch.enable_grad():
                _mixed(sample.query[:, number], key, value, sample.sight).backward(along)  # type: ignore[no-untyped-call]
        assert key.grad is not None
        assert value.grad is not None
        keys[:, head], values[:, head] = key.grad, value.grad
    return keys, values


def latent_derivative(sample: LatentSample, direction: Tensor) -> Tensor:
    """As `derivatives`, by latents: [B, T, rank], keys and values of all heads together."""
    free = sample.query.shape[-1] - sample.positional.shape[-1]
    wide = sample.expansion.shape[1] - free
    latent = sample.latent.clone().requires_grad_()
    for number in range(sample.query.shape[1]):
        along = direction @ sample.sight.projection[:, number * wide : (number + 1) * wide]
        with torch.enable_grad():
            key, value = torch.split(latent @ sample.expansion[number].T, [free, wide], dim=-1)
            key = torch.cat((key, sample.positional), dim=-1)
            _mixed(sample.query[:, number], key, value, sample.sight).backward(along)  # type: ignore[no-untyped-call]
    assert latent.grad is not None
    return latent.grad


def _mixed(query: Tensor, key: Tensor, value: Tensor, sight: Sight) -> Tensor:
    """One head's attention [B, T, V], whose derivative knows only what the cache has quantized."""
    scores = sight.scale * query @ key.transpose(-1, -2)
    if sight.cap is not None:
        scores = torch.tanh(scores / sight.cap) * sight.cap
    scores = torch.where(sight.quantized, scores, scores.detach())
    weights = scores.masked_fill(~sight.seen, float("-inf")).softmax(dim=-1)
    fixed = value.detach()
    return weights @ fixed + (weights.detach() * sight.quantized) @ (value - fixed)


def random_direction(stream: Tensor, generator: torch.Generator) -> Tensor:
    """Independent signs, shaped as `stream`."""
    return torch.randint(0, 2, stream.shape, generator=generator).mul_(2).sub_(1).float()
