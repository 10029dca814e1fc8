"""Cost of emulated matrix units, as ratios to torch's own float32 product in the same run.

Each product runs interleaved with the float32 product of the same shape. `ratio` compares the processor time of all
threads, the least of all rounds each: on a shared machine that holds where wall time measures the neighbours. `wall`
is the median of the ratios of wall times. Threads that wait in a spin count as busy, so that --threads 1 tells most.
The right operand is prepared beforehand, as a layer does with its weight; `prepare` is what that costs. The goals:
2.5 for a unit that is plain, 40 for one with a narrow accumulator and promotion.

`--model` runs the linears of the embedded dense model instead, one after the other, as the engine does: without an
emulated chip, and with one whose activations are cast and whose sums are as wide as float32, or narrow.

    python benchmarks/dot.py [--json] [--repeats N] [--threads N] [--units NAME ... | --model]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.embedded import embedded_model_path
from qwen_quantize.engine.compute import compute_for
from qwen_quantize.engine.linear import ChipCompute, LinearGroup, PlainGroup, emulated
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.formats import dot_calls
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.dot import emulated_matmul, prepare_right
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.dot_units import FMA_FP32, PLAIN_FP32, PUBLISHED_UNITS
from qwen_quantize.formats.native import native_status
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import E4M3FN

SHAPES = ((2048, 576, 1536), (512, 256, 640))  # M, K, N
UNITS = {
    unit.name: unit
    for unit in (
        PLAIN_FP32,
        FMA_FP32,
        *(
            PUBLISHED_UNITS[name]
            for name in (
                *("hopper-e4m3fn-promoted", "hopper-e4m3fn", "ada-e4m3fn", "blackwell-e4m3fn", "hopper-fp16"),
                *("hopper-bf16", "a100-fp16", "v100-fp16", "mi100-fp16", "mi250-fp16", "mi300-fp16"),
                "mi300-e4m3fnuz",
            )
        ),
    )
}
# Chips for the embedded model: profile, and what is assumed of it.
MODEL_CHIPS: dict[str, tuple[str, dict[str, str]]] = {
    "sums as wide as float32": ("ascend-950", {}),
    "13 bits, promoted": ("nvidia-h100", {}),
    "13 bits, never promoted": ("nvidia-h100", {"accumulator.promotion_interval": "never"}),
}
GOALS = {
    "fp32-plain": 2.5,
    "hopper-e4m3fn-promoted": 40.0,
    "embedded model: sums as wide as float32": 2.5,
    "embedded model: 13 bits, promoted": 40.0,
}


def seconds(function: Callable[[], object]) -> tuple[float, float]:
    """Processor time of the process, and wall time, of one call."""
    wall, busy = time.perf_counter(), time.process_time()
    function()
    return time.process_time() - busy, time.perf_counter() - wall


def operand(rows: int, columns: int, unit: DotUnit, seed: int) -> torch.Tensor:
    """Normally distributed values of the unit's format."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    assert isinstance(unit.a_format, FloatFormat)
    return x if unit.a_format.bits == 32 else quantize_values(x, unit.a_format, RNE_SATURATE)


def measure(unit: DotUnit, shape: tuple[int, int, int], repeats: int) -> dict[str, float]:
    """Ratios to torch's float32 product: `ratio` and `wall` of the product, `prepare` of preparing b."""
    m, k, n = shape
    a, b = operand(m, k, unit, 1), operand(n, k, unit, 2)
    right = prepare_right(b, unit)
    runs: tuple[Callable[[], object], ...] = (
        lambda: a @ b.T,
        lambda: emulated_matmul(a, right, unit),
        lambda: prepare_right(b, unit),
    )
    rounds = [[seconds(run) for run in runs] for _ in range(2 + repeats)][
        2:
    ]  # two to compile and touch pages
    plain, emulated, prepare = (min(row[i][0] for row in rounds) for i in range(3))
    wall = statistics.median(row[1][1] / row[0][1] for row in rounds)
    return {"ratio": emulated / plain, "wall": wall, "prepare": prepare / plain}


def measure_model(repeats: int, tokens: int = 1024) -> list[dict[str, object]]:
    """Ratios of the linears of the embedded model under three chips to its float32 linears."""
    reader = ModelReader(open_source(embedded_model_path()))
    layers = [reader.read_layer(index) for index in range(reader.blueprint.num_layers)]
    plain = [group for layer in layers for group in layer.groups.values()]
    inputs = {}
    chips = {"none": None, **{name: chip_of(chip, assume) for name, (chip, assume) in MODEL_CHIPS.items()}}
    groups: dict[str, list[LinearGroup]] = {}
    for name, compute in chips.items():
        groups[name] = []
        for group in plain:
            assert isinstance(group, PlainGroup)
            weight = quantize_values(group.weight, E4M3FN, RNE_SATURATE)
            chosen = PlainGroup(weight, group.bias, group.sizes)
            inputs[weight.shape[1]] = torch.randn(
                tokens, weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1])
            )
            groups[name].append(chosen if compute is None else emulated(chosen, compute))

    def run(name: str) -> None:
        for group, source in zip(groups[name], plain, strict=True):
            assert isinstance(source, PlainGroup)
            group(inputs[source.weight.shape[1]])

    rounds = [{name: seconds(partial(run, name)) for name in chips} for _ in range(1 + repeats)][1:]
    base = min(row["none"][0] for row in rounds)
    return [
        {
            "unit": f"embedded model: {name}",
            "shape": [tokens],
            "ratio": min(row[name][0] for row in rounds) / base,
            "wall": statistics.median(row[name][1] / row["none"][1] for row in rounds),
            "prepare": 0.0,
        }
        for name in MODEL_CHIPS
    ]


def chip_of(chip: str, assume: dict[str, str]) -> ChipCompute:
    """How a chip runs linears with groups of 128."""
    scheme = SCHEMES["ue8m0"]
    return compute_for(scheme, resolve_arithmetic(load_profile(chip), scheme, assume))


def main() -> int:
    """Print the ratios; exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    parser.add_argument("--model", action="store_true", help="the embedded model's linears instead")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results: list[dict[str, object]] = [
        {"unit": name, "shape": list(shape), **measure(UNITS[name], shape, arguments.repeats)}
        for shape in SHAPES
        for name in arguments.units
        if not arguments.model
    ]
    if arguments.model:
        results = measure_model(arguments.repeats)
    met = all(float(str(row["ratio"])) <= GOALS.get(str(row["unit"]), float("inf")) for row in results)
    kernels = native_status(dot_calls.SOURCE, libraries=("-lm",))
    if arguments.json:
        document = {
            "kernels": kernels,
            "threads": arguments.threads,
            "rows": results,
            "goals": GOALS,
            "met": met,
        }
        print(json.dumps(document))
    else:
        print(f"kernels: {kernels}; {arguments.threads} threads; ratio to torch's float32 product")
        for row in results:
            goal = f"  (goal {GOALS[str(row['unit'])]})" if row["unit"] in GOALS else ""
            times = f"{row['ratio']:7.2f}  wall {row['wall']:7.2f}  prepare {row['prepare']:6.2f}"
            print(f"{times}  {row['shape']}  {row['unit']}{goal}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
