"""A model run one layer at a time over many windows: memory holds one layer, never the model.

Of a sparse layer it holds one routed expert: batches of windows run inside for everything else, and experts
outside, so that each is read once per layer however many windows there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.experts import Routing, route, run_experts, shared_expert
from qwen_quantize.engine.layer import Layer, rms_norm
from qwen_quantize.engine.linear import LinearGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.model import mlp_input, run_attention, run_layer
from qwen_quantize.engine.packed_cache import SimulatedCache
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.models.blueprint import Stream

_TOKENS_PER_BATCH = 4096


class StreamedModel:
    """Holds at most one open layer or the head. `chip` makes quantized linears compute as the chip does.

    kv_plan: lets every query see what a decoder with such a key-value cache would.

    experts: by sparse layer the experts that all tokens of a run visit, [tokens, k] int64, as `last_routing` was in
    another run; without, the router chooses. What a small error does is smooth only where it sends no token elsewhere.

    last_routing: the experts that the open layer's last run chose, [tokens, k] int64, sorted in each row;
    None before it ran, and for a dense layer.
    """

    def __init__(
        self,
        reader: ModelReader,
        chip: Compute | None = None,
        kv_plan: KvPlan | None = None,
        experts: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.reader = reader
        self._experts: Mapping[int, Tensor] = {} if experts is None else experts
        self._kv_cache = None if kv_plan is None else SimulatedCache(kv_plan)
        self.chip = chip
        self.last_routing: Tensor | None = None
        self._layer: Layer | None = None
        self._index = -1
        self._head: tuple[Tensor, LinearGroup] | None = None

    @property
    def num_layers(self) -> int:
        return self.reader.blueprint.num_layers

    @property
    def vocab_size(self) -> int:
        return self.reader.blueprint.config.vocab_size

    def embed(self, tokens: Tensor) -> Tensor:
        return self.reader.embed(tokens)

    def open_layer(self, index: int) -> None:
        self._layer = None  # freed before the next one is read
        self.last_routing = None
        self._layer = self.reader.read_layer(index, self.chip)
        self._index = index

    def close_layer(self) -> None:
        """Free the open layer."""
        self._layer = None

    def run_layer(self, hidden: Tensor) -> Tensor:
        """hidden: any number of windows [n, T, hidden_size] -> the same shape (a new tensor)."""
        layer, index, reader = self._layer, self._index, self.reader
        if layer is None:
            raise ValueError("open_layer comes before run_layer")
        windows = max(1, _TOKENS_PER_BATCH // hidden.shape[1])
        if reader.blueprint.sparse(index) is not None:
            return self._run_sparse(hidden, layer, windows)
        if hidden.shape[0] <= windows:
            return run_layer(hidden, layer, index, reader.blueprint, reader.rotary, self._kv_cache)
        after = torch.empty_like(hidden)
        for source, target in _batches(windows, hidden, after):
            target.copy_(run_layer(source, layer, index, reader.blueprint, reader.rotary, self._kv_cache))
        return after

    def _run_sparse(self, hidden: Tensor, layer: Layer, windows: int) -> Tensor:
        index, blueprint, rotary = self._index, self.reader.blueprint, self.reader.rotary
        assert layer.experts is not None
        attended = torch.empty_like(hidden)
        routings: list[Routing] = []
        visited = self._experts.get(index)
        given = (
            itertools.repeat(None)
            if visited is None
            else iter(torch.split(visited, windows * hidden.shape[1]))
        )
        for source, target in _batches(windows, hidden, attended):
            target.copy_(run_attention(source, layer, index, blueprint, rotary, self._kv_cache))
            normed = mlp_input(target, layer, blueprint).flatten(0, 1)
            routings.append(route(normed, layer, index, blueprint, next(given)))
        routing = Routing(
            torch.cat([part.indices for part in routings]), torch.cat([part.weights for part in routings])
        )
        self.last_routing = routing.indices.sort(dim=-1).values
        mixed = run_experts(
            attended.flatten(0, 1),
            routing,
            layer.experts,
            blueprint.config.activation,
            prepare=lambda rows: mlp_input(rows, layer, blueprint),
        ).view_as(attended)
        for target, residual in _batches(windows, mixed, attended):
            if Stream.SHARED_INPUT in layer.groups:
                target += shared_expert(mlp_input(residual, layer, blueprint), layer, blueprint)
            target += residual
        return mixed

    def open_head(self) -> None:
        self._layer = None
        self.last_routing = None
        self._head = self.reader.read_head(self.chip)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            raise ValueError("open_head comes before log_probabilities")
        norm, head = self._head
        normed = rms_norm(hidden, norm, self.reader.blueprint.config.rms_norm_eps)
        (logits,) = head(normed)
        return functional.log_softmax(logits, dim=-1)


def _batches(windows: int, first: Tensor, second: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors [n, T, hidden_size] side by side, in views of at most `windows` windows."""
    return zip(torch.split(first, windows), torch.split(second, windows), strict=True)
