"""What errors of linears do to a model's predictions, measured on a little text under a ceiling of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from qwen_quantize.engine.load import ModelReader
from qwen_quantize.pipeline.candidates import KEPT
from qwen_quantize.pipeline.choosable import Choosable
from qwen_quantize.pipeline.memory import divergence_memory, variants_at_once
from qwen_quantize.pipeline.perturbation import ROWS, PerturbedReader, measure_divergence
from qwen_quantize.pipeline.sensitivity import Sensitivity, StreamSolver, places
from qwen_quantize.pipeline.stream import Progress

_DEPTHS = 4  # parts of the layers behind the first whose linears of one kind share an effect
_TOKENS = 1024  # of text that the effect is measured on


class EffectMeter:
    """Measures variants of one model on the beginning of one text.

    solving: bytes at the peak of solving half a layer; ceiling: of memory, None for none. UserError where not even
    one variant fits under it.
    """

    def __init__(
        self, solver: StreamSolver, windows: Tensor, ceiling: int | None, solving: int, progress: Progress
    ) -> None:
        self.solver = solver
        self.peak_memory_bytes = 0
        self._windows = _few(windows)
        self._ceiling = ceiling
        self._solving = solving
        self._progress = progress

    def divergences(self, chosen: Sequence[Mapping[str, str]]) -> list[float]:
        """Mean KL in nats of the model with each choice of candidates by linear; what is not named stays."""
        blueprint, tokens = self.solver.reader.blueprint, self._windows.numel()
        at_once = variants_at_once(self._ceiling, blueprint, self._solving, tokens, ROWS, len(chosen))
        needed = divergence_memory(blueprint, self._solving, tokens, ROWS, at_once)
        self.peak_memory_bytes = max(self.peak_memory_bytes, needed)
        variants = [PerturbedReader(self.solver, one) for one in chosen]
        return measure_divergence(self.solver.reader, variants, self._windows, self._progress, at_once)


def noise_of(found: Sensitivity, unit: Sequence[str], name: str) -> float:
    """What the unit adds to the residual under a candidate."""
    return 0.0 if name == KEPT else math.fsum(found.noise[module][name] for module in unit)


def effects_of(choosable: Choosable, found: Sensitivity, meter: EffectMeter | None) -> dict[str, float]:
    """KL of the predictions for each unit of noise, by the first linear of each choice: measured for the linears of
    one kind in neighbouring layers together, each as the candidate that errs most has it. 1 without a meter."""
    units, fitting = choosable.units, choosable.fitting
    if meter is None:
        return {unit[0]: 1.0 for unit in units}
    kinds = _kinds(meter.solver.reader)
    groups: dict[tuple[str, str, int], list[tuple[str, ...]]] = {}
    for unit in units:
        names = [name for name in choosable.plans if unit[0] in fitting[name]]
        if names:
            worst = max(names, key=lambda name: noise_of(found, unit, name))
            groups.setdefault((worst, *kinds[unit[0]]), []).append(unit)
    chosen = [
        dict.fromkeys((module for unit in members for module in unit), name)
        for (name, _, _), members in groups.items()
    ]
    effects = {unit[0]: 0.0 for unit in units}
    for ((name, _, _), members), divergence in zip(groups.items(), meter.divergences(chosen), strict=True):
        noise = math.fsum(noise_of(found, unit, name) for unit in members)
        effects |= dict.fromkeys((unit[0] for unit in members), divergence / noise if noise > 0 else 0.0)
    return effects


def _kinds(reader: ModelReader) -> dict[str, tuple[str, int]]:
    """(stream, part of the depth) of each linear; the first layer is a part of its own, since its residual is not yet
    what the others add to."""
    layers, found = reader.blueprint.num_layers, {}
    for layer in range(layers):
        part = 0 if layer == 0 else 1 + (layer - 1) * _DEPTHS // max(layers - 1, 1)
        for place in places(reader, layer):
            for site in place.sites:
                name = reader.blueprint.module_name(layer, site, place.expert)
                found[name] = (place.stream.value, part)
    return found


def _few(windows: Tensor) -> Tensor:
    """A few windows, or the beginnings of some."""
    length = min(windows.shape[1], _TOKENS // 2)
    return windows[: max(1, _TOKENS // length), :length]
