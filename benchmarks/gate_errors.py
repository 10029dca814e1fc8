"""How often the gate of `regress` is wrong: false alarms where nothing changed, and losses that it misses.

    python benchmarks/gate_errors.py [--json] [--repetitions 200] [--tokens 5000,50000]

The embedded model is quantized for `example@1.2` and run over its held-out novel under three arithmetics: that
one, `example@1.3` (casts cut off instead of rounding), and that one with its activations off by one part in 4096,
which is what another order of summation in a narrow accumulator does. Everything below resamples the token
losses of these real runs in pieces of 256 tokens, so that neighbours stay together:

- nothing changed: of each piece it is drawn which run counts as before and which as after. The differences have
  their real size and correlation, and their mean is zero. Every verdict but `harmless` is a false alarm.
- a loss of 1 % (0.5 %): the same, and every token after loses ln 1.01 (ln 1.005) more; or one token in a hundred,
  drawn at random, loses all of it. Every `harmless` is a miss.

With --json the rates are one document on stdout: `rows`, `tokens_needed` and `passes`: at most 5 % false alarms,
and at least 95 % of losses of 1 % found, at the largest number of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import StoredLinear
from qwen_quantize.cli.session import ChipQuestion, folder_chip, read_text
from qwen_quantize.engine.compute import ComputeRule, computed_as
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.eval.regression import Judgement, judge
from qwen_quantize.eval.token_scores import ScoreRecorder, TokenScores
from qwen_quantize.formats.activation_cast import GroupCast

PIECE = 256  # tokens that stay together
NOISE = 2.0**-12
LOSSES = ((0.0, False), (0.005, False), (0.01, False), (0.01, True))  # of perplexity; whether concentrated
CONCENTRATION = 0.01  # share of the tokens that a concentrated loss falls on


@dataclass(frozen=True, slots=True)
class NoisyCast(GroupCast):
    """A cast whose input is off by a random factor of 1 +- NOISE: the same for the same input shape."""

    def __call__(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(x.numel())
        factor = 1 + NOISE * (2 * torch.rand(x.shape, generator=generator) - 1)
        return GroupCast.__call__(self, x * factor)


def noisy_chip(chip: ComputeRule) -> ComputeRule:
    """The chip, with that noise before its casts."""

    def rule(stored: StoredLinear) -> ChipCompute | None:
        way = computed_as(chip, stored)
        if way is None or not isinstance(way.cast, GroupCast):
            return way
        cast = way.cast
        return replace(way, cast=NoisyCast(cast.format, cast.rule, cast.scale_rule, cast.group_size))

    return rule


def quantize(folder: Path) -> Path:
    output = folder / "model"
    command = [sys.executable, "-m", "qwen_quantize", "--device", "example@1.2", "--output-path", str(output)]
    subprocess.run([*command, "--no-validate", "--quiet"], check=True, stdout=subprocess.DEVNULL)
    return output


def record(model: Path, device: str, *, with_noise: bool = False) -> TokenScores:
    """Every prediction over the shipped novel."""
    reader = ModelReader(open_source(model))
    chip = folder_chip(ChipQuestion(device), None, reader).compute
    assert chip is not None
    windows, _ = read_text(None, reader, None, 1 << 20)
    recorder = ScoreRecorder()
    model_on_chip = StreamedModel(reader, noisy_chip(chip) if with_noise else chip)
    evaluate(model_on_chip, windows.windows, watch=recorder.add)
    return recorder.scores(windows.document_ids)


def drawn(
    first: TokenScores, second: TokenScores, tokens: int, generator: torch.Generator
) -> tuple[TokenScores, TokenScores]:
    """Two runs of `tokens` tokens in pieces of the real ones; each piece's runs change places at random."""
    pieces = first.tokens // PIECE
    count = math.ceil(tokens / PIECE)
    begin = torch.randint(pieces, (count,), generator=generator) * PIECE
    rows = (begin.unsqueeze(1) + torch.arange(PIECE)).flatten()[:tokens]
    swap = torch.randint(2, (count,), generator=generator).bool().repeat_interleave(PIECE)[:tokens]

    def mixed(name: str) -> tuple[Tensor, Tensor]:
        ours, theirs = getattr(first, name)[rows], getattr(second, name)[rows]
        where = swap.view(-1, *[1] * (ours.dim() - 1))
        return torch.where(where, theirs, ours), torch.where(where, ours, theirs)

    parts = [mixed(name) for name in ("log_probability", "top_ids", "top_log_probabilities")]
    document = torch.zeros(1, dtype=torch.int64)
    before, after = (
        TokenScores(own, first.targets[rows], ids, values, document, ("novel",))
        for own, ids, values in zip(*parts, strict=True)
    )
    return before, after


def with_loss(run: TokenScores, loss: float, concentrated: bool, generator: torch.Generator) -> TokenScores:
    """Perplexity higher by `loss` on average over draws."""
    nats = math.log1p(loss)
    if not concentrated:
        return replace(run, log_probability=run.log_probability - nats)
    hit = torch.rand(run.tokens, generator=generator) < CONCENTRATION
    return replace(run, log_probability=run.log_probability - hit * (nats / CONCENTRATION))


def measure(
    pair: tuple[TokenScores, TokenScores], tokens: int, repetitions: int
) -> dict[tuple[float, bool], list[Judgement]]:
    """The gate's answers for every loss of LOSSES, which share the tokens drawn."""
    found: dict[tuple[float, bool], list[Judgement]] = {loss: [] for loss in LOSSES}
    for repetition in range(repetitions):
        generator = torch.Generator().manual_seed(repetition)
        before, after = drawn(*pair, tokens, generator)
        for loss, concentrated in LOSSES:
            hurt = with_loss(after, loss, concentrated, generator) if loss else after
            found[loss, concentrated].append(judge(before, hurt, seed=repetition))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--tokens", default="5000,50000")
    options = parser.parse_args()
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        model = quantize(Path(name))
        rne, rtz = record(model, "example@1.2"), record(model, "example@1.3")
        noisy = record(model, "example@1.2", with_noise=True)
    torch.set_num_threads(1)  # thousands of short operations: waking a second thread costs more than it saves
    pairs = {"noise": (rne, noisy), "rne -> rtz": (rne, rtz)}
    sizes = [int(size) for size in options.tokens.split(",")]
    rows: list[dict[str, Any]] = []
    needed: dict[str, int] = {}
    for change, pair in pairs.items():
        real = judge(*pair)
        say(f"{change}: really {real.rise:+.3%} on {real.tokens} tokens, KL p99 {real.kl_p99:.4f}")
        for tokens in sizes:
            for (loss, concentrated), found in measure(pair, tokens, options.repetitions).items():
                row = {
                    "differences": change,
                    "tokens": tokens,
                    "loss": loss,
                    "concentrated": concentrated,
                    "repetitions": len(found),
                    "alarms": sum(not it.harmless for it in found) / len(found),
                    "undecided": sum(not it.conclusive for it in found) / len(found),
                }
                rows.append(row)
                how = "concentrated " if concentrated else ""
                say(
                    f"{change}, {tokens} tokens, {how}loss {loss:.1%}: alarms {row['alarms']:.1%}, "
                    f"undecided {row['undecided']:.1%}"
                )
                if loss == 0:
                    needed[change] = int(statistics.median(it.tokens_needed for it in found))
    for change, tokens in needed.items():
        say(f"tokens needed to tell 0.5 % from nothing, {change}: {tokens}")
    largest = [row for row in rows if row["tokens"] == max(sizes)]
    passes = all(row["alarms"] <= 0.05 for row in largest if row["loss"] == 0) and all(
        row["alarms"] >= 0.95 for row in largest if row["loss"] == 0.01
    )
    if options.json:
        seconds = time.perf_counter() - begin
        print(
            json.dumps(
                {"rows": rows, "tokens_needed": needed, "passes": passes, "seconds": seconds}, indent=2
            )
        )


def say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    main()
