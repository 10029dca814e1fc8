"""Rewrite the generated parts of README.md and README.zh-CN.md from the data that they speak of.

    python tools/readme_tables.py [--check]

A generated part stands between `<!-- generated: NAME -->` and `<!-- end generated -->`. NAME is `chips` (from the
chip profiles), `families` (from the records of model families), `methods` (from the calibrators), `layouts` (from the
records of layouts and what they plan for each scheme), `conversions` (from what each layout packs), `measured` (from
benchmarks/results/real_model.json, where it exists), `measured-moe` (from those of r1_layer.json, layers.json,
expert_policies.json and embedded_moe.json that exist in the same folder), `firmware-story` (from firmware_story.json
there), `gate` (gate_errors.json), `kv-cache` (kv_cache.json), `speed` (decode.json), `peers` (peers.json) or
`second-chip` (second_chip.json).
All but the first and embedded_moe.json hold what the benchmarks of these names print with --json, r1_layer.json one
run or a list of runs; embedded_moe.json holds what `qwen_quantize eval --json` prints. Words are in
readme_words.toml. With --check nothing is written; the exit code is 1 when a part is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen_quantize.calibrators.methods import METHODS
from qwen_quantize.checkpoint.gguf_config import ARCHITECTURES
from qwen_quantize.checkpoint.gguf_layout import GROUP, GgufLayout
from qwen_quantize.checkpoint.layouts import LAYOUTS, Layout
from qwen_quantize.checkpoint.mx_oss_layout import MxOssLayout, stack_experts
from qwen_quantize.checkpoint.shards import OutputTensor
from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.legality import check
from qwen_quantize.chip_profiles.loader import list_profiles, load_profile
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.chip_profiles.standing import standing
from qwen_quantize.errors import UserError
from qwen_quantize.formats.granularity import Granularity, GranularityKind
from qwen_quantize.formats.schemes import SCHEMES, Scheme, TensorSpec
from qwen_quantize.formats.tables import E8M0
from qwen_quantize.models.blueprint import Family
from qwen_quantize.models.lookup import FAMILIES
from qwen_quantize.pipeline.conversion_table import exact_conversions

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root, from which its neighbours are imported

from tools.readme_benchmarks import kv_cache, peers, second_chip, speed
from tools.readme_words import (
    LANGUAGES,
    RESULTS,
    ROOT,
    WORDS,
    Language,
    ReadmeError,
    shown,
    table,
)

MEASURED = RESULTS / "real_model.json"
_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
_FP8 = ("e4m3fn", "e4m3fnuz")  # the second is AMD's variant of the MI300 generation


def chips_table(say: Language) -> str:
    """One row for each shipped profile, claims left out, in the order of names."""
    head = [*(say(w) for w in ("chip", "vendor", "fp8", "int8", "int4", "memory")), "`ue8m0`"]
    return table([*head, say("arithmetic")], [_chip_row(load_profile(n), say) for n in list_profiles()])


def _chip_row(profile: ChipProfile, say: Language) -> list[str]:
    capacity = profile.memory.capacity
    memory = (
        say(str(capacity.value.value))
        if isinstance(capacity.value, Absent)
        else f"{capacity.value} {capacity.unit}"
    )
    return [
        f"`{profile.name}`",
        profile.chip.vendor,
        *(say(matrix_word(profile, types)) for types in (_FP8, ("int8",), ("int4",))),
        memory,
        say(check(profile, SCHEMES["ue8m0"]).status),
        say(standing(profile)),
    ]


def matrix_word(profile: ChipProfile, types: Sequence[str]) -> str:
    """yes, emulated, no or unknown: whether the matrix unit takes one of `types`, as `chips list` says it."""
    for name in types:
        if profile.capability(name, "matrix").value is True:
            return "emulated" if profile.capability(name, "emulated").value is True else "yes"
    first = profile.capability(types[0], "matrix").value
    return "no" if first is False or first is Absent.NOT_SUPPORTED else "unknown"


def families_table(say: Language) -> str:
    """One row for each architecture that has a forward pass, in the order of their records."""
    head = [say(w) for w in ("architecture", "models", "attention", "MLP")] + ["GGUF"]
    gguf = {known.architecture for known in ARCHITECTURES.values()}
    rows = []
    for family in FAMILIES:
        for name in family.architectures:
            if name not in WORDS["models"]:
                raise ReadmeError(f"tools/readme_words.toml names no model of the architecture {name}")
            kinds = say(_attention_word(family)), say(_mlp_word(family))
            rows.append(
                [f"`{name}`", WORDS["models"][name], *kinds, say("used" if name in gguf else "unused")]
            )
    return table(head, rows)


def _attention_word(family: Family) -> str:
    if family.rules.delta is not None:
        return "gated delta net, grouped-query"
    if family.rules.latent is None:
        return "grouped-query"
    return "latent" if family.indexer is None else "latent with an indexer"


def _mlp_word(family: Family) -> str:
    if not family.experts:
        return "dense"
    return "routed and shared experts" if family.shared else "routed experts"


def methods_table(say: Language) -> str:
    """One row for each entry of METHODS, in its order."""
    head = [say(w) for w in ("method", "weight", "activations", "scales", "text", "what it does")]
    rows = []
    for name, method in METHODS.items():
        if method.any_scheme:
            made = [say("of any scheme").format(scheme=f"`{method.scheme}`"), *[say("of the scheme")] * 2]
        else:
            made = _scheme_cells(SCHEMES[method.scheme], say)
        text = say("needed" if method.needs_data else "optional")
        rows.append([f"`{name}`", *made, text, _sentence(say, f"does {name}")])
    return table(head, rows)


def _scheme_cells(scheme: Scheme, say: Language) -> list[str]:
    activation, weight = scheme.activation, scheme.weight
    if activation is None:
        inputs, scales = say("none"), say("model scales")  # the plan stores them in the type of the model
    else:
        inputs = _spec_words(activation, "dynamic" if scheme.dynamic else "static", say)
        scales = say("e8m0 scales") if weight.scale_format is E8M0 else weight.scale_format.name.upper()
    if weight.tensor_scale_format is not None:
        scales = say("two scales").format(first=scales, second=weight.tensor_scale_format.name.upper())
    return [_spec_words(weight, "weights", say), inputs, scales]


def _sentence(say: Language, key: str) -> str:
    if key not in say.words:
        raise ReadmeError(f"tools/readme_words.toml has no {key!r} for {say.file}")
    return say.words[key]


def layouts_table(say: Language) -> str:
    """One row for each entry of LAYOUTS: what it holds of the named schemes is asked of the layout itself."""
    head = [
        say(w) for w in ("layout", "schemes", "tensors of a linear", "written for", "loaded in the tests")
    ]
    rows = []
    for name, layout in LAYOUTS.items():
        held = {scheme: _held(layout, SCHEMES[scheme]) for scheme in SCHEMES}
        asymmetric = _held(layout, SCHEMES["w4a16"].with_zero_point())
        schemes = ", ".join(
            f"`{scheme}`" + (say("zero points too") if scheme == "w4a16" and asymmetric else "")
            for scheme, outputs in held.items()
            if outputs
        )
        dtypes: dict[str, dict[str, None]] = {}
        for output in (*(it for outputs in held.values() for it in outputs), *asymmetric):
            dtypes.setdefault(output.name.removeprefix("m."), {})[output.dtype] = None
        tensors = ", ".join(f"`{suffix}` {' / '.join(types)}" for suffix, types in dtypes.items())
        readers = ", ".join(say(reader) for reader in layout.readers)
        rows.append([f"`{name}`", schemes, tensors, readers, _sentence(say, f"loaded {name}")])
    return table(head, rows)


def _held(layout: Layout, scheme: Scheme) -> tuple[OutputTensor, ...]:
    """The tensors of a linear "m" of the scheme, () where the layout has no place for it."""
    if isinstance(layout, GgufLayout) and scheme.name in ("w4a16", "w8a16"):
        scheme = scheme.with_group(GROUP)  # as a plan for this layout has it
    if isinstance(layout, GgufLayout | MxOssLayout) and scheme.name == "mxfp4":
        scheme = replace(scheme, activation=None, dynamic=False)
    try:
        if isinstance(layout, MxOssLayout):
            experts = (f"m.experts.0.{part}_proj" for part in ("gate", "up", "down"))
            return stack_experts([it for name in experts for it in layout.outputs(name, (256, 256), scheme)])[
                0
            ]
        return layout.outputs("m", (256, 256), scheme)
    except UserError:
        return ()


def conversions_table(say: Language) -> str:
    """One row for each form of weights, one column for each layout: between marked ones a conversion is exact."""
    rows = exact_conversions()
    cells = [
        [_form_words(row.form, say), *(say(f"converts {row.verdicts[name]}") for name in LAYOUTS)]
        for row in rows
    ]
    return table([say("weights as stored"), *(f"`{name}`" for name in LAYOUTS)], cells)


def _form_words(form: str, say: Language) -> str:
    first, *rest = form.split(", ")
    name = f"`{first}`" if first in SCHEMES else say(first)
    return ", ".join([name, *(say(part) for part in rest)])


def _spec_words(spec: TensorSpec, pattern: str, say: Language) -> str:
    return say(pattern).format(format=spec.format.name.upper(), region=_region_words(spec.granularity, say))


def _region_words(granularity: Granularity, say: Language) -> str:
    block = granularity.kind is GranularityKind.BLOCK
    size = f"{granularity.rows}x{granularity.cols}" if block else str(granularity.cols)
    return say(granularity.kind).format(size=size)


def measured_table(say: Language, results: Path = MEASURED) -> str:
    """The figures of benchmarks/real_model.py and the conditions they were taken under."""
    if not results.is_file():
        return say("no_results") + "\n"
    try:
        record = json.loads(results.read_text(encoding="utf-8"))
        head = [say(w) for w in ("weights and casts", "perplexity", "rise", "KL (nats)", "same top-1")]
        rows = table(head, [_measured_row(row) for row in record["rows"]])
        conditions = say("conditions").format(
            model=record["model"],
            tokens=f"{record['tokens']:,}",
            text=record["text"],
            calibration_tokens=f"{record['calibration_tokens']:,}",
            seconds=f"{record['quantize_seconds']:.0f}",
            memory=f"{record['quantize_peak_memory_bytes'] / 2**20:.0f} MiB",
            machine=", ".join(f"{key} {value}" for key, value in record["machine"].items()),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReadmeError(f"{results}: not what benchmarks/real_model.py writes ({error!r})") from error
    return f"{rows}\n{conditions}\n"


def _measured_row(row: Mapping[str, Any]) -> list[str]:
    def number(key: str, pattern: str, factor: float = 1.0) -> str:
        value = row.get(key)
        return "" if value is None else pattern.format(factor * float(value))

    rise, error = number("rise", "{:+.2f} %", 100), number("rise_standard_error", " ± {:.2f} %", 100)
    return [
        str(row["name"]),
        f"{float(row['perplexity']):.3f}",
        rise + error,
        number("kl_mean", "{:.5f}"),
        number("top1_agreement", "{:.2f} %", 100),
    ]


def measured_moe(say: Language, folder: Path = RESULTS) -> str:
    """A table for each file of results about mixtures of experts that is in the folder."""
    parts = [shown(say, folder / f"{name}.json", table) for name, table in _MOE_TABLES.items()]
    return "\n".join(part for part in parts if part) or say("no_moe_results") + "\n"


def _r1_layer(say: Language, found: Any) -> str:
    runs = found if isinstance(found, list) else [found]
    head = [say(w) for w in ("input", "routed experts in it", "calibrated", "size")]
    head += ["`ue8m0`", "`cp`", say("ratio"), say("peak memory")]
    rows = [
        [
            {"fp8": "FP8", "bf16": "BF16"}[run["input"]],
            str(run["experts"]),
            say("used" if run["calibrated"] else "unused"),
            f"{run['source_bytes'] / 1e9:.1f} GB",
            say("{seconds} s").format(seconds=f"{run['seconds']:.1f}"),
            say("{seconds} s").format(seconds=f"{run['copy_seconds']:.1f}"),
            f"{run['ratio']:.2f}",
            f"{run['peak_memory_bytes'] / 2**30:.2f} GiB",
        ]
        for run in runs
    ]
    ceilings = " / ".join(dict.fromkeys(str(run["max_memory"]) for run in runs))
    return f"{say('r1_layer').format(ceiling=ceilings)}\n\n{table(head, rows)}"


def _layers(say: Language, found: Any) -> str:
    head = [say(w) for w in ("varied", "values", "peak memory", "spread", "R² of the times")]
    rows = []
    for name, group in found.items():
        peaks = [row["peak_memory_bytes"] / 2**20 for row in group["rows"]]
        (key,) = set(group["rows"][0]) - {"seconds", "peak_memory_bytes", "output_bytes"}
        rows.append(
            [
                say(name),
                ", ".join(str(row[key]) for row in group["rows"]),
                say("{low} to {high}").format(low=f"{min(peaks):.0f}", high=f"{max(peaks):.0f} MiB"),
                f"{100 * group['peak_spread']:.1f} %",
                f"{group['r_squared']:.4f}",
            ]
        )
    return f"{say('layers')}\n\n{table(head, rows)}"


def _expert_policies(say: Language, found: Any) -> str:
    rows = []
    for policy, means in found["means"].items():
        rises = [100 * row["rise"] for row in found["rows"] if row["policy"] == policy]
        spread = say("{low} to {high}").format(low=f"{min(rises):+.3f}", high=f"{max(rises):+.3f} %")
        rows.append([f"`{policy}`", f"{100 * means['rise']:+.3f} %", spread, f"{means['kl_mean']:.6f}"])
    words = say("expert_policies").format(
        starved=f"{100 * found['starved']:.0f} %",
        tokens=f"{found['tokens']:,}",
        seeds=len({row["seed"] for row in found["rows"]}),
    )
    return f"{words}\n\n{table([say(w) for w in ('policy', 'rise', 'range', 'KL (nats)')], rows)}"


def _embedded_moe(say: Language, found: Any) -> str:
    head = [say(w) for w in ("original", "perplexity", "rise", "KL (nats)", "same top-1", "router agreement")]
    cells = [*_measured_row({"name": "", **found})[1:], f"{100 * found['router_agreement']:.2f} %"]
    rows = table(head, [[f"{found['reference_perplexity']:.3f}", *cells]])
    return f"{say('embedded_moe').format(tokens=format(found['tokens'], ','))}\n\n{rows}"


def firmware_story(say: Language, folder: Path = RESULTS) -> str:
    """A model before and after a firmware, and calibrated again; benchmarks/firmware_story.py measures it."""
    return shown(say, folder / "firmware_story.json", _firmware_story) or say("no_firmware_story") + "\n"


def chip_aware(say: Language, folder: Path = RESULTS) -> str:
    """Calibrated for a chip's own arithmetic or not; benchmarks/chip_aware.py measures it."""
    return shown(say, folder / "chip_aware.json", _chip_aware) or say("no_chip_aware") + "\n"


def gate(say: Language, folder: Path = RESULTS) -> str:
    """How often the gate of `regress` errs; benchmarks/gate_errors.py measures it."""
    return shown(say, folder / "gate_errors.json", _gate) or say("no_gate") + "\n"


def _firmware_story(say: Language, found: Any) -> str:
    words = say("firmware_story").format(
        model=found["model"],
        before=found["before"],
        after=found["after"],
        tokens=f"{found['tokens']:,}",
        changed=", ".join(f"`{change['text']}`" for change in found["changed"]),
        verdict=found["verdict"],
    )
    others = _other_stories(say, found.get("stories", ())[1:])
    if not found["rows"]:  # nothing was lost, so nothing was calibrated again
        return f"{words}\n{others}"
    head = [say(w) for w in ("calibrated for", "run on", "perplexity", "KL (nats)", "KL, 99 of 100 tokens")]
    rows = [[say("unquantized"), "", f"{found['unquantized_perplexity']:.3f}", "", ""]]
    old, new = (f"`{found[name]}`" for name in ("before", "after"))
    for name, chips in {"before": (old, old), "after": (old, new), "recalibrated": (new, new)}.items():
        row = found["rows"][name]
        rows.append([*chips, f"{row['perplexity']:.3f}", f"{row['kl_mean']:.5f}", f"{row['kl_p99']:.3f}"])
    share = found["recovered_fraction"]
    if share is not None:
        words += say("recovered").format(share=f"{100 * share:.0f} %")
    return f"{words}\n\n{table(head, rows)}{others}"


def _other_stories(say: Language, stories: Sequence[Any]) -> str:
    """A row for each other update, a perplexity of null being infinite; nothing without one."""
    if not stories:
        return ""
    head = [say(w) for w in ("change", "tokens", "verdict", "before it", "after it", "calibrated again")]
    rows = []
    for found in stories:
        again = found["rows"].get("recalibrated")
        figures = [found["perplexity_before"], found["perplexity_after"]]
        figures += [] if again is None else [again["perplexity"]]
        shown = ["∞" if value is None else f"{value:.3f}" for value in figures]
        changed = ", ".join(f"`{change['text']}`" for change in found["changed"])
        row = [changed, f"{found['tokens']:,}", f"`{found['verdict']}`", *shown]
        rows.append(row if again is not None else [*row, ""])
    served = any(found["conditions"] for found in stories)
    return f"\n{say('other stories')}{say('served otherwise') if served else ''}\n\n{table(head, rows)}"


def _chip_aware(say: Language, found: Any) -> str:
    head = [say(w) for w in ("model", "arithmetic of the chip", "seeds", "tokens", "perplexity, plain")]
    head += [say(w) for w in ("chip-aware", "difference in nats", "KL, plain", "KL, chip-aware")]
    rows = []
    for row in found["summary"]:
        error, kl_error = row["standard_error"], row["kl_standard_error"]
        rows.append(
            [
                row["model"],
                row["arithmetic"],
                str(row["seeds"]),
                f"{row['tokens']:,}",
                f"{row['plain_perplexity']:.3f}",
                f"{row['aware_perplexity']:.3f}",
                f"{row['difference']:+.4f} ± {error:.4f}",
                f"{row['plain_kl']:.5f}",
                f"{row['aware_kl']:.5f} ± {kl_error:.5f}",
            ]
        )
    return f"{say('chip_aware').format(method=found['method'])}\n\n{table(head, rows)}"


def _gate(say: Language, found: Any) -> str:
    losses = [(0.0, False), (0.005, False), (0.01, False), (0.01, True)]
    found_words = ("found", "found, twice the margin", "found, concentrated")
    head = [say(w) for w in ("differences", "tokens", "false alarms", *found_words)]
    rates: dict[tuple[str, int], dict[tuple[float, bool], float]] = {}
    for row in found["rows"]:
        key = row["differences"], row["tokens"]
        rates.setdefault(key, {})[row["loss"], row["concentrated"]] = row["alarms"]
    rows = [
        [say(kind), f"{tokens:,}", *(f"{100 * of[loss]:.1f} %" for loss in losses)]
        for (kind, tokens), of in rates.items()
    ]
    needed = say("; ").join(f"{say(kind)} {tokens:,}" for kind, tokens in found["tokens_needed"].items())
    repetitions = sorted({row["repetitions"] for row in found["rows"]})
    words = say("gate").format(repetitions=" / ".join(map(str, repetitions)), needed=needed)
    return f"{words}\n\n{table(head, rows)}"


_MOE_TABLES: dict[str, Callable[[Language, Any], str]] = {
    "r1_layer": _r1_layer,
    "layers": _layers,
    "expert_policies": _expert_policies,
    "embedded_moe": _embedded_moe,
}

PARTS: dict[str, Callable[[Language], str]] = {
    "chips": chips_table,
    "families": families_table,
    "methods": methods_table,
    "layouts": layouts_table,
    "conversions": conversions_table,
    "measured": measured_table,
    "measured-moe": measured_moe,
    "firmware-story": firmware_story,
    "chip-aware": chip_aware,
    "gate": gate,
    "kv-cache": kv_cache,
    "speed": speed,
    "peers": peers,
    "second-chip": second_chip,
}


def refreshed(text: str, say: Language, parts: Sequence[str] = tuple(PARTS)) -> str:
    """`text` with its generated parts made anew; ReadmeError when one of `parts` does not stand there once."""
    found = [match.group(2) for match in _PART.finditer(text)]
    unknown = sorted(set(found) - set(PARTS))
    if unknown:
        raise ReadmeError(f"{say.file}: no generated part is called {', '.join(unknown)}")
    for name in parts:
        if found.count(name) != 1:
            raise ReadmeError(
                f"{say.file}: the part {name!r} stands there {found.count(name)} times, not once"
            )

    def renew(match: re.Match[str]) -> str:
        name = match.group(2)
        body = f"\n{PARTS[name](say)}\n" if name in parts else match.group(3)
        return f"{match.group(1)}{body}{match.group(4)}"

    return _PART.sub(renew, text)


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 when a part is stale"
    )
    options = parser.parse_args(arguments)
    stale = []
    try:
        for say in LANGUAGES:
            path = ROOT / say.file
            old = path.read_text(encoding="utf-8")
            new = refreshed(old, say)
            if new != old:
                stale.append(say.file)
                if not options.check:
                    path.write_text(new, encoding="utf-8", newline="\n")
    except (ReadmeError, OSError) as error:
        print(f"readme_tables: {error}", file=sys.stderr)
        return 2
    if stale and options.check:
        print(f"stale: {', '.join(stale)}; run `python tools/readme_tables.py`", file=sys.stderr)
        return 1
    for name in stale:
        print(f"rewritten: {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
