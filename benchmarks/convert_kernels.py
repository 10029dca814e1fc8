"""Throughput of the data-free conversion kernels, in GB of source per second, and of what stands around them.

Each kernel converts one DeepSeek-R1 expert matrix (2048 x 7168) into a buffer made beforehand; the median of the
repeats is printed, as wall time with all threads and as processor time of one. SHA-256 and a plain copy of the same
bytes are there for comparison.

    python benchmarks/convert_kernels.py [--json] [--block N] [--repeats N] [--threads N]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import time
from collections.abc import Callable

import torch

from qwen_quantize.calibrators.block_convert import SOURCE, quantize_rows, requantize_blocks
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.native import native_status

ROWS, COLUMNS = 2048, 7168


def seconds(function: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    function()
    return clock() - start


def cases(block: int) -> dict[str, tuple[int, Callable[[int], object]]]:
    """Source bytes and what to run with a number of threads, by name."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(ROWS, COLUMNS, generator=generator)
    codes = (normal * 110).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    scale = torch.rand(-(-ROWS // block), -(-COLUMNS // block), generator=generator) * 1e-4 + 1e-4
    weight = normal * 0.02
    out, size = torch.empty_like(codes), (block, block)

    def quantize(dtype: torch.dtype) -> Callable[[int], object]:
        stored = weight.to(dtype)
        return lambda threads: quantize_rows(stored, size, RNE_SATURATE, out=out, threads=threads)

    count = ROWS * COLUMNS
    return {
        "fp8": (
            count,
            lambda threads: requantize_blocks(codes, scale, size, RNE_SATURATE, out=out, threads=threads),
        ),
        "bf16": (2 * count, quantize(torch.bfloat16)),
        "fp16": (2 * count, quantize(torch.float16)),
        "fp32": (4 * count, quantize(torch.float32)),
        "sha256": (count, lambda _: hashlib.sha256(codes.numpy().data).digest()),
        "copy": (count, lambda _: out.copy_(codes)),
    }


def measure(block: int, repeats: int, threads: int) -> dict[str, dict[str, float]]:
    rates = {}
    for name, (nbytes, run) in cases(block).items():
        run(threads)  # compiles, and touches the pages
        wall = [seconds(lambda: run(threads), time.perf_counter) for _ in range(repeats)]  # noqa: B023
        alone = [seconds(lambda: run(1), time.thread_time) for _ in range(repeats)]  # noqa: B023
        rates[name] = {
            "gigabytes_per_second": nbytes / statistics.median(wall) / 1e9,
            "gigabytes_per_processor_second": nbytes / statistics.median(alone) / 1e9,
        }
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--block", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rates = measure(arguments.block, arguments.repeats, arguments.threads)
    status = native_status(SOURCE)
    if arguments.json:
        print(
            json.dumps(
                {"kernels": status, "threads": arguments.threads, "block": arguments.block, "rates": rates}
            )
        )
        return
    print(f"{ROWS} x {COLUMNS}, blocks of {arguments.block}, kernels {status}")
    for name, rate in rates.items():
        wall, alone = rate.values()
        print(
            f"{name:8} {wall:6.2f} GB/s with {arguments.threads} threads, {alone:6.2f} GB per processor second"
        )


if __name__ == "__main__":
    main()
