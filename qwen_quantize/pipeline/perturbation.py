"""How much a model's predictions move when some of its linears are quantized: measured on a few windows of text.

All variants run side by side, layer by layer, each from the first layer on in which it differs; memory holds one
layer at a time and every variant's states.
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
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.sensitivity import StreamPlace, StreamSolver
from qwen_quantize.pipeline.solving import quantized_group
from qwen_quantize.pipeline.stream import Progress

_ROWS = 256  # predictions that are compared together


class PerturbedReader(ModelReader):
    """Reads a model with some linears, whole streams of them, as plans have them. plan: one for all, or by linear."""

    def __init__(
        self, solver: StreamSolver, plan: Plan | Mapping[str, Plan], modules: frozenset[str]
    ) -> None:
        super().__init__(solver.reader.source)
        self._solver = solver
        self._plans = dict.fromkeys(modules, plan) if isinstance(plan, Plan) else plan
        self._modules = modules
        layers = range(self.blueprint.num_layers)
        self.first_layer = min(
            (
                layer
                for layer in layers
                if any(m.startswith(self.blueprint.layer_name(layer, "")) for m in modules)
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
        if names[0] not in self._modules:
            return super().read_group(layer, sites, chip, expert)
        stream = sites[0].stream
        half = Half.ATTENTION if sites in self.blueprint.streams(layer, Half.ATTENTION).values() else Half.MLP
        place = StreamPlace(layer, half, stream, sites, expert)
        plain = self._solver.plain(place)
        plan = self._plans[names[0]]
        solutions, amax = self._solver.solve(plan, place, plain)
        return quantized_group(plan.choice_of(names[0]), plain, solutions, amax)


@torch.inference_mode()
def measure_divergence(
    reader: ModelReader, variants: Sequence[PerturbedReader], windows: Tensor, progress: Progress
) -> list[float]:
    """Of each variant the mean KL(model || variant) per predicted token, in nats. windows: [n, T] int64."""
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
    model.open_head()
    exact = hidden.flatten(0, 1)
    sums = [0.0 for _ in variants]
    for rows in torch.split(torch.arange(exact.shape[0]), _ROWS):
        expected = model.log_probabilities(exact[rows])
        for number, state in enumerate(states):
            if state is not None:
                found = model.log_probabilities(state.flatten(0, 1)[rows])
                sums[number] += float((expected.exp() * (expected - found)).sum(dtype=torch.float64))
    return [max(total / exact.shape[0], 0.0) for total in sums]
