"""Every shipped profile: loads, cites its sources, and lets nothing weak decide bits."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

from qwen_quantize.chip_profiles.arithmetic import ASSUMABLE, resolve_arithmetic
from qwen_quantize.chip_profiles.leaf import DECIDES_BITS, UNSTATED, Absent, Confidence, Leaf, Status
from qwen_quantize.chip_profiles.loader import chip_names, list_profiles, load_profile
from qwen_quantize.chip_profiles.schema import CACHE_LAYOUTS, SCALE_RULES
from qwen_quantize.chip_profiles.sources import source_table
from qwen_quantize.chip_profiles.standing import Standing, standing
from qwen_quantize.engine.cache_pages import CacheLayout
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES

CLAIMED = sorted(
    entry.name.removesuffix(".toml")
    for entry in (files("qwen_quantize.chip_profiles") / "claims").iterdir()
    if entry.name.endswith(".toml")
)


@pytest.mark.parametrize("name", list_profiles())
def test_a_shipped_profile_loads_and_each_fact_cites_a_source(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    stated = list(profile.stated_leaves())
    assert stated
    for path, leaf in stated:
        assert leaf.sources, path
        assert set(leaf.sources) <= set(source_table()), path
        assert leaf.status is not Status.KNOWN or leaf.confidence is not Confidence.UNKNOWN, path
        assert leaf.confidence is not Confidence.CLAIM, path
        assert not any(code.startswith("TRADE") for code in leaf.sources), path


@pytest.mark.parametrize("name", CLAIMED)
def test_claims_change_something_and_are_marked(name: str) -> None:
    assert name in list_profiles()
    plain = dict(load_profile(name).leaves())
    claimed = load_profile(name, with_claims=True)
    changed = {path: leaf for path, leaf in claimed.leaves() if plain.get(path, UNSTATED) != leaf}
    assert changed
    for path, leaf in changed.items():
        assert leaf.confidence in (Confidence.CLAIM, Confidence.UNKNOWN), path
        assert any(code.startswith("TRADE") for code in leaf.sources), path
        below = plain.get(path)
        if below is not None and below.known and leaf.known:
            assert below.value in [other.value for other in leaf.alternatives], path


@pytest.mark.parametrize("name", list_profiles())
@pytest.mark.parametrize("scheme", ["ue8m0", "w8a8", "mxfp4"])
def test_only_strong_evidence_decides_bits(name: str, scheme: str) -> None:
    profile = load_profile(name)
    arithmetic = resolve_arithmetic(profile, SCHEMES[scheme])
    assumed = {assumption.field for assumption in arithmetic.assumptions}
    assert assumed <= set(ASSUMABLE)
    assert not assumed & set(arithmetic.sources)
    for path, leaf in profile.leaves():
        if path.startswith("arithmetic.") and leaf.known and leaf.confidence not in DECIDES_BITS:
            # The weak ones that exist: a press report on promotion, and a CPU's default rounding from memory.
            assert path.endswith((".promotion_interval", "casts.fp32->fp16.rounding")), path


def test_a_memory_value_becomes_an_assumption() -> None:
    profile = load_profile("nvidia-h100")
    leaf = profile.arithmetic.matmul["e4m3fn*e4m3fn"].promotion_interval
    assert leaf.value == 128
    assert leaf.confidence is Confidence.PRESS
    arithmetic = resolve_arithmetic(profile, SCHEMES["fp8"])
    assert arithmetic.accumulator.promotion_interval is None
    (assumed,) = (a for a in arithmetic.assumptions if a.field == "accumulator.promotion_interval")
    assert "only press evidence says 128" in assumed.why


def test_claims_count_only_when_asked_for() -> None:
    versions = {"firmware": "V1.3"}
    plain = load_profile("biren-br100", versions=versions)
    claimed = load_profile("biren-br100", versions=versions, with_claims=True)
    before = resolve_arithmetic(plain, SCHEMES["ue8m0"])
    after = resolve_arithmetic(claimed, SCHEMES["ue8m0"])
    assert before.activation_cast.rounding == "rne"
    assert "cast.rounding" in {a.field for a in before.assumptions}
    assert after.activation_cast.rounding == "rtz"
    assert after.sources["cast.rounding"] == ("TRADE-0",)
    earlier = load_profile("biren-br100@1.2", with_claims=True)
    assert resolve_arithmetic(earlier, SCHEMES["ue8m0"]).activation_cast.rounding == "rne"


def test_scale_rule_names_are_those_of_the_formats_room() -> None:
    assert tuple(ScaleRule) == SCALE_RULES


def test_cache_layouts_are_those_of_the_engine() -> None:
    assert tuple(CacheLayout) == CACHE_LAYOUTS


def test_names_and_aliases_are_unique() -> None:
    seen: dict[str, str] = {}
    families = {chip.family for chip in chip_names()}
    for chip in chip_names():
        for word in {chip.name, *chip.aliases}:
            assert word not in seen, f"{word}: {chip.name} and {seen.get(word)}"
            assert (
                word not in families or word == chip.name == chip.family or word == "cpu" or word == "example"
            )
            seen[word] = chip.name
    for chip in chip_names():
        assert not set(chip.family_aliases) & set(seen)


def test_expected_facts() -> None:
    """A few facts read again by hand, so that a slip in a file shows."""
    ascend = load_profile("ascend-950")
    assert ascend.arithmetic.casts["fp32->e4m3fn"].modes.texts() == ("rne",)
    assert ascend.arithmetic.subnormals["vector"].text() == "flush"
    assert ascend.arithmetic.scale.static_format.text() == "fp19"
    assert ascend.capability("int4", "matrix").flag() is False
    assert ascend.memory.buffers["UB"].integer() == 253952
    hopper = load_profile("nvidia-h100").arithmetic.matmul["e4m3fn*e4m3fn"]
    assert (hopper.fraction_bits.value, hopper.products_per_step.value, hopper.final_rounding.value) == (
        13,
        32,
        "rtz",
    )
    assert load_profile("amd-mi300x").capability("e4m3fn", "matrix").flag() is False
    assert load_profile("iluvatar-bi-v150").memory.bandwidth.status is Status.DISPUTED


def test_standing() -> None:
    expected = {
        "example": Standing.STATED,
        "cpu": Standing.STATED,
        "ascend-950": Standing.PARTLY,
        "nvidia-h100": Standing.PARTLY,
        "cambricon-mlu690": Standing.UNKNOWN,
    }
    assert {name: standing(load_profile(name)) for name in expected} == expected


def test_unknown_is_neither_true_nor_false() -> None:
    leaf = load_profile("cambricon-mlu590").capability("e4m3fn", "matrix")
    value = leaf.flag()
    assert value is Absent.UNKNOWN
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(value)


def test_accessors_refuse_other_types() -> None:
    leaf = Leaf(True, Status.KNOWN, Confidence.PRESS, ("SURVEY",))
    for accessor in (leaf.integer, leaf.number, leaf.text, leaf.texts, leaf.integers):
        with pytest.raises(TypeError, match="leaf holds True"):
            accessor()
    with pytest.raises(ValueError, match="status known"):
        Leaf(Absent.UNKNOWN, Status.KNOWN, Confidence.PRESS, ("SURVEY",))


@pytest.mark.parametrize("arguments", [["list"], ["show", "ascend-950"]])
def test_listing_chips_does_not_import_torch(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom qwen_quantize.cli.chips import chips_app\n"
        f"chips_app({arguments!r}, standalone_mode=False)\nassert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "ascend-950" in done.stdout
