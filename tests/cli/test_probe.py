"""`probe` from the command line: its document, its files, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from qwen_quantize.chip_profiles.fingerprint import load_fingerprint
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.errors import UserError

Run = Callable[..., Result]


def test_the_document_and_the_files(run: Run, tmp_path: Path) -> None:
    layer, print_file = tmp_path / "layer.toml", tmp_path / "fp.json"
    result = run(
        "probe",
        "--on",
        "emulated:example@1.3",
        "--quick",
        "--json",
        "-q",
        "--output",
        layer,
        "--fingerprint",
        print_file,
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert {"parameters", "explained_fraction", "unexplained", "seconds"} <= record.keys()
    assert record["explained_fraction"]["overall"] == 1.0
    assert record["parameters"]["fp32->e4m3fn"]["rounding"]["value"] == "rtz"
    assert record["unexplained"] == {}
    assert (
        load_profile("example@1.2", measured=layer).arithmetic.casts["fp32->e4m3fn"].rounding.value == "rtz"
    )
    assert load_profile(layer).versions == {"firmware": "1.3"}  # the layer says what it was measured on
    loaded = load_fingerprint(print_file)
    assert loaded.versions.keys() >= {"qwen_quantize", "torch", "kernels", "firmware"}
    assert loaded.behaviour is not None
    assert loaded.behaviour.hashes.keys() >= {"fp32->e4m3fn", "e4m3fn*e4m3fn->fp32"}
    assert loaded.arithmetic["cast.rounding"] == "rtz"
    assert loaded.arithmetic["accumulator.fraction_bits"] == "23"
    assert loaded.arithmetic["accumulator.promotion_interval"] == "exact"
    again = run("probe", "--on", "emulated:example@1.3", "--quick", "--json", "-q")
    assert json.loads(again.stdout)["fingerprint"]["digest"] == loaded.digest
    other = run("probe", "--on", "emulated:example@1.2", "--quick", "--json", "-q")
    assert json.loads(other.stdout)["fingerprint"]["digest"] != loaded.digest


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("toaster", "no such device"),
        ("npu:0", "torch_npu"),
        ("cuda:x", "no such device"),
        ("emulated:exampel", "exampel"),
        ("emulated:", "unknown device"),
        ("", "no such device"),
    ],
)
def test_a_bad_device_is_one_sentence(run: Run, device: str, words: str) -> None:
    result = run("probe", "--on", device)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_missing_folder_is_said_before_the_work(run: Run, tmp_path: Path) -> None:
    result = run("probe", "--on", "emulated:example@1.2", "--output", tmp_path / "none" / "x.toml")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_a_changed_fingerprint_is_refused(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "fp.json"
    run("probe", "--on", "emulated:example@1.2", "--quick", "-q", "--fingerprint", file)
    record = json.loads(file.read_text())
    record["parameters"]["fp32->e4m3fn"]["rounding"] = "rtz"
    file.write_text(json.dumps(record))
    with pytest.raises(UserError, match="digest"):
        load_fingerprint(file)
    file.write_text("[]")
    with pytest.raises(UserError, match="no fingerprint"):
        load_fingerprint(file)
