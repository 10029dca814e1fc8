"""Versions as vendors write them, and what they decide."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.chip_profiles.versions import Version, in_range
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES

UE8M0 = SCHEMES["ue8m0"]


def test_order() -> None:
    ordered = [
        "7.0.0.alpha001",
        "7.0.0.beta1",
        "7.0.RC1",
        "7.0.RC2",
        "7.0",
        "8.0.RC1.alpha002",
        "8.0.RC1",
        "8.0.0",
        "8.0.1",
        "8.0.10",
        "9.1.0",
        "33.6.1",
    ]
    versions = [Version(text) for text in ordered]
    assert all(one < other for one, other in pairwise(versions))
    assert len(set(versions)) == len(versions)


@pytest.mark.parametrize(
    ("left", "right"), [("V1.2", "1.2"), ("1.2.0", "1.2"), ("3.8.0.3-c600u", "3.8.0.3"), ("1.0+br2xx", "1")]
)
def test_equal(left: str, right: str) -> None:
    assert Version(left) == Version(right)
    assert hash(Version(left)) == hash(Version(right))


def test_a_number_after_a_dash_orders() -> None:
    assert Version("5.10.0-108") > Version("5.10.0-20")


@pytest.mark.parametrize("text", ["", "newest", "1..2", "V", "-1"])
def test_unreadable_versions(text: str) -> None:
    with pytest.raises(ValueError, match="version"):
        Version(text)


def test_ranges() -> None:
    assert in_range("8.0.RC2", ">=8.0.RC1,<8.0")
    assert not in_range("8.0", ">=8.0.RC1,<8.0")
    assert in_range("V1.3", "1.3")
    for bad in ("", ">=", ">=1,,<2", "=>1"):
        with pytest.raises(ValueError, match="version"):
            in_range("1", bad)


def test_the_two_firmwares_of_the_example_differ_in_exactly_one_fact() -> None:
    before, after = (dict(load_profile(f"example@{version}").leaves()) for version in ("1.2", "1.3"))
    path = "arithmetic.casts.fp32->e4m3fn.rounding"
    assert {key for key in before if before[key] != after[key]} == {path}
    assert (before[path].value, after[path].value) == ("rne", "rtz")
    old = resolve_arithmetic(load_profile("example@V1.2"), UE8M0)
    new = resolve_arithmetic(load_profile("example", versions={"firmware": "1.3"}), UE8M0)
    assert not old.assumptions
    assert not new.assumptions
    assert {key for key in old.fields() if old.fields()[key] != new.fields()[key]} == {"cast.rounding"}
    assert old.fingerprint != new.fingerprint
    assert old.fingerprint == resolve_arithmetic(load_profile("example@1.1"), UE8M0).fingerprint


def test_an_unstated_version_makes_the_fact_unknown_and_an_assumption() -> None:
    profile = load_profile("example")
    assert profile.undecided == {"arithmetic.casts.fp32->e4m3fn.rounding": "firmware"}
    leaf = profile.arithmetic.casts["fp32->e4m3fn"].rounding
    assert leaf.value is Absent.UNKNOWN
    (assumption,) = resolve_arithmetic(profile, UE8M0).assumptions
    assert assumption.field == "cast.rounding"
    assert "firmware" in assumption.why
    # Another component's version decides nothing here.
    assert load_profile("example@driver=9").undecided == profile.undecided


@pytest.mark.parametrize(
    ("name", "versions", "message"),
    [
        ("example@newest", {}, "newest"),
        ("example@bios=1.3", {}, "unknown component 'bios'"),
        ("example@1.2", {"firmware": "1.3"}, "given twice"),
        ("example", {"frmware": "1.3"}, "did you mean `firmware`"),
        ("exmaple", {}, "did you mean `example`"),
    ],
)
def test_versions_that_cannot_be_used(name: str, versions: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_profile(name, versions=versions)


def test_two_matching_overrides_are_an_error(tmp_path: Path) -> None:
    text = Path(_example_path()).read_text(encoding="utf-8")
    block = text[text.index("[[overrides]]") :]
    path = tmp_path / "two.toml"
    path.write_text(
        text + "\n" + block.replace('">=1.3"', '"<2.0"').replace('"rtz"', '"rna"'), encoding="utf-8"
    )
    with pytest.raises(UserError, match=r"two overrides match: firmware >=1\.3 and firmware <2\.0"):
        load_profile(f"{path}@1.3")
    assert load_profile(f"{path}@1.2").arithmetic.casts["fp32->e4m3fn"].rounding.value == "rna"


def test_measured_facts_lie_on_top(tmp_path: Path) -> None:
    path = tmp_path / "measured.toml"
    path.write_text(
        '[probe]\ndate = "2026-11-29"\n[arithmetic]\nsource = ["PROBE"]\nconfidence = "measured"\n'
        '[arithmetic.casts."fp32->e4m3fn"]\nrounding = "odd"\n',
        encoding="utf-8",
    )
    profile = load_profile("example", measured=path)
    assert profile.arithmetic.casts["fp32->e4m3fn"].rounding.value == "odd"
    assert not profile.undecided
    path.write_text(path.read_text(encoding="utf-8").replace('"measured"', '"press"'), encoding="utf-8")
    with pytest.raises(UserError, match="holds only measured"):
        load_profile("example", measured=path)


def _example_path() -> str:
    from importlib.resources import files

    return str(files("qwen_quantize.chip_profiles") / "example.toml")
