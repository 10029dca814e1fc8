"""Which results compare, which is best, and what the page and the terminal say of it."""

from __future__ import annotations

import io
import json
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from qwen_quantize.errors import UserError
from qwen_quantize.report.compare import (
    APART,
    BEST,
    MeasuredOn,
    Order,
    Row,
    Share,
    compare,
    compare_lines,
    compare_tables,
    comparison_record,
    notes,
)
from qwen_quantize.report.compare_page import pareto, render_comparison
from qwen_quantize.report.compare_rows import Document, Kind, Recorded, kind_of, rows_of
from tests.report.sample import manifest

ON = MeasuredOn("ab" * 32, 4096, 8, 512, "heldout.txt")
HOSTILE = "<script>alert(1)</script>"


def row(name: str, kl: float | None, size: int | None, **more: object) -> Row:
    start = Row(name, (f"runs/{name}",), f"runs/{name}", "example", "firmware 1.2", "ue8m0", "ue8m0")
    return replace(
        start,
        measured=None if kl is None else ON,
        source_fingerprint="f" * 64,
        kl_mean=kl,
        perplexity=None if kl is None else 38 + kl,
        output_bytes=size,
        **more,  # type: ignore[arg-type]
    )


ROWS = [
    row("small", 0.05, 90 << 20, decode_tokens_per_second=30.0),
    row("exact", 0.01, 150 << 20, decode_tokens_per_second=10.0),
    row("beaten", 0.06, 160 << 20, decode_tokens_per_second=20.0),
]


@pytest.mark.parametrize(
    ("order", "names"),
    [
        (Order.KL, ["exact", "small", "beaten"]),
        (Order.PERPLEXITY, ["exact", "small", "beaten"]),
        (Order.SIZE, ["small", "exact", "beaten"]),
        (Order.SPEED, ["small", "beaten", "exact"]),
    ],
)
def test_what_matters_comes_first(order: Order, names: list[str]) -> None:
    assert [it.name for it in compare(ROWS, order).rows] == names


def test_the_best_of_each_line_and_the_frontier() -> None:
    found = compare(ROWS, Order.KL)
    best = {key: found.rows[index].name for index, key in found.best}
    assert best == {
        "kl_mean": "exact",
        "perplexity": "exact",
        "output_bytes": "small",
        "decode_tokens_per_second": "small",
    }
    assert [found.rows[index].name for index in found.frontier] == ["small", "exact"]


def test_equal_values_are_all_best_and_all_equal_ones_none() -> None:
    found = compare([row("a", 0.1, 5), row("b", 0.1, 5), row("c", 0.2, 5)], Order.KL)
    assert {found.rows[index].name for index, key in found.best if key == "kl_mean"} == {"a", "b"}
    assert not any(key == "output_bytes" for _, key in found.best)
    assert len(found.frontier) == 2


@pytest.mark.parametrize(
    "other",
    [
        replace(ON, text_sha256="cd" * 32),
        replace(ON, tokens=2048),
        replace(ON, windows=4),
        replace(ON, window_tokens=1024),
    ],
)
def test_what_was_measured_otherwise_is_shown_and_ranks_nowhere(other: MeasuredOn) -> None:
    stranger = replace(row("stranger", 0.001, 80 << 20), measured=other)
    found = compare([stranger, *ROWS], Order.KL)
    assert not found.comparable
    assert found.rows[-1].name == "stranger"
    assert found.apart[-1]
    assert all(not apart for apart in found.apart[:-1])
    assert (3, "kl_mean") not in found.best
    assert (3, "output_bytes") in found.best  # a size does not depend on a text
    assert 3 not in found.frontier
    cells = {line.split("\t")[0]: line for line in compare_lines(found)}
    assert f"1.00e-3 {APART}" in cells["stranger"]
    assert any(APART in note and "stranger" in note and "heldout.txt" in note for note in notes(found))
    assert compare([stranger, *ROWS], Order.SIZE).rows[0].name == "stranger"


def test_another_source_is_another_model() -> None:
    found = compare([*ROWS, replace(ROWS[0], name="other", source_fingerprint="e" * 64)], Order.KL)
    assert [bool(it) for it in found.apart] == [False, False, False, True]
    assert found.apart[-1] == "made from another model than the others"
    unknown = replace(ROWS[0], name="unknown", source_fingerprint="")
    assert compare([*ROWS, unknown], Order.KL).comparable


def test_what_is_not_known_comes_last() -> None:
    rows = [row("unmeasured", None, None), row("nan", math.nan, 3), row("measured", 0.5, 9)]
    found = compare(rows, Order.KL)
    assert [it.name for it in found.rows] == ["measured", "unmeasured", "nan"]
    assert not any(key == "kl_mean" for _, key in found.best)
    assert compare([row("unmeasured", None, None)], Order.SIZE).measured is None


def printed(found: object, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    for table in compare_tables(found, width):  # type: ignore[arg-type]
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_tables_fit_the_terminal(width: int) -> None:
    long = replace(ROWS[0], name="a" * 60, assumptions=("cast.rounding = rne",) * 5)
    text = printed(compare([*ROWS, long], Order.KL), width)
    assert max(map(len, text.splitlines())) <= width
    squeezed = re.sub(r"\s", "", text)
    for words in ("small", "exact", "beaten", "a" * 10, f"1.00e-2{BEST}", "150MiB", "rne"):
        assert words in squeezed


def test_names_are_no_markup() -> None:
    assert "[bold]x" in printed(compare([row("[bold]x", 0.1, 1)], Order.KL), 80)


def test_lines_for_a_pipe_have_as_many_cells_as_titles() -> None:
    lines = compare_lines(compare([*ROWS, row("bare", None, None)], Order.KL))
    assert {line.count("\t") for line in lines} == {lines[0].count("\t")}
    assert lines[0].startswith("result\t")
    assert f"1.00e-2 {BEST}" in lines[1]


def test_the_record_is_json_and_says_what_is_best() -> None:
    record = json.loads(json.dumps(comparison_record(compare(ROWS, Order.SPEED))))
    assert record["by"] == "speed"
    assert record["comparable"] is True
    assert [it["name"] for it in record["rows"]] == ["small", "beaten", "exact"]
    assert record["rows"][0]["best"] == ["output_bytes", "decode_tokens_per_second"]
    assert [it["on_frontier"] for it in record["rows"]] == [True, False, True]
    assert record["measured_on"]["tokens"] == 4096


def test_the_page_holds_every_result_and_loads_nothing() -> None:
    shares = (Share("weights", 0.01, 0.001), Share(HOSTILE, 0.02, None))
    rows = [
        *ROWS,
        replace(ROWS[0], name=HOSTILE, method=HOSTILE, attribution=shares, assumptions=(HOSTILE,)),
    ]
    found = compare(rows, Order.KL)
    page = render_comparison(found)
    assert page == render_comparison(found)
    assert HOSTILE not in page
    assert page.count("&lt;script&gt;") >= 5
    assert not re.search(r"(?:src|href)=|url\(|@import|https?:", page)
    assert page.count('<svg class="plot"') == 2
    assert "1.00e-2 ± 1.00e-3" in page
    assert f"1.00e-2 {BEST}</td>" in page
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_the_page_says_what_does_not_compare() -> None:
    stranger = replace(row("stranger", 0.001, 80 << 20), measured=replace(ON, tokens=5))
    page = render_comparison(compare([*ROWS, stranger], Order.KL))
    assert "Not all of these can be compared" in page
    assert "Not all" not in render_comparison(compare(ROWS, Order.KL))
    alone = render_comparison(compare([ROWS[0], stranger], Order.KL))
    assert "<svg" not in alone
    assert "Not drawn" in alone


@pytest.mark.parametrize("kl", [0.0, 1e-320, 1e300])
def test_extreme_divergences_are_drawn(kl: float) -> None:
    drawn = pareto(compare([*ROWS, row("extreme", kl, 10**15)], Order.KL), 340.0, "key")
    assert drawn is not None
    assert "nan" not in drawn
    assert drawn.count("extreme") >= 1
    assert pareto(compare([row("a", math.inf, 5), row("b", 0.1, 5)], Order.KL), 340.0, "key") is None


def test_numbers_of_points_that_lie_together_do_not_cover_each_other() -> None:
    rows = [row(f"r{index}", 0.0500 + index * 1e-6, (90 << 20) + index) for index in range(8)]
    drawn = pareto(compare(rows, Order.KL), 600.0, "key")
    assert drawn is not None
    places = re.findall(r'<text class="strong over" x="([\d.]+)" y="([\d.]+)"', str(drawn))
    assert len(places) == 8
    assert len(set(places)) == 8


# Rows from what programs wrote.


def document(kind: Kind, model: str, record: dict[str, object], path: str = "result.json") -> Document:
    return Document(path, kind, record, model)


def measured_record(kl: float, tokens: int = 900) -> dict[str, object]:
    return {
        "model": "m",
        "chip": "ascend-950 (from the model's manifest)",
        "text": "t",
        "text_sha256": "1f" * 32,
        "tokens": tokens,
        "windows": 1,
        "window_tokens": tokens,
        "perplexity": 9.5,
        "kl_mean": kl,
    }


def test_results_of_one_model_make_one_row() -> None:
    record = manifest()
    speed = {"decode_tokens_per_second": 7.0, "prefill_tokens_per_second": 70.0, "peak_memory_bytes": 1 << 30}
    made = {"output_path": "runs/out", "validation": None, "peak_memory_bytes": 2 << 30, "chip": "x"}
    documents = [
        Document("runs/out", Kind.MANIFEST, record, "/runs/out", 12345),
        document(Kind.BENCH, "/runs/out", speed, "bench.json"),
        document(Kind.QUANTIZE, "/runs/out", made, "made.json"),
    ]
    (found,) = rows_of(documents)
    assert found.name == "out"
    assert found.sources == ("runs/out", "bench.json", "made.json")
    assert (found.chip, found.method) == (record["chip"]["name"], record["method"])
    assert found.linear_bytes == 12345
    weights = sum(
        math.prod(linear["shape"]) for layer in record["layers"] for linear in layer["linears"]
    ) + sum(math.prod(linear["shape"]) for linear in record["head"])
    assert found.bits_per_weight == pytest.approx(8 * 12345 / weights)
    assert found.kl_mean == record["validation"]["kl_mean"]
    assert (found.decode_tokens_per_second, found.run_memory_bytes) == (7.0, 1 << 30)
    assert found.quantize_memory_bytes == 2 << 30
    assert len(found.assumptions) == len(record["assumptions"])
    measured = [document(Kind.EVAL, "/runs/out", measured_record(0.5), "eval.json")]
    (found,) = rows_of(documents + measured)
    assert (found.kl_mean, found.measured and found.measured.tokens) == (0.5, 900)
    assert found.output_bytes == record["output_bytes"]


def test_two_measurements_of_one_model_are_two_rows() -> None:
    own = Document("runs/out", Kind.MANIFEST, manifest(), "/runs/out", None)
    other = measured_record(0.7) | {"chip": "example (asked for)", "activation_rounding": "rtz"}
    found = rows_of(
        [
            own,
            document(Kind.EVAL, "/runs/out", measured_record(0.5), "first.json"),
            document(Kind.EVAL, "/runs/out", other, "second.json"),
        ]
    )
    assert [it.name for it in found] == ["out (first)", "out (second)"]
    assert found[1].chip == "example (asked for), casts rtz"
    assert found[1].versions == ""


def test_recorded_runs_have_a_perplexity_only() -> None:
    (found,) = rows_of([], [Recorded("r.safetensors", "/runs/out", "example", {"firmware": "1.3"}, ON, 12.5)])
    assert (found.perplexity, found.kl_mean, found.chip) == (12.5, None, "example")
    assert found.versions == "firmware 1.3"


def test_folders_of_one_name_are_told_apart() -> None:
    documents = [
        Document(p, Kind.MANIFEST, manifest(), p, None) for p in ("/a/x/out", "/b/x/out", "/c/other")
    ]
    assert [it.name for it in rows_of(documents)] == ["a/x/out", "b/x/out", "other"]


def test_other_documents_are_refused() -> None:
    assert kind_of(manifest(), "f") is Kind.MANIFEST
    assert kind_of(measured_record(0.1), "f") is Kind.EVAL
    with pytest.raises(UserError, match=r"^f\.json is none of"):
        kind_of({"verdict": "harmless"}, "f.json")


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (Kind.MANIFEST, {**manifest(), "output_bytes": "many"}),
        (Kind.MANIFEST, {**manifest(), "scheme": []}),
        (Kind.BENCH, {"decode_tokens_per_second": "fast"}),
        (Kind.BENCH, {"peak_memory_bytes": -1}),
        (Kind.EVAL, {"kl_mean": []}),
        (Kind.EVAL, {"attribution": {"parts": [1]}}),
        (Kind.QUANTIZE, {"peak_memory_bytes": True}),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_file(kind: Kind, record: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"bad\.json"):
        rows_of([Document("bad.json", kind, record, "/m", None)])
