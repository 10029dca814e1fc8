"""Terminal output: the numbers are there, at 80 columns, and hostile names stay words."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from qwen_quantize.errors import UserError
from qwen_quantize.report.tables import comparison_lines, comparison_tables, plain_lines, summary_tables
from tests.report.sample import manifest, mixture, validation

RUN = {
    "seconds": 72.3,
    "stages": {"quantize": 60.1, "validate": 12.2},
    "peak_memory_bytes": 700_000_000,
    "output_path": "out/small",
    "decode_tokens_per_second": 41.27,
}


def printed(tables: list[Table], width: int = 80) -> str:
    console = Console(file=StringIO(), width=width, color_system="truecolor", force_terminal=True)
    for table in tables:
        console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def plain(tables: list[Table]) -> str:
    console = Console(file=StringIO(), width=80)
    for table in tables:
        console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_tables_hold_the_numbers_at_80_columns() -> None:
    shown = plain(summary_tables(manifest(), RUN))
    numbers = (
        "31.42, original 31.02: +1.29% ± 0.10%",
        "mean 0.00421",
        "p99 0.0317",
        "95.38%",
        "3.18e-3",
        "668 MiB",
    )
    for number in (
        *numbers,
        "1 min 12 s (quantize 1 min 00 s, validate 12.2 s)",
        "41.3 tokens/s",
        "out/small",
    ):
        assert number in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown  # nothing was cut


def test_four_tables_and_fewer_when_there_is_less_to_say() -> None:
    titles = [str(table.title) for table in summary_tables(manifest(), RUN)]
    assert titles == ["What was made", "What it costs", "Worst linears by output error", "What to know"]
    assert [str(table.title) for table in summary_tables({}, {})] == titles[:2]


def test_lines_say_the_same() -> None:
    lines = plain_lines(manifest(), RUN)
    assert "perplexity: 31.42, original 31.02: +1.29% ± 0.10%" in lines
    assert "time: 1 min 12 s (quantize 1 min 00 s, validate 12.2 s)" in lines
    worst = [line for line in lines if line.startswith("worst linear: ")]
    assert len(worst) == 5
    assert worst[0] == (
        "worst linear: model.layers.2.mlp.down_proj, output error 3.18e-3, "
        "round to nearest 4.67e-3, 31.8% removed"
    )
    assert lines[-4].startswith("assumed: cast.subnormals = keep: ")
    assert all("\n" not in line for line in lines)


def test_without_validation_and_calibration() -> None:
    lines = plain_lines(manifest(1) | {"validation": None, "calibration": None}, {"output_path": "out"})
    assert "validation: not measured: nothing is known about the quality of this model" in lines
    assert "calibration: none: scales were searched on the weights alone" in lines
    assert any("weight error" in line for line in lines)
    assert not any(line.startswith(("time", "peak memory")) for line in lines)


def test_hostile_names_are_words() -> None:
    made = manifest(1)
    made["notes"] = ["[bold red]red[/] [/nothing] \x1b[31mred"]
    assert "[bold red]red[/] [/nothing] \ufffd[31mred" in plain(summary_tables(made, RUN))
    assert "\x1b[31m" not in printed(summary_tables(made, RUN))
    assert "note: [bold red]red[/] [/nothing] \ufffd[31mred" in plain_lines(made, RUN)


def test_many_notes_are_counted() -> None:
    lines = plain_lines(manifest(1) | {"notes": [f"note {n}" for n in range(30)]}, {})
    assert "note: 22 more stand in the report" in lines


def test_comparison() -> None:
    record: dict[str, Any] = {
        "model": "out/small", "against": "big", "chip": "example (asked for)", "activation_rounding": "rtz",
        **validation(4), "seconds": 3.5, "peak_memory_bytes": 2**30,
    }  # fmt: skip
    lines = comparison_lines(record)
    assert lines[:4] == [
        "model: out/small",
        "compared with: big",
        "chip: example (asked for), activations cast rtz",
        "perplexity: 31.42, original 31.02: +1.29% ± 0.10%",
    ]
    assert lines[-2:] == ["time: 3.50 s", "peak memory: 1.00 GiB"]
    assert "mean 0.00421" in plain(comparison_tables(record))


def test_comparison_with_nothing() -> None:
    record = {"model": "m", "against": None, "tokens": 10, "windows": 1, "perplexity": 7.0, "kl_mean": None}
    lines = comparison_lines(record | {"layers": (), "kl_edges": (), "kl_counts": (), "chip": None})
    assert lines == [
        "model: m",
        "compared with: nothing",
        "perplexity: 7.000",
        "measured on: 10 tokens in 1 window",
    ]


def test_exact_and_lowest_layers() -> None:
    record = validation(3)
    record["layers"][0]["sqnr_db"], record["layers"][1]["sqnr_db"] = None, 12.0
    assert "lowest 12.0 dB after layer 1" in "\n".join(comparison_lines(record))
    for layer in record["layers"]:
        layer["sqnr_db"] = None
    assert "hidden states: exact after the last layer" in comparison_lines(record)


def test_experts_and_routers_of_a_mixture() -> None:
    made = mixture(4, 16)
    lines = plain_lines(made, {})
    assert (
        "experts: 48 routed in 3 layers; 6 starved, 2 of them without a token (1,024 needed; policy shrink)"
        in lines
    )
    assert "router agreement: 98.20%, lowest 97.42% in layer 1" in lines
    shown = plain(summary_tables(made, {}))
    assert "48 routed in 3 layers" in shown
    assert "98.20%, lowest 97.42% in layer 1" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "router agreement: 98.20%, lowest 97.42% in layer 1" in comparison_lines(made["validation"])


def test_a_worst_linear_of_an_expert_is_named_by_its_expert() -> None:
    made = mixture(2, 4)
    made["layers"][1]["linears"][-1]["error"] = 0.5
    assert any("model.layers.1.mlp.experts.3.down_proj" in line for line in plain_lines(made, {}))
    assert "mlp.experts.3.down_proj" in plain(summary_tables(made, {}))


def test_a_dense_model_says_nothing_of_experts() -> None:
    assert not [line for line in plain_lines(manifest(), RUN) if line.startswith(("experts", "router"))]


def test_a_broken_record_is_a_user_error() -> None:
    with pytest.raises(UserError, match="kl_counts"):
        comparison_lines(validation(1) | {"kl_counts": 3})
