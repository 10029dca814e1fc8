"""How much a model's predictions move when some of its linears are quantized: measured on a few windows of text.

Variants run side by side, layer by layer, each from the first layer on in which it differs; memory holds one layer
at a time and the states of the variants that run together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.linear import LinearGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.models.blueprint import Half, LinearSite
from qwen_quantize.pipeline.sensitivity import StreamPlace, StreamSolver
from qwen_quantize.pipeline.solving import quantized_group
from qwen_quantize.pipeline.stream import Progress

ROWS = 256  # predictions that are compared together


class PerturbedReader(ModelReader):
    """Reads a model with some linears, whole streams of them, as candidates have them. chosen: candidate by linear."""

    def __init__(self, solver: StreamSolver, chosen: Mapping[str, str]) -> None:
        super().__init__(solver.reader.source)
        self._solver = solver
        self._chosen = chosen
        layers = range(self.blueprint.num_layers)
        self.first_layer = min(
            (
                layer
                for layer in layers
                if any(m.startswith(self.blueprint.layer_name(layer, "")) for m in chosen)
            ),
            default=self.blueprint.num_layers,
        )

    def read_group(
        self,
        layer: int,
        sites: tuple[LinearSite, ...],
        chip: Compute | None,
        expert: int | None = None,
    ) -> LinearGroup:
        names = [self.blueprint.module_name(layer, site, expert) for site in sites]
        if names[0] not in self._chosen:
            return super().read_group(layer, sites, chip, expert)
        stream = sites[0].stream
        half = Half.ATTENTION if sites in self.blueprint.streams(layer, Half.ATTENTION).values() else Half.MLP
        place = StreamPlace(layer, half, stream, sites, expert)
        plain = self._solver.plain(place)
        candidate = self._chosen[names[0]]
        solved = self._solver.solve(candidate, place, plain)
        choice = self._solver.plans[candidate].choice_of(names[0])
        return quantized_group(choice, plain, solved.weights, solved.input_amax)


def measure_divergence(
    reader: ModelReader,
    variants: Sequence[PerturbedReader],
    windows: Tensor,
    progress: Progress,
    at_once: int | None = None,
) -> list[float]:
    """Of each variant the mean KL(model || variant) per predicted token, in nats. windows: [n, T] int64.

    at_once: variants that run together; None for all.
    """
    step = at_once or max(len(variants), 1)
    parts = [variants[begin : begin + step] for begin in range(0, len(variants), step)]
    return [kl for part in parts for kl in _divergences(reader, part, windows, progress)]


@torch.inference_mode()
def _divergences(
    reader: ModelReader, variants: Sequence[PerturbedReader], windows: Tensor, progress: Progress
) -> list[float]:
    model = StreamedModel(reader)
    others = [StreamedModel(variant) for variant in variants]
    hidden = model.embed(windows)
    states: list[Tensor | None] = [None for _ in variants]
    for layer in range(model.num_layers):
        for number, (other, variant) in enumerate(zip(others, variants, strict=True)):
            if variant.first_layer > layer:
                continue
            before = states[number]
            other.open_layer(layer)
            states[number] = other.run_layer(hidden if before is None else before)
            other.close_layer()
        model.open_layer(layer)
        hidden = model.run_layer(hidden)
        progress("effect of errors, layers", layer + 1, model.num_layers)
    model.open_head()  # which no variant has changed
    exact = hidden.flatten(0, 1)
    sums = [0.0 for _ in variants]
    for rows in torch.split(torch.arange(exact.shape[0]), ROWS):
        expected = model.log_probabilities(exact[rows])
        for number, state in enumerate(states):
            if state is not None:
                found = model.log_probabilities(state.flatten(0, 1)[rows])
                sums[number] += float((expected.exp() * (expected - found)).sum(dtype=torch.float64))
    return [max(total / exact.shape[0], 0.0) for total in sums]
