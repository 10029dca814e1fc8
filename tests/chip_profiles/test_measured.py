"""A layer of measured facts as a device: the chip that it was measured on, with the facts laid over."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_quantize.chip_profiles.devices import resolve_device
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.chip_profiles.measured import device_with_layer
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES

FACT = '[arithmetic.casts."fp32->e4m3fn"]\nrounding = { value = "odd", source = ["PROBE"], confidence = "measured" }\n'


def layer(path: Path, chip: str | None, facts: str = FACT) -> Path:
    head = "" if chip is None else f'[probe]\nchip = "{chip}"\ndate = "2026-01-01"\n'
    path.write_text(head + facts, encoding="utf-8")
    return path


def test_a_layer_is_its_chip_with_the_facts(tmp_path: Path) -> None:
    file = layer(tmp_path / "layer.toml", "example")
    profile = load_profile(file)
    cast = profile.arithmetic.casts["fp32->e4m3fn"]
    assert (profile.name, cast.rounding.value, cast.rounding.confidence) == ("example", "odd", "measured")
    assert cast.overflow.value == "saturate"  # of the profile below
    assert load_profile(f"{file}@1.2").versions == {"firmware": "1.2"}
    assert load_profile(file, versions={"driver": "5"}).versions == {"driver": "5"}
    assert resolve_device(str(file), SCHEMES["ue8m0"]).profile.name == "example"


def test_a_layer_may_state_the_version_it_was_measured_at(tmp_path: Path) -> None:
    file = layer(tmp_path / "layer.toml", "example@1.3")
    assert load_profile(file).versions == {"firmware": "1.3"}
    assert load_profile(f"{file}@1.3").versions == {"firmware": "1.3"}
    with pytest.raises(UserError, match=r"given twice, as 1\.[34] and as 1\.[34]"):
        load_profile(f"{file}@1.4")


def test_a_layer_with_a_device(tmp_path: Path) -> None:
    file = layer(tmp_path / "layer.toml", "example@1.3")
    assert device_with_layer(None, file) == str(file)
    assert device_with_layer("example", file) == device_with_layer("example-family", file) == str(file)
    assert device_with_layer("example@1.3", file) == f"{file}@1.3"
    with pytest.raises(UserError, match="was measured on example, which cpu is not"):
        device_with_layer("cpu", file)


def test_layers_that_cannot_be_used(tmp_path: Path) -> None:
    first, second = layer(tmp_path / "first.toml", "example"), layer(tmp_path / "own.toml", "")
    with pytest.raises(UserError, match="do not say of which chip"):
        load_profile(second)
    with pytest.raises(UserError, match="no more can be laid over it"):
        load_profile(first, measured=first)
    loop = layer(tmp_path / "loop.toml", str(tmp_path / "loop.toml"))
    with pytest.raises(UserError, match="no more can be laid over it"):
        load_profile(loop)
    unknown = layer(tmp_path / "unknown.toml", "exampel")
    with pytest.raises(UserError, match="did you mean `example`"):
        load_profile(unknown)
    (tmp_path / "profile.toml").write_text('[chip]\nname = "x"\n')
    (tmp_path / "broken.toml").write_text("= 3")
    for file, words in (
        (second, "do not say of which chip"),
        (layer(tmp_path / "none.toml", None), "do not say of which chip"),
        (tmp_path / "profile.toml", "a profile of its own"),
        (tmp_path / "broken.toml", "cannot be read"),
        (tmp_path / "absent.toml", "cannot be read"),
        (tmp_path / "layer.json", "in a .toml file"),
    ):
        with pytest.raises(UserError, match=words):
            device_with_layer("example", file)
