"""From a profile to the matrix unit that is emulated: what is stated, what is assumed, where float32 will do."""

from __future__ import annotations

import pytest

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of, with_any_exponent
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.dot_units import PUBLISHED_UNITS
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.tables import E4M3FN, FP32, INT8

UE8M0 = SCHEMES["ue8m0"]


def unit_of(chip: str, group: int | None = 128, scheme: str = "ue8m0", **assume: str) -> DotUnit | None:
    wanted = {f"accumulator.{key}": value for key, value in assume.items()}
    return dot_unit_of(resolve_arithmetic(load_profile(chip), SCHEMES[scheme], wanted), E4M3FN, E4M3FN, group)


def test_hopper_is_the_published_unit() -> None:
    """Bare codes: the profile's facts make the unit that formats knows, but for the bits of a NaN."""
    fast = unit_of("nvidia-h100", None, promotion_interval="never")
    assert fast is not None
    published = PUBLISHED_UNITS["hopper-e4m3fn"]
    for key in ("products", "fraction_bits", "mantissa_bits", "alignment_rounding", "final_rounding"):
        assert getattr(fast, key) == getattr(published, key), key
    assert fast.promotion_interval is None
    promoted = unit_of("nvidia-h100", None)
    assert promoted is not None
    assert promoted.promotion_interval == PUBLISHED_UNITS["hopper-e4m3fn-promoted"].promotion_interval


def test_float32_or_better_is_plain_unless_bits_are_asked_for() -> None:
    for chip in ("cpu", "example@1.2", "nvidia-b200", "ascend-950"):
        assert unit_of(chip) is None, chip
    example = resolve_arithmetic(load_profile("example@1.2"), UE8M0)
    exact = dot_unit_of(example, E4M3FN, E4M3FN, bit_true=True)
    assert exact is not None
    assert (exact.fraction_bits, exact.products, exact.final_rounding) == (23, 16, Rounding.RNE)
    unknown = resolve_arithmetic(load_profile("ascend-950"), UE8M0)
    assert dot_unit_of(unknown, E4M3FN, E4M3FN, bit_true=True) is None
    assert unit_of("example@1.2", fraction_bits="22") is not None
    assert dot_unit_of(example, INT8, INT8, bit_true=True) is None


def test_one_assumption_makes_a_defined_unit() -> None:
    """A unit that applies scales itself never leaves its register; any other one does with each group."""
    inside = unit_of("ascend-950", fraction_bits="13")
    outside = unit_of("nvidia-h20", fraction_bits="13")
    assert inside is not None
    assert outside is not None
    for unit in (inside, outside):
        assert (unit.products, unit.fraction_bits, unit.mantissa_bits) == (32, 13, 23)
        assert (unit.alignment_rounding, unit.final_rounding) == (Rounding.RTZ, Rounding.RNE)
    assert inside.promotion_interval is None
    assert outside.promotion_interval == 128
    said = unit_of("nvidia-h20", fraction_bits="13", promotion_interval="never", products_per_step="16")
    assert said is not None
    assert (said.promotion_interval, said.products) == (None, 16)


def test_a_promotion_never_spans_two_groups() -> None:
    for group, interval, expected in ((32, "128", 32), (128, "64", 64), (128, "4096", 128)):
        unit = unit_of("nvidia-h100", group, promotion_interval=interval)
        assert unit is not None
        assert unit.promotion_interval == expected


def test_an_fp16_register_keeps_eleven_significant_bits() -> None:
    unit = unit_of("cpu", format="fp16")
    assert unit is not None
    assert (unit.mantissa_bits, unit.fraction_bits) == (10, None)


def test_nothing_is_listed_where_no_bit_hangs_on_it() -> None:
    fields = {a.field for a in resolve_arithmetic(load_profile("ascend-950"), UE8M0).assumptions}
    assert not [
        key for key in fields if key.startswith("accumulator.") and key != "accumulator.fraction_bits"
    ]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("products_per_step", "65", r"allowed: 1 \.\. 64"),
        ("promotion_interval", "100", "allowed: never, 4, 8"),
        ("final_rounding", "odd", "allowed: rne, rna, rtz, floor, ceil"),
    ],
)
def test_impossible_accumulators(key: str, value: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        unit_of("cpu", **{key: value})


def test_any_exponent() -> None:
    wide = with_any_exponent(E4M3FN)
    assert (wide.mantissa_bits, wide.min_exponent, wide.bits) == (3, -126, 12)
    assert wide.max == 2.0**127 * 1.875
    assert wide.nan_code is not None
    assert wide.is_nan(wide.nan_code)
    assert with_any_exponent(FP32) is FP32
