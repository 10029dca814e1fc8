"""Widths of the key-value cache: importance by what it stands for, exact budgets, and choices that pay."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_cache import (
    WIDTHS,
    MixedSide,
    allocate,
    channel_units,
    mixed_sides,
    plan_of_choice,
    shares,
    total_bits,
    unit_size,
)
from qwen_quantize.calibrators.kv_plans import KvFindings, KvRange, uniform_plan
from qwen_quantize.calibrators.kv_statistics import (
    AttentionSample,
    KvObserver,
    KvStatistics,
    importance,
    squared_error,
)
from qwen_quantize.checkpoint.kv_side import KV_FILE, kv_file_bytes, read_kv_plan
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_scheme import KvElement, KvScaling, parse_kv_scheme
from qwen_quantize.formats.tables import FP16, INT4, INT8
from qwen_quantize.models.config import ModelConfig, parse_model_config

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
}


def config() -> ModelConfig:
    return parse_model_config(CONFIG, "LlamaForCausalLM")


def sample(seed: int, length: int = 24, loud: int | None = None) -> AttentionSample:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, length, 32, generator=generator)
    if loud is not None:
        query[..., loud] *= 30
    return AttentionSample(
        query=query,
        key=torch.randn(1, 2, length, 32, generator=generator),
        value=torch.randn(1, 2, length, 32, generator=generator),
        seen=torch.ones(length, length, dtype=torch.bool).tril(),
        quantized=torch.ones(length, length, dtype=torch.bool).tril(),
        scale=32**-0.5,
        cap=None,
        projection=torch.randn(64, 128, generator=generator) / 8,
    )


def outputs(own: AttentionSample, key: Tensor, value: Tensor) -> Tensor:
    wide = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    scores = own.scale * own.query @ wide[0].transpose(-1, -2)
    weights = scores.masked_fill(~own.seen, float("-inf")).softmax(-1)
    return (weights @ wide[1]).transpose(1, 2).flatten(2) @ own.projection.T


@pytest.mark.parametrize("keys", [True, False])
def test_importance_foretells_what_small_errors_do(keys: bool) -> None:
    """Random errors of one channel, against the squared change of the output that they really make."""
    own = sample(3)
    factor = importance(own)[0 if keys else 1]
    exact = outputs(own, own.key, own.value)
    generator = torch.Generator().manual_seed(8)
    for head, channel in ((0, 3), (1, 20)):
        noise = torch.zeros(4000, *own.key.shape[1:])
        noise[:, head, :, channel] = 1e-2 * torch.randn(4000, own.key.shape[2], generator=generator)
        moved = outputs(own, own.key + noise, own.value) if keys else outputs(own, own.key, own.value + noise)
        found = float((moved - exact).square().sum(-1).mean()) / 1e-4
        assert found == pytest.approx(float(factor[head, channel]), rel=0.15)


def statistics(seed: int, loud: int | None = None) -> KvStatistics:
    key, value = KvElement(INT4, KvScaling.SPAN, 8), KvElement(INT4, KvScaling.SLICE, 32)
    wider = (KvElement(INT8, KvScaling.SPAN, 8), KvElement(INT8, KvScaling.SLICE, 32))
    observer = KvObserver((key, wider[0]), (value, wider[1]))
    observer.add(sample(seed, loud=loud), torch.ones(1, 24, 64))
    return observer.statistics()


def test_loud_queries_make_their_channel_and_its_pair_wide() -> None:
    seen = {0: statistics(1, loud=5), 1: statistics(2)}
    scheme = parse_kv_scheme("mixed:5.1")
    sides = mixed_sides(scheme, config(), seen)
    chosen = allocate(sides, 5.1)
    keys = dict(
        zip([(side.layer, side.keys) for side in sides], zip(sides, chosen, strict=True), strict=True)
    )
    side, widths = keys[0, True]
    wide = side.units.channels[widths > 0].flatten().tolist()
    assert {5, 5 + 16, 32 + 5, 32 + 5 + 16} <= set(wide)
    assert all((channel + 16) % 32 + channel // 32 * 32 in wide for channel in wide), "a pair was split"


@pytest.mark.parametrize("bits", [4.9, 5.07, 6.0, 7.6, 9.0, 12.5, 15.9, 16.0])
def test_budgets_are_kept_to_the_bit_and_nearly_used(bits: float) -> None:
    sides = mixed_sides(parse_kv_scheme("mixed"), config(), {0: statistics(1), 1: statistics(2)})
    chosen = allocate(sides, bits)
    plan = plan_of_choice(parse_kv_scheme("mixed"), config(), sides, chosen)
    assert plan.bits == pytest.approx(total_bits(sides, chosen) / (4 * 64))
    assert plan.bits <= bits + 1e-9
    step = unit_size(32) * 12 / (4 * 64)
    assert plan.bits > min(bits, 16.0) - step - 0.5, "bits were left over"
    for layer in plan.attention_layers:
        for tensor in (layer.keys, layer.values):
            assert len(tensor.parts) <= 3
            x = torch.randn(1, 128, tensor.width)
            assert (tensor.unpack(tensor.pack(x)) - x).abs().max() < 0.5


def test_too_small_a_budget_names_the_least_there_is() -> None:
    sides = mixed_sides(parse_kv_scheme("mixed"), config(), {0: statistics(1)})
    with pytest.raises(UserError, match=r"4\.625 bits of a value"):
        allocate(sides, 4.3)


def test_the_price_finds_what_trying_everything_finds() -> None:
    """On a side of four units whose scales cost nothing, all 81 choices under each budget."""
    elements = tuple(KvElement(fmt) for fmt in WIDTHS)
    generator = torch.Generator().manual_seed(4)
    units = channel_units(torch.rand(3, 1, 32, generator=generator).sort(dim=0, descending=True).values, None)
    side = MixedSide(0, False, 32, elements, units)
    for budget in (5.0, 8.0, 10.0, 13.0):
        (found,) = allocate([side], budget)
        best = min(
            sum(float(units.costs[unit, width]) for unit, width in enumerate(choice))
            for choice in itertools.product(range(3), repeat=4)
            if side.bits(side.counts(torch.tensor(choice))) <= 32 * budget
        )
        cost = sum(float(units.costs[unit, int(width)]) for unit, width in enumerate(found))
        every = sum(float(units.costs[unit, 0]) for unit in range(4))
        assert cost <= best + 0.12 * every


def test_chosen_channels_beat_the_same_number_chosen_blindly() -> None:
    seen = {0: statistics(1, loud=5), 1: statistics(2, loud=9)}
    sides = mixed_sides(parse_kv_scheme("mixed"), config(), seen)
    chosen = allocate(sides, 6.0)

    def cost(widths: list[Tensor]) -> float:
        return sum(
            float(side.units.costs.gather(1, one.unsqueeze(1)).sum())
            for side, one in zip(sides, widths, strict=True)
        )

    blind = [one.flip(0) for one in chosen]
    assert total_bits(sides, blind) == total_bits(sides, chosen)
    assert cost(chosen) < 0.7 * cost(blind)
    assert sum(share for _, share in shares(sides, chosen)) == pytest.approx(1)


def test_errors_are_measured_on_whole_spans() -> None:
    x = torch.randn(1, 2, 20, 8, generator=torch.Generator().manual_seed(1))
    narrow = squared_error(x, KvElement(INT4, KvScaling.SPAN, 8))
    assert narrow.shape == (2, 8)
    assert (squared_error(x, KvElement(INT8, KvScaling.SPAN, 128)) < narrow / 50).all()
    assert squared_error(x, KvElement(FP16)).max() == 0


def test_plans_come_back_from_their_file(tmp_path: Path) -> None:
    sides = mixed_sides(parse_kv_scheme("mixed"), config(), {0: statistics(1), 1: statistics(2)})
    mixed = plan_of_choice(parse_kv_scheme("mixed:6"), config(), sides, allocate(sides, 6))
    ranges = KvFindings({layer: KvRange(torch.rand(2, 32) + 1, torch.rand(2, 32) + 1) for layer in range(2)})
    for plan in (mixed, uniform_plan(parse_kv_scheme("fp8:head"), config(), ranges)):
        (tmp_path / KV_FILE).write_bytes(kv_file_bytes(plan))
        found = read_kv_plan(tmp_path)
        assert found is not None
        assert kv_file_bytes(found) == kv_file_bytes(plan)
        x = torch.randn(1, 128, 64, generator=torch.Generator().manual_seed(1))
        for ours, theirs in zip(found.attention_layers, plan.attention_layers, strict=True):
            assert torch.equal(ours.keys.unpack(ours.keys.pack(x)), theirs.keys.unpack(theirs.keys.pack(x)))
    assert read_kv_plan(tmp_path / "nothing") is None


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    sides = mixed_sides(parse_kv_scheme("mixed"), config(), {0: statistics(1), 1: statistics(2)})
    good = kv_file_bytes(plan_of_choice(parse_kv_scheme("mixed:6"), config(), sides, allocate(sides, 6)))
    broken = [
        b"", b"{}", good[:-9], good.replace(b"span", b"spam"), good.replace(b"int4", b"int9"),
        good.replace(b'\\"width\\": 64', b'\\"width\\": 62'), good[:-8] + bytes([255] * 8),
    ]  # fmt: skip
    for data in broken:
        assert data != good
        (tmp_path / KV_FILE).write_bytes(data)
        with pytest.raises(UserError, match=r"key-value cache|scheme"):
            read_kv_plan(tmp_path)
