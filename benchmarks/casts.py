"""Throughput of the casts, as ratios to torch's own float32 -> float8_e4m3fn conversion in the same run.

Each cast runs interleaved with the conversion it is compared to, and the median of the ratios is printed: on
a shared machine a ratio holds where a throughput does not. `encode` and `decode` allocate their output, as
torch does; the others write into one made beforehand.

    python benchmarks/casts.py [--json] [--elements N] [--repeats N] [--threads N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qwen_quantize.formats import kernel_calls
from qwen_quantize.formats.block_kernels import block_squared_error, quantize_blocks
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.native import native_status
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.tables import E4M3FN, HIF8

COLUMNS = 4096


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def cases(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The casts to measure, by name."""
    out = torch.empty_like(x)
    codes = encode(x, E4M3FN, RNE_SATURATE)
    generator = torch.Generator().manual_seed(0)
    measured: dict[str, Callable[[], object]] = {}
    for rounding in Rounding:
        fmt = HIF8 if rounding is Rounding.HYBRID else E4M3FN
        rule = CastRule(rounding, Overflow.SATURATE, Subnormals.KEEP)
        measured[f"encode {fmt.name} {rounding}"] = lambda f=fmt, r=rule: encode(x, f, r, generator=generator)  # type: ignore[misc]
        measured[f"quantize {fmt.name} {rounding}"] = lambda f=fmt, r=rule: quantize_values(  # type: ignore[misc]
            x, f, r, generator=generator, out=out
        )
    rna = CastRule(Rounding.RNA, Overflow.SATURATE, Subnormals.KEEP)
    measured["encode hif8 rna"] = lambda: encode(x, HIF8, rna)
    measured["decode e4m3fn"] = lambda: decode(codes, E4M3FN)
    for size in (32, 128):
        measured[f"fake_quantize_groups e4m3fn group {size}"] = lambda s=size: fake_quantize_groups(  # type: ignore[misc]
            x, E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, s, out
        )
    rows, columns = -(-x.shape[0] // 128), -(-x.shape[1] // 128)
    exponents = torch.zeros(2, rows, columns, dtype=torch.int32)
    measured["quantize_blocks e4m3fn 128x128"] = lambda: quantize_blocks(
        x, exponents[0], E4M3FN, RNE_SATURATE, 128, 128
    )
    measured["block_squared_error e4m3fn 128x128, 2 candidates"] = lambda: block_squared_error(
        x, exponents, E4M3FN, RNE_SATURATE, 128, 128
    )
    return measured


def measure(elements: int, repeats: int) -> dict[str, float]:
    """Ratio of torch's time to each cast's time: above 1 is faster than torch."""
    x = torch.randn(max(elements // COLUMNS, 1), COLUMNS, generator=torch.Generator().manual_seed(1)) * 4
    ratios: dict[str, float] = {}
    for name, function in cases(x).items():
        # The first three rounds compile, touch the outputs' pages and wake the clocks.
        pairs = [(seconds(lambda: x.to(torch.float8_e4m3fn)), seconds(function)) for _ in range(3 + repeats)]
        ratios[name] = statistics.median(theirs / ours for theirs, ours in pairs[3:])
    return ratios


def main() -> int:
    """Print the ratios; exit code 1 if a cast is slower than its goal."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ratios = measure(arguments.elements, arguments.repeats)
    goals = {
        name: 0.6 if name == "encode e4m3fn rne" else 0.25
        for name in ratios
        if name.startswith("encode e4m3fn")
    }
    met = all(ratios[name] >= goal for name, goal in goals.items())
    kernels = native_status(Path(kernel_calls.SOURCE))
    if arguments.json:
        print(
            json.dumps(
                {
                    "kernels": kernels,
                    "threads": arguments.threads,
                    "ratios": ratios,
                    "goals": goals,
                    "met": met,
                }
            )
        )
    else:
        print(f"kernels: {kernels}; {arguments.threads} threads; ratio to torch's cast to float8_e4m3fn")
        for name, ratio in ratios.items():
            print(f"{ratio:6.2f}  {name}" + (f"  (goal {goals[name]})" if name in goals else ""))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
