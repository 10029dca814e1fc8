"""What `ue8m0` costs on SmolLM2-135M-Instruct: perplexity, KL and agreement on held-out prose, time and memory.

    make real-model
    python benchmarks/real_model.py [--folder build/real-model] [--tokens 20480] [--output FILE]

The model comes as a Q4_1 GGUF: its weights had been 4-bit before. The calibrated checkpoint is made by the
command line in a process of its own, whose time and peak memory are recorded. Writes
benchmarks/results/real_model.json, from which `tools/readme_tables.py` makes the table of the README.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.session import ChipQuestion, folder_chip
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import evaluation_windows, load_documents

RESULTS = Path(__file__).resolve().parent / "results" / "real_model.json"
DEVICE = "ascend"


def quantize(model: Path, output: Path, dataset: Path | None, *more: str) -> dict[str, Any]:
    """Run the command line and return its JSON record."""
    command = [
        sys.executable,
        "-m",
        "qwen_quantize",
        "--model-path",
        str(model),
        "--output-path",
        str(output),
    ]
    command += ["--device", DEVICE, "--quant-method", "ue8m0", "--no-validate", "--json", *more]
    if dataset is not None:
        command += ["--calibration-dataset", str(dataset)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path("build/real-model"))
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    (model,) = arguments.folder.glob("*.gguf")
    dataset, text = arguments.folder / "calib.jsonl", arguments.folder / "heldout.txt"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        plain, calibrated = Path(work) / "plain", Path(work) / "calibrated"
        quantize(model, plain, None)
        run = quantize(model, calibrated, dataset)
        large = quantize(model, Path(work) / "large", dataset, "--calibration-samples", "64")
        rows, windows = measure_rows(model, plain, calibrated, text, arguments.tokens)
        calibration = json.loads((calibrated / "qwen_quantize.json").read_text())["calibration"]
    record = {
        "machine": {
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "platform": platform.machine(),
        },
        "model": "SmolLM2-135M-Instruct (from a Q4_1 GGUF: its weights had been 4-bit before)",
        "device": DEVICE,
        "text": f"the opening of a novel that calibration never saw, {windows} windows of 2048 tokens",
        "tokens": rows[0]["tokens"],
        "calibration_tokens": calibration["tokens"],
        "quantize_seconds": run["seconds"],
        "quantize_peak_memory_bytes": run["peak_memory_bytes"],
        "quantize_64x512_seconds": large["seconds"],
        "quantize_64x512_peak_memory_bytes": large["peak_memory_bytes"],
        "rows": rows,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def measure_rows(
    model: Path, plain: Path, calibrated: Path, text: Path, tokens: int
) -> tuple[list[dict[str, Any]], int]:
    """One row for each combination of weights and activations, all on the same windows."""
    source = open_source(model)
    windows = evaluation_windows(load_documents(text), source_tokenizer(source), 2048, tokens).windows
    readers = {
        name: ModelReader(open_source(path)) for name, path in (("plain", plain), ("full", calibrated))
    }
    chip = folder_chip(ChipQuestion(DEVICE), None, readers["plain"]).compute
    reference = ModelReader(source)
    candidates = {
        "weights rounded, no calibration data; activations untouched": StreamedModel(readers["plain"]),
        "weights calibrated; activations untouched": StreamedModel(readers["full"]),
        "weights untouched; activations cast by the chip": StreamedModel(
            ModelReader(source, readers["full"]), chip
        ),
        "weights rounded, no calibration data; activations cast": StreamedModel(readers["plain"], chip),
        "weights calibrated; activations cast (the checkpoint as served)": StreamedModel(
            readers["full"], chip
        ),
    }
    rows: list[dict[str, Any]] = []
    for name, candidate in candidates.items():
        found = evaluate(candidate, windows, StreamedModel(reference))
        print(f"{name}: rise {found.rise}, KL {found.kl_mean}", file=sys.stderr, flush=True)
        rows.append(
            {
                "name": name,
                "tokens": found.tokens,
                "perplexity": found.perplexity,
                "reference_perplexity": found.reference_perplexity,
                "rise": found.rise,
                "rise_standard_error": found.rise_standard_error,
                "kl_mean": found.kl_mean,
                "kl_p99": found.kl_p99,
                "top1_agreement": found.top1_agreement,
            }
        )
    return rows, windows.shape[0]


if __name__ == "__main__":
    main()
