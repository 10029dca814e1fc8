"""The parts of the README that set this program beside others, and the cache's schemes beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.readme_words import RESULTS, Language, shown, table


def kv_cache(say: Language, folder: Path = RESULTS) -> str:
    """What schemes of the key-value cache cost; benchmarks/kv_cache.py measures it."""
    return shown(say, folder / "kv_cache.json", _kv_cache) or say("no_kv_cache") + "\n"


def speed(say: Language, folder: Path = RESULTS) -> str:
    """The engine beside others on a CPU; benchmarks/decode.py measures it."""
    return shown(say, folder / "decode.json", _speed) or say("no_speed") + "\n"


def peers(say: Language, folder: Path = RESULTS) -> str:
    """Other quantizers on the same model and texts; benchmarks/peers/run.py measures it."""
    return shown(say, folder / "peers.json", _peers) or say("no_peers") + "\n"


def second_chip(say: Language, folder: Path = RESULTS) -> str:
    """What a second chip costs after the statistics are collected; benchmarks/second_chip.py measures it."""
    return shown(say, folder / "second_chip.json", _second_chip) or say("no_second_chip") + "\n"


def _second_chip(say: Language, found: Any) -> str:
    head = [
        say(w) for w in ("tokens", "method", "collecting", "first chip", "second chip", "second over first")
    ]
    rows = [
        [
            f"{row['tokens']:,}",
            f"`{row['method']}`",
            *(f"{row[part]['cpu_seconds']:.0f}" for part in ("collect", "first", "second")),
            f"{row['share']:.2f}",
        ]
        for row in found["rows"]
    ]
    chips = found["chips"]
    words = say("second_chip_words").format(first=f"`{chips['first']}`", second=f"`{chips['second']}`")
    return f"{words}\n\n{table(head, rows)}"


def _kv_cache(say: Language, found: Any) -> str:
    head = [say(w) for w in ("model", "scheme", "window", "tokens", "bits of a value", "KL", "rise")]
    rows = [
        [
            row["model"],
            f"`{row['scheme']}`",
            f"{row['window']:,}",
            f"{row['tokens']:,}",
            f"{row['bits']:.2f}",
            _millionths(row, "kl"),
            f"{100 * row['rise']:+.3f} % ± {100 * row['rise_standard_error']:.3f} %",
        ]
        for row in found["rows"]
    ]
    text = f"{say('kv_cache_words')}\n\n{table(head, rows)}"
    if not found.get("contests"):
        return text
    head = [
        say(w)
        for w in (
            "model",
            "mixed scheme",
            "bytes",
            "KL, mixed",
            "KL, uniform less mixed",
            "KL, blind less mixed",
        )
    ]
    rows = []
    for row in found["contests"]:
        words, size = f"`{row['mixed']['scheme']}`", f"{row['mixed']['measured_bytes']:,}"
        rows.append([row["model"], words, size, *_contest(row)])
        if "same_experts" in row["mixed"]:
            same = {side: row[side]["same_experts"] for side in ("mixed", "uniform", "blind")}
            rows.append([f"{row['model']}, {say('same experts')}", words, size, *_contest(same)])
    text = f"{text}\n{say('kv_contest_words')}"
    if any("same_experts" in row["mixed"] for row in found["contests"]):
        text += ("" if text.endswith("。") else " ") + say("kv_same_experts_words")
    return f"{text}\n\n{table(head, rows)}"


def _contest(row: Any) -> list[str]:
    over = (_millionths(row[rival], "kl_over_mixed", "+") for rival in ("uniform", "blind"))
    return [_millionths(row["mixed"], "kl"), *over]


def _millionths(row: Any, key: str, sign: str = "") -> str:
    if key not in row:
        return "–"
    return f"{1e6 * row[key]:{sign}.2f} ± {1e6 * row[f'{key}_standard_error']:.2f}"


_ENGINES = ("ours", "ours, head as stored", "llama.cpp", "transformers")


def _speed(say: Language, found: Any) -> str:
    words = say("speed_words").format(
        threads=found["threads"], prompt=found["prompt_tokens"], new=found["new_tokens"]
    )
    head = [
        say(w) for w in ("model", "engine", "prefill, tokens/s", "decode, tokens/s", "decode, ours over it")
    ]
    rows = []
    for key, name in (("smollm2", "SmolLM2-135M-Instruct"), ("qwen_shaped", say("qwen shaped"))):
        of = found[key]
        decode, prefill = of["decode_tokens_per_second"], of["prefill_tokens_per_second"]
        for engine in (one for one in _ENGINES if one in decode):
            figures = (
                f"{prefill[engine]:.0f}",
                f"{decode[engine]:.1f}",
                f"{decode['ours'] / decode[engine]:.2f}",
            )
            rows.append([name, say(engine), *figures])
    return f"{words}\n\n{table(head, rows)}"


def _peers(say: Language, found: Any) -> str:
    names = list(found["texts"])
    head = [say(w) for w in ("task", "tool", "method", "seconds", "CPU seconds", "peak memory")]
    head += [f"{say('rise')}, {say(name)}" for name in names]
    head += [f"KL, {say(name)}" for name in names]
    rows = []
    for row in found["rows"]:
        start = [row["task"], row["tool"], f"`{row['method']}`"]
        if "not_run" in row:
            rows.append([*start, say("not run"), *[""] * (2 + 2 * len(names))])
            continue
        texts = [row["texts"][name] for name in names]
        rows.append(
            [
                *start,
                f"{row['seconds']:.0f}",
                f"{row['cpu_seconds']:.0f}" if "cpu_seconds" in row else "–",
                f"{row['peak_memory_bytes'] / 2**20:.0f} MiB",
                *(f"{100 * text['rise']:+.1f} % ± {100 * text['rise_standard_error']:.1f}" for text in texts),
                *(f"{text['kl_mean']:.4f}" for text in texts),
            ]
        )
    words = say("peers_words").format(
        tokens=f"{found['calibration_tokens']:,}", threads=found["machine"]["threads"]
    )
    return f"{words}\n\n{table(head, rows)}"
