"""The quick rounding against plain and searched rounding."""

from __future__ import annotations

import pytest
import torch

from qwen_quantize.calibrators.clipped_rounding import clipped_error, clipped_rounding
from qwen_quantize.calibrators.range_search import grid_codes, grid_values, min_max_grid, search_grid
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.schemes import SCHEMES

SPECS = {
    "w4a16": SCHEMES["w4a16"].with_group(32).weight,
    "w4a16-asymmetric": SCHEMES["w4a16"].with_group(32).with_zero_point().weight,
    **{name: SCHEMES[name].weight for name in ("w8a8", "fp8", "mxfp4", "mxfp8", "nvfp4", "ue8m0", "hif8")},
}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_between_plain_and_searched(name: str) -> None:
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 160, generator=generator) * torch.rand(40, 1, generator=generator)
    importance = torch.rand(160, generator=generator) ** 3

    def error(values: torch.Tensor) -> float:
        return float(((values - weight).square() * importance).sum(dtype=torch.float64))

    plain, searched = min_max_grid(weight, spec), search_grid(weight, spec, RNE_SATURATE, importance).grid
    found = error(clipped_rounding(weight, importance, spec, RNE_SATURATE))
    worst, best = (
        error(grid_values(grid_codes(weight, spec, RNE_SATURATE, grid), spec, grid))
        for grid in (plain, searched)
    )
    assert found <= worst * (1 + 1e-6)
    assert found >= best * 0.9  # its shares are others than those of the search, which may miss one
    if name.startswith("w4a16"):
        assert found <= best + 0.5 * (worst - best)


def test_zeros_stay_zeros() -> None:
    for spec in SPECS.values():
        assert torch.equal(
            clipped_rounding(torch.zeros(4, 64), torch.ones(64), spec, RNE_SATURATE), torch.zeros(4, 64)
        )


@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_error_is_that_of_the_rounded_weight(name: str) -> None:
    spec = SPECS[name]
    generator = torch.Generator().manual_seed(1)
    weight, importance = torch.randn(24, 130, generator=generator), torch.rand(130, generator=generator) ** 3
    rounded = clipped_rounding(weight, importance, spec, RNE_SATURATE)
    expected = float(((rounded.double() - weight.double()).square() * importance.double()).sum())
    assert clipped_error(weight, importance, spec) == pytest.approx(expected, rel=1e-5)
