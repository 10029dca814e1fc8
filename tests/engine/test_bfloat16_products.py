"""Products of numbers rounded to bfloat16: what they are, and that nothing else changes by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen_quantize.engine.linear import Bfloat16Group, PlainGroup

_MKLDNN: Any = torch.backends.mkldnn


def test_products_are_of_rounded_numbers_or_stay() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(2, 96, 512, generator=generator), torch.randn(384, 512, generator=generator)
    plain = PlainGroup(weight, torch.randn(384, generator=generator), (128, 256))
    rounded = PlainGroup(weight.bfloat16().float(), plain.bias, plain.sizes)
    has_unit = hasattr(_MKLDNN, "matmul") and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    before = plain(x)
    expected = rounded(x.bfloat16().float())
    found = Bfloat16Group(plain)(x)
    assert [part.dtype for part in found] == [torch.float32] * 2
    for one, of_rounded, exact in zip(found, expected, before, strict=True):
        if has_unit:
            assert (one - of_rounded).norm() < 1e-5 * exact.norm()  # nothing but the order of float32 sums
        assert torch.equal(one, exact) != has_unit
    for one, exact in zip(plain(x), before, strict=True):
        assert torch.equal(one, exact)


def test_the_setting_comes_back_after_an_error() -> None:
    before = _MKLDNN.matmul.fp32_precision
    with pytest.raises(RuntimeError):
        Bfloat16Group(PlainGroup(torch.ones(4, 8), None, (4,)))(torch.ones(2, 7))
    assert _MKLDNN.matmul.fp32_precision == before
