"""What the calibrators' constants are worth, each beside its alternatives, on unseen text like and unlike their own.

    python benchmarks/constants.py [--json] [--only NAME ...] [--model FOLDER] [--dataset calib.jsonl]
        [--like novel.txt] [--layers 0,2] [--tokens 4096] [--group-size 32] [--minutes M] [--results FILE]

A cell is one value of one constant. Every linear of the named layers is solved from the second moments of the
calibration text, and its relative output error is taken under those of text that it has not seen, both kinds: the
table holds the geometric mean over linears, and as `like` and `unlike` that of each linear's ratio to the value in
force (`in_force`), so 1.05 is five per cent worse. `seconds` are of the processor, of solving alone. A cell is written
to benchmarks/results/constants.json as soon as it is measured, and not measured again for the same model, layers and
tokens; --minutes ends the run early. Without options: the embedded dense model, its texts, and the language reference
that every Python carries as the text unlike them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators import awq, gain, grid_weights, hessian, thorough
from qwen_quantize.calibrators.clipped_rounding import clipped_rounding
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics, residual_weight
from qwen_quantize.calibrators.pair_scaling import expand_tied, tie_of
from qwen_quantize.calibrators.range_search import Grid, grid_codes, grid_values, search_grid
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_model_path, heldout_text_path
from qwen_quantize.engine.layer import Layer
from qwen_quantize.engine.linear import ObservedGroup, PlainGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.model import run_attention, run_mlp
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Rounding
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES, TensorSpec
from qwen_quantize.formats.tables import E4M3FN
from qwen_quantize.models.blueprint import RESIDUAL_WRITERS, Half, Stream
from qwen_quantize.models.scale_pairs import scale_pairs
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import calibration_batches, evaluation_windows, load_documents

RESULTS = Path(__file__).resolve().parent / "results" / "constants.json"
LENGTH = 512
TEXTS = ("calibration", "like", "unlike")


@dataclass(frozen=True, slots=True)
class Seen:
    """One stream of one layer. inputs, weights: of each text [tokens, K] and [tokens]; tie: as `tie_of` has it.

    moves: whether factors may move into this stream's linears.
    """

    name: str
    linears: tuple[Tensor, ...]
    inputs: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    moves: bool
    tie: Tensor | None

    def statistics(
        self,
        text: str = "calibration",
        cast: Callable[[Tensor], Tensor] | None = None,
        *,
        crossed: bool = False,
    ) -> InputStatistics:
        features = self.linears[0].shape[1]
        observer = InputObserver(features, cast, (features,), crossed=crossed)
        observer.observe(self.inputs[text], self.weights[text])
        return observer.statistics()

    def error(
        self, text: str, wanted: Tensor, got: Tensor, cast: Callable[[Tensor], Tensor] | None = None
    ) -> float:
        """Squared output error over squared output, the tokens weighed; got: [N, K], meets the cast input."""
        x, weight = self.inputs[text], self.weights[text].unsqueeze(1)
        exact = x @ wanted.T
        lost = exact - (x if cast is None else cast(x)) @ got.T
        return float((lost.square() * weight).sum() / (exact.square() * weight).sum())


@dataclass(frozen=True, slots=True)
class Study:
    """A constant. values: in words, with what solves a stream under each: its linears as they become, in order, each
    as the chip would multiply with it. in_force: the words of the value that the package has."""

    name: str
    in_force: str
    values: Mapping[str, Callable[[Seen], Sequence[Tensor]]]
    cast: Callable[[Tensor], Tensor] | None = None


def observe(reader: ModelReader, texts: Mapping[str, Tensor], layers: Sequence[int]) -> list[Seen]:
    """The streams of some layers as the unquantized model has them; memory holds the inputs of those layers."""
    blueprint = reader.blueprint
    seen: list[Seen] = []
    hidden = {name: reader.embed(windows) for name, windows in texts.items()}
    for index in range(max(layers) + 1):
        layer = reader.read_layer(index)
        for half in Half:
            kept: dict[Stream, dict[str, tuple[Tensor, Tensor]]] = {
                s: {} for s in blueprint.streams(index, half)
            }
            for name in texts:
                groups = dict(layer.groups)
                for stream in kept:
                    groups[stream] = _watched(layer, stream, hidden[name], kept[stream], name)
                watched = Layer(groups, layer.tensors, layer.experts)
                if half is Half.ATTENTION:
                    hidden[name] = run_attention(hidden[name], watched, index, blueprint, reader.rotary)
                else:
                    hidden[name] = run_mlp(hidden[name], watched, index, blueprint)
            pairs = {pair.stream: pair for pair in scale_pairs(blueprint, index, half)}
            for stream, by_text in kept.items():
                group = layer.groups[stream]
                assert isinstance(group, PlainGroup)
                if index in layers:
                    seen.append(
                        Seen(
                            f"{index}.{stream.value}",
                            tuple(torch.split(group.weight, list(group.sizes))),
                            {name: by_text[name][0] for name in texts},
                            {name: by_text[name][1] for name in texts},
                            stream in pairs,
                            tie_of(pairs[stream]) if stream in pairs else None,
                        )
                    )
    return seen


def _watched(
    layer: Layer, stream: Stream, hidden: Tensor, kept: dict[str, tuple[Tensor, Tensor]], name: str
) -> ObservedGroup:
    group = layer.groups[stream]
    assert isinstance(group, PlainGroup)

    def keep(x: Tensor) -> None:
        rows = x.flatten(0, -2)
        weight = torch.ones(rows.shape[0])
        if stream in RESIDUAL_WRITERS:
            weight = residual_weight(hidden.flatten(0, -2), rows, group.weight)
        kept[name] = rows, weight

    return ObservedGroup(group, keep)


def four_bits(group_size: int) -> TensorSpec:
    return replace(SCHEMES["w4a16"].weight, granularity=Granularity.group(group_size))


def rounded(weight: Tensor, spec: TensorSpec, importance: Tensor | None) -> Tensor:
    grid = search_grid(weight, spec, RNE_SATURATE, importance).grid
    return grid_values(grid_codes(weight, spec, RNE_SATURATE, grid), spec, grid)


def compensated(
    seen: Seen,
    spec: TensorSpec,
    damping: float = hessian.GRID_DAMPING,
    floor: float = hessian.GRID_FLOOR,
    sweeps: int = grid_weights.SWEEPS,
    refits: int = grid_weights.REFITS,
    high: tuple[int, int] | None = None,
) -> list[Tensor]:
    """As `solve_compensated`; high: rounds and sweeps of `improve`."""
    factors = hessian.factorize_statistics(seen.statistics(), damping, floor)
    importance = grid_weights.compensated_weight(factors)
    solved = []
    for weight in seen.linears:
        start: Grid = search_grid(weight, spec, RNE_SATURATE, importance).grid
        codes, grid = grid_weights.compensate(weight, start, spec, factors, sweeps=sweeps, refits=refits)
        if high is not None:
            codes, grid = thorough.improve(weight, codes, grid, spec, factors, rounds=high[0], sweeps=high[1])
        solved.append(grid_values(codes, spec, grid))
    return solved


def moved(
    seen: Seen,
    spec: TensorSpec,
    sampled: int | None = awq.SAMPLED_WEIGHTS,
    least_gain: float = awq.LEAST_GAIN,
    floor: float = hessian.GRID_FLOOR,
) -> list[Tensor]:
    """As `awq` has the stream's linears: factors, and rounding on a searched grid."""
    statistics = seen.statistics()
    importance = statistics.weighed_mean_square().float()
    scale = torch.ones(seen.linears[0].shape[1])
    if seen.moves:
        choice = awq.search_awq(
            seen.linears,
            statistics,
            partial(_clipped, spec),
            seen.tie,
            sampled_weights=sampled,
            least_gain=least_gain,
            floor=floor,
        )
        scale = expand_tied(choice.scale, seen.tie)
    return [rounded(weight * scale, spec, importance / scale.square()) / scale for weight in seen.linears]


def _clipped(spec: TensorSpec, weight: Tensor, squares: Tensor) -> Tensor:
    return clipped_rounding(weight, squares, spec, RNE_SATURATE)


def regained(seen: Seen, cast: Callable[[Tensor], Tensor], ridge_tokens: float | None) -> list[Tensor]:
    """Weights with what the cast takes given back, not rounded; ridge_tokens None: by each feature's gain alone."""
    statistics = seen.statistics(cast=cast, crossed=True)
    own = gain.column_gain(statistics)
    assert own is not None
    if ridge_tokens is None:
        return [weight * own for weight in seen.linears]
    (by,) = gain.input_maps(statistics, own, ridge_tokens)
    return [weight @ by for weight in seen.linears]


def _biased_cast(rounding: Rounding) -> Callable[[Tensor], Tensor]:
    rule = CastRule(rounding, RNE_SATURATE.overflow, RNE_SATURATE.subnormals)

    def cast(x: Tensor) -> Tensor:
        return fake_quantize_groups(x, E4M3FN, rule, ScaleRule.RCEIL, x.shape[1])

    return cast


def studies(group_size: int) -> Iterator[Study]:
    spec, eight = four_bits(group_size), SCHEMES["fp8"].weight
    yield Study(
        "awq.SAMPLED_WEIGHTS",
        str(awq.SAMPLED_WEIGHTS),
        {
            str(count or "all"): partial(moved, spec=spec, sampled=count)
            for count in (64 * 576, awq.SAMPLED_WEIGHTS, 400 * 576, None)
        },
    )
    yield Study(
        "awq.LEAST_GAIN",
        str(awq.LEAST_GAIN),
        {
            str(share): partial(moved, spec=spec, least_gain=share)
            for share in sorted({0.0, 0.03, 0.05, 0.1, 1.0, awq.LEAST_GAIN})
        },
    )
    yield Study(
        "hessian.GRID_FLOOR in awq",
        "0.0",
        {str(floor): partial(moved, spec=spec, floor=floor) for floor in (0.0, 0.25, 0.5, 1.0, 2.0)},
    )
    yield Study(
        "hessian.GRID_DAMPING, GRID_FLOOR",
        f"{hessian.GRID_DAMPING}, {hessian.GRID_FLOOR}",
        {
            f"{damping}, {floor}": partial(compensated, spec=spec, damping=damping, floor=floor)
            for damping, floor in (
                (0.01, 0.0),
                (0.05, 0.0),
                (0.2, 0.0),
                (0.05, 0.25),
                (0.05, 0.5),
                (0.05, 1.0),
                (0.2, 0.5),
            )
        },
    )
    yield Study(
        "hessian.DAMPING",
        str(hessian.DAMPING),
        {
            str(damping): partial(compensated, spec=eight, damping=damping, floor=0.0)
            for damping in (0.01, 0.05, 0.2, 0.5, 1.0)
        },
    )
    yield Study(
        "grid_weights.SWEEPS, REFITS",
        f"{grid_weights.SWEEPS}, {grid_weights.REFITS}",
        {
            f"{sweeps}, {refits}": partial(compensated, spec=spec, sweeps=sweeps, refits=refits)
            for sweeps, refits in ((0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (4, 1), (2, 2))
        },
    )
    yield Study(
        "thorough.ROUNDS, SWEEPS",
        f"{thorough.ROUNDS}, {thorough.SWEEPS}",
        {
            f"{rounds}, {sweeps}": partial(compensated, spec=spec, high=(rounds, sweeps))
            for rounds, sweeps in ((0, 0), (1, 4), (2, 4), (3, 1), (3, 4), (3, 8), (5, 4))
        },
    )
    for rounding in (Rounding.RTZ, Rounding.FLOOR):
        cast = _biased_cast(rounding)
        yield Study(
            f"gain.RIDGE_TOKENS after {rounding.value}",
            str(gain.RIDGE_TOKENS),
            {
                "none, gain alone" if ridge is None else str(ridge): partial(
                    regained, cast=cast, ridge_tokens=ridge
                )
                for ridge in (None, 1638.4, 8192.0, 16384.0, 40960.0)
            },
            cast,
        )


@torch.inference_mode()
def measure(study: Study, value: str, seen: Sequence[Seen]) -> dict[str, Any]:
    """One cell. errors: by text the relative error of every linear, in order."""
    errors: dict[str, list[float]] = {name: [] for name in TEXTS}
    seconds = 0.0
    for stream in seen:
        begin = time.process_time()
        solved = study.values[value](stream)
        seconds += time.process_time() - begin
        for weight, got in zip(stream.linears, solved, strict=True):
            for name in TEXTS:
                errors[name].append(stream.error(name, weight, got, study.cast))
    means = {name: math.exp(math.fsum(map(math.log, found)) / len(found)) for name, found in errors.items()}
    return {"constant": study.name, "value": value, "error": means, "seconds": seconds}


def with_ratios(rows: Sequence[Mapping[str, Any]], in_force: Mapping[str, str]) -> list[dict[str, Any]]:
    """Rows with each error over that of the value in force; as ratios of geometric means are means of ratios."""
    found = []
    for row in rows:
        name = row["constant"]
        base = [r for r in rows if r["constant"] == name and r["value"] == in_force.get(name)]
        ratios = {text: row["error"][text] / base[0]["error"][text] for text in TEXTS} if base else {}
        found.append({**row, "in_force": row["value"] == in_force.get(name), "ratio": ratios})
    return found


def line(row: Mapping[str, Any]) -> str:
    mark = "*" if row["in_force"] else " "
    parts = [f"{name} {row['error'][name]:.3e}" for name in TEXTS]
    parts += [f"{name} x{ratio:.3f}" for name, ratio in row["ratio"].items() if name != "calibration"]
    return f"{row['constant']:34} {mark}{row['value']:18} " + "  ".join(parts) + f"  {row['seconds']:.1f} s"


def texts_of(model: Path, dataset: Path, like: Path, tokens: int) -> dict[str, Tensor]:
    tokenizer = source_tokenizer(open_source(model))
    windows = tokens // LENGTH
    unlike = "\n\n".join(text for _, text in sorted(topics.topics.items()))
    return {
        "calibration": calibration_batches(
            load_documents(str(dataset)), tokenizer, windows, LENGTH, 0
        ).tokens,
        "like": evaluation_windows(like.read_text(encoding="utf-8"), tokenizer, LENGTH, tokens).windows,
        "unlike": evaluation_windows(unlike, tokenizer, LENGTH, tokens).windows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--only", nargs="*", help="beginnings of constants' names, such as thorough")
    parser.add_argument("--model", type=Path, default=embedded_model_path())
    parser.add_argument("--dataset", type=Path, default=calibration_text_path())
    parser.add_argument("--like", type=Path, default=heldout_text_path())
    parser.add_argument("--layers", help="numbers with commas; every one where this is left out")
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=math.inf)
    asked = parser.parse_args()
    end = time.monotonic() + 60 * asked.minutes
    reader = ModelReader(open_source(asked.model))
    layers = list(range(reader.blueprint.num_layers))
    if asked.layers is not None:
        layers = sorted({int(number) for number in asked.layers.split(",")})
    about = {
        "model": asked.model.name,
        "layers": layers,
        "tokens": asked.tokens,
        "group_size": asked.group_size,
    }
    kept: list[dict[str, Any]] = (
        json.loads(asked.results.read_text())["rows"] if asked.results.is_file() else []
    )
    others = [row for row in kept if any(row[key] != value for key, value in about.items())]
    rows = [row for row in kept if row not in others]
    every = list(studies(asked.group_size))
    in_force = {study.name: study.in_force for study in every}
    wanted = [it for it in every if not asked.only or any(it.name.startswith(name) for name in asked.only)]
    done = {(row["constant"], row["value"]) for row in rows}
    missing = [
        (study, value) for study in wanted for value in study.values if (study.name, value) not in done
    ]
    if missing:
        with torch.inference_mode():
            seen = observe(reader, texts_of(asked.model, asked.dataset, asked.like, asked.tokens), layers)
    for study, value in missing:
        if time.monotonic() > end:
            break
        rows.append({**about, **measure(study, value, seen)})
        order = {(s.name, v): at for at, (s, v) in enumerate((s, v) for s in every for v in s.values)}
        rows.sort(key=lambda row: order.get((row["constant"], row["value"]), len(order)))
        rows = with_ratios(rows, in_force)
        asked.results.parent.mkdir(parents=True, exist_ok=True)
        asked.results.write_text(json.dumps({"rows": others + rows}, indent=1) + "\n", encoding="utf-8")
        print(f"{study.name} {value}", file=sys.stderr, flush=True)
    rows = with_ratios(rows, in_force)
    if asked.json:
        print(json.dumps({"rows": rows}))
    else:
        for row in rows:
            print(line(row))


if __name__ == "__main__":
    main()
