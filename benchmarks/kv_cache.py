"""What key-value caches of few bits cost in perplexity, and whether mixing widths by importance pays.

    python benchmarks/kv_cache.py [--json] [--models embedded:dense,FILE] [--cache FOLDER]
                                  [--tokens 8192] [--window 2048] [--minutes M]

Each row is one scheme on one model: bits of a quantized value with its scales, bits of a value at the context's end
with window and sinks, and the rise of perplexity with its standard error over windows, every query seeing what a
decoder with that cache would see. `blind` has as many channels of each width in each layer's keys and values as the
mixed plan of that budget, chosen by their numbers and not by what they are worth. Rows without window and sinks
(`,window=0,sinks=0`) show the widths alone. A row is written to benchmarks/results/kv_cache.json as soon as it is
measured, and is not measured again; --minutes ends the run early.

A model is `embedded:dense` or a path. The embedded one uses the shipped texts, any other model those of --cache
(calib.jsonl, heldout.txt), which `make real-model` fetches.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_cache import MixedSide, allocate, mixed_sides, plan_of_choice
from qwen_quantize.calibrators.kv_plans import KvFindings, KvRange, uniform_plan
from qwen_quantize.calibrators.kv_statistics import KvStatistics
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_by_name, heldout_text_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.packed_cache import PackedKVCache
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.perplexity import paired_rise, perplexity, rows_to_score, targets_of, token_nll
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import KvKind, KvScheme, parse_kv_scheme
from qwen_quantize.pipeline.kv_cache import observe
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import calibration_batches, evaluation_windows, load_documents

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "kv_cache.json"
BARE = ",window=0,sinks=0"
SCHEMES = (
    "int4:128",
    "mixed:5.07",
    "int4:32" + BARE,
    "mixed:5" + BARE,
    "blind:5" + BARE,
    "int4:128" + BARE,
    "int4:32",
    "mixed:5",
    "blind:5",
    "int8",
    "fp8",
    "fp16",
)
_ROWS = 256  # predictions whose probabilities are held together


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its texts: calibration [n, T] and evaluation [m, U], int64."""

    name: str
    path: Path
    calibration: Tensor
    windows: Tensor


def case_of(name: str, cache: Path, window: int, tokens: int) -> Case:
    embedded = embedded_by_name(name)
    path = Path(name) if embedded is None else embedded
    dataset = cache / "calib.jsonl" if embedded is None else calibration_text_path()
    text = cache / "heldout.txt" if embedded is None else heldout_text_path()
    source = open_source(path)
    longest = ModelReader(source).blueprint.config.max_position
    tokenizer = source_tokenizer(source)
    calibration = calibration_batches(load_documents(str(dataset)), tokenizer, 8, min(512, longest), 0).tokens
    windows = evaluation_windows(load_documents(str(text)), tokenizer, min(window, longest), tokens).windows
    return Case(path.name if embedded is None else name, path, calibration, windows)


@torch.inference_mode()
def losses(reader: ModelReader, plan: KvPlan | None, windows: Tensor) -> Tensor:
    """[predictions] float64, one window at a time inside each layer."""
    model = StreamedModel(reader, None, plan)
    hidden = model.embed(windows)
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
    model.open_head()
    rows, targets = rows_to_score(hidden), targets_of(windows)
    return torch.cat(
        [
            token_nll(model.log_probabilities(rows[at : at + _ROWS]), targets[at : at + _ROWS])
            for at in range(0, rows.shape[0], _ROWS)
        ]
    )


def blind(sides: list[MixedSide], chosen: list[Tensor]) -> list[Tensor]:
    """As many units of each width in each side as chosen, by the numbers of their channels."""
    places = []
    for side, widths in zip(sides, chosen, strict=True):
        order = side.units.channels[:, 0].argsort()
        scattered = widths.sort(descending=True).values
        # Spread evenly over the heads: a step that is prime to the count visits every unit once.
        count = len(order)
        step = next(step for step in range(count // 2 + 1, count + 2) if math.gcd(step, count) == 1)
        visited = order[(torch.arange(count) * step) % count]
        given = torch.empty_like(widths)
        given[visited] = scattered
        places.append(given)
    return places


def plan_for(text: str, reader: ModelReader, calibration: Tensor, known: dict[str, Any]) -> KvPlan:
    """The plan of a row's words; statistics are found once."""
    config = reader.blueprint.config
    ignorant = text.startswith("blind")
    scheme = parse_kv_scheme(text.replace("blind", "mixed"))
    if scheme.kind is KvKind.MIXED:
        statistics = _statistics(scheme, reader, calibration, known)
        sides = mixed_sides(scheme, config, statistics)
        assert scheme.bits is not None
        chosen = allocate(sides, scheme.bits)
        return plan_of_choice(scheme, config, sides, blind(sides, chosen) if ignorant else chosen)
    findings = KvFindings()
    if scheme.needs_scales:
        statistics = _statistics(parse_kv_scheme("mixed"), reader, calibration, known)
        findings = KvFindings({n: KvRange(s.key_largest, s.value_largest) for n, s in statistics.items()})
    return uniform_plan(scheme, config, findings)


def _statistics(
    scheme: KvScheme, reader: ModelReader, calibration: Tensor, known: dict[str, Any]
) -> dict[int, KvStatistics]:
    key = f"{scheme.window},{scheme.sinks}"
    if key not in known:
        known[key] = observe(reader, calibration, scheme)
    found: dict[int, KvStatistics] = known[key]
    return found


def row_of(case: Case, text: str, plan: KvPlan, ours: Tensor, exact: Tensor, config: Any) -> dict[str, Any]:
    window = case.windows.shape[1]
    rise, error = paired_rise(exact, ours, window - 1)
    cache = PackedKVCache(config, plan, 1, window)
    cache.reserve(window)
    return {
        "model": case.name,
        "scheme": text,
        "window": window,
        "tokens": ours.numel(),
        "bits": plan.bits,
        "bits_at_window": plan.bits_at(window),
        "planned_bytes": plan.bytes_at(1, window),
        "measured_bytes": cache.packed_bytes,
        "perplexity": perplexity(ours),
        "reference_perplexity": perplexity(exact),
        "rise": rise,
        "rise_standard_error": error,
    }


def run(
    names: list[str], cache: Path, window: int, tokens: int, minutes: float, results: Path
) -> list[dict[str, Any]]:
    end = time.monotonic() + 60 * minutes
    rows: list[dict[str, Any]] = json.loads(results.read_text())["rows"] if results.is_file() else []
    for name in names:
        case = case_of(name, cache, window, tokens)
        reader = ModelReader(open_source(case.path))
        done = {(r["model"], r["scheme"], r["window"], r["tokens"]) for r in rows}
        size = case.windows.shape[1]
        missing = [t for t in SCHEMES if (case.name, t, size, case.windows.shape[0] * (size - 1)) not in done]
        if not missing:
            continue
        exact = losses(reader, None, case.windows)
        known: dict[str, Any] = {}
        for text in missing:
            if time.monotonic() > end:
                break
            plan = plan_for(text, reader, case.calibration, known)
            row = row_of(case, text, plan, losses(reader, plan, case.windows), exact, reader.blueprint.config)
            rows = [r for r in rows if (r["model"], r["scheme"]) != (case.name, text)]
            rows.append(row)
            results.parent.mkdir(parents=True, exist_ok=True)
            results.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
            print(_line(row), file=sys.stderr, flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model'][:28]:28} {row['scheme']:28} {row['bits']:6.3f} {row['bits_at_window']:6.3f} "
        f"{100 * row['rise']:+8.3f} % +- {100 * row['rise_standard_error']:.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default="embedded:dense")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    rows = run(asked.models.split(","), asked.cache, asked.window, asked.tokens, asked.minutes, asked.results)
    if asked.json:
        print(json.dumps({"rows": rows}))
    else:
        for row in rows:
            print(_line(row))


if __name__ == "__main__":
    main()
