"""Rewrite the generated parts of README.md and README.zh-CN.md from the data that they speak of.

    python tools/readme_tables.py [--check]

A generated part stands between `<!-- generated: NAME -->` and `<!-- end generated -->`. NAME is `chips` (from
the chip profiles), `methods` (from the calibrators) or `measured` (from benchmarks/results/real_model.json,
where it exists). With --check nothing is written; the exit code is 1 when a part is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_quantize.calibrators.methods import METHODS
from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.legality import check
from qwen_quantize.chip_profiles.loader import list_profiles, load_profile
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.chip_profiles.standing import standing
from qwen_quantize.formats.granularity import Granularity, GranularityKind
from qwen_quantize.formats.schemes import SCHEMES, TensorSpec
from qwen_quantize.formats.tables import E8M0

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "real_model.json"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end generated -->)", re.DOTALL)
_FP8 = ("e4m3fn", "e4m3fnuz")  # the second is AMD's variant of the MI300 generation


class ReadmeError(RuntimeError):
    """A README or the results cannot be used; says which and why."""


@dataclass(frozen=True, slots=True)
class Language:
    """One edition: its file and its words for what the tables say."""

    file: str
    words: Mapping[str, str]
    no_results: str
    conditions: str

    def __call__(self, word: str) -> str:
        """The edition's word; in English most words stand for themselves."""
        return self.words.get(word, word)


ENGLISH = Language(
    "README.md",
    {
        "fp8": "FP8",
        "int8": "INT8",
        "int4": "INT4",
        "not_applicable": "n/a",
        "used": "yes",
        "unused": "no",
        "e8m0 scales": "one power of two (E8M0) for each block or group",
        "tensor": "one scale for the tensor",
        "channel": "one scale for each output channel",
        "token": "one scale for each token",
        "group": "groups of {size}",
        "block": "blocks of {size}",
        "none": "unchanged (16 bits)",
        "dynamic": "{format}, {region}, scaled at run time",
        "static": "{format}, {region}, scaled beforehand",
        "weights": "{format}, {region}",
    },
    no_results="There are no figures in this checkout yet. `make real-model` fetches the model and the texts, "
    "and `benchmarks/real_model.py` measures them and writes `benchmarks/results/real_model.json`.",
    conditions="{model}; {tokens} tokens of {text}; {calibration_tokens} tokens of calibration text. Quantizing "
    "took {seconds} s and at most {memory} of memory. Machine: {machine}.",
)
CHINESE = Language(
    "README.zh-CN.md",
    {
        "chip": "芯片",
        "vendor": "厂商",
        "fp8": "FP8",
        "int8": "INT8",
        "int4": "INT4",
        "memory": "内存",
        "arithmetic": "运算细节",
        "yes": "有",
        "no": "无",
        "unknown": "未知",
        "emulated": "模拟",
        "not_applicable": "不适用",
        "not_supported": "不支持",
        "disputed": "说法不一",
        "used": "是",
        "unused": "否",
        "allowed": "可以",
        "unsupported": "不可以",
        "stated": "已公开",
        "partly": "部分公开",
        "method": "方法",
        "weight": "权重",
        "activations": "激活",
        "scales": "缩放因子",
        "second moments": "使用输入的二阶矩",
        "e8m0 scales": "每块或每组一个 2 的幂（E8M0）",
        "tensor": "整个张量一个缩放因子",
        "channel": "每个输出通道一个缩放因子",
        "token": "每个 token 一个缩放因子",
        "group": "每 {size} 个元素一组",
        "block": "{size} 分块",
        "none": "不变（16 位）",
        "dynamic": "{format}，{region}，推理时计算缩放因子",
        "static": "{format}，{region}，缩放因子预先确定",
        "weights": "{format}，{region}",
        "weights and casts": "权重与激活",
        "perplexity": "困惑度",
        "rise": "升幅",
        "KL (nats)": "KL（nat）",
        "same top-1": "top-1 一致率",
    },
    no_results="本仓库目前还没有实测数据。`make real-model` 下载模型与文本，`benchmarks/real_model.py` 负责测量，"
    "并写出 `benchmarks/results/real_model.json`。",
    conditions="模型：{model}；评测文本：{text}，{tokens} 个 token；校准文本：{calibration_tokens} 个 token。"
    "量化用时 {seconds} 秒，内存峰值 {memory}。机器：{machine}。",
)
LANGUAGES = (ENGLISH, CHINESE)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def chips_table(say: Language) -> str:
    """One row for each shipped profile, claims left out, in the order of names."""
    head = [*(say(w) for w in ("chip", "vendor", "fp8", "int8", "int4", "memory")), "`ue8m0`"]
    return _table([*head, say("arithmetic")], [_chip_row(load_profile(n), say) for n in list_profiles()])


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


def methods_table(say: Language) -> str:
    """One row for each entry of METHODS."""
    head = [say(w) for w in ("method", "weight", "activations", "scales", "second moments")]
    rows = []
    for name, method in sorted(METHODS.items()):
        scheme = SCHEMES[method.scheme]
        activation = scheme.activation
        rows.append(
            [
                f"`{name}`",
                _spec_words(scheme.weight, "weights", say),
                say("none")
                if activation is None
                else _spec_words(activation, "dynamic" if scheme.dynamic else "static", say),
                say("e8m0 scales")
                if scheme.weight.scale_format is E8M0
                else scheme.weight.scale_format.name.upper(),
                say("used" if method.uses_second_moments else "unused"),
            ]
        )
    return _table(head, rows)


def _spec_words(spec: TensorSpec, pattern: str, say: Language) -> str:
    return say(pattern).format(format=spec.format.name.upper(), region=_region_words(spec.granularity, say))


def _region_words(granularity: Granularity, say: Language) -> str:
    block = granularity.kind is GranularityKind.BLOCK
    size = f"{granularity.rows}x{granularity.cols}" if block else str(granularity.cols)
    return say(granularity.kind).format(size=size)


def measured_table(say: Language, results: Path = RESULTS) -> str:
    """The figures of benchmarks/real_model.py and the conditions they were taken under."""
    if not results.is_file():
        return say.no_results + "\n"
    try:
        record = json.loads(results.read_text(encoding="utf-8"))
        head = [say(w) for w in ("weights and casts", "perplexity", "rise", "KL (nats)", "same top-1")]
        table = _table(head, [_measured_row(row) for row in record["rows"]])
        conditions = say.conditions.format(
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
    return f"{table}\n{conditions}\n"


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


PARTS: dict[str, Callable[[Language], str]] = {
    "chips": chips_table,
    "methods": methods_table,
    "measured": measured_table,
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
