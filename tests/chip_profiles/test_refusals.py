"""Broken profile files: each is refused with the file, the place, what was found and what is allowed."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.chips import chips_app
from qwen_quantize.errors import UserError

EXAMPLE = (files("qwen_quantize.chip_profiles") / "example.toml").read_text(encoding="utf-8")

# (text in example.toml, what replaces it, the parts that the message has to name)
MUTATIONS = [
    ("[identity]", "[identty]", ("identty", "no such field", "`identity`")),
    ('smi = "ex-smi"', 'sim = "ex-smi"', ("identity.sim", "did you mean `smi`")),
    ('smi = "ex-smi"', "smi = 3", ("identity.smi", "found 3", "a string")),
    ('smi = "ex-smi"', 'smi = ""', ("identity.smi", "found ''")),
    ("clock = 1.0", "clock = true", ("compute.clock", "found True", "a number")),
    ("clock = 1.0", "clock = nan", ("compute.clock", "found nan")),
    ("l2_line = 128", "l2_line = -128", ("memory.l2_line", "-128", "not negative")),
    ("l2_line = 128", "l2_line = 128.5", ("memory.l2_line", "128.5", "a whole number")),
    ("matrix_cores = 16", 'matrix_cores = "16"', ("compute.matrix_cores", "found '16'")),
    ("soc_ids = [1]", "soc_ids = [true]", ("identity.soc_ids", "[True]", "list of whole numbers")),
    ('stack = ["EXStack"]', "stack = []", ("software.stack", "found []")),
    ('unit = "GB"', 'unit = "furlong"', ("memory.capacity.unit", "'furlong'", "GB, GiB")),
    ('"EXAMPLE"', '"EXAMPEL"', ("source", "'EXAMPEL'", "sources.toml", "`EXAMPLE`")),
    ('confidence = "vendor-doc"', 'confidence = "rumour"', ("confidence", "'rumour'", "vendor-doc", "press")),
    ('confidence = "vendor-doc"', 'confidence = "claim"', ("claim", "claims/")),
    (
        'source = ["EXAMPLE"]\nconfidence = "vendor-doc"\nproducts',
        "products",
        ("identity.products", "no source"),
    ),
    ('rounding = "rne"  ', 'rounding = "nearest"  ', ("fp32->e4m3fn.rounding", "'nearest'", "rne")),
    ("[dtypes.e4m3fn]", "[dtypes.e4m3]", ("dtypes.e4m3", "'e4m3'", "`e4m3fn`")),
    ('casts."fp32->e4m3fn"]', 'casts."fp32-e4m3fn"]', ("fp32-e4m3fn", "expected a cast")),
    ('matmul."e4m3fn*e4m3fn"]', 'matmul."e4m3fn"]', ("arithmetic.matmul.e4m3fn", "operand pair")),
    (
        'overflow = "wrap"',
        'overflow = { value = "wrap", status = "unknown" }',
        ("excludes a value", "'wrap'"),
    ),
    ('overflow = "wrap"', 'overflow = { status = "disputed" }', ("at least two alternatives", "found 0")),
    ('overflow = "wrap"', 'overflow = { status = "maybe" }', ("status", "'maybe'", "not_supported")),
    ('overflow = "wrap"', 'overflow = { valeu = "wrap" }', ("valeu", "did you mean `value`")),
    ('overflow = "wrap"', "overflow = {}", ("int8*int8.overflow", "needs `value`")),
    ("[software.components.firmware]", "[software.components.bios]", ("components.bios", "firmware, driver")),
    ("[memory.buffers]", '[memory."buf.fers"]', ("no such field", "`buffers`")),
    ("L1 = 524288", '"L.1" = 524288', ("L.1", "dot")),
    ("generation = 1", 'generation = "1"', ("chip.generation", "found '1'")),
    ('name = "example"', 'nam = "example"', ("chip.nam", "name, title")),
    ("[chip]", "[chips]", ("chip", "expected a table [chip]")),
    ('versions = ">=1.3"', 'versions = ">=newest"', ("overrides[0].versions", "newest")),
    (
        'field = "arithmetic.casts',
        'field = "arithmetic.cats',
        ("arithmetic.cats", "no such field", "`casts`"),
    ),
    ('e4m3fn.rounding"', 'e4m3fn"', ("not the path of a single fact",)),
    ('component = "firmware"\n', "", ("overrides[0].component", "missing")),
    ('fact = { value = "rtz"', 'fact = { value = "rzt"', ("fp32->e4m3fn.rounding", "'rzt'", "`rtz`")),
    ("[memory]", "[memory", ("not a TOML file",)),
]


@pytest.mark.parametrize(("old", "new", "parts"), MUTATIONS)
def test_a_broken_file_is_refused(tmp_path: Path, old: str, new: str, parts: tuple[str, ...]) -> None:
    assert old in EXAMPLE
    path = tmp_path / "broken.toml"
    path.write_text(EXAMPLE.replace(old, new), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_profile(path)
    for part in (str(path), *parts):
        assert part in str(caught.value)


def test_the_unbroken_file_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "whole.toml"
    path.write_text(EXAMPLE, encoding="utf-8")
    done = CliRunner().invoke(chips_app, ["validate", str(path), "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["valid"] is True


def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    listed = runner.invoke(chips_app, ["list", "--json"])
    chips = json.loads(listed.stdout)["chips"]
    assert {"name", "family", "arithmetic"} <= set(chips[0])
    assert {chip["arithmetic"] for chip in chips} == {"stated", "partly", "unknown"}
    shown = runner.invoke(chips_app, ["show", "example@1.3", "--json"])
    facts = json.loads(shown.stdout)["facts"]
    assert facts["arithmetic.casts.fp32->e4m3fn.rounding"]["value"] == "rtz"
    plain = runner.invoke(chips_app, ["show", "910b"])
    assert "memory.l2_size\t201326592 bytes\tknown\tvendor-doc\tINI ADK" in plain.stdout
    broken = tmp_path / "broken.toml"
    broken.write_text(EXAMPLE.replace("[identity]", "[identty]"), encoding="utf-8")
    refused = runner.invoke(chips_app, ["validate", str(broken)])
    assert refused.exit_code == 2
    assert "identty" in refused.stderr
    assert runner.invoke(chips_app, ["show", "nothing-like-it"]).exit_code == 2
