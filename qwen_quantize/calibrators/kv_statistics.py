"""What quantizing a layer's keys and values would cost, channel by channel, from text that runs through it.

A query mixes values v_s with weights a_s = softmax(scale * q . k_s), and the output projection W takes the mixture o
of each head to the stream that all layers share. To second order, and with errors of different tokens and channels
independent, an error e of the values' channel c costs E[sum_s a_s^2] |W_c|^2 e^2 there. One of the keys' channel c
moves the score of s by scale * q_c e, and a score moves the output by a_s W (v_s - o): it costs
E[scale^2 q_c^2 sum_s a_s^2 |W (v_s - o)|^2] e^2. Query heads that share a key head add up. What counts for a choice
among widths is that factor times the error that the width really makes, which is measured on the same keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.kv_codec import requantized, to_half
from qwen_quantize.formats.kv_scheme import KvElement, KvScaling


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSample:
    """Queries [B, heads, T, D], keys [B, kv_heads, T, D] and values [B, kv_heads, T, V] of whole windows.

    seen: bool [T, T], the keys that a query sees; quantized: those of them that a cache would have quantized.
    scale: of the scores; cap: their soft bound. projection: [hidden, heads * V], the output's weight.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    seen: Tensor
    quantized: Tensor
    scale: float
    cap: float | None
    projection: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KvStatistics:
    """Of one layer, means over its tokens, [kv_heads, channels] each.

    importance: what a squared error of 1 costs in the squared output, as a part of the stream's second moment.
    errors: mean squared error of each element that was tried, in their order. largest: magnitudes.
    """

    key_importance: Tensor
    value_importance: Tensor
    key_errors: tuple[Tensor, ...]
    value_errors: tuple[Tensor, ...]
    key_largest: Tensor
    value_largest: Tensor


class KvObserver:
    """Sums over the windows of a text. elements: what is tried on keys and on values."""

    def __init__(self, key_elements: Sequence[KvElement], value_elements: Sequence[KvElement]) -> None:
        self._elements = (tuple(key_elements), tuple(value_elements))
        self._importance = [torch.zeros(()), torch.zeros(())]
        self._errors: tuple[list[Tensor], list[Tensor]] = (
            [torch.zeros(())] * len(key_elements),
            [torch.zeros(())] * len(value_elements),
        )
        self._largest = [torch.zeros(()), torch.zeros(())]
        self._stream = 0.0
        self._windows = 0

    def add(self, sample: AttentionSample, stream: Tensor) -> None:
        """stream: [B, T, hidden], what the layer's attention adds to."""
        keys, values = importance(sample)
        batch = sample.query.shape[0]
        self._importance[0] = self._importance[0] + batch * keys
        self._importance[1] = self._importance[1] + batch * values
        for side, x in enumerate((sample.key, sample.value)):
            self._largest[side] = torch.maximum(self._largest[side], x.abs().amax(dim=(0, 2)))
            for number, element in enumerate(self._elements[side]):
                found = batch * squared_error(x, element)
                self._errors[side][number] = self._errors[side][number] + found
        self._stream += batch * float(stream.square().sum(dim=-1).mean())
        self._windows += batch

    def statistics(self) -> KvStatistics:
        """ValueError before any window was seen."""
        if self._windows == 0:
            raise ValueError("no text was seen")
        part = max(self._stream, 1e-30)
        return KvStatistics(
            key_importance=self._importance[0] / part,
            value_importance=self._importance[1] / part,
            key_errors=tuple(error / self._windows for error in self._errors[0]),
            value_errors=tuple(error / self._windows for error in self._errors[1]),
            key_largest=self._largest[0],
            value_largest=self._largest[1],
        )


def importance(sample: AttentionSample) -> tuple[Tensor, Tensor]:
    """(keys [kv_heads, D], values [kv_heads, V]), means over windows and tokens; see the module."""
    heads, kv_heads = sample.query.shape[1], sample.key.shape[1]
    shared, value_dim = heads // kv_heads, sample.value.shape[-1]
    keys, values = [], []
    for head in range(kv_heads):
        key_factor, value_factor = torch.zeros(sample.query.shape[-1]), torch.zeros(value_dim)
        for number in range(head * shared, (head + 1) * shared):
            scores = sample.scale * sample.query[:, number] @ sample.key[:, head].transpose(-1, -2)
            if sample.cap is not None:
                scores = torch.tanh(scores / sample.cap) * sample.cap
            weights = scores.masked_fill_(~sample.seen, float("-inf")).softmax(dim=-1)
            out = sample.projection[:, number * value_dim : (number + 1) * value_dim]
            gram = out.T @ out
            mixed, value = weights @ sample.value[:, head], sample.value[:, head]
            squares = weights.square() * sample.quantized
            turned = mixed @ gram
            # |W (v_s - o_t)|^2 summed over s with the weights' squares, without a tensor of all differences.
            own = (squares @ ((value @ gram) * value).sum(dim=-1, keepdim=True)).squeeze(-1)
            cross = (squares * (turned @ value.transpose(-1, -2))).sum(dim=-1)
            norms = (turned * mixed).sum(dim=-1) * squares.sum(dim=-1)
            moved = (own - 2 * cross + norms).clamp(min=0)  # [B, T]
            query = sample.query[:, number].square() * moved.unsqueeze(-1)
            key_factor += sample.scale**2 * query.mean(dim=(0, 1))
            value_factor += squares.sum(dim=-1).mean() * gram.diagonal()
        keys.append(key_factor)
        values.append(value_factor)
    return torch.stack(keys), torch.stack(values)


def squared_error(x: Tensor, element: KvElement) -> Tensor:
    """Mean over windows and tokens of what `element` changes, [heads, channels], of x [B, heads, T, channels].

    Spans of tokens that do not divide the text leave its end out, and shrink to a text that is shorter.
    """
    if element.scaling is KvScaling.SPAN:
        span = min(element.group, x.shape[2])
        element = KvElement(element.format, element.scaling, span)
        x = x[:, :, : x.shape[2] // span * span]
    kept = to_half(x).float()
    return (requantized(kept, element) - kept).square().mean(dim=(0, 2))
