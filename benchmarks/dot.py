"""Cost of emulated matrix units, as ratios to torch's own float32 product in the same run.

Each product runs interleaved with the float32 product of the same shape. `ratio` compares the processor time of all
threads, the least of all rounds each: on a shared machine that holds where wall time measures the neighbours. `wall`
is the median of the ratios of wall times. Threads that wait in a spin count as busy, so that --threads 1 tells most.
The right operand is prepared beforehand, as a layer does with its weight; `prepare` is what that costs. The goals:
2.5 for a unit that is plain, 40 for one with a narrow accumulator and promotion.

    python benchmarks/dot.py [--json] [--repeats N] [--threads N] [--units NAME ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from qwen_quantize.formats import dot_calls
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.dot import emulated_matmul, prepare_right
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.dot_units import FMA_FP32, PLAIN_FP32, PUBLISHED_UNITS
from qwen_quantize.formats.native import native_status
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import FloatFormat

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
GOALS = {"fp32-plain": 2.5, "hopper-e4m3fn-promoted": 40.0}


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


def main() -> int:
    """Print the ratios; exit code 1 if a goal is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--units", nargs="+", choices=UNITS, default=list(UNITS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = [
        {"unit": name, "shape": list(shape), **measure(UNITS[name], shape, arguments.repeats)}
        for shape in SHAPES
        for name in arguments.units
    ]
    met = all(row["ratio"] <= GOALS.get(str(row["unit"]), float("inf")) for row in results)
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
