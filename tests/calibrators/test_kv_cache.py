"""Widths of the key-value cache: importance by what it stands for, exact budgets, and choices that pay."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen_quantize.calibrators.kv_cache import allocate, mixed_plan, plan_of_choice, shares
from qwen_quantize.calibrators.kv_plans import KvFindings, KvRange, uniform_plan
from qwen_quantize.calibrators.kv_sides import (
    MixedSide,
    channel_units,
    mixed_elements,
    mixed_sides,
    total_bits,
    unit_size,
)
from qwen_quantize.calibrators.kv_statistics import (
    AttentionSample,
    KvStatistics,
    LatentSample,
    SideObserver,
    Sight,
    damage,
    derivatives,
    latent_derivative,
    random_direction,
)
from qwen_quantize.checkpoint.kv_side import KV_FILE, kv_file_bytes, read_kv_plan
from qwen_quantize.engine.rotary import rotate
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_scheme import KvElement, KvScaling, parse_kv_scheme
from qwen_quantize.formats.tables import FP16, INT4, INT8
from qwen_quantize.models.config import ConfigRules, ModelConfig, parse_model_config
from qwen_quantize.models.latent import parse_latent

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


def sight(length: int, generator: torch.Generator, heads: int = 4) -> Sight:
    return Sight(
        seen=torch.ones(length, length, dtype=torch.bool).tril(),
        quantized=torch.ones(length, length, dtype=torch.bool).tril(),
        scale=32**-0.5,
        cap=None,
        projection=torch.randn(64, 32 * heads, generator=generator) / 8,
    )


def sample(seed: int, length: int = 24, loud: int | None = None) -> AttentionSample:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, 4, length, 32, generator=generator)
    if loud is not None:
        query[..., loud] *= 30
    return AttentionSample(
        query=query,
        key=torch.randn(1, 2, length, 32, generator=generator),
        value=torch.randn(1, 2, length, 32, generator=generator),
        sight=sight(length, generator),
    )


def mixture(query: Tensor, key: Tensor, value: Tensor, own: Sight) -> Tensor:
    scores = own.scale * query @ key.transpose(-1, -2)
    weights = scores.masked_fill(~own.seen, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2).flatten(2) @ own.projection.T


def outputs(own: AttentionSample, key: Tensor, value: Tensor) -> Tensor:
    wide = [x.repeat_interleave(2, dim=1) for x in (key, value)]
    return mixture(own.query, *wide, own.sight)


def many(x: Tensor, count: int) -> Tensor:
    return x.expand(count, *x.shape[1:])


@pytest.mark.parametrize("keys", [True, False])
def test_derivatives_foretell_what_small_errors_do(keys: bool) -> None:
    """Random errors of one channel, against the squared change of the output that they really make."""
    own, generator = sample(3), torch.Generator().manual_seed(8)
    probes = 400
    wide = replace(
        own, query=many(own.query, probes), key=many(own.key, probes), value=many(own.value, probes)
    )
    found = derivatives(wide, random_direction(torch.empty(probes, 24, 64), generator))[0 if keys else 1]
    factor = found.square().mean(dim=(0, 2))
    exact = outputs(own, own.key, own.value)
    for head, channel in ((0, 3), (1, 20)):
        noise = torch.zeros(600, *own.key.shape[1:])
        noise[:, head, :, channel] = 1e-2 * torch.randn(600, own.key.shape[2], generator=generator)
        moved = outputs(own, own.key + noise, own.value) if keys else outputs(own, own.key, own.value + noise)
        truth = float((moved - exact).square().sum(-1).mean()) / 1e-4
        assert truth == pytest.approx(float(factor[head, channel]), rel=0.25)


def test_latents_are_weighed_by_all_that_is_expanded_from_them() -> None:
    generator = torch.Generator().manual_seed(5)
    query, latent = (torch.randn(1, *shape, generator=generator) for shape in ((4, 24, 40), (24, 16)))
    positional, expansion = (torch.randn(*shape, generator=generator) for shape in ((1, 24, 8), (4, 64, 16)))
    own = LatentSample(query, latent, positional, expansion, sight(24, generator))

    def output(latent: Tensor) -> Tensor:
        key, value = torch.einsum("btr,hcr->bhtc", latent, expansion).split(32, dim=-1)
        wide = positional.unsqueeze(1).expand(latent.shape[0], 4, -1, -1)
        return mixture(query, torch.cat((key, wide), dim=-1), value, own.sight)

    probes = 400
    wide = replace(
        own, query=many(query, probes), latent=many(latent, probes), positional=many(positional, probes)
    )
    factor = (
        latent_derivative(wide, random_direction(torch.empty(probes, 24, 64), generator))
        .square()
        .mean((0, 1))
    )
    noise = torch.zeros(600, 24, 16)
    noise[..., 7] = 1e-3 * torch.randn(600, 24, generator=generator)
    truth = float((output(latent + noise) - output(latent)).square().sum(-1).mean()) / 1e-6
    assert truth == pytest.approx(float(factor[7]), rel=0.25)


def test_only_what_is_quantized_counts() -> None:
    own = sample(3)
    some = torch.zeros(24, 24, dtype=torch.bool)
    some[20:, 2:5] = True
    own = replace(own, sight=replace(own.sight, quantized=some))
    for found in derivatives(own, torch.ones(1, 24, 64)):
        assert found[:, :, 2:5].abs().min() > 0
        assert found[:, :, :2].abs().max() == found[:, :, 5:].abs().max() == 0


def statistics(seed: int, loud: int | None = None) -> KvStatistics:
    own, generator = sample(seed, loud=loud), torch.Generator().manual_seed(seed)
    found = []
    for elements, x, along in zip(
        mixed_elements(parse_kv_scheme("mixed"), config()),
        (own.key, own.value),
        derivatives(own, random_direction(torch.empty(1, 24, 64), generator)),
        strict=True,
    ):
        observer = SideObserver(elements)
        observer.add(x, along)
        found.append(observer.statistics(1.0))
    return KvStatistics(*found)


@pytest.mark.parametrize("turned", [32, 24])
def test_ranges_of_rotated_keys_hold_at_later_positions(turned: int) -> None:
    """A text of eight tokens turns slow channels by a few degrees; what they hold then moves to their partners."""
    key = torch.randn(1, 2, 8, 32, generator=torch.Generator().manual_seed(5))
    key[..., 10] = 20.0

    def at(first: int) -> torch.Tensor:
        angles = (
            torch.arange(first, first + 8).double()[:, None] * 1e-4 ** (torch.arange(turned // 2) / 16)
        ).float()
        both = torch.cat((angles, angles), dim=-1)
        return rotate(key, both.cos(), both.sin())

    def largest(turned: int) -> torch.Tensor:
        observer = SideObserver([], turned)
        observer.add(at(0), torch.zeros_like(key))
        return observer.statistics(1.0).largest

    later = torch.stack([at(first).abs().amax(dim=(0, 2)) for first in (500, 3000, 20000)]).amax(dim=0)
    assert bool((later <= 1.0001 * largest(turned)).all())
    assert float((later / largest(0)).max()) > 2
    assert torch.equal(largest(turned)[:, turned:], largest(0)[:, turned:])


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
            assert len(tensor.parts) <= 5
            x = torch.randn(1, 128, tensor.width)
            assert (tensor.unpack(tensor.pack(x)) - x).abs().max() < 0.5


def test_too_small_a_budget_names_the_least_there_is() -> None:
    sides = mixed_sides(parse_kv_scheme("mixed"), config(), {0: statistics(1)})
    with pytest.raises(UserError, match=r"4\.625 bits of a value"):
        allocate(sides, 4.3)
    (latent,) = mixed_sides(parse_kv_scheme("mixed"), latent_config(), {0: latent_statistics()})
    with pytest.raises(UserError, match=r"4\.500 bits of a value"):
        allocate([latent], 4.4)


def test_the_price_finds_what_trying_everything_finds() -> None:
    """On a side of four units whose scales cost nothing, all 81 choices under each budget."""
    elements = tuple(KvElement(fmt) for fmt in (INT4, INT8, FP16))
    generator = torch.Generator().manual_seed(4)
    units = channel_units(torch.rand(3, 1, 32, generator=generator).sort(dim=0, descending=True).values, 0)
    side = MixedSide(0, False, 32, elements, units, torch.arange(32))
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
    narrow = damage(x, torch.ones_like(x), KvElement(INT4, KvScaling.SPAN, 8))
    assert narrow.shape == (2, 8)
    assert (damage(x, torch.ones_like(x), KvElement(INT8, KvScaling.SPAN, 128)) < narrow / 50).all()
    assert damage(x, torch.ones_like(x), KvElement(FP16)).max() == 0
    late = torch.zeros_like(x)
    late[:, :, 16:] = 1  # tokens behind the last whole span
    assert damage(x, late, KvElement(INT4, KvScaling.SPAN, 8)).max() == 0


LATENT = CONFIG | {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
}


def latent_config() -> ModelConfig:
    return parse_model_config(LATENT, "DeepseekV3ForCausalLM", ConfigRules(latent=parse_latent))


def latent_statistics(loud: tuple[int, ...] = ()) -> KvStatistics:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(1, 1, 64, 64, generator=generator)
    along = torch.randn(1, 1, 64, 64, generator=generator)
    along[..., loud] *= 20
    observer = SideObserver(mixed_elements(parse_kv_scheme("mixed"), latent_config())[0])
    observer.add(x, along)
    return KvStatistics(observer.statistics(1.0), None)


def test_channels_of_a_latent_have_widths_of_their_own() -> None:
    loud = (3, 17, 20, 40, 41, 50, 60, 63)
    plan = mixed_plan(
        parse_kv_scheme("mixed:5.6"), latent_config(), {layer: latent_statistics(loud) for layer in range(2)}
    )
    assert plan.latent
    for layer in plan.attention_layers:
        assert (layer.keys.width, layer.values.width) == (64, 8)
        assert (
            layer.keys.bits_per_token == 5.5 * 64
        )  # one group of eight channels in INT8, with scales of its own
        assert layer.values.bits_per_token == 16 * 8
        wide = [part.channels for part in layer.keys.parts if part.element.format != INT4]
        assert set(loud) == {channel for part in wide if part is not None for channel in part.tolist()}


def test_channels_of_like_size_share_scales() -> None:
    """Sizes that alternate from channel to channel: sorted, half of the groups have small scales."""
    generator = torch.Generator().manual_seed(2)
    x, along = (torch.randn(1, 1, 64, 64, generator=generator) for _ in range(2))
    x[..., ::2] *= 30
    elements = mixed_elements(parse_kv_scheme("mixed"), latent_config())[0]
    observer = SideObserver(elements)
    observer.add(x, along)
    seen = KvStatistics(observer.statistics(1.0), None)
    small = seen.keys.damages[1][0, 1::2]  # in groups of 32
    assert small.max() < damage(x, along.square(), elements[1])[0, 1::2].min() / 50
    (side,) = mixed_sides(parse_kv_scheme("mixed"), latent_config(), {0: seen})
    keys = side.tensor(torch.ones(len(side.units.channels), dtype=torch.int64))
    found = (keys.unpack(keys.pack(x[:, 0])) - x[:, 0]).square() * along[:, 0].square()
    torch.testing.assert_close(found.mean(dim=(0, 1)), seen.keys.damages[1][0], rtol=3e-2, atol=0)


def test_latents_have_no_rotation_to_leave_out() -> None:
    for text in ("mixed:6,keys=pre-rope", "int4,keys=pre-rope"):
        seen = {layer: latent_statistics() for layer in range(2)}
        make = partial(mixed_plan, statistics=seen) if text.startswith("mixed") else uniform_plan
        with pytest.raises(UserError, match="keys=pre-rope"):
            make(parse_kv_scheme(text), latent_config())


def test_plans_come_back_from_their_file(tmp_path: Path) -> None:
    sides = mixed_sides(parse_kv_scheme("mixed"), config(), {0: statistics(1), 1: statistics(2)})
    mixed = plan_of_choice(parse_kv_scheme("mixed:6"), config(), sides, allocate(sides, 6))
    ranges = KvFindings({layer: KvRange(torch.rand(2, 32) + 1, torch.rand(2, 32) + 1) for layer in range(2)})
    unrotated = uniform_plan(parse_kv_scheme("int4:32,keys=pre-rope"), config())
    latents = mixed_plan(
        parse_kv_scheme("mixed:6"), latent_config(), {n: latent_statistics() for n in range(2)}
    )
    for plan in (mixed, unrotated, latents, uniform_plan(parse_kv_scheme("fp8:head"), config(), ranges)):
        (tmp_path / KV_FILE).write_bytes(kv_file_bytes(plan))
        found = read_kv_plan(tmp_path)
        assert found is not None
        assert kv_file_bytes(found) == kv_file_bytes(plan)
        assert found.scheme == plan.scheme
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
