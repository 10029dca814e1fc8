"""What becomes of experts that calibration does not reach: three policies, measured on held-out text.

    python benchmarks/expert_policies.py [--json] [--tokens 40960] [--seeds 3] [--starved 0.25]

The embedded mixture of experts is calibrated after its router was kept, in the calibration copy alone, from
sending any token to a quarter of each layer's experts. The calibrated weights are then judged with the
untouched router, so that the starved experts do serve. Weights only; activations are left alone.

Each policy is run twice: with `ue8m0`, whose 8-bit weights leave little to lose, and with the same solver on a
4-bit grid (E2M1 values, which E4M3 holds exactly), where the choice of statistics shows. Prints the mean
perplexity over the seeds, its rise over the unquantized model's, the KL divergence, and the paired difference
of the token losses to those of the policy `shrink`, with its standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_quantize.calibrators.block_fp8 import solve_block_fp8
from qwen_quantize.calibrators.experts import ExpertPolicy
from qwen_quantize.calibrators.methods import METHODS, Method
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_moe_path, heldout_text_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.perplexity import rows_to_score, targets_of, token_nll
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.codec import decode_table, encode
from qwen_quantize.formats.tables import E2M1, E4M3FN
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Output, Recipe
from qwen_quantize.pipeline.run import quantize, source_tokenizer
from qwen_quantize.pipeline.texts import evaluation_windows, load_documents

WINDOW = 512
NARROW = "e2m1-values"
UNREACHABLE = -1e4  # added to the correction bias: below every score, so never among the chosen


def solve_narrow(problem: LayerProblem) -> LayerSolution:
    """The solver of `ue8m0` on the grid of E2M1, its values written as E4M3 codes."""
    weight = replace(problem.scheme.weight, format=E2M1)
    found = solve_block_fp8(replace(problem, scheme=replace(problem.scheme, weight=weight)))
    as_e4m3 = encode(decode_table(E2M1), E4M3FN, RNE_SATURATE)
    quantized = replace(found.quantized, codes=as_e4m3[found.quantized.codes.long()], format=E4M3FN)
    return replace(found, quantized=quantized)


def starve(source: Path, target: Path, share: float, seed: int) -> dict[str, Tensor]:
    """Copy a model with `share` of each layer's experts out of the router's reach; returns the true biases."""
    shutil.copytree(source, target)
    state = load_file(target / "model.safetensors")
    kept = {}
    for name, bias in list(state.items()):
        if name.endswith("e_score_correction_bias"):
            kept[name] = bias
            order = torch.randperm(bias.numel(), generator=torch.Generator().manual_seed(seed))
            starved = bias.clone()
            starved[order[: round(share * bias.numel())]] = UNREACHABLE
            state[name] = starved
    save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    return kept


def calibrate(model: Path, output: Path, method: str, policy: ExpertPolicy, seed: int) -> None:
    recipe = Recipe(
        model_path=str(model),
        device="ascend",
        method=method,
        dataset=str(calibration_text_path()),
        seed=seed,
        expert_policy=policy,
    )
    source = open_source(model)
    plan = make_plan(recipe, source)
    staged = quantize(plan, source, ModelReader(source), Output(output), lambda *_: None)
    staged.folder.finish()


def restore(folder: Path, biases: dict[str, Tensor]) -> None:
    """Give the router its true biases back."""
    state = load_file(folder / "model.safetensors")
    state.update(biases)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@torch.inference_mode()
def token_losses(model: Path, windows: Tensor) -> tuple[Tensor, Tensor]:
    """(losses [tokens] float64, log-probabilities [tokens, vocab]) of every prediction."""
    scorer = StreamedModel(ModelReader(open_source(model)))
    hidden = scorer.embed(windows)
    for index in range(scorer.num_layers):
        scorer.open_layer(index)
        hidden = scorer.run_layer(hidden)
    scorer.open_head()
    scores = scorer.log_probabilities(rows_to_score(hidden))
    return token_nll(scores, targets_of(windows)), scores


def measure(windows: Tensor, method: str, share: float, seeds: int) -> list[dict[str, Any]]:
    """A row for each policy, means over the seeds."""
    source = embedded_moe_path()
    reference, reference_scores = token_losses(source, windows)
    losses: dict[ExpertPolicy, list[Tensor]] = {policy: [] for policy in ExpertPolicy}
    divergence = dict.fromkeys(ExpertPolicy, 0.0)
    for seed in range(seeds):
        for policy in ExpertPolicy:
            with tempfile.TemporaryDirectory() as folder:
                model, output = Path(folder) / "model", Path(folder) / "out"
                biases = starve(source, model, share, seed)
                calibrate(model, output, method, policy, seed)
                restore(output, biases)
                found, scores = token_losses(output, windows)
            losses[policy].append(found)
            kl = (reference_scores.exp() * (reference_scores - scores)).sum(dim=-1)
            divergence[policy] += float(kl.double().mean()) / seeds
            print(f"{method}, seed {seed}, {policy.value}: {math.exp(found.mean()):.4f}", file=sys.stderr)
    best = torch.stack(losses[ExpertPolicy.SHRINK])
    rows = []
    for policy in ExpertPolicy:
        mine = torch.stack(losses[policy])
        # Windows are independent of each other, tokens inside one are not.
        difference = (mine - best).mean(dim=0).view(windows.shape[0], -1).mean(dim=1)
        rows.append(
            {
                "method": method,
                "policy": policy.value,
                "perplexity": math.exp(mine.mean()),
                "rise": math.exp(mine.mean() - reference.mean()) - 1,
                "kl_mean": divergence[policy],
                "worse_than_shrink": float(difference.mean()),
                "worse_than_shrink_standard_error": float(difference.std() / windows.shape[0] ** 0.5),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--tokens", type=int, default=40960)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--starved", type=float, default=0.25, help="share of experts without tokens")
    options = parser.parse_args()
    METHODS[NARROW] = Method(NARROW, "ue8m0", solve_narrow, True, "E2M1 values in an FP8 checkpoint")
    documents = load_documents(str(heldout_text_path()))
    tokenizer = source_tokenizer(open_source(embedded_moe_path()))
    windows = evaluation_windows(documents, tokenizer, WINDOW, options.tokens).windows
    rows = [
        row
        for method in ("ue8m0", NARROW)
        for row in measure(windows, method, options.starved, options.seeds)
    ]
    record = {
        "tokens": windows.numel(),
        "seeds": options.seeds,
        "starved_share": options.starved,
        "calibration_tokens": 16 * 512,
        "rows": rows,
    }
    if options.json:
        print(json.dumps(record, indent=1))
        return
    for row in rows:
        print(
            f"{row['method']:12} {row['policy']:7} perplexity {row['perplexity']:.3f}, rise {row['rise']:+.3%}, "
            f"KL {row['kl_mean']:.5f}, nats a token above shrink {row['worse_than_shrink']:+.5f} "
            f"+- {row['worse_than_shrink_standard_error']:.5f}"
        )


if __name__ == "__main__":
    main()
