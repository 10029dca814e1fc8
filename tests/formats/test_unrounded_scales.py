"""Activation groups with float32 scales, which power-of-two scales are measured against."""

from __future__ import annotations

import math

import pytest
import torch

from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.tables import E4M3FN
from qwen_quantize.formats.unrounded_scales import fake_quantize_unrounded

RTZ = CastRule(Rounding.RTZ, Overflow.SATURATE, Subnormals.KEEP)


def draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("rule", [RNE_SATURATE, RTZ])
def test_equal_where_the_scale_is_a_power_of_two_anyway(rule: CastRule) -> None:
    x = draw(40, 96)
    for group in range(3):
        part = x[:, 32 * group : 32 * group + 32]
        part.mul_(
            448.0
            * 2.0 ** (group - 9)
            / part.abs().amax(dim=1, keepdim=True).nextafter(torch.tensor(math.inf))
        )
        part[:, 3] = -448.0 * 2.0 ** (group - 9)
    expected = fake_quantize_groups(x, E4M3FN, rule, ScaleRule.RCEIL, 32)
    assert torch.equal(fake_quantize_unrounded(x, E4M3FN, rule, 32), expected)


@pytest.mark.parametrize("rule", [RNE_SATURATE, RTZ])
def test_the_largest_of_a_group_is_kept(rule: CastRule) -> None:
    """A truncating cast would lose a step of it where amax / scale is a bit below the format's maximum."""
    x = draw(300, 70)
    found = fake_quantize_unrounded(x, E4M3FN, rule, 32)
    for group in (slice(0, 32), slice(32, 64), slice(64, 70)):
        amax, place = x[:, group].abs().max(dim=1)
        kept = found[:, group].abs().gather(1, place.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(kept, amax, rtol=2e-7, atol=0)
        error = (found - x)[:, group].abs() / amax.unsqueeze(1)
        assert float(error.max()) <= 32 / 448 * (1 if rule is RTZ else 0.5) * (1 + 1e-6)


def test_special_groups() -> None:
    x = draw(4, 64)
    x[0, :32] = 0
    x[1, 5] = math.nan
    x[2, 40] = -math.inf
    x[3, 32:] = 2.0**-140
    found = fake_quantize_unrounded(x, E4M3FN, RNE_SATURATE, 32)
    assert (found[0, :32] == 0).all()
    assert found[1, :32].isnan().all()
    assert found[2, 32:].isnan().all()
    assert found[2, :32].isfinite().all()
    assert (found[3, 32:].abs() <= 2.0**-134).all()
    with pytest.raises(ValueError, match="tokens, K"):
        fake_quantize_unrounded(x[0], E4M3FN, RNE_SATURATE, 32)
