"""`regress` end to end: what changed, whether it hurts, what to do; and everything that it must refuse."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.difference import arithmetic_from_fields, change_text, difference
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.main import app
from qwen_quantize.eval.recording import RecordedRun, read_run, write_run
from qwen_quantize.formats.schemes import SCHEMES
from tests.tiny_models import words

Run = Callable[..., Result]
ROUNDING = "cast fp32->e4m3: rne -> rtz"


@pytest.fixture(scope="module")
def quantized(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model for `example@1.2`, calibrated on a text beside it; never written to by a test."""
    folder = tmp_path_factory.mktemp("quantized")
    data = folder / "calib.jsonl"
    data.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(12)))
    (folder / "text.txt").write_text(words(1500, seed=77))
    arguments = ["--model-path", tiny_source, "--device", "example@1.2", "--output-path", folder / "model"]
    arguments += ["--calibration-dataset", data, "--calibration-length", "32", "--no-validate", "--quiet"]
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return folder / "model"


@pytest.fixture
def regress(quantized: Path, run: Run) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Run `regress MODEL ... --json` on the text; its exit code and record."""

    def call(before: object, after: object, *more: object) -> tuple[int, dict[str, Any]]:
        text = () if "--text" in more else ("--text", quantized.parent / "text.txt")
        result = run("regress", quantized, "--before", before, "--after", after, *text, *more, "--json", "-q")
        return result.exit_code, json.loads(result.stdout)

    return call


@pytest.fixture
def recorded(quantized: Path, run: Run, tmp_path: Path) -> Path:
    path = tmp_path / "before.safetensors"
    text = quantized.parent / "text.txt"
    assert run("eval", quantized, "--text", text, "--against", "none", "--record", path, "-q").exit_code == 0
    return path


def fingerprint(path: Path, arithmetic: dict[str, Any], **more: Any) -> Path:
    path.write_text(json.dumps({"arithmetic": arithmetic, **more}))
    return path


def worse(path: Path, nats: float) -> Path:
    """The same run, every token less likely by `nats`."""
    run = read_run(path)
    scores = replace(run.scores, log_probability=run.scores.log_probability - nats)
    other = path.with_name(f"worse-{nats}.safetensors")
    write_run(other, RecordedRun(run.about, scores))
    return other


def test_the_same_firmware_is_unchanged(regress: Any, tmp_path: Path) -> None:
    code, record = regress("example@1.2", "example@1.2", "--junit", tmp_path / "j.xml")
    assert (code, record["verdict"], record["changed"], record["tests"]) == (0, "unchanged", [], [])
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("1", "0")


def test_the_new_firmware_is_named_and_tested(regress: Any, tmp_path: Path) -> None:
    code, record = regress("example@1.2", "example@1.3", "--margin", "0.001%", "--junit", tmp_path / "j.xml")
    assert code == 1
    assert record["verdict"] == "recalibrate"
    assert record["changed"] == [
        {"field": "cast.rounding", "before": "rne", "after": "rtz", "text": ROUNDING}
    ]
    names = [test["name"] for test in record["tests"]]
    assert names == ["finite", "non-inferiority", "harm", "kl_p99", "top1_flips"]
    for test in record["tests"]:
        assert {"name", "statistic", "p_value", "bound", "threshold", "passed"} <= test.keys()
    assert 1300 < record["tokens"] <= 1500
    rise = record["perplexity_after"] / record["perplexity_before"] - 1
    assert record["rise"] == pytest.approx(rise, rel=1e-6)
    assert rise != 0
    assert record["kl_mean"] > 0
    assert record["seconds"] > 0
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert list(cases) == ["arithmetic", *names]
    assert cases["arithmetic"].findtext("system-out") == ROUNDING
    assert [name for name, case in cases.items() if case.find("failure") is not None] == [
        test["name"] for test in record["tests"] if not test["passed"]
    ]
    assert suite.get("failures") != "0"


def test_a_wide_margin_makes_it_harmless(regress: Any) -> None:
    code, record = regress("example@1.2", "example@1.3", "--margin", "50%")
    assert (code, record["verdict"], record["conclusive"]) == (0, "harmless", True)
    assert record["changed"]


def test_people_read_the_same(run: Run, quantized: Path) -> None:
    text = quantized.parent / "text.txt"
    done = run(
        "regress", quantized, "--before", "example@1.2", "--after", "example@1.3", "--text", text, "--margin", "0.001%"
    )  # fmt: skip
    assert done.exit_code == 1
    assert f"changed: {ROUNDING}" in done.stdout
    assert "non-inferiority: FAILED" in done.stdout
    assert "verdict: recalibrate" in done.stdout


def test_manifests_and_fingerprints_are_sides_too(regress: Any, quantized: Path, tmp_path: Path) -> None:
    nested = fingerprint(tmp_path / "a.json", {"cast": {"rounding": "rtz"}})
    table = tmp_path / "b.toml"
    table.write_text('[arithmetic]\n"cast.rounding" = "rtz"\n')
    for after in (nested, table):
        for before in (quantized, quantized / "qwen_quantize.json"):
            code, record = regress(before, after, "--margin", "50%")
            assert code == 0
            assert [change["text"] for change in record["changed"]] == [ROUNDING]
            assert "cast.overflow" in record["not_compared"]
    assert regress(quantized, "example@1.2")[1]["verdict"] == "unchanged"
    assert regress(quantized, fingerprint(tmp_path / "c.json", {"cast.rounding": "rne"}))[0] == 0


@pytest.mark.parametrize(
    ("rounding", "device", "assumed"),
    [(None, "example@1.3", {}), ("odd", "example@firmware=1.2", {"cast.rounding": "odd"})],
)
def test_recalibration_for_the_changed_chip(
    regress: Any, tmp_path: Path, rounding: str | None, device: str, assumed: dict[str, str]
) -> None:
    """As the manifest asked, but for the other arithmetic, whether a profile or a fingerprint states it."""
    after: object = device
    if rounding is not None:
        after = fingerprint(tmp_path / "after.json", {"cast.rounding": rounding})
    new = tmp_path / "new"
    code, record = regress("example@1.2", after, "--margin", "0.001%", "--recalibrate", new)
    assert code == 1
    manifest = json.loads((new / "qwen_quantize.json").read_text())
    request = manifest["request"]
    assert (request["device"], request["length"], request["assume"]) == (device, 32, assumed)
    assert manifest["chip"]["arithmetic"]["cast.rounding"] == (rounding or "rtz")
    again = record["recalibrated"]
    assert [row["name"] for row in again["rows"]] == ["before", "after", "recalibrated"]
    assert again["rows"][0]["perplexity"] == pytest.approx(record["perplexity_before"])
    assert again["rows"][1]["perplexity"] == pytest.approx(record["perplexity_after"])
    assert all(0 < row["kl_mean"] < row["kl_p99"] for row in again["rows"])


def test_recalibration_is_not_done_where_it_is_not_needed(regress: Any, tmp_path: Path) -> None:
    code, record = regress("example@1.2", "example@1.2", "--recalibrate", tmp_path / "new")
    assert code == 0
    assert not (tmp_path / "new").exists()
    assert any("not needed" in note for note in record["notes"])


def test_accumulators_are_named_and_computed(regress: Any, tmp_path: Path) -> None:
    narrow = fingerprint(tmp_path / "narrow.json", {"accumulator.fraction_bits": 7})
    code, record = regress("example@1.2", narrow, "--margin", "0.001%", "--junit", tmp_path / "j.xml")
    assert code == 1
    assert [change["text"] for change in record["changed"]] == ["accumulator: 23 bits -> 7 bits"]
    assert not any("level 2 was not run" in note for note in record["notes"])
    assert record["kl_mean"] > 1e-6
    assert int(ElementTree.parse(tmp_path / "j.xml").getroot().get("failures", "0")) >= 1


def test_recorded_runs(regress: Any, recorded: Path) -> None:
    assert regress(recorded, recorded)[1]["verdict"] == "unchanged"
    code, record = regress(recorded, worse(recorded, 0.02))
    assert (code, record["verdict"], record["conclusive"]) == (1, "recalibrate", True)
    assert record["rise"] == pytest.approx(0.0202, rel=0.01)
    words_of = shlex.split(record["command"])
    assert words_of[:2] == ["qwen_quantize", "--model-path"]
    assert words_of[words_of.index("--device") + 1] == "example@firmware=1.2"
    assert words_of[words_of.index("--calibration-length") + 1] == "32"
    assert regress(recorded, worse(recorded, 0.002))[1]["verdict"] == "harmless"


def test_a_recorded_run_and_a_chip(regress: Any, recorded: Path) -> None:
    """The other side is run on the same windows; the run itself is not repeated."""
    both = regress("example@1.2", "example@1.3", "--margin", "50%")[1]
    mixed = regress(recorded, "example@1.3", "--margin", "50%")[1]
    for key in ("changed", "tokens", "perplexity_before", "perplexity_after", "kl_p99"):
        assert mixed[key] == both[key]


def test_eval_keeps_what_it_measured(quantized: Path, recorded: Path, run: Run) -> None:
    text = quantized.parent / "text.txt"
    shown = json.loads(run("eval", quantized, "--text", text, "--against", "none", "--json", "-q").stdout)
    kept = read_run(recorded)
    assert kept.scores.tokens == shown["tokens"]
    assert kept.about.text_sha256 == shown["text_sha256"]
    assert kept.about.versions == {"firmware": "1.2"}
    assert kept.about.arithmetic["cast.rounding"] == "rne"
    mean = float(kept.scores.log_probability.double().mean())
    assert shown["perplexity"] == pytest.approx(2.718281828459045**-mean, rel=1e-6)


def test_claims_only_with_claims(regress: Any) -> None:
    code, record = regress("biren-br100@V1.2", "biren-br100@V1.3", "--with-claims", "--margin", "50%")
    assert [change["text"] for change in record["changed"]] == [ROUNDING]
    assert (code, regress("biren-br100@V1.2", "biren-br100@V1.3")[1]["verdict"]) == (0, "unchanged")


def hostile(path: Path) -> list[tuple[str, object, str]]:
    """(what is wrong, a side, what the message says)."""
    weights = path / "weights.safetensors"
    from safetensors.torch import save_file
    from torch import zeros

    save_file({"weight": zeros(2)}, weights)
    (path / "list.json").write_text("[1]")
    (path / "empty").mkdir()
    (path / "bad.toml").write_text("= 3")
    return [
        ("unknown chip", "exampel@1.2", "exampel"),
        ("no such file", path / "absent.json", "cannot be read"),
        ("no manifest", path / "empty", "holds no qwen_quantize.json"),
        ("weights", weights, "no recorded run"),
        ("a list", path / "list.json", "must be a JSON object"),
        ("bad TOML", path / "bad.toml", "not a TOML file"),
        ("no arithmetic", fingerprint(path / "none.json", {}), "states no arithmetic"),
        ("unknown value", fingerprint(path / "value.json", {"cast.rounding": "up"}), "allowed: rne"),
        ("a list inside", fingerprint(path / "inside.json", {"cast.rounding": ["rne"]}), "must be text"),
        ("many lines", fingerprint(path / "lines.json", {"x": "a\nb"}), "short line"),
        ("no integer", fingerprint(path / "bits.json", {"accumulator.fraction_bits": "-1"}), "whole number"),
        ("nothing in common", fingerprint(path / "other.json", {"x": "y"}), "nothing in common"),
        ("stochastic", fingerprint(path / "sr.json", {"cast.rounding": "stochastic"}), "not emulated here"),
    ]


def test_bad_sides_end_with_two(regress: Any, tmp_path: Path) -> None:
    for what, side, message in hostile(tmp_path):
        code, record = regress("example@1.2", side)
        assert (code, message in record["error"]) == (2, True), (what, record)


def test_bad_requests_end_with_two(
    regress: Any, run: Run, quantized: Path, tiny_source: Path, recorded: Path, tmp_path: Path
) -> None:
    sides = ("--before", "example@1.2", "--after", "example@1.3")
    for more, message in (
        (("--margin", "0.5"), "write a percentage"),
        (("--margin", "0%"), "write a percentage"),
        (("--margin", "nan%"), "write a percentage"),
        (("--text", tmp_path / "absent.txt"), "absent.txt"),
        (("--junit", tmp_path / "absent" / "j.xml"), "there is no folder"),
        (("--recalibrate", quantized), "exists"),
        (("--recalibrate", tmp_path / "n", "--calibration-dataset", tmp_path / "absent.txt"), "is not here"),
    ):
        code, record = regress("example@1.2", "example@1.3", *more)
        assert (code, message in record["error"]) == (2, True), record
    assert run("regress", tmp_path / "absent", *sides).exit_code == 2
    plain = run("regress", tiny_source, *sides, "--text", quantized.parent / "text.txt", "-q")
    assert plain.exit_code == 2
    assert "quantize it first" in plain.stderr
    other = tmp_path / "other.txt"
    other.write_text(words(1500, seed=78))
    code, record = regress(recorded, "example@1.3", "--text", other)
    assert (code, "of another text" in record["error"]) == (2, True)


def test_the_arithmetic_of_a_profile_comes_back_from_its_fields() -> None:
    for name in ("example@1.2", "example@1.3", "nvidia-h100", "ascend-950", "amd-mi300x"):
        arithmetic = resolve_arithmetic(load_profile(name), SCHEMES["ue8m0"])
        again = arithmetic_from_fields(arithmetic.fields(), arithmetic.chip, arithmetic.scheme)
        assert again.fields() == arithmetic.fields()
        assert again.fingerprint == arithmetic.fingerprint


def test_changes_in_words() -> None:
    assert change_text("cast.rounding", "rne", "rtz", "e4m3fnuz") == "cast fp32->e4m3fnuz: rne -> rtz"
    assert change_text("accumulator.fraction_bits", "exact", "13") == "accumulator: exact -> 13 bits"
    assert change_text("accumulator.promotion_interval", "exact", "128").endswith(
        "never -> every 128 products"
    )
    assert change_text("vector.order", "a", "b") == "vector.order: a -> b"
    found = difference(
        {"cast.nan": "zero", "b": "1", "a": "1"}, {"cast.nan": "propagate", "b": "2", "c": "3"}
    )
    assert [change.field for change in found.changed] == ["cast.nan", "b"]
    assert found.not_compared == ("a", "c")
