"""Statistics of the unquantized model, half a layer at a time: run the tokens once, observe, write, go on."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import qwen_quantize
from qwen_quantize.calibrators.experts import needed_tokens
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics, TokenSample
from qwen_quantize.calibrators.output_gain import SAMPLE_TOKENS
from qwen_quantize.checkpoint.disk import disk_errors, replacing, require_free_space, sync_folder
from qwen_quantize.checkpoint.staging import StagingFolder
from qwen_quantize.engine.experts import Routing
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import LinearGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import ResumableError, UserError
from qwen_quantize.formats.kernel_calls import native_library
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.models.lookup import architecture_of
from qwen_quantize.pipeline.calibration import Batch
from qwen_quantize.pipeline.expert_stream import (
    expert_unit,
    observe_everyone,
    observe_expert,
    routed_to,
    spread_tokens,
    write_without_experts,
)
from qwen_quantize.pipeline.hidden import HiddenStates, HiddenWriter, window_ranges
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.memory import MemoryPlan, moment_ranges, plan_memory, states_bytes
from qwen_quantize.pipeline.recipe import Output, Recipe
from qwen_quantize.pipeline.run import Progress, read_calibration
from qwen_quantize.pipeline.solving import check_finite_group
from qwen_quantize.pipeline.statistics_folder import (
    ANYONE,
    MANIFEST,
    Data,
    StatisticsFolder,
    StatisticsManifest,
    StreamStatistics,
    Unit,
    read_statistics,
    tokenizer_sha256,
    unit_file,
    write_unit,
)
from qwen_quantize.pipeline.stream import (
    check_half,
    embed,
    half_step,
    half_unit,
    observe_half,
    require_states,
    unfinished_halves,
)
from qwen_quantize.pipeline.texts import CalibrationTokens


class KeyedObserver(InputObserver):
    """Observes without a cast, and keeps the tokens of the text with the smallest keys as its sample.

    keys: [all tokens] int64, one for each position that `batch` may name.
    """

    def __init__(self, features: int, ranges: tuple[int, ...], batch: Batch, keys: Tensor) -> None:
        super().__init__(features, None, ranges)
        self._batch = batch
        self._all = keys
        self._keys = torch.empty(0, dtype=torch.int64)
        self._kept = TokenSample(torch.empty(0, features), torch.empty(0))

    def observe(self, x: Tensor, weight: Tensor | None = None) -> None:
        super().observe(x, weight)
        new = self._all[self._batch.tokens]
        keys = torch.cat([self._keys, new])
        chosen = keys.argsort(stable=True)[:SAMPLE_TOKENS]
        held = self._keys.shape[0]
        old, fresh = chosen[chosen < held], chosen[chosen >= held] - held
        inputs = torch.cat([self._kept.inputs[old], x[fresh]])
        weights = torch.ones(fresh.numel()) if weight is None else weight[fresh]
        weights = torch.cat([self._kept.weight[old], weights])
        kept = torch.cat([self._keys[old], new[fresh]])
        order = kept.argsort(stable=True)
        self._keys, self._kept = kept[order], TokenSample(inputs[order], weights[order])

    def statistics(self) -> InputStatistics:
        return replace(super().statistics(), sample=self._kept)

    def collected(self) -> StreamStatistics:
        return StreamStatistics(self.statistics(), self._keys)


def token_keys(tokens: Tensor) -> Tensor:
    """[windows * T] int64, not negative: a number for each token that depends on its window's ids and its place.

    tokens: [windows, T] int64. What SplitMix64 makes of the sum of the window's hash and its position.
    """
    windows, length = tokens.shape
    seeds = [hashlib.sha256(row.numpy().astype("<i8").tobytes()).digest()[:8] for row in tokens]
    start = np.frombuffer(b"".join(seeds), "<u8").reshape(windows, 1)
    place = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = start + place
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = (mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)
    return torch.from_numpy(mixed.astype(np.int64)).flatten()


@dataclass(frozen=True, slots=True)
class Collection:
    """What every step of a collecting run works with. keys: of all tokens; folder: where files grow."""

    blueprint: Blueprint
    reader: ModelReader
    states: HiddenStates
    journal: Journal
    folder: Path
    memory: MemoryPlan
    keys: Tensor

    def batches(self) -> list[tuple[int, int]]:
        return window_ranges(self.states.shape[0], self.memory.windows)

    def observer(self, features: int, batch: Batch, _module: str) -> KeyedObserver:
        return KeyedObserver(features, moment_ranges(features, self.memory.most_features), batch, self.keys)

    def as_it_runs(self, group: LinearGroup, _module: str) -> LinearGroup:
        """In float32: no chip is known yet."""
        return group

    def finish(self, unit: str, observers: Mapping[str, InputObserver]) -> None:
        """Write the file of a unit and put it on record."""
        streams = {}
        for name, observer in observers.items():
            assert isinstance(observer, KeyedObserver)
            streams[name] = observer.collected()
        self.journal.finish(unit, asdict(write_unit(self.folder, unit, streams)))


def collect(recipe: Recipe, reader: ModelReader, output: Output, progress: Progress) -> StatisticsFolder:
    """Make the folder of statistics, complete or not at all. Of the recipe the model, the text and the memory count.

    A UserError leaves nothing behind, unless the run can be resumed.
    """
    calibration = read_calibration(recipe, reader)
    assert calibration is not None
    memory = plan_memory(recipe, reader.blueprint, 0)
    staging = statistics_staging(output)
    try:
        if not staging.resumed:
            require_free_space(staging.path, _disk_bytes(reader.blueprint, memory, calibration))
        manifest = _fill(recipe, reader, calibration, memory, staging, output.resume, progress)
        write_manifest(staging.path, manifest)
        publish(staging)
    except UserError as error:
        if not (staging.resumed or isinstance(error, ResumableError)):
            staging.remove()
        raise
    finally:
        staging.release()
    return read_statistics(staging.target)


def statistics_staging(output: Output) -> StagingFolder:
    """The hidden folder in which statistics grow; UserError where the target is in the way."""
    try:
        return StagingFolder(
            output.path,
            resume=output.resume,
            overwrite=output.overwrite,
            marks=(MANIFEST,),
            what="folder of statistics",
        )
    except UserError as error:
        raise UserError(str(error).replace("another --output-path", "another folder")) from error


def _disk_bytes(blueprint: Blueprint, memory: MemoryPlan, calibration: CalibrationTokens) -> int:
    hidden = states_bytes(blueprint, calibration.tokens.numel(), in_turn=False)
    total = 0
    for layer in range(blueprint.num_layers):
        widths = [
            blueprint.linear_shape(sites[0], layer)[1]
            for half in Half
            for sites in blueprint.streams(layer, half).values()
        ]
        for sites in blueprint.expert_streams(layer).values():
            widths += [blueprint.linear_shape(sites[0], layer)[1]] * blueprint.num_experts(layer)
        total += sum(
            4 * SAMPLE_TOKENS * width
            + sum(4 * size * (size + 1) for size in moment_ranges(width, memory.most_features))
            for width in widths
        )
    return total + hidden


def _fill(
    recipe: Recipe,
    reader: ModelReader,
    calibration: CalibrationTokens,
    memory: MemoryPlan,
    staging: StagingFolder,
    resume: bool,
    progress: Progress,
) -> StatisticsManifest:
    source = reader.source
    identity = {
        "version": qwen_quantize.__version__,
        "torch version": torch.__version__,
        "request": recipe.as_record(),
        "source": source.fingerprint(),
        "calibration text": calibration.sha256,
        "number of threads": torch.get_num_threads(),
        "kernels": "native" if native_library() is not None else "torch",
    }
    journal = Journal(staging.path / "journal.jsonl", identity, resume)
    windows, length = calibration.tokens.shape
    states = HiddenStates(staging.path / "work", windows, length, reader.blueprint.config.hidden_size)
    keys = token_keys(calibration.tokens)
    run = Collection(reader.blueprint, reader, states, journal, staging.path, memory, keys)
    _check_files(run)
    _run_all(run, calibration.tokens, progress)
    units = {name: Unit(**{key: value for key, value in record.items() if key != "unit"})
             for name, record in journal.units.items()}  # fmt: skip
    local = Path(recipe.model_path)
    return StatisticsManifest(
        version=qwen_quantize.__version__,
        path=str(local.resolve() if local.exists() else local),
        fingerprint=source.fingerprint(),
        architecture=architecture_of(source.config),
        tokenizer=tokenizer_sha256(source),
        data=(
            Data(
                str(recipe.dataset), calibration.sha256, windows, length, calibration.tokens.numel(), recipe.seed,
                calibration.note,
            ),
        ),
        layers=layer_counts(reader.blueprint, units),
        units=in_order(reader.blueprint, units),
    )  # fmt: skip


def layer_counts(blueprint: Blueprint, units: Mapping[str, Unit]) -> tuple[dict[str, Any], ...]:
    """For each layer its number, the tokens that ran through it, and how many visited each routed expert."""
    return tuple(
        {
            "layer": layer,
            "tokens": max(units[half_unit(layer, Half.ATTENTION)].streams.values()),
            "experts": [
                units[expert_unit(layer, expert)].streams[Stream.EXPERT_INPUT.value]
                for expert in range(blueprint.num_experts(layer))
            ],
        }
        for layer in range(blueprint.num_layers)
    )


def in_order(blueprint: Blueprint, units: Mapping[str, Unit]) -> dict[str, Unit]:
    """The units in the model's order; a resumed run may have put them on record in another."""
    names = []
    for layer in range(blueprint.num_layers):
        names += [half_unit(layer, half) for half in Half]
        names += [expert_unit(layer, expert) for expert in range(blueprint.num_experts(layer))]
    return {name: units[name] for name in names}


def _check_files(run: Collection) -> None:
    missing = [unit for unit in run.journal.units if not (run.folder / unit_file(unit)).is_file()]
    if missing:
        raise UserError(
            f"{run.folder / unit_file(missing[0])} should be written but is gone; start again with --overwrite"
        )


def write_manifest(folder: Path, manifest: StatisticsManifest) -> None:
    """The manifest's bytes follow from what it says; ResumableError when the disk fails."""
    content = json.dumps(manifest.record(), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    data = content.encode("utf-8", "backslashreplace")
    with disk_errors(folder, len(data)), replacing(folder / MANIFEST) as file:
        file.write(data)


def publish(staging: StagingFolder) -> None:
    """Remove what only a resumed run needs, and put the folder in the target's place."""
    with disk_errors(staging.target, 0):
        shutil.rmtree(staging.path / "work", ignore_errors=True)
        (staging.path / "journal.jsonl").unlink(missing_ok=True)
        sync_folder(staging.path)
        staging.publish()


def _run_all(run: Collection, tokens: Tensor, progress: Progress) -> None:
    total = len(Half) * run.blueprint.num_layers
    rest = unfinished_halves(run.blueprint, run.journal)
    done = total - len(rest)
    if rest and done == 0:  # whatever lies there may come from another request
        embed(run, tokens)
    for step in range(done):
        run.states.remove(step)
    for layer, half in rest:
        require_states(run, layer, half)
        _collect_half(run, layer, half)
        run.states.remove(half_step(layer, half))
        done += 1
        progress("half layers", done, total)
    run.states.remove(total)


@torch.inference_mode()
def _collect_half(run: Collection, index: int, half: Half) -> None:
    layer = run.reader.read_half(index, half)
    check_half(run, index, half, layer)
    last = half is Half.MLP and index + 1 == run.blueprint.num_layers
    with nullcontext() if last else run.states.writing(half_step(index, half) + 1) as writer:
        if half is Half.MLP and run.blueprint.num_experts(index):
            routing, everyone = observe_everyone(run, layer, index)
            if writer is not None:
                write_without_experts(run, layer, index, writer)
            _collect_experts(run, layer, index, routing, writer)
            observers = everyone
        else:
            observers = observe_half(run, layer, index, half, writer)
    # After the states: once the half is on record, the next one begins with them.
    run.finish(half_unit(index, half), {stream.value: one for stream, one in observers.items()})


def _collect_experts(
    run: Collection, layer: Layer, index: int, routing: Routing, writer: HiddenWriter | None
) -> None:
    """Every routed expert's statistics over its own tokens, and where these are few, over the average token."""
    assert layer.experts is not None
    for expert in range(run.blueprint.num_experts(index)):
        groups = layer.experts(expert)
        for stream, sites in run.blueprint.expert_streams(index).items():
            names = [run.blueprint.module_name(index, site, expert) for site in sites]
            check_finite_group(run.reader, names, groups[stream])
        routed = routed_to(routing, expert)
        observers = observe_expert(run, layer, index, groups, routed, writer=writer)
        if expert_unit(index, expert) in run.journal.units:
            continue
        found: dict[str, InputObserver] = {stream.value: one for stream, one in observers.items()}
        inside = needed_tokens(observers[Stream.EXPERT_HIDDEN].amax.shape[0])
        if routed.tokens.numel() < inside:
            spread = spread_tokens(routing, inside)
            average = observe_expert(run, layer, index, groups, spread, only_hidden=True)
            found[ANYONE] = average[Stream.EXPERT_HIDDEN]
        run.finish(expert_unit(index, expert), found)
