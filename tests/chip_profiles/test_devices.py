"""Device names, what a chip may do, and the arithmetic that follows."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.devices import members_of, resolve_device
from qwen_quantize.chip_profiles.legality import Legality, check
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.schemes import SCHEMES

UE8M0 = SCHEMES["ue8m0"]


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("ascend-910b", Legality.UNSUPPORTED),
        ("ascend-310p", Legality.UNSUPPORTED),
        ("enflame-s60", Legality.UNSUPPORTED),
        ("kunlunxin-p800", Legality.UNSUPPORTED),
        ("amd-mi300x", Legality.UNSUPPORTED),
        ("ascend-950", Legality.ALLOWED),
        ("nvidia-h100", Legality.ALLOWED),
        ("moorethreads-s5000", Legality.ALLOWED),
        ("cambricon-mlu590", Legality.UNKNOWN),
        ("cpu", Legality.EMULATED),
    ],
)
def test_who_may_run_ue8m0(name: str, status: Legality) -> None:
    verdict = check(load_profile(name), UE8M0)
    assert verdict.status is status
    assert verdict.sources
    if name in ("ascend-910b", "ascend-310p", "enflame-s60"):
        assert verdict.nearest[0] in ("w8a8", "w4a8")
        assert "w8a8" in verdict.nearest


@pytest.mark.parametrize(
    ("name", "scheme", "status"),
    [
        ("nvidia-h100", "mxfp8", Legality.UNSUPPORTED),  # its unit applies no E8M0 scales
        ("nvidia-b200", "nvfp4", Legality.ALLOWED),
        ("ascend-950", "nvfp4", Legality.UNSUPPORTED),  # MX pairs take E8M0 scales only
        ("ascend-950", "hif8", Legality.ALLOWED),
        ("ascend-950", "w4a8", Legality.ALLOWED),
        ("moorethreads-s5000", "mxfp8", Legality.UNKNOWN),
        ("ascend-910b", "w4a16", Legality.ALLOWED),
        ("cambricon-mlu690", "w4a16", Legality.UNKNOWN),
    ],
)
def test_other_methods(name: str, scheme: str, status: Legality) -> None:
    assert check(load_profile(name), SCHEMES[scheme]).status is status


def test_the_family_resolves_to_the_member_that_may_and_says_why() -> None:
    found = resolve_device("ascend", UE8M0)
    assert found.profile.name == "ascend-950"
    assert found.alias_explanation is not None
    for word in (
        "newest member",
        "ue8m0",
        "ascend-910c, ascend-910b, ascend-310p: its matrix unit has no e4m3fn",
    ):
        assert word in found.alias_explanation
    assert resolve_device("nvidia", SCHEMES["w8a8"]).profile.name == "nvidia-h100"
    assert resolve_device("mlu", SCHEMES["w8a8"]).profile.name == "cambricon-mlu370"
    assert resolve_device("mlu", UE8M0).verdict.status is Legality.UNKNOWN


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("ascend-a2", "ascend-910b"),
        ("910b", "ascend-910b"),
        ("ascend-a3", "ascend-910c"),
        ("ascend-a5", "ascend-950"),
        ("biren", "biren-br2xx"),
        ("supa", "biren-br2xx"),
        ("corex", "iluvatar-bi-v150"),
        ("musa", "moorethreads-s5000"),
        ("dcu", "hygon-bw1100"),
        ("gcu", "enflame-l600"),
        ("maca", "metax-c600"),
        ("kunlun", "kunlunxin-m100"),
        ("kunpeng", "kunpeng-920"),
        ("phytium", "phytium-s5000c"),
        ("cuda", "nvidia-b200"),
        ("rocm", "amd-mi355x"),
        ("CPU", "cpu"),
        ("example@1.3", "example"),
        ("H100", "nvidia-h100"),
    ],
)
def test_aliases(alias: str, name: str) -> None:
    found = resolve_device(alias, UE8M0, allow_unsupported=True)
    assert found.profile.name == name
    plain = alias.split("@")[0].lower()
    assert (found.alias_explanation is None) == (plain == name)


def test_names_that_are_none() -> None:
    with pytest.raises(UserError, match=r"unknown device 'ascnd': did you mean `ascend`.*chips list"):
        members_of("ascnd")
    with pytest.raises(UserError, match="cannot be read"):
        resolve_device("/nowhere/chip.toml", UE8M0)


def test_an_unsupported_method_says_what_the_chip_can_and_how_to_go_on() -> None:
    with pytest.raises(UserError) as caught:
        resolve_device("910b", UE8M0)
    message = str(caught.value)
    for part in (
        "ascend-910b",
        "ue8m0",
        "no e4m3fn",
        "int8",
        "w8a8",
        "--allow-unsupported",
        "widens the weights",
    ):
        assert part in message
    found = resolve_device("910b", UE8M0, allow_unsupported=True)
    assert found.verdict.status is Legality.UNSUPPORTED


def test_the_arithmetic_of_the_950() -> None:
    arithmetic = resolve_arithmetic(load_profile("ascend-950"), UE8M0)
    assert arithmetic.sources["cast.rounding"] == ("ADK", "HD")
    assert arithmetic.weight_cast == RNE_SATURATE
    assert arithmetic.activation_cast.nan == "zero"  # a saturating cast of this chip
    unsaturated = resolve_arithmetic(load_profile("ascend-950"), UE8M0, {"cast.overflow": "nonsaturate"})
    assert unsaturated.activation_cast.nan == "propagate"
    assert arithmetic.accumulator.format == "fp32"
    assert arithmetic.activation_scale_rule == "rceil"
    assumed = {a.field: a for a in arithmetic.assumptions}
    assert set(assumed) == {
        "cast.overflow",
        "cast.subnormals",
        "scale.rule",
        "accumulator.fraction_bits",
    }
    assert "saturate and nonsaturate" in assumed["cast.overflow"].why
    assert "floor, rceil" in assumed["scale.rule"].why


def test_assumptions_can_be_set_and_are_listed() -> None:
    wanted = {
        "cast.rounding": "rtz",
        "cast.subnormals": "flush",
        "scale.rule": "floor",
        "accumulator.format": "fp16",
        "accumulator.fraction_bits": "13",
    }
    plain = resolve_arithmetic(load_profile("ascend-950"), UE8M0)
    arithmetic = resolve_arithmetic(load_profile("ascend-950"), UE8M0, wanted)
    assert {a.field: a.assumed for a in arithmetic.assumptions if a.field in wanted} == wanted
    # A sum that is narrow needs all its details, so that they are assumed too, and said.
    details = {"accumulator.output_mantissa_bits": "10", "accumulator.products_per_step": "32"}
    assert arithmetic.fields() == {**plain.fields(), **wanted, **details}
    assert {a.field for a in arithmetic.assumptions} - {a.field for a in plain.assumptions} - set(wanted) == {
        *details,
        "accumulator.alignment_rounding",
        "accumulator.final_rounding",
        "accumulator.promotion_interval",
    }
    assert arithmetic.accumulator.fraction_bits == 13
    (rounding,) = (a for a in arithmetic.assumptions if a.field == "cast.rounding")
    assert "the profile states rne" in rounding.why  # a stated fact that the user overrules is said
    assert arithmetic.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cast.roundin", "rtz", "did you mean `cast.rounding`"),
        ("cast.rounding", "rzt", "did you mean `rtz`"),
        ("scale.rule", "search", "allowed: floor, ceil, rceil, even"),
        ("accumulator.fraction_bits", "0", r"exact, 1 \.\. 63"),
    ],
)
def test_assumptions_that_do_not_exist(key: str, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_arithmetic(load_profile("cpu"), UE8M0, {key: value})


def test_an_assumption_without_effect_is_refused() -> None:
    with pytest.raises(UserError, match=r"cast\.rounding: w4a16 has no such step; it takes accumulator"):
        resolve_arithmetic(load_profile("cpu"), SCHEMES["w4a16"], {"cast.rounding": "rtz"})


def test_int8_on_ascend_is_rounded_twice() -> None:
    assert resolve_arithmetic(load_profile("ascend-910b"), SCHEMES["w8a8"]).activation_path == ("fp16",)
    assert resolve_arithmetic(load_profile("nvidia-h100"), SCHEMES["w8a8"]).activation_path == ()


def test_nothing_is_assumed_of_the_host() -> None:
    for scheme in SCHEMES.values():
        assert not resolve_arithmetic(load_profile("cpu"), scheme).assumptions


def test_adding_a_chip_needs_one_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
[chip]
name = "mine"
title = "My chip"
vendor = "Me"
family = "mine"
generation = 1

[dtypes.e4m3fn]
matrix = { value = true, source = ["PROBE"], confidence = "measured" }

[arithmetic.casts."fp32->e4m3fn"]
source = ["PROBE"]
confidence = "measured"
rounding = "rtz"
overflow = "nonsaturate"
""",
        encoding="utf-8",
    )
    found = resolve_device(str(path), UE8M0)
    assert found.profile.name == "mine"
    assert found.verdict.status is Legality.ALLOWED
    arithmetic = resolve_arithmetic(found.profile, UE8M0)
    assert arithmetic.activation_cast.rounding == "rtz"
    assert arithmetic.activation_cast.overflow == "nonsaturate"
    assert {"cast.subnormals", "accumulator.format"} <= {a.field for a in arithmetic.assumptions}
