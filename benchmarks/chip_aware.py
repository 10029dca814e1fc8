"""Whether calibrating for the chip's own arithmetic pays: chip-aware against plain, under five arithmetics.

    python benchmarks/chip_aware.py [--json] [--models embedded:dense,embedded:moe,FILE] [--seeds 3] [--tokens 8192]

`ue8m0` is calibrated twice from the same text: plain, for casts to nearest and float32 sums, and chip-aware, for
the chip as it is. Both results then run on that chip. The chip is the fictitious `example`, with casts that cut off
(rtz) or round down (floor), with sums that keep 13 or 8 bits and never leave their register, and as it is (rne),
where chip-aware and plain are the same. Thirteen bits lose so much less than rounding to E4M3 does that hardly
anything is there to win; with eight, sums shrink visibly. A seed chooses the passages of calibration text. Each
cell is a paired difference of token losses, chip-aware minus plain, in nats, with its standard error over windows;
below zero chip-aware is better. Writes benchmarks/results/chip_aware.json after every cell and goes on from there
when it is started again; a cell that was measured on other tokens is measured anew.

A model is `embedded:dense`, `embedded:moe` or a path. The embedded ones use the shipped texts, any other model
those of --cache (calib.jsonl, heldout.txt), which `make real-model` fetches.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_by_name, heldout_text_path
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.perplexity import paired_rise, perplexity, rows_to_score, targets_of, token_nll
from qwen_quantize.pipeline.plan import Plan, make_plan
from qwen_quantize.pipeline.recipe import Output, Recipe
from qwen_quantize.pipeline.run import quantize, source_tokenizer
from qwen_quantize.pipeline.texts import evaluation_windows, load_documents

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "chip_aware.json"
SMOLLM = "SmolLM2-135M-Instruct.Q4_1.gguf"
WINDOW = 512
DEVICE = "example@1.2"
# What is assumed of the chip, beside its profile, in each arithmetic.
ARITHMETICS: Mapping[str, Mapping[str, str]] = {
    "rne": {},
    "rtz": {"cast.rounding": "rtz"},
    "floor": {"cast.rounding": "floor"},
    "13-bit": {"accumulator.fraction_bits": "13"},
    "8-bit": {"accumulator.fraction_bits": "8"},
}
_ROWS = 256  # predictions whose probabilities are held together


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its texts; windows: [n, T] int64."""

    name: str
    path: Path
    dataset: Path
    windows: Tensor


def case_of(name: str, cache: Path, tokens: int) -> Case:
    embedded = embedded_by_name(name)
    path = Path(name) if embedded is None else embedded
    dataset = cache / "calib.jsonl" if embedded is None else calibration_text_path()
    text = cache / "heldout.txt" if embedded is None else heldout_text_path()
    tokenizer = source_tokenizer(open_source(path))
    windows = evaluation_windows(load_documents(str(text)), tokenizer, WINDOW, tokens).windows
    return Case(path.name if embedded is None else name, path, dataset, windows)


def plan_for(case: Case, assume: Mapping[str, str], seed: int, samples: int) -> Plan:
    recipe = Recipe(
        model_path=str(case.path),
        device=DEVICE,
        method="ue8m0",
        dataset=str(case.dataset),
        samples=samples,
        seed=seed,
        assume=tuple(sorted(assume.items())),
    )
    return make_plan(recipe, open_source(case.path))


def calibrated(case: Case, plan: Plan, output: Path) -> None:
    source = open_source(case.path)
    quantize(plan, source, ModelReader(source), Output(output), lambda *_: None).folder.finish()


def final_states(model: Path, chip: ChipCompute | None, windows: Tensor) -> tuple[StreamedModel, Tensor]:
    """(the model, its head open; what the head reads for every prediction of the windows, [tokens, hidden])."""
    scorer = StreamedModel(ModelReader(open_source(model)), chip)
    hidden = scorer.embed(windows)
    for index in range(scorer.num_layers):
        scorer.open_layer(index)
        hidden = scorer.run_layer(hidden)
    scorer.open_head()
    return scorer, rows_to_score(hidden)


@torch.inference_mode()
def losses(case: Case, model: Path, chip: ChipCompute | None) -> tuple[Tensor, Tensor]:
    """[tokens] float64 each: what every prediction costs, and its divergence from the unquantized model's."""
    reference, expected = final_states(case.path, None, case.windows)
    scorer, rows = final_states(model, chip, case.windows)
    targets = targets_of(case.windows)
    costs, divergences = [], []
    for at in range(0, rows.shape[0], _ROWS):
        found = scorer.log_probabilities(rows[at : at + _ROWS])
        wanted = reference.log_probabilities(expected[at : at + _ROWS])
        costs.append(token_nll(found, targets[at : at + _ROWS]))
        divergences.append((wanted.exp() * (wanted - found)).sum(dim=-1).double())
    return torch.cat(costs), torch.cat(divergences)


def over_windows(difference: Tensor, window: int) -> float:
    """The standard error of the mean of [tokens] whose windows, not tokens, are independent."""
    means = difference.view(-1, window).mean(dim=1)
    return float(means.std() / math.sqrt(means.numel()))


def measure(case: Case, arithmetic: str, seed: int, samples: int, plain: Path) -> dict[str, Any]:
    """One cell; `plain`: the folder of the model that was calibrated for the chip as it is."""
    plan = plan_for(case, ARITHMETICS[arithmetic], seed, samples)
    chip = plan.principal.chip_compute()
    with tempfile.TemporaryDirectory() as work:
        aware = Path(work) / "aware"
        calibrated(case, plan, aware)
        ours, our_divergence = losses(case, aware, chip)
        same = _weights(aware) == _weights(plain)
    theirs, their_divergence = losses(case, plain, chip)
    window = case.windows.shape[1] - 1
    _, error = paired_rise(theirs, ours, window)
    difference = float((ours - theirs).mean())
    return {
        "model": case.name,
        "arithmetic": arithmetic,
        "seed": seed,
        "tokens": ours.numel(),
        "calibration_samples": samples,
        "plain_perplexity": perplexity(theirs),
        "aware_perplexity": perplexity(ours),
        "difference": difference,
        "standard_error": error / math.exp(difference),  # of the difference itself, not of its exponential
        "plain_kl": float(their_divergence.mean()),
        "aware_kl": float(our_divergence.mean()),
        "kl_difference": float((our_divergence - their_divergence).mean()),
        "kl_standard_error": over_windows(our_divergence - their_divergence, window),
        "same_weights": same,
    }


def _weights(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


def run_cells(
    cases: list[Case], arithmetics: list[str], seeds: int, samples: int, results: Path
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(results.read_text())["rows"] if results.is_file() else []
    for case in cases:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as work:
                plain, tokens = Path(work) / "plain", targets_of(case.windows).numel()
                for arithmetic in arithmetics:
                    cell = {"model": case.name, "arithmetic": arithmetic, "seed": seed}
                    same = [row for row in found if cell.items() <= row.items()]
                    if any(row["tokens"] == tokens and row["calibration_samples"] == samples for row in same):
                        continue
                    if not plain.exists():
                        calibrated(case, plan_for(case, ARITHMETICS["rne"], seed, samples), plain)
                    row = measure(case, arithmetic, seed, samples, plain)
                    print(
                        f"{case.name} {arithmetic} seed {seed}: {row['plain_perplexity']:.4f} -> "
                        f"{row['aware_perplexity']:.4f} ({row['difference']:+.5f} +- {row['standard_error']:.5f}), KL "
                        f"{row['plain_kl']:.5f} -> {row['aware_kl']:.5f} +- {row['kl_standard_error']:.5f}",
                        file=sys.stderr,
                        flush=True,
                    )
                    found = [other for other in found if other not in same] + [row]
                    results.parent.mkdir(parents=True, exist_ok=True)
                    results.write_text(json.dumps(record_of(found), indent=1) + "\n")
    return found


def record_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows and, for each model and arithmetic, what they say together over the seeds."""
    summary = []
    for model, arithmetic in dict.fromkeys((row["model"], row["arithmetic"]) for row in rows):
        cells = [row for row in rows if (row["model"], row["arithmetic"]) == (model, arithmetic)]
        count = len(cells)
        mean = sum(row["difference"] for row in cells) / count
        # Seeds share their text, so their errors do not average out: the mean of them is an upper bound.
        error = sum(row["standard_error"] for row in cells) / count
        summary.append(
            {
                "model": model,
                "arithmetic": arithmetic,
                "seeds": count,
                "tokens": cells[0]["tokens"],
                "plain_perplexity": math.exp(sum(math.log(row["plain_perplexity"]) for row in cells) / count),
                "aware_perplexity": math.exp(sum(math.log(row["aware_perplexity"]) for row in cells) / count),
                "difference": mean,
                "standard_error": error,
                "plain_kl": sum(row["plain_kl"] for row in cells) / count,
                "aware_kl": sum(row["aware_kl"] for row in cells) / count,
                "kl_standard_error": sum(row["kl_standard_error"] for row in cells) / count,
                "better_in_every_seed": all(row["difference"] < 0 for row in cells),
                "nearer_in_every_seed": all(row["kl_difference"] < 0 for row in cells),
                "significantly_worse": mean > 1.645 * error,
            }
        )
    return {"device": DEVICE, "method": "ue8m0", "summary": summary, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "real-model")
    parser.add_argument("--models", help="separated by commas; the two embedded ones and SmolLM2 by default")
    parser.add_argument("--arithmetics", default=",".join(ARITHMETICS), help="separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens")
    parser.add_argument("--samples", type=int, default=16, help="calibration passages of 512 tokens")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    default = f"embedded:dense,embedded:moe,{options.cache / SMOLLM}"
    cases = [case_of(name, options.cache, options.tokens) for name in (options.models or default).split(",")]
    record = record_of(
        run_cells(cases, options.arithmetics.split(","), options.seeds, options.samples, options.results)
    )
    if options.json:
        print(json.dumps(record, indent=1))
        return
    for row in record["summary"]:
        print(
            f"{row['model']:32} {row['arithmetic']:6} plain {row['plain_perplexity']:9.4f} chip-aware "
            f"{row['aware_perplexity']:9.4f} nats {row['difference']:+.5f} +- {row['standard_error']:.5f} KL "
            f"{row['plain_kl']:.5f} -> {row['aware_kl']:.5f} +- {row['kl_standard_error']:.5f}"
        )


if __name__ == "__main__":
    main()
