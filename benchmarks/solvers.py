"""What each four-bit solver loses on text like its calibration text and on text unlike it, in two slices each.

    python benchmarks/solvers.py [--json] [--model FOLDER] [--dataset calib.jsonl] [--like novel.txt]
        [--tokens 2048] [--samples 8] [--group-size 64] [--only gptq/high ...] [--results FILE]

Each solver runs through the command's own pipeline, symmetric and with zero points, and the bytes it wrote are read
back and compared with the unquantized model. The text unlike the calibration text is the language reference that
every Python carries. Choices are made on slice a and confirmed on slice b. The rise is that of the perplexity over the
unquantized model's; KL in nats a token. Without options: the embedded model and its novels, group 32.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

from torch import Tensor

from qwen_quantize.calibrators.problem import Effort
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_model_path, heldout_text_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Output, Recipe
from qwen_quantize.pipeline.run import quantize, source_tokenizer
from qwen_quantize.pipeline.texts import evaluation_windows

LENGTH = 512


@dataclass(frozen=True, slots=True)
class Solver:
    """One row."""

    method: str
    asymmetric: bool
    effort: Effort

    @property
    def name(self) -> str:
        return "/".join([self.method, *["zero"] * self.asymmetric, *["high"] * (self.effort is Effort.HIGH)])


SOLVERS = tuple(
    Solver(method, asymmetric, effort)
    for asymmetric in (False, True)
    for method, effort in (
        ("rtn", Effort.NORMAL),
        ("awq", Effort.NORMAL),
        ("gptq", Effort.NORMAL),
        ("gptq", Effort.HIGH),
        ("awq_v2", Effort.NORMAL),
        ("awq_v2", Effort.HIGH),
    )
)


def slices(model: Path, like: Path, tokens: int) -> dict[str, Tensor]:
    """Windows of each text: the first `tokens` tokens are slice a, as many after them slice b."""
    tokenizer = source_tokenizer(open_source(model))
    texts = {
        "like": like.read_text(encoding="utf-8"),
        "unlike": "\n\n".join(text for _, text in sorted(topics.topics.items())),
    }
    found: dict[str, Tensor] = {}
    for name, text in texts.items():
        windows = evaluation_windows(text, tokenizer, LENGTH, 2 * tokens).windows
        half = len(windows) // 2
        found |= {f"{name} a": windows[:half], f"{name} b": windows[half:]}
    return found


def measure(recipe: Recipe, windows: Mapping[str, Tensor]) -> dict[str, Any]:
    """Seconds of the solver's whole run, and per slice the rise and the KL."""
    source = open_source(recipe.model_path)
    reader = ModelReader(source)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        begin = time.perf_counter()
        staged = quantize(make_plan(recipe, source), source, reader, Output(out), lambda *_: None)
        staged.folder.finish()
        seconds = time.perf_counter() - begin
        written = ModelReader(open_source(out))
        row: dict[str, Any] = {"seconds": seconds}
        for name, part in windows.items():
            found = evaluate(StreamedModel(written), part, StreamedModel(reader))
            assert found.reference_perplexity is not None
            row[name] = {
                "rise": found.perplexity / found.reference_perplexity - 1,
                "kl_mean": found.kl_mean,
            }
    return row


def line(row: Mapping[str, Any], names: list[str]) -> str:
    parts = [f"{name} {row[name]['rise']:+.2%} KL {row[name]['kl_mean']:.4f}" for name in names]
    return f"{row['solver']:18} " + ", ".join(parts) + f", {row['seconds']:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--results", type=Path, help="write the JSON document to this file too")
    parser.add_argument("--model", type=Path, default=embedded_model_path())
    parser.add_argument("--dataset", type=Path, default=calibration_text_path())
    parser.add_argument("--like", type=Path, default=heldout_text_path())
    parser.add_argument("--tokens", type=int, default=2048, help="of each slice")
    parser.add_argument("--samples", type=int, default=8, help=f"calibration windows of {LENGTH} tokens")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--only", nargs="*", help="names of solvers, such as awq_v2/zero/high")
    options = parser.parse_args()
    windows = slices(options.model, options.like, options.tokens)
    rows = []
    for solver in SOLVERS:
        if options.only and solver.name not in options.only:
            continue
        recipe = Recipe(
            model_path=str(options.model),
            device="cpu",
            method=solver.method,
            dataset=None if solver.method == "rtn" else str(options.dataset),
            samples=options.samples,
            group_size=options.group_size,
            asymmetric=solver.asymmetric,
            allow_unsupported=True,
            effort=solver.effort,
        )
        rows.append({"solver": solver.name, **measure(recipe, windows)})
        print(line(rows[-1], list(windows)), file=sys.stderr, flush=True)
    record = {
        "model": options.model.name,
        "group_size": options.group_size,
        "calibration_tokens": options.samples * LENGTH,
        "tokens_of_a_slice": {name: part.numel() for name, part in windows.items()},
        "rows": rows,
    }
    document = json.dumps(record, indent=1) + "\n"
    if options.results is not None:
        options.results.write_text(document, encoding="utf-8")
    if options.json:
        sys.stdout.write(document)


if __name__ == "__main__":
    main()
