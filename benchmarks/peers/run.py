"""Peers side by side: the same model, calibration windows, texts and machine; time, memory, size, perplexity, KL.

    python benchmarks/peers/run.py [--json] [--only WORD]... [--slow] [--kept] [--trial]
                                   [--folder build/peers]

Each row runs in a process of its own, peers in a virtual environment of their own, and leaves a JSON in FOLDER/rows;
what is there is not run again. A row that cannot run says why. `seconds` is time on the clock, `cpu_seconds` that of
all threads together, which other work on the machine changes less; ours hold the whole process, a peer's only its
call that quantizes. The weights that a peer made are read as float32 and measured by this package's engine,
activations cast alike for all. --json prints rows and summary, for benchmarks/results/peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from qwen_quantize import __version__
from qwen_quantize.errors import UserError

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the root, from which its neighbours are imported

from benchmarks.peers.environments import EnvironmentRefusal, python_of
from benchmarks.peers.evaluation import Evaluator, evaluator, linear_bytes, read_back
from benchmarks.peers.inputs import LENGTH, ROOT, SEED, Inputs, prepare
from benchmarks.peers.rows import OURS, ROWS, Row
from benchmarks.peers.summary import summary

QUANTIZERS = Path(__file__).resolve().parent / "quantizers"


class NotRun(RuntimeError):
    """A row's tool cannot do it here; says why."""


def quantize_with_peer(row: Row, inputs: Inputs, place: Path, folder: Path, limit: float) -> dict[str, Any]:
    """The peer's own record; the model as float32 is in place/weights, or only in its own form in place/quantized."""
    try:
        python = python_of(row.tool, folder / "env")
    except EnvironmentRefusal as refusal:
        raise NotRun(str(refusal)) from refusal
    command = [str(python), str(QUANTIZERS / f"with_{row.tool}.py"), "--model", str(inputs.model)]
    command += ["--calibration", str(inputs.calibration), "--output", str(place), "--method", row.method]
    _call([*command, *row.arguments], place, limit)
    record: dict[str, Any] = json.loads((place / "record.json").read_text())
    if "error" in record:
        raise NotRun(record["error"])
    if (place / "quantized").is_dir():
        record["linear_bytes"] = linear_bytes(place / "quantized")
    return {
        **record,
        "parts": record["seconds"],
        "seconds": record["seconds"]["quantize"],
        "cpu_seconds": record["cpu_seconds"]["quantize"],
    }


def quantize_with_ours(row: Row, inputs: Inputs, place: Path, device: str, limit: float) -> dict[str, Any]:
    """The command line's record; its seconds count reading the model and writing the result too."""
    command = [sys.executable, "-m", "qwen_quantize", "--model-path", str(inputs.model), "--device", device]
    command += ["--output-path", str(place / "weights"), "--json", "--no-validate", "--overwrite"]
    command += ["--allow-unsupported", *row.arguments]
    if row.calibrated:
        command += ["--calibration-dataset", str(inputs.dataset), "--seed", str(SEED)]
        command += ["--calibration-samples", str(inputs.samples), "--calibration-length", str(LENGTH)]
    before = _cpu_seconds_of_children()
    said = _call(command, place, limit)
    cpu_seconds = _cpu_seconds_of_children() - before
    try:
        record = json.loads(said)
    except ValueError:
        raise NotRun(_last_words(place)) from None
    if "seconds" not in record:
        raise NotRun(str(record.get("error", record))[:300])
    return {
        "version": __version__,
        "torch": torch.__version__,
        "seconds": record["seconds"],
        "cpu_seconds": cpu_seconds,
        "peak_memory_bytes": record["peak_memory_bytes"],
        "output_bytes": sum(path.stat().st_size for path in (place / "weights").glob("*.safetensors")),
        "linear_bytes": linear_bytes(place / "weights"),
    }


def _cpu_seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _call(command: Sequence[str], place: Path, limit: float) -> str:
    """Its standard output; words go to place/log.txt."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if command[0] != sys.executable:  # a peer's environment must not see this repository
        del environment["PYTHONPATH"]
    with (place / "log.txt").open("w") as log:
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
                timeout=limit,
                env=environment,
            )
        except subprocess.TimeoutExpired:
            raise NotRun(f"took more than {limit:.0f} seconds") from None
    if done.returncode != 0 and not (place / "record.json").is_file():
        raise NotRun(_last_words(place) if not done.stdout.startswith("{") else done.stdout.strip()[:300])
    return done.stdout


def _last_words(place: Path) -> str:
    lines = (place / "log.txt").read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it ended without a word"


def run_row(row: Row, inputs: Inputs, options: argparse.Namespace, measure: Evaluator) -> dict[str, Any]:
    """Quantize and measure; `not_run` says why where that cannot be."""
    place = options.folder / "work" / row.folder
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    about = {"task": row.task.name, "tool": row.tool, "method": row.method, "calibrated": row.calibrated}
    try:
        if row.tool == OURS:
            made = quantize_with_ours(row, inputs, place, options.device, options.limit)
        else:
            made = quantize_with_peer(row, inputs, place, options.folder, options.limit)
    except NotRun as refusal:
        return {**about, "not_run": str(refusal)}
    decoded = place / "weights" if (place / "weights").is_dir() else place / "quantized"
    with torch.inference_mode():
        try:
            texts = measure.score(decoded, row.task.cast)
        except UserError as refusal:
            return {**about, "not_run": f"its checkpoint cannot be read here: {refusal}"}
        if (place / "quantized").is_dir() and decoded.name == "weights":
            made["read_back"] = _read_back(place)
    if not options.keep:
        shutil.rmtree(place)
    return {**about, **made, "calibrated": row.calibrated, "texts": texts}


def _read_back(place: Path) -> dict[str, Any]:
    try:
        return read_back(place / "quantized", place / "weights")
    except UserError as refusal:
        return {"refused": str(refusal)}


def all_rows(rows: Sequence[Row], inputs: Inputs, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The record of each row, from its file where that is of the same inputs and did run."""
    kept = options.folder / ("rows-trial" if options.trial else "rows")
    kept.mkdir(parents=True, exist_ok=True)
    digest, measure, records = inputs.sha256(), None, []
    for row in rows:
        path = kept / f"{row.folder}.json"
        record = json.loads(path.read_text()) if path.is_file() else {}
        fresh = record.get("inputs") == digest and not ("not_run" in record and options.again)
        if not fresh:
            if measure is None:
                measure = evaluator(inputs.model, inputs.windows)
            record = {**run_row(row, inputs, options, measure), "inputs": digest}
            path.write_text(json.dumps(record, indent=1) + "\n")
        record["calibrated"] = row.calibrated  # of the row, not measured
        print(_line(record), file=sys.stderr, flush=True)
        records.append(record)
    return records


def _line(record: dict[str, Any]) -> str:
    name = f"{record['task']:22} {record['tool']:14} {record['method']:16}"
    if "not_run" in record:
        return f"{name} not run: {record['not_run']}"
    cost = f"{record['seconds']:7.1f} s {record['peak_memory_bytes'] / 2**20:6.0f} MiB"
    size = record.get("linear_bytes")
    size_text = "        -" if size is None else f"{size / 2**20:5.1f} MiB"
    texts = "  ".join(
        f"{name}: {text['perplexity']:.3f} ({100 * text['rise']:+.2f} ± {100 * text['rise_standard_error']:.2f} %), "
        f"KL {text['kl_mean']:.4f}"
        for name, text in record["texts"].items()
    )
    return f"{name} {cost} {size_text}  {texts}"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--json", action="store_true", help="rows and summary on stdout")
    parser.add_argument(
        "--folder", type=Path, default=Path("build/peers"), help="environments, rows, weights"
    )
    parser.add_argument(
        "--real-model", type=Path, default=Path("build/real-model"), help="of tools/real_model.py"
    )
    parser.add_argument("--tokens", type=int, default=16384, help="of each text")
    parser.add_argument(
        "--only", action="append", default=[], help="rows whose name has this in it; repeatable"
    )
    parser.add_argument("--device", default="cpu", help="the chip that our rows are made for")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for one row")
    parser.add_argument("--slow", action="store_true", help="the rows that take many minutes or hours, too")
    parser.add_argument("--again", action="store_true", help="try again what could not run before")
    parser.add_argument("--kept", action="store_true", help="only rows that were measured before")
    parser.add_argument("--keep", action="store_true", help="keep the weights that the rows made")
    parser.add_argument(
        "--trial", action="store_true", help="two layers and four windows: do the scripts work?"
    )
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    inputs = prepare(options.real_model, options.folder, options.tokens, options.trial)
    wanted = [row for row in ROWS if options.slow or options.kept or not row.slow]
    wanted = [row for row in wanted if all(word in row.name for word in options.only)]
    if options.kept:
        wanted = [row for row in wanted if (options.folder / "rows" / f"{row.folder}.json").is_file()]
    records = all_rows(wanted, inputs, options)
    found = summary(records)
    if options.json:
        machine = {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "platform": platform.machine(),
        }
        about = {
            "machine": machine,
            "model": "SmolLM2-135M-Instruct (from a Q4_1 GGUF: its weights had been 4-bit before)",
            "calibration_tokens": inputs.samples * LENGTH,
            "texts": {
                "like": "another novel by the same author",
                "unlike": "the language reference of Python",
            },
            "python": platform.python_version(),
        }
        print(json.dumps({**about, "rows": records, "summary": found}, indent=1))
    for line in found["lines"]:
        print(f"{'holds' if line['holds'] else 'FAILS'}: {line['line']}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
