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
import torch
from typer.testing import CliRunner, Result

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.behaviour import Behaviour
from qwen_quantize.chip_profiles.difference import arithmetic_from_fields, change_text, difference
from qwen_quantize.chip_profiles.fingerprint import Fingerprint, write_fingerprint
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


# ---- behaviours and measured layers ----

LAYER = """[probe]
chip = "example@1.2"
[arithmetic.casts."fp32->e4m3fn"]
rounding = {{ value = "{rounding}", source = ["PROBE"], confidence = "measured" }}
"""


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fingerprint of a device that computes as `example@1.2`; never written to by a test."""
    path = tmp_path_factory.mktemp("probed") / "fingerprint.json"
    arguments = ["probe", "--on", "emulated:example@1.2", "--quick", "--quiet", "--fingerprint", str(path)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    return path


def altered(probed: Path, path: Path, name: str, group: str, **fields: str) -> Path:
    """The same fingerprint with other outputs in one group, and other fields, as another device would have it."""
    record = json.loads(probed.read_text())
    del record["kind"], record["digest"]
    stored = record.pop("behaviour")
    hashes = {what: dict(groups) for what, groups in stored["hashes"].items()}
    hashes[name][group] = "0" * 64
    record["arithmetic"] |= {key.replace("__", "."): value for key, value in fields.items()}
    record["versions"]["torch"] = "0.1"
    other = Fingerprint(**record, behaviour=Behaviour(hashes, {}, stored["corpus"]))
    write_fingerprint(other, path)
    return path


def test_a_model_and_the_device_it_was_made_for(regress: Any, quantized: Path, probed: Path) -> None:
    """What a manifest emulates and what a probe of that chip sees are the same bits."""
    manifest = json.loads((quantized / "qwen_quantize.json").read_text())["chip"]["behaviour"]
    stored = json.loads(probed.read_text())["behaviour"]["hashes"]
    assert set(manifest["hashes"]) == {"fp32->e4m3fn", "e4m3fn*e4m3fn->fp32"}
    for name, groups in manifest["hashes"].items():
        assert stored[name] == groups
    code, record = regress(quantized, probed)
    assert (code, record["verdict"], record["changed"]) == (0, "unchanged", [])


@pytest.mark.parametrize(
    ("name", "group", "text"),
    [
        ("fp32->e4m3fn", "ties", "cast fp32->e4m3: its outputs differ (ties), and no field says why"),
        (
            "e4m3fn*e4m3fn->fp32",
            "long",
            "product e4m3*e4m3->fp32: its outputs differ (long), and no field says why",
        ),
    ],
)
def test_outputs_that_no_field_names(
    regress: Any, quantized: Path, probed: Path, tmp_path: Path, name: str, group: str, text: str
) -> None:
    after = altered(probed, tmp_path / "after.json", name, group)
    for before in (quantized, probed, "example@1.2"):
        code, record = regress(before, after, "--junit", tmp_path / "j.xml")
        assert (code, record["verdict"], record["conclusive"]) == (1, "recalibrate", False)
        assert [change["text"] for change in record["changed"]] == [text]
        assert record["changed"][0]["field"] == f"outputs.{name}"
        assert any(
            note.startswith("versions that differ: ") and "torch: " in note for note in record["notes"]
        )
        suite = ElementTree.parse(tmp_path / "j.xml").getroot()
        assert suite.get("failures") == "1"


def test_other_outputs_than_the_models_are_only_noted(regress: Any, probed: Path, tmp_path: Path) -> None:
    after = altered(probed, tmp_path / "after.json", "int8*int8->int32", "mixed")
    code, record = regress(probed, after)
    assert (code, record["verdict"], record["changed"]) == (0, "unchanged", [])
    assert any("not used by this model: the outputs of int8*int8->int32" in note for note in record["notes"])


def test_a_named_change_does_not_hide_another(regress: Any, probed: Path, tmp_path: Path) -> None:
    """The rounding is named and harmless here; what happened to the product is not known, so nothing is certain."""
    after = altered(probed, tmp_path / "after.json", "e4m3fn*e4m3fn->fp32", "step", cast__rounding="rtz")
    code, record = regress(probed, after, "--margin", "50%")
    assert (code, record["verdict"], record["conclusive"]) == (1, "recalibrate", False)
    assert [change["text"].split(":")[0] for change in record["changed"]] == [
        "cast fp32->e4m3",
        "product e4m3*e4m3->fp32",
    ]
    assert all(test["passed"] for test in record["tests"])
    assert "could not" in record["advice"]


def test_fingerprints_that_cannot_be_used(regress: Any, probed: Path, tmp_path: Path) -> None:
    record = json.loads(probed.read_text())
    for change, message in (
        ({"hashes": {}}, "the digest does not fit"),
        ({"behaviour": 3}, "not one that this program wrote"),
        ({"operands": "int8"}, "this model needs that of e4m3fn"),
    ):
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(record | change))
        code, answer = regress("example@1.2", path)
        assert (code, message in answer["error"]) == (2, True), answer


def layer(path: Path, rounding: str) -> Path:
    path.write_text(LAYER.format(rounding=rounding))
    return path


def test_measured_layers_are_sides(regress: Any, quantized: Path, tmp_path: Path) -> None:
    old, new = layer(tmp_path / "old.toml", "rne"), layer(tmp_path / "new.toml", "rtz")
    for before in (old, quantized, "example@1.2"):
        code, record = regress(before, new, "--margin", "50%")
        assert (code, record["verdict"]) == (0, "harmless")
        assert [change["text"] for change in record["changed"]] == [ROUNDING]
        assert record["not_compared"] == []
    assert regress(quantized, old)[1]["verdict"] == "unchanged"
    bare = tmp_path / "bare.toml"
    bare.write_text(new.read_text().partition("\n[")[2].join(("[", "")))
    code, record = regress("example@1.2", bare)
    assert (code, "do not say of which chip" in record["error"]) == (2, True)


def test_recalibration_for_a_measured_layer(regress: Any, run: Run, quantized: Path, tmp_path: Path) -> None:
    new = layer(tmp_path / "new.toml", "rtz")
    code, record = regress(quantized, new, "--margin", "0.001%", "--recalibrate", tmp_path / "model")
    assert (code, record["recalibrated"]["rows"][2]["name"]) == (1, "recalibrated")
    manifest = json.loads((tmp_path / "model" / "qwen_quantize.json").read_text())
    assert (manifest["request"]["device"], manifest["chip"]["name"]) == (str(new), "example")
    assert manifest["chip"]["arithmetic"]["cast.rounding"] == "rtz"
    text = quantized.parent / "text.txt"
    more = ("--text", text, "--against", "none", "--json", "-q")
    own = json.loads(run("eval", tmp_path / "model", *more).stdout)
    other = json.loads(run("eval", quantized, "--measured", new, *more).stdout)
    assert own["activation_rounding"] == other["activation_rounding"] == "rtz"


def test_quantize_and_show_take_a_measured_layer(run: Run, tiny_source: Path, tmp_path: Path) -> None:
    new = layer(tmp_path / "new.toml", "rtz")
    made = ("--model-path", tiny_source, "--no-validate", "-q")
    for number, chip in enumerate((("--device", "example@1.2"), ())):
        output = tmp_path / f"model{number}"
        assert run(*made, *chip, "--measured", new, "--output-path", output).exit_code == 0
        manifest = json.loads((output / "qwen_quantize.json").read_text())
        assert manifest["chip"]["arithmetic"]["cast.rounding"] == "rtz"
        assert manifest["chip"]["versions"] == {"firmware": "1.2"}
    facts = json.loads(run("chips", "show", "example@1.2", "--measured", new, "--json").stdout)["facts"]
    leaf = facts["arithmetic.casts.fp32->e4m3fn.rounding"]
    assert (leaf["value"], leaf["confidence"]) == ("rtz", "measured")
    wrong = run(*made, "--device", "cpu", "--measured", new, "--output-path", tmp_path / "x")
    assert wrong.exit_code == 2
    assert "was measured on example" in wrong.stderr


def test_a_manifest_says_which_bits_its_arithmetic_gives(run: Run, tiny_source: Path, tmp_path: Path) -> None:
    """Bytes that are the same with any number of threads, without times, and that hold every part."""
    written = []
    for threads in (1, 2):
        output = tmp_path / f"threads{threads}"
        done = run(
            *("--model-path", tiny_source, "--device", "example@1.3", "--output-path", output),
            *("--no-validate", "-q", "--threads", threads),
        )
        assert done.exit_code == 0
        chip = json.loads((output / "qwen_quantize.json").read_text())["chip"]
        written.append(json.dumps(chip["behaviour"]))
        assert (
            chip["behaviour"]["versions"].items() >= {"firmware": "1.3", "torch": torch.__version__}.items()
        )
        assert chip["behaviour"]["versions"].keys() == {"qwen_quantize", "torch", "kernels", "firmware"}
        assert chip["behaviour"]["digest"] != chip["fingerprint"]
    assert written[0] == written[1]
