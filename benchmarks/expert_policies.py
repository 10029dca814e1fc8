"""What becomes of experts that calibration does not reach: three policies, measured on held-out text.

    python benchmarks/expert_policies.py [--json] [--tokens 20480] [--seeds 3] [--starved 0.25]

The embedded mixture of experts is calibrated after its router was kept, in the calibration copy alone, from
sending any token to a quarter of each layer's experts. The calibrated weights are then judged with the
untouched router, so that the starved experts do serve. Prints the paired rise of perplexity and the KL
divergence for each policy, weights only and as the chip computes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_moe_path, heldout_text_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import evaluation_windows, load_documents

POLICIES = ("shrink", "forced", "round")
UNREACHABLE = -1e4  # added to the correction bias: below every score, so never among the chosen


def starve(source: Path, target: Path, share: float, seed: int) -> dict[str, torch.Tensor]:
    """Copy a model with `share` of each layer's experts out of the router's reach; returns the true biases."""
    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    kept = {}
    for name, bias in state.items():
        if name.endswith("e_score_correction_bias"):
            kept[name] = bias
            order = torch.randperm(bias.numel(), generator=torch.Generator().manual_seed(seed))
            starved = bias.clone()
            starved[order[: round(share * bias.numel())]] = UNREACHABLE
            state[name] = starved
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return kept


def quantize(model: Path, output: Path, policy: str, seed: int) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "qwen_quantize", "--json", "--quiet", "--no-validate", "--device", "ascend",
        "--model-path", str(model), "--output-path", str(output), "--seed", str(seed),
        "--calibration-dataset", str(calibration_text_path()), "--expert-policy", policy,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def restore(folder: Path, biases: dict[str, torch.Tensor]) -> None:
    """Give the router its true biases back."""
    state = load_file(folder / "model.safetensors")
    state.update(biases)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--starved", type=float, default=0.25, help="share of experts without tokens")
    options = parser.parse_args()
    source = embedded_moe_path()
    reference = ModelReader(open_source(source))
    documents = load_documents(str(heldout_text_path()))
    windows = evaluation_windows(documents, source_tokenizer(reference.source), 512, options.tokens).windows
    rows = []
    for seed in range(options.seeds):
        for policy in POLICIES:
            with tempfile.TemporaryDirectory() as folder:
                model, output = Path(folder) / "model", Path(folder) / "out"
                biases = starve(source, model, options.starved, seed)
                quantize(model, output, policy, seed)
                restore(output, biases)
                written = StreamedModel(ModelReader(open_source(output)))
                found = evaluate(written, windows, StreamedModel(reference))
            rows.append(
                {
                    "seed": seed,
                    "policy": policy,
                    "rise": found.rise,
                    "rise_standard_error": found.rise_standard_error,
                    "kl_mean": found.kl_mean,
                    "router_agreement": found.router_agreement,
                }
            )
            print(json.dumps(rows[-1]), file=sys.stderr)
    means = {
        policy: {
            key: sum(row[key] for row in rows if row["policy"] == policy) / options.seeds
            for key in ("rise", "kl_mean")
        }
        for policy in POLICIES
    }
    record = {"tokens": windows.numel(), "starved": options.starved, "rows": rows, "means": means}
    if options.json:
        print(json.dumps(record, indent=1))
        return
    for policy, mean in means.items():
        print(f"{policy:7} rise {mean['rise']:+.4%}, KL {mean['kl_mean']:.6f}")


if __name__ == "__main__":
    main()
