"""Several results side by side: which rows there are, which of them can be compared, and which is best at what."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from qwen_quantize.report.numbers import human_bytes, percent, scientific, significant

BEST = "*"  # beside the best value of a line, so that it is not told by colour alone
APART = "†"  # beside figures that were measured otherwise than the others
_LABEL_WIDTH = 18
_COLUMN_WIDTH = 19


class Order(StrEnum):
    """What the user says matters."""

    KL = "kl"
    SIZE = "size"
    SPEED = "speed"
    PERPLEXITY = "perplexity"


@dataclass(frozen=True, slots=True)
class MeasuredOn:
    """What figures of accuracy were taken on: they compare only where all of this is the same."""

    text_sha256: str
    tokens: int
    windows: int
    window_tokens: int
    text: str

    @property
    def key(self) -> tuple[str, int, int, int]:
        return (self.text_sha256, self.tokens, self.windows, self.window_tokens)

    @property
    def words(self) -> str:
        name = self.text or "a text without a name"
        return (
            f"{self.tokens:,} tokens in windows of {self.window_tokens:,} of {name} ({self.text_sha256[:12]})"
        )


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the loss, in nats per token; standard_error None where one window was scored."""

    part: str
    nats: float | None
    standard_error: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One result. What is not known is None or empty; bytes are those of files and of resident memory.

    linear_bytes: of the quantized linears with their scales; bits_per_weight: 8 linear_bytes over their weights.
    quantize_memory_bytes, run_memory_bytes: peaks while quantizing, and while the bundled engine generates.
    """

    name: str
    sources: tuple[str, ...]
    model: str = ""
    chip: str = ""
    versions: str = ""
    method: str = ""
    scheme: str = ""
    layout: str = ""
    measured: MeasuredOn | None = None
    source_fingerprint: str = ""
    perplexity: float | None = None
    reference_perplexity: float | None = None
    rise: float | None = None
    rise_standard_error: float | None = None
    kl_mean: float | None = None
    kl_p99: float | None = None
    top1_agreement: float | None = None
    linear_bytes: int | None = None
    output_bytes: int | None = None
    bits_per_weight: float | None = None
    quantize_memory_bytes: int | None = None
    run_memory_bytes: int | None = None
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    attribution: tuple[Share, ...] = ()
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """A line of figures. accuracy: taken on a text, so that it compares only on the same one."""

    key: str
    title: str
    show: Callable[[float | None], str]
    smallest: bool | None  # is best; None where neither end is
    accuracy: bool = False

    def value(self, row: Row) -> float | None:
        """None also for what is no number."""
        found: float | None = getattr(row, self.key)
        return None if found is None or math.isnan(found) else float(found)


def _bytes(value: float | None) -> str:
    return "n/a" if value is None else human_bytes(value)


MEASURES = (
    Measure("perplexity", "perplexity", lambda v: significant(v, 4), True, True),
    Measure("reference_perplexity", "original's", lambda v: significant(v, 4), None, True),
    Measure("rise", "rise", lambda v: percent(v, signed=True), None, True),
    Measure("kl_mean", "KL, mean (nats)", scientific, True, True),
    Measure("kl_p99", "KL, 99 % below", scientific, True, True),
    Measure("top1_agreement", "same top-1", percent, False, True),
    Measure("linear_bytes", "linears", _bytes, True),
    Measure("output_bytes", "whole model", _bytes, True),
    Measure("bits_per_weight", "bits per weight", significant, True),
    Measure("quantize_memory_bytes", "memory, quantizing", _bytes, True),
    Measure("run_memory_bytes", "memory, running", _bytes, True),
    Measure("prefill_tokens_per_second", "prefill (tokens/s)", significant, False),
    Measure("decode_tokens_per_second", "decode (tokens/s)", significant, False),
)
_BY_KEY = {measure.key: measure for measure in MEASURES}
_ORDER_KEYS = {
    Order.KL: ("kl_mean",),
    Order.SIZE: ("output_bytes", "linear_bytes"),
    Order.SPEED: ("decode_tokens_per_second",),
    Order.PERPLEXITY: ("perplexity",),
}
WORDS = (
    ("chip", "chip"),
    ("versions", "versions"),
    ("method", "method"),
    ("scheme", "scheme"),
    ("layout", "layout"),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rows in the order asked for. apart: by row, why its accuracy does not compare with the others', or "".

    best: (row, key of a measure) of every best value. frontier: rows that no other beats in both size and KL.
    """

    rows: tuple[Row, ...]
    order: Order
    apart: tuple[str, ...]
    best: frozenset[tuple[int, str]]
    frontier: tuple[int, ...]
    measured: MeasuredOn | None

    @property
    def comparable(self) -> bool:
        return not any(self.apart)

    @property
    def measures(self) -> list[Measure]:
        """Those that any row has a value for."""
        return [it for it in MEASURES if any(it.value(row) is not None for row in self.rows)]

    @property
    def parts(self) -> list[str]:
        """The parts of the loss that any row names, in order of appearance."""
        return list(dict.fromkeys(share.part for row in self.rows for share in row.attribution))


def compare(rows: Sequence[Row], order: Order) -> Comparison:
    """Rows whose accuracy was taken as most others' was come first, each group by what matters."""
    common, fingerprint = _most_common(rows)
    why = {id(row): _apart(row, common, fingerprint) for row in rows}
    primary = _BY_KEY[_ORDER_KEYS[order][0]]

    def place(row: Row) -> tuple[bool, bool, float]:
        values = (_BY_KEY[key].value(row) for key in _ORDER_KEYS[order])
        value = next((found for found in values if found is not None), None)
        outside = primary.accuracy and bool(why[id(row)])
        if value is None:
            return outside, True, 0.0
        return outside, False, value if primary.smallest else -value

    placed = tuple(sorted(rows, key=place))
    apart = tuple(why[id(row)] for row in placed)
    return Comparison(placed, order, apart, _best(placed, apart), _frontier(placed, apart), common)


def _most_common(rows: Sequence[Row]) -> tuple[MeasuredOn | None, str]:
    """What most rows were measured on, and the source that most of those came from; the first of equals."""
    measured = [row.measured for row in rows if row.measured is not None]
    if not measured:
        return None, ""
    key = Counter(it.key for it in measured).most_common(1)[0][0]
    common = next(it for it in measured if it.key == key)
    sources = [
        row.source_fingerprint
        for row in rows
        if row.source_fingerprint and row.measured is not None and row.measured.key == key
    ]
    return common, Counter(sources).most_common(1)[0][0] if sources else ""


def _apart(row: Row, common: MeasuredOn | None, fingerprint: str) -> str:
    if row.measured is None or common is None:
        return ""
    if row.measured.key != common.key:
        return f"measured on {row.measured.words}"
    if fingerprint and row.source_fingerprint not in ("", fingerprint):
        return "made from another model than the others"
    return ""


def _best(rows: Sequence[Row], apart: Sequence[str]) -> frozenset[tuple[int, str]]:
    """Nothing is best where fewer than two rows compare, or where all are equal."""
    found = set()
    for measure in MEASURES:
        if measure.smallest is None:
            continue
        values = {
            index: value
            for index, row in enumerate(rows)
            if (value := measure.value(row)) is not None and not (measure.accuracy and apart[index])
        }
        if len(set(values.values())) < 2:
            continue
        target = min(values.values()) if measure.smallest else max(values.values())
        found |= {(index, measure.key) for index, value in values.items() if value == target}
    return frozenset(found)


def _frontier(rows: Sequence[Row], apart: Sequence[str]) -> tuple[int, ...]:
    points = {
        index: (row.output_bytes, row.kl_mean)
        for index, row in enumerate(rows)
        if row.output_bytes is not None
        and row.kl_mean is not None
        and math.isfinite(row.kl_mean)
        and not apart[index]
    }
    kept = [
        index
        for index, (size, kl) in points.items()
        if not any(s <= size and k <= kl and (s, k) != (size, kl) for s, k in points.values())
    ]
    return tuple(sorted(kept, key=lambda index: points[index]))


def notes(found: Comparison) -> list[str]:
    """What a reader must know beside the figures, in sentences."""
    said = []
    if found.measured is not None:
        said.append(f"accuracy was measured on {found.measured.words}")
    said += [
        f"{APART} {row.name} cannot be compared in accuracy: {why}"
        for row, why in zip(found.rows, found.apart, strict=True)
        if why
    ]
    without = [row.name for row in found.rows if row.measured is None]
    if without and found.measured is not None:
        said.append(f"without a measured accuracy: {', '.join(without)}")
    if any(row.decode_tokens_per_second is not None for row in found.rows):
        said.append("speed and running memory are the bundled engine's on a CPU, not the chip's")
    if found.best:
        said.append(f"{BEST} best of those that can be compared")
    return said


def comparison_record(found: Comparison) -> dict[str, Any]:
    """What `--json` prints, but for what the command itself adds."""
    return {
        "by": found.order.value,
        "comparable": found.comparable,
        "measured_on": None if found.measured is None else asdict(found.measured),
        "rows": [
            {
                **asdict(row),
                "apart": why or None,
                "best": [it.key for it in MEASURES if (index, it.key) in found.best],
                "on_frontier": index in found.frontier,
            }
            for index, (row, why) in enumerate(zip(found.rows, found.apart, strict=True))
        ],
        "notes": notes(found),
    }


def lines_of(found: Comparison) -> list[tuple[str, list[str]]]:
    """(title, a cell for each row): what any row knows, marked with what is best and what stands apart."""
    lines = [
        (title, [getattr(row, key) or "n/a" for row in found.rows])
        for key, title in WORDS
        if any(getattr(row, key) for row in found.rows)
    ]
    for measure in found.measures:
        lines.append((measure.title, [cell(found, index, measure) for index in range(len(found.rows))]))
    for part in found.parts:
        lines.append((f"loss, {part}", [share_words(row, part) for row in found.rows]))
    if any(row.assumptions for row in found.rows):
        lines.append(("assumed", ["; ".join(row.assumptions) or "nothing" for row in found.rows]))
    return lines


def cell(found: Comparison, index: int, measure: Measure) -> str:
    """A figure with its marks."""
    value = measure.value(found.rows[index])
    if value is None:
        return "n/a"
    mark = BEST if (index, measure.key) in found.best else ""
    mark += APART if measure.accuracy and found.apart[index] else ""
    return f"{measure.show(value)} {mark}".rstrip()


def share_words(row: Row, part: str) -> str:
    for share in row.attribution:
        if share.part == part:
            spread = "" if share.standard_error is None else f" ± {scientific(share.standard_error)}"
            return f"{scientific(share.nats)}{spread}"
    return "n/a"


def compare_tables(found: Comparison, width: int) -> list[Table]:
    """One column for each result, as many side by side as `width` characters hold, at least one."""
    together = max(1, (width - _LABEL_WIDTH) // _COLUMN_WIDTH)
    lines = lines_of(found)
    tables = []
    for start in range(0, len(found.rows), together):
        chosen = range(start, min(start + together, len(found.rows)))
        table = Table(
            title=f"Compared by {found.order.value}" if start == 0 else None,
            title_justify="left",
            title_style="bold",
            box=box.HORIZONTALS,
            pad_edge=False,
        )
        table.add_column("", style="dim", overflow="fold", max_width=_LABEL_WIDTH)
        for index in chosen:
            table.add_column(Text(f"{index + 1} {found.rows[index].name}"), overflow="fold")
        for title, cells in lines:
            bold = [Text(cells[i], style="bold" if cells[i].endswith(BEST) else "") for i in chosen]
            table.add_row(title, *bold)
        tables.append(table)
    return tables


def compare_lines(found: Comparison) -> list[str]:
    """For a pipe: a line of titles, then a line for each result, cells apart by tabs."""
    lines = lines_of(found)
    titles = "\t".join(("result", *(title for title, _ in lines)))
    rows = [
        "\t".join((row.name, *(cells[index] for _, cells in lines))) for index, row in enumerate(found.rows)
    ]
    return [titles, *rows]
