"""The parts of a loss in words."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from qwen_quantize.errors import UserError
from qwen_quantize.report.attribution_tables import attribution_lines, attribution_tables


def effect(nats: float, error: float | None = 1e-4) -> dict[str, Any]:
    return {"nats": nats, "standard_error": error, "kl_mean": 2 * nats, "kl_standard_error": error}


def sample(**changes: Any) -> dict[str, Any]:
    record: dict[str, Any] = {
        "parts": [
            {"part": "weights", **effect(0.01), "recovered": effect(0.008)},
            {"part": "scale_rounding", **effect(0.002, None), "recovered": effect(-0.001)},
        ],
        "interactions": [{"part": "weights x scale_rounding", **effect(-0.0005)}],
        "total": effect(0.0115),
        "everything_off_is_the_reference": True,
    }
    return {**record, **changes}


def test_lines() -> None:
    assert attribution_lines(sample()) == [
        "loss from weights: 1.00e-2 ± 1.00e-4 nats, won back without it 8.00e-3 ± 1.00e-4, KL 2.00e-2 ± 1.00e-4",
        "loss from scale rounding: 2.00e-3 nats, won back without it -1.00e-3 ± 1.00e-4, KL 4.00e-3",
        "loss from weights x scale rounding: -5.00e-4 ± 1.00e-4 nats, KL -1.00e-3 ± 1.00e-4",
        "loss from the whole: 1.15e-2 ± 1.00e-4 nats, KL 2.30e-2 ± 1.00e-4",
        "everything off: the reference, bit for bit",
    ]


def test_the_table_fits_a_terminal_and_says_when_it_cannot_be_trusted() -> None:
    console = Console(width=100, file=io.StringIO())
    for table in attribution_tables(sample(everything_off_is_the_reference=False)):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "scale rounding" in text
    assert "2.30e-2 ± 1.00e-4" in text
    assert "NOT the reference" in text
    assert "…" not in text


def test_wrong_types_are_named() -> None:
    with pytest.raises(UserError, match=r"attribution\.total\.nats"):
        attribution_lines(sample(total={"nats": "much"}))
