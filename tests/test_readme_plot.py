"""The README's plot: what ran is drawn, smallest first, ours told apart without colour, and a stale file is noticed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tools import readme_plot

SVG = "{http://www.w3.org/2000/svg}"


def result(task: str, tool: str, method: str, size: int | None, rise: float) -> dict[str, Any]:
    texts = {
        name: {"rise": rise * part, "rise_standard_error": 0.01}
        for name, part in (("like", 1), ("unlike", 2))
    }
    return {"task": task, "tool": tool, "method": method, "linear_bytes": size, "texts": texts}


RECORD: dict[str, Any] = {
    "model": "a <model>",
    "texts": {"like": "a novel", "unlike": "a manual"},
    "rows": [
        result("w8a8", "qwen_quantize", "w8a8", 106_000_000, -0.001),
        result("w4a16 g64 symmetric", "peer", "gptq", 57_200_000, 0.15),
        result("w4a16 g64 symmetric", "qwen_quantize", "awq_v2", 59_700_000, 0.05),
        result("w4a16 g64 symmetric", "other", "rtn", None, 0.3),
        {"task": "w8a8", "tool": "peer", "method": "w8a8", "not_run": "it needs a device"},
    ],
}


def test_rows_that_ran_by_size_and_then_by_rise() -> None:
    found = [(line.tool, line.method) for line in readme_plot.lines_of(RECORD)]
    assert found == [
        ("qwen_quantize", "awq_v2"),
        ("peer", "gptq"),
        ("other", "rtn"),
        ("qwen_quantize", "w8a8"),
    ]
    with pytest.raises(ValueError, match="no row"):
        readme_plot.lines_of({**RECORD, "rows": RECORD["rows"][-1:]})


def test_the_drawing() -> None:
    tree = ElementTree.fromstring(readme_plot.drawing(RECORD))
    words = [element.text for element in tree.iter(f"{SVG}text")]
    for needed in ("4-bit weights in groups of 64, symmetric: 57–60 MB", "peer gptq", "5.0", "10.0", "-0.1"):
        assert needed in words
    assert "peer w8a8" not in words
    marks = [element.get("class", "") for element in tree.iter() if "mark" in element.get("class", "")]
    assert sum("hollow" in it for it in marks) == 1 + 2 * 2  # the legend's, and two results on two texts
    assert len(marks) == 2 + 4 * 2
    described = tree.findtext(f"{SVG}desc") or ""
    assert "lowest is qwen_quantize awq_v2, 5.0 % on like text and 10.0 % on unlike text" in described
    wide = float(tree.get("width", "0"))
    places = [float(element.get("x", "0")) for element in tree.iter(f"{SVG}text")]
    assert all(0 <= x < wide for x in places)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", readme_plot.drawing(RECORD))


def test_a_stale_figure_is_noticed(tmp_path: Path) -> None:
    results, figure = tmp_path / "peers.json", tmp_path / "figures" / "accuracy.svg"
    results.write_text(json.dumps(RECORD), encoding="utf-8")
    asked = ["--results", str(results), "--output", str(figure)]
    assert readme_plot.main([*asked, "--check"]) == 1
    assert readme_plot.main(asked) == 0
    assert readme_plot.main([*asked, "--check"]) == 0
    figure.write_text(figure.read_text(encoding="utf-8").replace("5.0", "4.0"), encoding="utf-8")
    assert readme_plot.main([*asked, "--check"]) == 1


def test_the_figure_is_fresh() -> None:
    assert readme_plot.main(["--check"]) == 0, "run `python tools/readme_plot.py`"
