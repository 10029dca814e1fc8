"""What every peer's script does alike: its arguments, its clock, and the files that it leaves.

Runs inside the peer's own environment, so nothing of this repository is imported here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(slots=True)
class Job:
    """What to do, and how long its parts took.

    output gets `weights` (the model with its quantized weights as float32) and, where the tool writes a
    checkpoint of its own, `quantized`.
    """

    model: Path
    calibration: Path
    output: Path
    method: str
    group_size: int
    symmetric: bool
    seconds: dict[str, float] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def quantized(self) -> Path:
        return self.output / "quantized"

    def windows(self) -> Tensor:
        """int64 [samples, length]"""
        ids: Tensor = load_file(self.calibration)["input_ids"]
        return ids

    @contextmanager
    def clock(self, part: str) -> Iterator[None]:
        """Adds the time of the block to seconds[part], and that of all its threads to cpu_seconds[part]."""
        begin, cpu_begin = time.perf_counter(), time.process_time()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
        self.cpu_seconds[part] = self.cpu_seconds.get(part, 0.0) + time.process_time() - cpu_begin


def peak_memory_bytes() -> int:
    """The largest resident size of this process so far, which Linux calls VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def write_weights(job: Job, state: Mapping[str, Tensor]) -> None:
    """A folder like the model's, with these tensors as float32 under the model's own names."""
    folder = job.output / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    with safe_open(job.model / "model.safetensors", "pt") as original:
        names = list(original.keys())
    absent = sorted(set(names) - set(state))
    if absent:
        raise RuntimeError(f"the quantized model lacks {len(absent)} tensors, the first is {absent[0]}")
    kept = {name: state[name].detach().to(torch.float32).contiguous().clone() for name in names}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    for path in job.model.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja"):
            shutil.copyfile(path, folder / path.name)


def run(package: str, quantize: Callable[[Job], dict[str, Any]]) -> None:
    """Do the job of the command line and write record.json, also when the tool fails: then it holds the error.

    quantize returns what else the record is to say, at least `peak_memory_bytes`, taken right after quantizing.
    """
    parser = argparse.ArgumentParser()
    for name in ("model", "calibration", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--asymmetric", action="store_true")
    options = parser.parse_args()
    job = Job(
        options.model.resolve(),
        options.calibration.resolve(),
        options.output.resolve(),
        options.method,
        options.group_size,
        not options.asymmetric,
    )
    job.output.mkdir(parents=True, exist_ok=True)
    os.chdir(job.output)  # some tools write logs where they stand
    record: dict[str, Any] = {"package": package, "version": version(package), "torch": version("torch")}
    begin = time.perf_counter()
    try:
        record |= quantize(job)
        if job.quantized.is_dir():
            record["output_bytes"] = sum(p.stat().st_size for p in job.quantized.glob("*.safetensors"))
    except Exception as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{'/'.join(Path(where.filename).parts[-2:])}:{where.lineno}"
        record["error"] = f"{type(error).__name__} at {place}: {' '.join(str(error).split())[:300]}"
    record |= {"seconds": job.seconds, "cpu_seconds": job.cpu_seconds}
    record["total_seconds"] = time.perf_counter() - begin
    (job.output / "record.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if "error" in record else 0)
