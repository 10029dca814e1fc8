"""Whether a cast overflows under a scale rule, against casts of very many magnitudes."""

from __future__ import annotations

import pytest
import torch

from qwen_quantize.chip_profiles.arithmetic import resolve_arithmetic
from qwen_quantize.chip_profiles.devices import resolve_device
from qwen_quantize.chip_profiles.headroom import (
    cast_overflows,
    overflow_words,
    require_headroom,
    rule_with_headroom,
)
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES

DYNAMIC = [rule for rule in ScaleRule if rule is not ScaleRule.SEARCH]


def unsaturated(rounding: Rounding) -> CastRule:
    return CastRule(rounding, Overflow.NONSATURATE, Subnormals.KEEP)


def profile() -> ChipProfile:
    return resolve_device("example@1.2", SCHEMES["ue8m0"]).profile


@pytest.mark.parametrize("scheme", ["ue8m0", "mxfp8", "mxfp4", "mxfp6"])
@pytest.mark.parametrize(
    "rounding", [Rounding.RNE, Rounding.RNA, Rounding.RTZ, Rounding.FLOOR, Rounding.CEIL]
)
@pytest.mark.parametrize("rule", DYNAMIC)
def test_overflow_is_foretold(scheme: str, rounding: Rounding, rule: ScaleRule) -> None:
    fmt = SCHEMES[scheme].activation
    assert fmt is not None
    # Every magnitude with 12 bits of fraction between 1 and 2, and the largest below 2, of both signs.
    one = 1 + torch.arange(4096) / 4096
    one = torch.cat([one, torch.tensor([2 - 2.0**-23])])
    values = torch.cat([one, -one]).unsqueeze(1)
    found = fake_quantize_groups(values, fmt.format, unsaturated(rounding), rule, 1)
    assert cast_overflows(SCHEMES[scheme], unsaturated(rounding), rule) == (not bool(found.isfinite().all()))


@pytest.mark.parametrize("rule", DYNAMIC)
def test_a_saturating_cast_never_overflows(rule: ScaleRule) -> None:
    assert not cast_overflows(SCHEMES["ue8m0"], RNE_SATURATE, rule)


def test_float_scales_leave_one_rounding_above_the_largest() -> None:
    assert not cast_overflows(SCHEMES["fp8"], unsaturated(Rounding.RNE), ScaleRule.RCEIL)
    assert cast_overflows(SCHEMES["fp8"], unsaturated(Rounding.CEIL), ScaleRule.RCEIL)


def test_the_remedy_is_a_rule_that_the_chip_offers() -> None:
    scheme = SCHEMES["ue8m0"]
    assumed = {"scale.rule": "floor", "cast.overflow": "nonsaturate"}
    arithmetic = resolve_arithmetic(profile(), scheme, assumed)
    words = overflow_words(arithmetic, scheme)
    assert words is not None
    assert "floor" in words
    assert rule_with_headroom(profile(), scheme, arithmetic.activation_cast) == "rceil"
    with pytest.raises(UserError, match=r"--assume scale\.rule=rceil"):
        require_headroom(arithmetic, scheme, profile())
    require_headroom(
        resolve_arithmetic(profile(), scheme, {**assumed, "scale.rule": "rceil"}), scheme, profile()
    )


def test_directed_rounding_with_float_scales_has_no_rule_to_choose() -> None:
    scheme = SCHEMES["fp8"]
    assumed = {"cast.rounding": "ceil", "cast.overflow": "nonsaturate"}
    with pytest.raises(UserError, match=r"cast\.overflow=saturate"):
        require_headroom(resolve_arithmetic(profile(), scheme, assumed), scheme, profile())
