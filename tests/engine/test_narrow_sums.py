"""Linears on a matrix unit with narrow sums: against exact rational arithmetic, and against a kernel on codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.chip_profiles.dot_unit import with_any_exponent
from qwen_quantize.engine import load
from qwen_quantize.engine.linear import (
    ChipCompute,
    EmulatedGroup,
    PlainGroup,
    emulated,
    fuse,
)
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.formats.activation_cast import GroupCast
from qwen_quantize.formats.cast_rule import RNE_SATURATE, Rounding
from qwen_quantize.formats.dot import emulated_matmul
from qwen_quantize.formats.dot_record import DotUnit, Order
from qwen_quantize.formats.dot_reference import dot_reference
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.tables import E4M3FN, FP32
from tests.engine.test_experts import store_as_block_fp8
from tests.tiny_models import make_tiny

CAST = GroupCast(E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 32)
SCALED = with_any_exponent(E4M3FN)
NARROW = DotUnit(
    "narrow", SCALED, SCALED, Order.ALIGNED, products=16, fraction_bits=6, mantissa_bits=7,
    final_rounding=Rounding.RTZ,
)  # fmt: skip
PROMOTED = replace(NARROW, name="promoted", promotion_interval=32)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class SlowGroup:
    """A group that computes every output as one dot product in exact rational arithmetic."""

    inner: PlainGroup
    chip: ChipCompute
    row_scale: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        assert self.chip.cast is not None
        assert self.chip.unit is not None
        rows = self.chip.cast(x).flatten(0, -2).tolist()
        columns = self.inner.weight.tolist()
        out = torch.tensor(
            [[dot_reference(row, column, self.chip.unit) for column in columns] for row in rows]
        )
        if self.inner.bias is not None:
            out = out + self.inner.bias
        return torch.split(out.view(*x.shape[:-1], -1), list(self.inner.sizes), dim=-1)


@pytest.mark.parametrize("unit", [NARROW, PROMOTED], ids=lambda unit: unit.name)
def test_logits_are_those_of_exact_arithmetic(
    unit: DotUnit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tiny(tmp_path, "llama-biased", hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    store_as_block_fp8(tmp_path)
    reader = ModelReader(open_source(tmp_path))
    tokens = torch.randint(160, (1, 3), generator=torch.Generator().manual_seed(1))
    chip = ChipCompute(CAST, unit)
    found = load_model(reader, chip).forward(tokens)
    cast_only = load_model(reader, ChipCompute(CAST)).forward(tokens)
    monkeypatch.setattr(load, "emulated", SlowGroup)
    assert torch.equal(found, load_model(reader, chip).forward(tokens))
    assert not torch.equal(found, cast_only)


def test_a_plain_unit_is_the_product_it_was() -> None:
    plain = fuse([draw(8, 64, seed=1), draw(4, 64, seed=2)], [None, draw(4, seed=3)])
    x = draw(2, 5, 64, seed=4)
    group = emulated(plain, ChipCompute(CAST))
    assert group.right is None
    for ours, theirs in zip(group(x), plain(CAST(x)), strict=True):
        assert torch.equal(ours, theirs)


def test_weights_are_prepared_once() -> None:
    group = emulated(
        fuse([quantize_values(draw(8, 64, seed=1), E4M3FN, RNE_SATURATE)], [None]), ChipCompute(CAST, NARROW)
    )
    right = group.right
    group(draw(3, 64, seed=2))
    assert group.right is right


def scaled_operands(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [rows, 128] without subnormals, and a power-of-two scale for each row and group of 32."""
    magnitude = 1 + torch.rand(24, 128, generator=torch.Generator().manual_seed(seed))
    exponent = torch.randint(-6, 8, (24, 128), generator=torch.Generator().manual_seed(seed + 1))
    sign = torch.randint(2, (24, 128), generator=torch.Generator().manual_seed(seed + 2)) * 2 - 1
    codes = quantize_values(sign * magnitude * 2.0**exponent, E4M3FN, RNE_SATURATE)
    scales = 2.0 ** torch.randint(-20, 20, (24, 4), generator=torch.Generator().manual_seed(seed + 3))
    return codes, scales, codes[:10], scales[:10]


def test_scaled_values_give_the_bits_of_a_kernel_that_promotes() -> None:
    """The kernel multiplies codes, group by group, and scales each sum while it adds it in float32."""
    a, a_scale, _, _ = scaled_operands(1)
    _, _, b, b_scale = scaled_operands(7)
    codes_only = replace(PROMOTED, a_format=E4M3FN, b_format=E4M3FN, promotion_interval=None)
    out = torch.zeros(24, 10)
    for group in range(4):
        part = slice(32 * group, 32 * group + 32)
        sums = emulated_matmul(a[:, part], b[:, part], codes_only)
        out += sums * a_scale[:, group, None] * b_scale[None, :, group]
    wide_a, wide_b = (x * s.repeat_interleave(32, dim=1) for x, s in ((a, a_scale), (b, b_scale)))
    assert torch.equal(emulated_matmul(wide_a, wide_b, PROMOTED), out)
    assert not torch.equal(emulated_matmul(wide_a, wide_b, NARROW), out)


def test_activations_that_are_not_cast_meet_the_same_unit() -> None:
    """With float32 operands: what attribution does when it switches the cast off."""
    unit = replace(NARROW, a_format=FP32)
    group = emulated(fuse([draw(4, 32, seed=5)], [None]), ChipCompute(None, replace(unit, b_format=FP32)))
    x = draw(3, 32, seed=6)
    assert isinstance(group, EmulatedGroup)
    expected = [
        [dot_reference(row, column, group.right.unit) for column in group.inner.weight.tolist()]
        for row in x.tolist()
    ]  # type: ignore[union-attr]
    assert torch.equal(group(x)[0], torch.tensor(expected))


@pytest.mark.parametrize("half", ["read_layer", "read_head"])
def test_all_off_reads_plain_groups(half: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "deepseek-v3")
    store_as_block_fp8(tmp_path)
    reader = ModelReader(open_source(tmp_path))
    read: Callable[..., object] = getattr(reader, half)
    assert "EmulatedGroup" not in repr(read(*([1] if half == "read_layer" else []), ChipCompute(None, None)))
