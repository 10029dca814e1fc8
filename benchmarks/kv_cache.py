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
which says more than a mean where a few tokens visit other experts. `foretold` is the divergence that an allocation by
the gradient's squares expects of its choice.

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
from dataclasses import dataclass, replace
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
from qwen_quantize.eval.divergence import token_kl
from qwen_quantize.eval.perplexity import paired_rise, perplexity, rows_to_score, targets_of, token_nll
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import KvKind, KvScheme, parse_kv_scheme
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.pipeline.kv_gradient import observe_gradient
from qwen_quantize.pipeline.kv_observe import observe
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import calibration_batches, evaluation_windows, load_documents

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
_ROWS = 256  # predictions whose probabilities are held together


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


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of one cache, token by token, float64: losses, and divergences from the unquantized cache's predictions."""

    loss: Tensor
    divergence: Tensor


@torch.inference_mode()
def last_states(reader: ModelReader, plan: KvPlan | None, windows: Tensor) -> Tensor:
    """What the head reads for each prediction, one window at a time inside each layer."""
    model = StreamedModel(reader, None, plan)
    hidden = model.embed(windows)
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
    return rows_to_score(hidden)


@torch.inference_mode()
def predictions(reader: ModelReader, plan: KvPlan | None, windows: Tensor, exact: Tensor) -> Predictions:
    """exact: `last_states` of the unquantized cache."""
    rows, targets = exact if plan is None else last_states(reader, plan, windows), targets_of(windows)
    model = StreamedModel(reader)
    model.open_head()
    loss, divergence = [], []
    for at in range(0, rows.shape[0], _ROWS):
        part = slice(at, at + _ROWS)
        ours, theirs = (model.log_probabilities(one[part]) for one in (rows, exact))
        loss.append(token_nll(ours, targets[part]))
        divergence.append(token_kl(theirs, ours))
    return Predictions(torch.cat(loss), torch.cat(divergence))


def mean_and_error(values: Tensor, tokens: int) -> tuple[float, float]:
    """Mean of values that come in windows of `tokens`, and its standard error over windows."""
    means = values.view(-1, tokens).mean(dim=1)
    return float(means.mean()), float(means.std(unbiased=True)) / math.sqrt(means.numel())


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


class Statistics:
    """What calibration text says of one model, looked at once for each window and sinks."""

    def __init__(self, reader: ModelReader, calibration: Tensor) -> None:
        self._reader, self._calibration = reader, calibration
        self._known: dict[KvScheme, dict[int, KvStatistics]] = {}

    def of(self, scheme: KvScheme) -> dict[int, KvStatistics]:
        key = replace(scheme, bits=16.0)
        if key not in self._known:
            look = observe_gradient if scheme.gradient else observe
            self._known[key] = look(self._reader, self._calibration, scheme)
        return self._known[key]


def plan_for(text: str, config: ModelConfig, statistics: Statistics) -> KvPlan:
    """The plan of a row's words."""
    ignorant = text.startswith("blind")
    scheme = parse_kv_scheme(text.replace("blind", "mixed"))
    if scheme.kind is KvKind.MIXED:
        mixed, blind_plan, _ = mixed_and_blind(scheme, config, statistics)
        return blind_plan if ignorant else mixed
    findings = KvFindings()
    if scheme.needs_scales and config.latent is None:
        seen = statistics.of(parse_kv_scheme("mixed"))
        ranges = {
            n: KvRange(s.keys.largest, s.values.largest) for n, s in seen.items() if s.values is not None
        }
        findings = KvFindings(ranges)
    return uniform_plan(scheme, config, findings)


def mixed_and_blind(
    scheme: KvScheme, config: ModelConfig, statistics: Statistics
) -> tuple[KvPlan, KvPlan, float]:
    """(the allocation's plan, the blind one, the damage that the first expects)."""
    sides = mixed_sides(scheme, config, statistics.of(scheme))
    assert scheme.bits is not None
    chosen = allocate(sides, scheme.bits)
    damage = sum(
        float(side.units.costs.gather(1, widths.unsqueeze(1)).sum())
        for side, widths in zip(sides, chosen, strict=True)
    )
    plans = [plan_of_choice(scheme, config, sides, one) for one in (chosen, blind(sides, chosen))]
    return plans[0], plans[1], damage


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


def contest_plans(
    group: int, rest: str, config: ModelConfig, statistics: Statistics
) -> dict[str, tuple[str, KvPlan]]:
    """(words, plan) of the three caches of one contest. rest: the mixed scheme's words after its budget."""
    uniform = uniform_plan(parse_kv_scheme(f"int4:{group}"), config)
    bits = uniform.bits
    if config.latent is not None:  # the budget is the latents'
        keys = uniform.attention_layers[0].keys
        bits = keys.bits_per_token / keys.width
    text = f"mixed:{bits:g}{rest}"
    scheme = parse_kv_scheme(text)
    mixed, ignorant, damage = mixed_and_blind(scheme, config, statistics)
    window = scheme.window + mixed.step - uniform.step
    words = f"int4:{group},window={window},sinks={scheme.sinks}"
    words += ",keys=pre-rope" if scheme.unrotated else ""
    found = {
        "uniform": (words, uniform_plan(parse_kv_scheme(words), config)),
        "blind": (text.replace("mixed", "blind"), ignorant),
        "mixed": (text, mixed),
    }
    if scheme.gradient:
        found["mixed"] = (text, replace(mixed, notes=(f"{damage / 2!r}",)))
    return found


def contest_of(
    case: Case, reader: ModelReader, contest: Contest, exact: Tensor, statistics: Statistics
) -> dict[str, Any]:
    config, size = reader.blueprint.config, case.windows.shape[1]
    reference = predictions(reader, None, case.windows, exact).loss
    plans = contest_plans(contest.group, contest.rest, config, statistics)
    seen = {name: predictions(reader, plan, case.windows, exact) for name, (_, plan) in plans.items()}
    sides: dict[str, Any] = {}
    for name, (words, plan) in plans.items():
        row = row_of(case, words, plan, seen[name], reference, config)
        if name != "mixed":
            divergence, loss = (
                seen[name].divergence - seen["mixed"].divergence,
                seen[name].loss - seen["mixed"].loss,
            )
            row["kl_over_mixed"], row["kl_over_mixed_standard_error"] = mean_and_error(divergence, size - 1)
            closer = (seen["mixed"].divergence < seen[name].divergence).double()
            row["mixed_closer"], row["mixed_closer_standard_error"] = mean_and_error(closer, size - 1)
            row["loss_over_mixed"], row["loss_over_mixed_standard_error"] = mean_and_error(loss, size - 1)
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
