"""What a second chip costs once the statistics are collected, beside the first run.

    python benchmarks/second_chip.py [--json] [--model FOLDER] [--dataset calib.jsonl] [--samples 32 --samples 128]
        [--length 512] [--group-size 64] [--method awq ...] [--first ascend-910b] [--second cambricon-mlu370]

Each step is a run of the command line in a process of its own: text is collected once, then every method compiles for
both chips. `share` is the second compilation's processor time over that of collecting and the first compilation
together, start of the interpreter included; other work on the machine changes it little. A text of more tokens takes
longer to collect, and no longer to compile. Without options: the embedded model and its text, group 32.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from qwen_quantize.embedded import calibration_text_path, embedded_model_path

ROOT = Path(__file__).resolve().parents[1]
GROUPED = ("rtn", "gptq", "awq", "awq_v2", "w4a8")


def timed(arguments: list[str]) -> dict[str, float]:
    """{seconds, cpu_seconds} of the command with these arguments; CalledProcessError with what it said if it fails."""
    began, before = time.perf_counter(), _cpu_seconds()
    command = [sys.executable, "-m", "qwen_quantize", *arguments, "--json", "--overwrite"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        done.check_returncode()
    return {"seconds": time.perf_counter() - began, "cpu_seconds": _cpu_seconds() - before}


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(options: argparse.Namespace, samples: int, work: Path) -> list[dict[str, Any]]:
    """One row for each method."""
    model, statistics = ["--model-path", str(options.model)], work / f"statistics-{samples}"
    text = ["--calibration-dataset", str(options.dataset), "--calibration-samples", str(samples)]
    collected = timed(
        [*model, *text, "--calibration-length", str(options.length), "--collect", str(statistics)]
    )
    rows = []
    for method in options.method:
        compiled = []
        for device in (options.first, options.second):
            arguments = [
                *model,
                "--from-statistics",
                str(statistics),
                "--quant-method",
                method,
                "--device",
                device,
            ]
            arguments += ["--output-path", str(work / "out"), "--no-validate", "--allow-unsupported"]
            if method in GROUPED:
                arguments += ["--group-size", str(options.group_size)]
            compiled.append(timed(arguments))
        first = collected["cpu_seconds"] + compiled[0]["cpu_seconds"]
        row = {
            "method": method,
            "tokens": samples * options.length,
            "collect": collected,
            "first": compiled[0],
            "second": compiled[1],
            "share": compiled[1]["cpu_seconds"] / first,
        }
        print(f"{row['tokens']:7} tokens  {method:8} {row['share']:.3f}", file=sys.stderr, flush=True)
        rows.append(row)
    return rows


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", action="store_true", help="rows on stdout")
    parser.add_argument("--model", type=Path, default=embedded_model_path())
    parser.add_argument("--dataset", type=Path, default=calibration_text_path())
    parser.add_argument("--samples", type=int, action="append", help="windows of text; repeatable")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--method", action="append", help="repeatable")
    parser.add_argument("--first", default="ascend-910b")
    parser.add_argument("--second", default="cambricon-mlu370")
    options = parser.parse_args()
    options.method = options.method or ["awq", "gptq"]
    rows = []
    with tempfile.TemporaryDirectory(prefix="second-chip-") as work:
        for samples in options.samples or [32]:
            rows += measure(options, samples, Path(work))
    if options.json:
        chips = {"first": options.first, "second": options.second}
        print(json.dumps({"model": str(options.model.name), "chips": chips, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
