"""What rotating a model's features before its weights are quantized does to each method's loss.

    python benchmarks/rotations.py [--json] [--model FOLDER] [--dataset calib.jsonl] [--like novel.txt]
        [--tokens 4096] [--samples 8] [--group-size 64] [--only w4a8 ...] [--work FOLDER] [--results FILE]

Every method runs through the command's own pipeline on the model as it is and on rotated copies that compute the same
function: r2 turns each head's values, r1r2 the residual stream too, r1r2:32 both within runs of 32 features. Statistics
are collected once for each copy. The bytes written are read back, inputs cast as the scheme says, and compared with the
unquantized, unrotated model on text like the calibration text and on the language reference that every Python carries.
Cells that the results file has are not measured again. The rise is the perplexity's; KL in nats a token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

from torch import Tensor

from qwen_quantize.checkpoint.source import CheckpointSource, open_source
from qwen_quantize.cli.session import chip_compute
from qwen_quantize.embedded import calibration_text_path, embedded_model_path, heldout_text_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.pipeline.collect import collect
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Output, Recipe
from qwen_quantize.pipeline.rotated_source import Rotate, RotatedSource, Rotating
from qwen_quantize.pipeline.run import quantize, source_tokenizer
from qwen_quantize.pipeline.texts import evaluation_windows

LENGTH = 512
METHODS = ("w4a8", "mxfp4", "w8a8", "nvfp4", "rtn", "awq_v2", "gptq", "fp8", "mxfp6")
GROUPED = ("rtn", "awq_v2", "gptq", "w4a8")


@dataclass(frozen=True, slots=True)
class Copy:
    """A way to rotate the model."""

    name: str
    asked: Rotating

    def of(self, source: CheckpointSource, seed: int) -> CheckpointSource:
        return RotatedSource(source, self.asked, seed) if self.rotated else source

    @property
    def rotated(self) -> bool:
        return self.asked.kind is not Rotate.NONE


COPIES = tuple(Copy(name, Rotating.parse(name)) for name in ("none", "r2", "r1r2", "r1r2:32"))


class Remembered(StreamedModel):
    """A model that has run through its layers once: only its head is computed again."""

    def __init__(self, reader: ModelReader, windows: Tensor) -> None:
        super().__init__(reader)
        hidden = self.embed(windows)
        for index in range(self.num_layers):
            super().open_layer(index)
            hidden = super().run_layer(hidden)
        self.close_layer()
        self._last = hidden

    def open_layer(self, index: int) -> None:
        pass

    def run_layer(self, hidden: Tensor) -> Tensor:  # noqa: ARG002
        return self._last


def texts(source: CheckpointSource, like: Path, tokens: int) -> dict[str, Tensor]:
    """Windows of each text."""
    tokenizer = source_tokenizer(source)
    found = {
        "like": like.read_text(encoding="utf-8"),
        "unlike": "\n\n".join(text for _, text in sorted(topics.topics.items())),
    }
    return {name: evaluation_windows(text, tokenizer, LENGTH, tokens).windows for name, text in found.items()}


def measure(
    recipe: Recipe,
    source: CheckpointSource,
    windows: Mapping[str, Tensor],
    references: Mapping[str, Remembered],
) -> dict[str, Any]:
    """Bytes and per text the rise and the KL."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        plan = make_plan(recipe, source)
        staged = quantize(plan, source, ModelReader(source), Output(out), lambda *_: None)
        staged.folder.finish()
        written = ModelReader(open_source(out))
        chip = chip_compute(written, *(choice.arithmetic for choice in plan.distinct_choices))
        row: dict[str, Any] = {"output_bytes": plan.output_bytes}
        for name, part in windows.items():
            found = evaluate(StreamedModel(written, chip), part, references[name])
            row[name] = {"rise": found.rise, "kl_mean": found.kl_mean, "top1_agreement": found.top1_agreement}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--results", type=Path, help="write the JSON document to this file too, and go on from it"
    )
    parser.add_argument("--model", type=Path, default=embedded_model_path())
    parser.add_argument("--dataset", type=Path, default=calibration_text_path())
    parser.add_argument("--like", type=Path, default=heldout_text_path())
    parser.add_argument("--tokens", type=int, default=4096, help="of each text")
    parser.add_argument("--samples", type=int, default=8, help=f"calibration windows of {LENGTH} tokens")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=1, help="of random signs, for each rotated copy")
    parser.add_argument("--only", nargs="*", default=METHODS, help="names of methods")
    parser.add_argument("--copies", nargs="*", default=[copy.name for copy in COPIES])
    parser.add_argument("--work", type=Path, help="a folder that keeps the statistics")
    options = parser.parse_args()
    source = open_source(options.model)
    windows = texts(source, options.like, options.tokens)
    record: dict[str, Any] = {
        "model": options.model.name,
        "group_size": options.group_size,
        "calibration_tokens": options.samples * LENGTH,
        "tokens": {name: part.numel() for name, part in windows.items()},
    }
    rows: list[dict[str, Any]] = []
    if options.results is not None and options.results.exists():
        rows = json.loads(options.results.read_text(encoding="utf-8"))["rows"]
    done = {(row["method"], row["copy"], row["seed"]) for row in rows}
    references = {name: Remembered(ModelReader(source), part) for name, part in windows.items()}
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        for method in options.only:
            for copy in (copy for copy in COPIES if copy.name in options.copies):
                for seed in range(options.seeds if copy.rotated else 1):
                    if (method, copy.name, seed) in done:
                        continue
                    begin = time.perf_counter()
                    seen = copy.of(source, seed)
                    recipe = Recipe(
                        model_path=str(options.model),
                        device="cpu",
                        method=method,
                        statistics=str(
                            statistics(options, seen, work / f"{copy.name.replace(':', '-')}-{seed}")
                        ),
                        group_size=options.group_size if method in GROUPED else None,
                        allow_unsupported=True,
                    )
                    row = {"method": method, "copy": copy.name, "seed": seed}
                    row |= measure(recipe, seen, windows, references)
                    rows.append(row)
                    print(line(row, time.perf_counter() - begin), file=sys.stderr, flush=True)
                    if options.results is not None:
                        options.results.write_text(document(record, rows), encoding="utf-8")
    if options.json:
        sys.stdout.write(document(record, rows))


def statistics(options: argparse.Namespace, source: CheckpointSource, folder: Path) -> Path:
    """The statistics of a copy of the model, collected unless they are there."""
    if not folder.exists():
        recipe = Recipe(
            model_path=str(options.model),
            device="cpu",
            method="gptq",
            dataset=str(options.dataset),
            samples=options.samples,
        )
        collect(recipe, ModelReader(source), Output(folder), lambda *_: None)
    return folder


def line(row: Mapping[str, Any], seconds: float) -> str:
    parts = [f"{name} {row[name]['rise']:+.2%} KL {row[name]['kl_mean']:.5f}" for name in ("like", "unlike")]
    return f"{row['method']:8} {row['copy']:8} {row['seed']} " + ", ".join(parts) + f", {seconds:.0f} s"


def document(record: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    ordered = sorted(
        rows,
        key=lambda row: (
            METHODS.index(row["method"]),
            [c.name for c in COPIES].index(row["copy"]),
            row["seed"],
        ),
    )
    return json.dumps({**record, "rows": ordered}, indent=1) + "\n"


if __name__ == "__main__":
    main()
