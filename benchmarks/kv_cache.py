"""What key-value caches of few bits cost, and whether mixing widths by importance pays.

    python benchmarks/kv_cache.py [--json] [--models embedded:dense,embedded:moe,FILE] [--cache FOLDER]
                                  [--tokens 8192] [--window 2048] [--minutes M] [--only rows|contests]

Each row is one scheme on one model: bits of a quantized value with its scales, bits of a value at the context's end
with window and sinks, the divergence of its predictions from those with an unquantized cache, and the rise of
perplexity, both with standard errors over windows, every query seeing what a decoder with that cache would see. Rows
without window and sinks (`,window=0,sinks=0`) show the widths alone.

Each contest sets three caches of the same bytes beside each other: uniform INT4, a mixed one, and a blind one with as
many channels of each width in each layer's keys and values as the mixed one, chosen by their numbers and not by what
they are worth. Where the mixed cache waits for longer spans of tokens, the uniform one keeps as many more of the newest
tokens in 16 bits as that takes. Differences to the mixed cache are those of the same tokens, with their standard errors
over windows; `mixed_closer` is the share of tokens whose predictions the mixed cache leaves closer to the exact ones,
which says more than a mean where a few tokens visit other experts. Of a model with experts `same_experts` has all of
this once more with every token sent to the experts of the unquantized cache's run: an error that is too small to send
a token elsewhere then still counts, and the few tokens that any error sends elsewhere do not drown all others.
`foretold` is the divergence that an allocation by the gradient's squares expects of its choice.

A row or contest is written to benchmarks/results/kv_cache.json as soon as it is measured, and is not measured again;
--minutes ends the run early. A model is `embedded:dense`, `embedded:moe` or a path. The embedded ones use the shipped
texts, any other model those of --cache (calib.jsonl, heldout.txt), which `make real-model` fetches.
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

from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_by_name, heldout_text_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.packed_cache import PackedKVCache
from qwen_quantize.eval.perplexity import paired_rise, perplexity
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import calibration_batches, evaluation_windows, load_documents

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root, from which its neighbours are imported

from benchmarks.kv_contestants import Statistics, contest_plans, plan_for
from benchmarks.kv_predictions import (
    LastStates,
    Predictions,
    last_states,
    mean_and_error,
    over_mixed,
    predictions,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "kv_cache.json"
BARE = ",window=0,sinks=0"
SCHEMES = (
    "int4:128",
    "mixed:5.07",
    "int4:32" + BARE,
    "int4:32,keys=pre-rope" + BARE,
    "int4:128" + BARE,
    "int4:128,keys=pre-rope" + BARE,
    "mixed:5" + BARE,
    "int8",
    "fp8",
    "fp16",
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its texts: calibration [n, T] and evaluation [m, U], int64."""

    name: str
    path: Path
    calibration: Tensor
    windows: Tensor


@dataclass(frozen=True, slots=True)
class Contest:
    """group: of the uniform INT4 cache; rest: the mixed scheme's words behind its budget, which is as many bits."""

    group: int
    rest: str

    def is_of(self, row: dict[str, Any]) -> bool:
        return (row["group"], row["rest"]) == (self.group, self.rest)


CONTESTS = (
    Contest(32, ":32,window=128,sinks=4"),
    Contest(32, ":32,window=0,sinks=0"),
    Contest(32, ":32,importance=gradient,window=0,sinks=0"),
    Contest(32, ":32,keys=pre-rope,window=0,sinks=0"),
    Contest(32, ",window=128,sinks=4"),
)
# Keys whose scales span tokens, and that are rotated, are what latent attention does not store.
OF_LATENTS = (CONTESTS[0], CONTESTS[1], CONTESTS[2])


@dataclass(frozen=True, slots=True)
class Asked:
    """The command line."""

    models: list[str]
    cache: Path
    window: int
    tokens: int
    minutes: float
    only: str | None
    results: Path


def case_of(name: str, asked: Asked) -> Case:
    embedded = embedded_by_name(name)
    path = Path(name) if embedded is None else embedded
    dataset = asked.cache / "calib.jsonl" if embedded is None else calibration_text_path()
    text = asked.cache / "heldout.txt" if embedded is None else heldout_text_path()
    source = open_source(path)
    longest = ModelReader(source).blueprint.config.max_position
    tokenizer = source_tokenizer(source)
    calibration = calibration_batches(load_documents(str(dataset)), tokenizer, 8, min(512, longest), 0).tokens
    windows = evaluation_windows(
        load_documents(str(text)), tokenizer, min(asked.window, longest), asked.tokens
    ).windows
    return Case(path.name if embedded is None else name, path, calibration, windows)


def row_of(
    case: Case, text: str, plan: KvPlan, ours: Predictions, exact: Tensor, config: ModelConfig
) -> dict[str, Any]:
    window = case.windows.shape[1]
    rise, error = paired_rise(exact, ours.loss, window - 1)
    divergence, spread = mean_and_error(ours.divergence, window - 1)
    cache = PackedKVCache(config, plan, 1, window)
    cache.reserve(window)
    return {
        "model": case.name,
        "scheme": text,
        "window": window,
        "tokens": ours.loss.numel(),
        "bits": plan.bits,
        "bits_at_window": plan.bits_at(window),
        "planned_bytes": plan.bytes_at(1, window),
        "measured_bytes": cache.packed_bytes,
        "perplexity": perplexity(ours.loss),
        "reference_perplexity": perplexity(exact),
        "rise": rise,
        "rise_standard_error": error,
        "kl": divergence,
        "kl_standard_error": spread,
        "kl_median": float(ours.divergence.median()),
    }


def contest_of(
    case: Case, reader: ModelReader, contest: Contest, exact: LastStates, statistics: Statistics
) -> dict[str, Any]:
    config, size = reader.blueprint.config, case.windows.shape[1]
    reference = predictions(reader, None, case.windows, exact).loss
    plans = contest_plans(contest.group, contest.rest, config, statistics)
    seen = {name: predictions(reader, plan, case.windows, exact) for name, (_, plan) in plans.items()}
    pinned = {}
    if exact.experts:
        pinned = {
            name: predictions(reader, plan, case.windows, exact, exact.experts)
            for name, (_, plan) in plans.items()
        }
    sides: dict[str, Any] = {}
    for name, (words, plan) in plans.items():
        row = row_of(case, words, plan, seen[name], reference, config)
        if name != "mixed":
            row |= over_mixed(seen[name], seen["mixed"], size - 1)
        if pinned:
            divergence, spread = mean_and_error(pinned[name].divergence, size - 1)
            same = {"kl": divergence, "kl_standard_error": spread}
            if name != "mixed":
                same |= over_mixed(pinned[name], pinned["mixed"], size - 1)
            row["same_experts"] = same
        sides[name] = {key: value for key, value in row.items() if key not in ("model", "window", "tokens")}
    foretold = plans["mixed"][1].notes
    return {
        "model": case.name,
        "group": contest.group,
        "rest": contest.rest,
        "window": size,
        "tokens": reference.numel(),
        "foretold": float(foretold[0]) if ",importance=gradient" in contest.rest else None,
        **sides,
    }


def run(asked: Asked) -> dict[str, Any]:
    end = time.monotonic() + 60 * asked.minutes
    found = _stored(asked.results)
    for name in asked.models:
        case = case_of(name, asked)
        reader = ModelReader(open_source(case.path))
        config, size = reader.blueprint.config, case.windows.shape[1]
        shape = (case.name, size, case.windows.shape[0] * (size - 1))
        work: list[str | Contest] = [
            text
            for text in (SCHEMES if asked.only != "contests" else ())
            if (config.latent is None or "pre-rope" not in text)
            and not any(
                _shape(row) == shape and row["scheme"] == text and "kl" in row for row in found["rows"]
            )
        ]
        work += [
            contest
            for contest in (
                () if asked.only == "rows" else OF_LATENTS if config.latent is not None else CONTESTS
            )
            if not any(_shape(row) == shape and contest.is_of(row) for row in found["contests"])
        ]
        if not work:
            continue
        exact = last_states(reader, None, case.windows)
        reference = predictions(reader, None, case.windows, exact).loss
        statistics = Statistics(reader, case.calibration)
        for one in work:
            if time.monotonic() > end:
                break
            if isinstance(one, Contest):
                row = contest_of(case, reader, one, exact, statistics)
                found = _stored(asked.results)  # another run may have written meanwhile
                found["contests"] = [
                    r for r in found["contests"] if r["model"] != case.name or not one.is_of(r)
                ] + [row]
            else:
                plan = plan_for(one, config, statistics)
                ours = predictions(reader, plan, case.windows, exact)
                row = row_of(case, one, plan, ours, reference, config)
                found = _stored(asked.results)
                found["rows"] = [
                    r for r in found["rows"] if (r["model"], r["scheme"]) != (case.name, one)
                ] + [row]
            asked.results.parent.mkdir(parents=True, exist_ok=True)
            asked.results.write_text(json.dumps(found, indent=1) + "\n")
            print("\n".join(_lines(row)), file=sys.stderr, flush=True)
    return found


def _stored(results: Path) -> dict[str, list[dict[str, Any]]]:
    stored = json.loads(results.read_text()) if results.is_file() else {}
    rows = [row for row in stored.get("rows", []) if row["scheme"] in SCHEMES]
    return {"rows": rows, "contests": stored.get("contests", [])}


def _shape(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["model"], row["window"], row["tokens"]


def _lines(row: dict[str, Any]) -> list[str]:
    if "scheme" in row:
        return [_line(row["model"], row)]
    return [_line(row["model"], row[side]) for side in ("uniform", "blind", "mixed")]


def _line(model: str, row: dict[str, Any]) -> str:
    text = (
        f"{model[:16]:16} {row['scheme']:44} {row['measured_bytes']:>9} {row['bits']:6.3f} "
        f"KL {1e6 * row.get('kl', math.nan):8.2f}e-6 +- {1e6 * row.get('kl_standard_error', math.nan):6.2f} med "
        f"{1e6 * row.get('kl_median', math.nan):6.2f} "
        f"{100 * row['rise']:+8.4f} % +- {100 * row['rise_standard_error']:.4f}"
    )
    if "kl_over_mixed" in row:
        text += (
            f" closer {row['mixed_closer']:.3f} +- {row['mixed_closer_standard_error']:.3f}"
            f"  over mixed: {1e6 * row['kl_over_mixed']:+8.2f}e-6 +- {1e6 * row['kl_over_mixed_standard_error']:.2f} "
            f"{1e6 * row['loss_over_mixed']:+8.2f}e-6 +- {1e6 * row['loss_over_mixed_standard_error']:.2f}"
        )
    if "same_experts" in row:
        same = row["same_experts"]
        text += f"\n{'':16} {'  with the same experts':44} KL {1e6 * same['kl']:8.2f}e-6 +- "
        text += f"{1e6 * same['kl_standard_error']:6.2f}"
        if "kl_over_mixed" in same:
            text += (
                f" closer {same['mixed_closer']:.3f} +- {same['mixed_closer_standard_error']:.3f}  over mixed: "
                f"{1e6 * same['kl_over_mixed']:+8.2f}e-6 +- {1e6 * same['kl_over_mixed_standard_error']:.2f}"
            )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default="embedded:dense,embedded:moe")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache")
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--minutes", type=float, default=1e6)
    parser.add_argument("--only", choices=("rows", "contests"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    asked = Asked(
        given.models.split(","),
        given.cache,
        given.window,
        given.tokens,
        given.minutes,
        given.only,
        given.results,
    )
    found = run(asked)
    if given.json:
        print(json.dumps(found))
        return
    for row in (*found["rows"], *found["contests"]):
        print("\n".join(_lines(row)))


if __name__ == "__main__":
    main()
