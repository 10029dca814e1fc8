"""What a probe found as facts of confidence `measured` that the loader lays over a profile or takes as one."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from qwen_quantize.chip_profiles.probe import ProbeResult
from qwen_quantize.chip_profiles.probe_decide import MEASURED, NOT_APPLICABLE, Parameter
from qwen_quantize.chip_profiles.schema import DTYPES, Cast, Matmul, field_names

_SOURCE = 'source = ["PROBE"]'
# Found values that the schema calls otherwise.
_NOT_IN_A_PROFILE = ("order",)


def profile_text(result: ProbeResult, chip: str | None) -> str:
    """A TOML layer for `chip` (`load_profile(chip, measured=...)`), or a profile of its own where chip is None."""
    lines = [
        f"# What `qwen_quantize probe --on {result.device}` measured on {today()}.",
        *(f"# {name}: {text}" for name, text in _about(result)),
        *(f"# not available: {name}: {_line(why)}" for name, why in result.unavailable.items()),
        "",
    ]
    if chip is None:
        lines += ["[chip]", 'name = "measured"', f"title = {_text(f'Measured: {result.device}')}"]
        lines += ['vendor = "measured"', 'family = "measured"', "generation = 1", ""]
    else:
        lines += ["[probe]", f"chip = {_text(chip)}", f"date = {_text(today())}"]
        lines += [f"{_text(name)} = {_text(text)}" for name, text in _about(result)]
        lines += ["[probe.explained_fraction]"]
        lines += [f"{_text(name)} = {value!r}" for name, value in result.fractions.items()] + [""]
    for finding in result.casts:
        fraction = f"{finding.explained_fraction:.6f} of {finding.inputs} casts are explained"
        lines += _group("casts", f"fp32->{finding.target}", finding.parameters, field_names(Cast), fraction)
    written: set[str] = set()
    for product in result.products:
        key = f"{product.pair.operands}*{product.pair.operands}"
        if key in written or product.pair.operands not in DTYPES:
            continue  # the widest output is the first, and shows most
        written.add(key)
        fraction = f"{product.explained_fraction:.6f} of {product.dots} dot products are explained"
        lines += _group("matmul", key, product.parameters, field_names(Matmul), fraction)
    return "\n".join(lines) + "\n"


def json_record(result: ProbeResult) -> dict[str, Any]:
    """The document that `--json` prints."""
    fractions = result.fractions
    unexplained: dict[str, Any] = {item.pair.name: list(item.unexplained) for item in result.products}
    unexplained |= {f"fp32->{item.target}": list(item.unexplained) for item in result.casts}
    return {
        "device": result.device,
        "versions": dict(result.about),
        "parameters": {
            name: {key: item.record() for key, item in found.items()}
            for name, found in result.parameters().items()
        },
        "explained_fraction": {"overall": min(fractions.values(), default=None), **fractions},
        "checked": {
            **{item.pair.name: item.dots for item in result.products},
            **{f"fp32->{item.target}": item.inputs for item in result.casts},
        },
        "unexplained": {name: found for name, found in unexplained.items() if found},
        "unavailable": dict(result.unavailable),
        "seconds": result.seconds,
    }


def today() -> str:
    """The date, UTC."""
    return datetime.now(UTC).date().isoformat()


def _about(result: ProbeResult) -> list[tuple[str, str]]:
    return [(name, _line(text)) for name, text in sorted(result.about.items())]


def _group(
    table: str, key: str, parameters: tuple[Parameter, ...], fields: tuple[str, ...], fraction: str
) -> list[str]:
    facts, words = [], []
    for item in parameters:
        note = f"note = {_text(item.why)}"
        if item.name not in fields:
            words.append(
                f"# {item.name}: {item.status if item.value is None else item.value} ({_line(item.why)})"
            )
        elif item.status == MEASURED and item.name == "path":
            if item.value != "direct":
                steps = [word for word in str(item.value).split() if word in DTYPES]
                facts.append(
                    f'path = {{ value = {json.dumps(steps)}, {_SOURCE}, confidence = "measured", {note} }}'
                )
        elif item.status == MEASURED and item.value != "exact":
            value = _text(item.value) if isinstance(item.value, str) else json.dumps(item.value)
            facts.append(f'{item.name} = {{ value = {value}, {_SOURCE}, confidence = "measured", {note} }}')
        elif item.status == NOT_APPLICABLE or item.value == "exact":
            facts.append(f'{item.name} = {{ status = "not_applicable", {_SOURCE}, {note} }}')
        else:
            words.append(f"# {item.name}: unknown ({_line(item.why)})")
    return [f"[arithmetic.{table}.{_text(key)}]", f"# {fraction}", *facts, *words, ""]


def _text(text: str) -> str:
    """A TOML string; JSON's escapes are TOML's."""
    return json.dumps(text, ensure_ascii=True)


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
