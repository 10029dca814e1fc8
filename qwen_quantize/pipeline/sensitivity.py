"""What each candidate scheme would do to the model, linear by linear, from collected statistics.

Errors are put on one scale, the power that they add to the residual relative to its size, per token. Linears that
write to the residual are observed with that weight. What goes wrong before them passes through: a relative error of
the input of half a layer counts with the share that this half adds to the residual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from qwen_quantize.calibrators.experts import ExpertPolicy, needed_tokens, shrunk
from qwen_quantize.calibrators.observers import InputStatistics
from qwen_quantize.calibrators.sensitivity import OutputPower, output_power
from qwen_quantize.engine.linear import PlainGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.models.blueprint import RESIDUAL_WRITERS, Half, LinearSite, Stream
from qwen_quantize.pipeline.compile import seen_by_chip
from qwen_quantize.pipeline.expert_stream import expert_unit
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.solved import SolvedStore, SolvedStream
from qwen_quantize.pipeline.solving import check_finite_group, factors_of, solve_group
from qwen_quantize.pipeline.statistics_folder import ANYONE, StatisticsFolder, StreamStatistics
from qwen_quantize.pipeline.stream import Progress, half_unit


@dataclass(frozen=True, slots=True)
class StreamPlace:
    """The linears of one input. expert: of a routed expert its number."""

    layer: int
    half: Half
    stream: Stream
    sites: tuple[LinearSite, ...]
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """relative: of each linear under each candidate, error over output power. noise: what the linear adds to the
    residual, by linear and candidate."""

    relative: Mapping[str, Mapping[str, float]]
    noise: Mapping[str, Mapping[str, float]]


class StreamSolver:
    """Solves the linears of one stream as a plan has them, on statistics instead of a forward pass.

    plans: by candidate. store: keeps what was solved, so that each stream is solved once for each candidate.
    """

    def __init__(
        self,
        reader: ModelReader,
        folder: StatisticsFolder,
        plans: Mapping[str, Plan],
        store: SolvedStore | None = None,
    ) -> None:
        self.reader = reader
        self.folder = folder
        self.plans = plans
        self._store = store
        self._read: dict[bool, tuple[str, dict[str, StreamStatistics]]] = {}

    def unit(self, name: str) -> dict[str, StreamStatistics]:
        """The streams of half a layer or of an expert; the last of each is kept, as its streams come one by one."""
        routed = ".experts." in name
        if routed not in self._read or self._read[routed][0] != name:
            self._read.pop(routed, None)
            self._read[routed] = name, self.folder.read(name)
        return self._read[routed][1]

    def modules(self, place: StreamPlace) -> list[str]:
        blueprint = self.reader.blueprint
        return [blueprint.module_name(place.layer, site, place.expert) for site in place.sites]

    def raw(self, place: StreamPlace) -> StreamStatistics:
        """The statistics of the stream as they were collected."""
        if place.expert is not None:
            return self.unit(expert_unit(place.layer, place.expert))[place.stream.value]
        shared = place.stream is Stream.SHARED_INPUT  # a shared expert reads what every routed expert reads
        name = Stream.EXPERT_INPUT if shared else place.stream
        return self.unit(half_unit(place.layer, place.half))[name.value]

    def plain(self, place: StreamPlace) -> PlainGroup:
        group = self.reader.read_group(place.layer, place.sites, None, place.expert)
        assert isinstance(group, PlainGroup)
        check_finite_group(self.reader, self.modules(place), group)
        return group

    def solve(self, candidate: str, place: StreamPlace, plain: PlainGroup) -> SolvedStream:
        """The stream's linears as the candidate's method solves them, without what it moves between linears first."""
        modules, plan = self.modules(place), self.plans[candidate]
        kept = None if self._store is None else self._store.get(candidate, modules[0])
        if kept is not None:
            return kept
        choice = plan.choice_of(modules[0])
        seen = self._seen(plan, place)
        solutions = solve_group(choice, modules, plain, seen, factors_of(choice.method, seen))
        weights = {module: solution.quantized for module, solution in solutions.items()}
        solved = SolvedStream(weights, None if seen is None else float(seen.amax.max()))
        if self._store is not None:
            self._store.put(candidate, modules[0], solved)
        return solved

    def _seen(self, plan: Plan, place: StreamPlace) -> InputStatistics | None:
        """What the solver is given, for routed experts as `expert_statistics` has it (forced ones: their own)."""
        module = self.modules(place)[0]
        if place.expert is None:
            return seen_by_chip(plan, self.raw(place), module)
        # Read anew: what is made up for missing tokens is added in place.
        found = self.folder.read(expert_unit(place.layer, place.expert))
        own, policy = seen_by_chip(plan, found[place.stream.value], module), plan.recipe.expert_policy
        widths = self._widths(place.layer)
        if policy is ExpertPolicy.FORCED or own.tokens >= max(map(needed_tokens, widths.values())):
            return own
        if policy is ExpertPolicy.ROUND:
            return None
        needed = needed_tokens(widths[place.stream])
        if own.tokens >= needed:
            return own
        if place.stream is Stream.EXPERT_HIDDEN:
            return shrunk(own, seen_by_chip(plan, found[ANYONE], module), needed)
        everyone = self.unit(half_unit(place.layer, Half.MLP))[Stream.EXPERT_INPUT.value]
        return shrunk(own, seen_by_chip(plan, everyone, module), needed)

    def _widths(self, layer: int) -> dict[Stream, int]:
        blueprint = self.reader.blueprint
        return {
            stream: blueprint.linear_shape(sites[0], layer)[1]
            for stream, sites in blueprint.expert_streams(layer).items()
        }


def places(reader: ModelReader, layer: int) -> list[StreamPlace]:
    """The streams of a layer in the order in which it runs them, each after those that read from it."""
    blueprint = reader.blueprint
    found = []
    for half in Half:
        found += [
            StreamPlace(layer, half, stream, sites)
            for stream, sites in blueprint.streams(layer, half).items()
        ]
    for expert in range(blueprint.num_experts(layer)):
        found += [
            StreamPlace(layer, Half.MLP, stream, sites, expert)
            for stream, sites in blueprint.expert_streams(layer).items()
        ]
    return found


@torch.inference_mode()
def measure_sensitivity(
    fitting: Mapping[str, frozenset[str]], solver: StreamSolver, progress: Progress
) -> Sensitivity:
    """Solve every linear as each candidate has it; memory holds one stream at a time.

    fitting: by candidate the linears that it is for.
    """
    relative: dict[str, dict[str, float]] = {}
    noise: dict[str, dict[str, float]] = {}
    layers = solver.reader.blueprint.num_layers
    for layer in range(layers):
        # By what shares its way to the residual: half a layer, or one expert of it.
        written: dict[tuple[Half, int | None, bool], float] = {}
        waiting: list[tuple[tuple[Half, int | None, bool], str, str, float]] = []
        for place in places(solver.reader, layer):
            key = _way(place)
            powers = _powers(fitting, solver, place)
            tokens = _tokens(solver, place)
            for module, by_candidate in powers.items():
                writes = place.stream in RESIDUAL_WRITERS
                for name, power in by_candidate.items():
                    relative.setdefault(module, {})[name] = power.relative
                    if writes:
                        scale = solver.reader.blueprint.config.hidden_size * max(tokens, 1)
                        noise.setdefault(module, {})[name] = power.noise / scale
                        written[key] = power.signal / scale
                    else:
                        waiting.append((key, module, name, power.relative))
        for key, module, name, error in waiting:
            noise.setdefault(module, {})[name] = error * written.get(key, 1.0)
        progress("sensitivity, layers", layer + 1, layers)
    return Sensitivity(relative, noise)


def _way(place: StreamPlace) -> tuple[Half, int | None, bool]:
    shared = place.stream in (Stream.SHARED_INPUT, Stream.SHARED_HIDDEN)
    return place.half, place.expert, shared


def _tokens(solver: StreamSolver, place: StreamPlace) -> int:
    """Tokens that the layer has seen; a routed expert saw some of them."""
    if place.expert is None:
        return solver.raw(place).statistics.tokens
    return int(solver.folder.manifest.layers[place.layer]["tokens"])


def _powers(
    fitting: Mapping[str, frozenset[str]], solver: StreamSolver, place: StreamPlace
) -> dict[str, dict[str, OutputPower]]:
    modules = solver.modules(place)
    wanted = [name for name in solver.plans if modules[0] in fitting[name]]
    if not wanted:
        return {}
    plain, stored = solver.plain(place), solver.raw(place).statistics
    weights: Sequence[torch.Tensor] = torch.split(plain.weight, list(plain.sizes))
    found: dict[str, dict[str, OutputPower]] = {module: {} for module in modules}
    for name in wanted:
        cast = solver.plans[name].choice_of(modules[0]).chip_compute().cast
        solved = solver.solve(name, place, plain)
        for module, weight in zip(modules, weights, strict=True):
            quantized = solved.weights[module].dequantize()
            found[module][name] = output_power(weight, quantized, stored, cast)
    return found
