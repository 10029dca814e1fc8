"""Whose fault a loss is, for people: parts, interactions and the whole, as a table or as lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from qwen_quantize.report.fields import Fields
from qwen_quantize.report.numbers import NOT_MEASURED, scientific

_RESTORED = "everything off: the reference, bit for bit"
_NOT_RESTORED = "everything off: NOT the reference bit for bit, so these numbers are not to be trusted"


def attribution_tables(record: Mapping[str, Any]) -> list[Table]:
    """record: what `eval --attribute` puts under `attribution`. UserError for values of the wrong type."""
    table = Table(
        title="Whose fault the loss is, in nats per token",
        title_justify="left",
        title_style="bold",
        caption=_verdict(record),
        caption_justify="left",
        box=box.HORIZONTALS,
        pad_edge=False,
    )
    for name in ("", "loss", "won back without it", "KL"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    rows = _rows(record)
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=number >= len(rows) - 2)
    return [table]


def attribution_lines(record: Mapping[str, Any]) -> list[str]:
    """The same facts as `attribution_tables`, one a line."""
    lines = []
    for name, loss, recovered, divergence in _rows(record):
        without = f", won back without it {recovered}" if recovered else ""
        lines.append(f"loss from {name}: {loss} nats{without}, KL {divergence}")
    return [*lines, _verdict(record)]


def _rows(record: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    fields = Fields(record, "attribution")
    shares = [*fields.records("parts"), *fields.records("interactions")]
    rows = [(share.text("part").replace("_", " "), share) for share in shares]
    rows.append(("the whole", fields.record("total")))
    return [
        (
            name,
            _with_error(effect, "nats", "standard_error"),
            _with_error(effect.record("recovered"), "nats", "standard_error")
            if effect.has("recovered")
            else "",
            _with_error(effect, "kl_mean", "kl_standard_error"),
        )
        for name, effect in rows
    ]


def _with_error(effect: Fields, key: str, error: str) -> str:
    value, spread = scientific(effect.number(key)), scientific(effect.number(error))
    return value if spread == NOT_MEASURED else f"{value} ± {spread}"


def _verdict(record: Mapping[str, Any]) -> str:
    return _RESTORED if record.get("everything_off_is_the_reference") is True else _NOT_RESTORED
