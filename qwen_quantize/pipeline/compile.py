"""A calibrated run from collected statistics: no forward pass, so halves of layers are solved in any order.

What the model's inputs are is known; what a chip's cast makes of them is worked out here (`seen_by_chip`). Every
half is calibrated on what the unquantized model would give it, not on what the quantized halves before it do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.methods import Transform
from qwen_quantize.calibrators.observers import InputStatistics, TokenSample
from qwen_quantize.engine.linear import PlainGroup
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Half, Stream
from qwen_quantize.pipeline.calibration import Calibration
from qwen_quantize.pipeline.expert_stream import (
    ExpertInputs,
    expert_statistics,
    expert_unit,
    solve_expert,
    solve_shared,
)
from qwen_quantize.pipeline.memory import moment_ranges
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.solving import check_finite_group
from qwen_quantize.pipeline.statistics_folder import ANYONE, StatisticsFolder, StreamStatistics
from qwen_quantize.pipeline.stream import (
    Progress,
    check_half,
    check_written,
    half_unit,
    solve_moved,
    unfinished_halves,
)
from qwen_quantize.pipeline.transform import Move, Moved, follow_move, move_half, moved_statistics

_PRIOR_TOKENS = 256.0  # a feature's own ratios count as much as the stream's common ones after so many tokens


def compile_halves(run: Calibration, folder: StatisticsFolder, progress: Progress) -> None:
    """Solve and write every half that is not on record, several at once with one thread each.

    How many does not change the bytes: each is computed alone, and they are put on record in order.
    """
    total = len(Half) * run.blueprint.num_layers
    rest = unfinished_halves(run.blueprint, run.journal)
    check_written(run, rest)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # new threads take this over; sums must not depend on how many there are
    try:
        with ThreadPoolExecutor(run.plan.memory.halves) as pool:
            try:
                jobs = [pool.submit(_compile_half, run, folder, layer, half) for layer, half in rest]
                for done, ((layer, half), job) in enumerate(zip(rest, jobs, strict=True), 1):
                    record = job.result()
                    run.folder.sync()
                    run.journal.finish(half_unit(layer, half), record)
                    progress("half layers", total - len(rest) + done, total)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _compile_half(run: Calibration, folder: StatisticsFolder, index: int, half: Half) -> dict[str, Any]:
    torch.set_num_threads(1)
    try:
        if half is Half.MLP and run.blueprint.num_experts(index):
            return _compile_experts_half(run, folder, index)
        _, record = solve_moved(run, index, half, _moved(run, folder, index, half))
        return record
    except (RuntimeError, ValueError) as error:  # torch's own is a RuntimeError
        if "cholesky" not in str(error).lower():
            raise
        raise UserError(
            f"{folder.path}: the second moments of layer {index} are not those of any input; collect them again"
        ) from error


def _moved(run: Calibration, folder: StatisticsFolder, index: int, half: Half) -> Moved:
    layer = run.reader.read_half(index, half)
    check_half(run, index, half, layer)
    features, sites = {}, run.blueprint.streams(index, half)
    modules = {stream: run.blueprint.module_name(index, sites[stream][0]) for stream in sites}
    for stream, group in layer.groups.items():
        assert isinstance(group, PlainGroup)
        if stream is not Stream.SHARED_INPUT:  # a shared expert reads what every routed expert reads
            features[stream.value] = group.weight.shape[1]
    if half is Half.MLP and run.blueprint.num_experts(index):
        features[Stream.EXPERT_INPUT.value] = run.blueprint.config.hidden_size
        routed = run.blueprint.expert_sites(index)[0]
        modules[Stream.EXPERT_INPUT] = run.blueprint.module_name(index, routed, 0)
    found = folder.read(half_unit(index, half), features, moments=_use_moments(run, modules.values()))
    seen = {
        stream: seen_by_chip(run.plan, found.pop(stream.value), modules[stream])
        for stream in map(Stream, features)
    }
    return move_half(run, index, half, layer, seen)


def _use_moments(run: Calibration, modules: Iterable[str]) -> bool:
    return any(run.plan.choice_of(module).method.uses_second_moments for module in modules)


def _compile_experts_half(run: Calibration, folder: StatisticsFolder, index: int) -> dict[str, Any]:
    moved = _moved(run, folder, index, Half.MLP)
    everyone, move = moved.statistics[Stream.EXPERT_INPUT], moved.expert_move
    experts = moved.layer.experts
    assert experts is not None
    _, record = solve_shared(run, index, moved)
    coverage = []
    first = [run.blueprint.module_name(index, site, 0) for site in run.blueprint.expert_sites(index)]
    use_moments = _use_moments(run, first)
    for expert in range(run.blueprint.num_experts(index)):
        unit = expert_unit(index, expert)
        if unit not in run.journal.units:
            groups = experts(expert)
            features = {}
            for stream, sites in run.blueprint.expert_streams(index).items():
                plain = groups[stream]
                assert isinstance(plain, PlainGroup)
                features[stream.value] = plain.weight.shape[1]
                names = [run.blueprint.module_name(index, site, expert) for site in sites]
                check_finite_group(run.reader, names, plain)
            found = folder.read(unit, features, moments=use_moments)
            groups = follow_move(run, index, expert, groups, move)
            known, statistics = expert_statistics(
                run.plan.recipe.expert_policy,
                expert,
                groups,
                everyone,
                _inputs(run, folder, index, unit, found, move),
            )
            solve_expert(run, index, expert, groups, known, statistics)
        coverage.append(run.journal.units[unit]["coverage"])
    return {**record, "experts": coverage}


def _inputs(
    run: Calibration,
    folder: StatisticsFolder,
    index: int,
    unit: str,
    found: Mapping[str, StreamStatistics],
    move: Move | None,
) -> ExpertInputs:
    modules = {
        stream: run.blueprint.module_name(index, sites[0], 0)
        for stream, sites in run.blueprint.expert_streams(index).items()
    }

    def own() -> dict[Stream, InputStatistics]:
        seen = {
            stream: seen_by_chip(run.plan, found[stream.value], modules[stream])
            for stream in (Stream.EXPERT_INPUT, Stream.EXPERT_HIDDEN)
        }
        if move is not None:
            seen[Stream.EXPERT_INPUT] = moved_statistics(seen[Stream.EXPERT_INPUT], move)
        return seen

    def anyone(_count: int) -> InputStatistics:
        if ANYONE not in found:
            raise UserError(f"{folder.path}: {unit} lacks the average token; collect the statistics again")
        return seen_by_chip(run.plan, found[ANYONE], modules[Stream.EXPERT_HIDDEN])

    def forced(_count: int) -> dict[Stream, InputStatistics]:
        raise ValueError("the plan refuses statistics with forced experts")

    return ExpertInputs(found[Stream.EXPERT_INPUT.value].statistics.tokens, own, forced, anyone)


def seen_by_chip(plan: Plan, stored: StreamStatistics, module: str) -> InputStatistics:
    """What an observer behind the chip's cast Q would have gathered, as the method of `module`, which reads it, wants.

    Exact without a cast, and for methods that move factors first, which observe none. Else the sampled tokens tell,
    for each feature, the slope a of Q(x) on x and the ratio r of their squares, each drawn toward the stream's
    common one as if that had been seen on 256 tokens. What the cast adds beside a x is taken as uncorrelated
    between features: E[Q Q^T] is a a^T times E[x x^T], its diagonal r times that; E[x Q^T] is E[x x^T] times a.
    """
    choice = plan.choice_of(module)
    seen, chip = stored.statistics, choice.chip_compute()
    moments = _narrowed(seen.second_moments, plan.memory.most_features)
    sample = seen.sample
    assert sample is not None
    wanted = choice.method.uses_second_moments
    if choice.method.transform is not Transform.NONE:
        smooths = choice.method.transform is Transform.SMOOTHING
        kept = sample if smooths else None
        return replace(seen, second_moments=moments if wanted else (), sample=kept)
    if chip.cast is None:
        kept = None if chip.unit is None else sample
        return replace(seen, second_moments=moments if wanted else (), sample=kept)
    cast = TokenSample(chip.cast(sample.inputs), sample.weight)
    kept = None if chip.unit is None else cast
    if not wanted:
        return replace(seen, second_moments=(), sample=kept)
    slope, ratio = _cast_ratios(sample, cast)
    crossed = choice.sees_bias()
    changed, crosses, begin = [], [], 0
    for moment in moments:
        part = slice(begin, begin + moment.shape[0])
        crossing = moment * slope[part]
        if crossed:
            crosses.append(crossing)
        through = crossing * slope[part].unsqueeze(1)
        through.diagonal().copy_(moment.diagonal() * ratio[part])
        changed.append(through)
        begin = part.stop
    return replace(
        seen,
        second_moments=tuple(changed),
        cross=seen.cross * slope,
        cross_moments=tuple(crosses),
        sample=kept,
    )


def _cast_ratios(sample: TokenSample, cast: TokenSample) -> tuple[Tensor, Tensor]:
    """([K] float64 E[x Q] / E[x^2], likewise E[Q^2] / E[x^2]) over the sample; ones where it says nothing."""
    weight = sample.weight.double().unsqueeze(1)
    x, q = sample.inputs.double(), cast.inputs.double()
    squares = (weight * x * x).sum(dim=0)
    own = sample.inputs.shape[0] / (sample.inputs.shape[0] + _PRIOR_TOKENS)
    total = float(squares.sum())
    found = []
    for products in ((weight * x * q).sum(dim=0), (weight * q * q).sum(dim=0)):
        common = float(products.sum()) / total if total > 0 else 1.0
        found.append(torch.where(squares > 0, own * products / squares + (1 - own) * common, common))
    return found[0], found[1]


def _narrowed(moments: tuple[Tensor, ...], most: int | None) -> tuple[Tensor, ...]:
    """The moments over ranges of features no wider than a memory ceiling asks for."""
    parts = []
    for moment in moments:
        sizes = moment_ranges(moment.shape[0], most)
        begin = 0
        for size in sizes:
            whole = len(sizes) == 1
            parts.append(moment if whole else moment[begin : begin + size, begin : begin + size].clone())
            begin += size
    return tuple(parts)
