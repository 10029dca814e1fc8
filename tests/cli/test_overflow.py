"""A cast that no longer saturates, from the refusal to calibrate for it to what makes the model answer again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.recalibrate import recovered_fraction
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.report.regression_tables import regression_lines
from tests.tiny_models import words

Run = Callable[..., Result]
OVERFLOW = ("--assume", "scale.rule=floor", "--assume", "cast.overflow=nonsaturate")


def side(path: Path, **fields: str) -> Path:
    profile = load_profile("example@1.2")
    arithmetic = resolve_arithmetic(profile, SCHEMES["ue8m0"]).fields()
    changed = {key.replace("_", "."): value for key, value in fields.items()}
    path.write_text(
        json.dumps(
            {"chip": "example", "versions": {"firmware": "1.2"}, "arithmetic": {**arithmetic, **changed}}
        )
    )
    return path


def test_nobody_calibrates_for_a_cast_that_overflows(
    run: Run, model: Path, dataset: Path, tmp_path: Path
) -> None:
    done = run(
        "--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2", *OVERFLOW,
        "--calibration-dataset", dataset, "--calibration-length", "32", "--quiet",
    )  # fmt: skip
    assert done.exit_code == 2
    assert "scale.rule=rceil" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_an_overflow_is_noticed_measured_and_mended(
    run: Run, model: Path, dataset: Path, tmp_path: Path
) -> None:
    text, old, new = tmp_path / "text.txt", tmp_path / "old", tmp_path / "new"
    text.write_text(words(1500, seed=77))
    done = run(
        "--model-path", model, "--output-path", old, "--device", "example@1.2", "--assume", "scale.rule=floor",
        "--calibration-dataset", dataset, "--calibration-length", "32", "--no-validate", "--quiet",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    before = side(tmp_path / "before.json", scale_rule="floor")
    after = side(tmp_path / "after.json", scale_rule="floor", cast_overflow="nonsaturate")
    done = run(
        "regress", old, "--before", before, "--after", after, "--text", text, "--recalibrate", new, "--json", "-q"
    )  # fmt: skip
    record = json.loads(done.stdout)
    assert (done.exit_code, record["verdict"], record["conclusive"]) == (1, "recalibrate", True)
    assert [change["text"] for change in record["changed"]] == [
        "cast fp32->e4m3, overflow: saturate -> nonsaturate"
    ]
    assert record["perplexity_after"] is None  # infinite
    assert [test["name"] for test in record["tests"]] == ["finite"]
    assert "scale.rule=rceil" in record["command"]
    assert record["advice"].startswith("choose the scale rule rceil where the model is served")
    assert "on condition: choose the scale rule rceil" in " ".join(regression_lines(record))
    again = record["recalibrated"]
    assert again["rows"][1]["perplexity"] is None
    assert math.isfinite(again["rows"][2]["perplexity"])
    assert again["recovered_fraction"] == 1.0
    assert any("choose the scale rule rceil where the model is served" in it for it in again["conditions"])
    done = run("eval", old, "--device", "example@1.2", *OVERFLOW, "--text", text, "--json", "-q")
    found = json.loads(done.stdout)
    assert found["perplexity"] is None
    assert found["lost_predictions"] > 0


@pytest.mark.parametrize(
    ("before", "after", "again", "share"),
    [
        (10.0, 12.0, 10.5, 0.75),
        (10.0, 10.0, 10.0, None),
        (10.0, math.inf, 11.0, 1.0),
        (10.0, math.inf, math.inf, 0.0),
        (math.inf, math.inf, 10.0, None),
    ],
)
def test_recovered_fraction(before: float, after: float, again: float, share: float | None) -> None:
    assert recovered_fraction(before, after, again) == share
