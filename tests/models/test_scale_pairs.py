"""Every pair of every family: a factor moved from producer to readers changes no output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qwen_quantize.calibrators.pair_scaling import (
    LayerTensors,
    apply_pair,
    divide_producer,
    divided_norm,
    divided_rows,
    multiply_expert_readers,
    multiply_readers,
    storable_scale,
    tie_of,
)
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.layer import Layer, ResidentExperts
from qwen_quantize.engine.linear import LinearGroup, PlainGroup, fuse
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model, run_layer
from qwen_quantize.models.blueprint import Blueprint, Half, LinearSite, Stream
from qwen_quantize.models.scale_pairs import (
    NormProducer,
    RowsProducer,
    ScalePair,
    SharedFeatures,
    expert_scale_pairs,
    scale_pairs,
)
from tests.tiny_models import FAMILIES, make_tiny


def take_apart(layer: Layer, index: int, blueprint: Blueprint) -> LayerTensors:
    """Everything of a layer in float64, by path."""
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}

    def add(groups: Mapping[Stream, LinearGroup], sites: Mapping[Stream, list[str]]) -> None:
        for stream, paths in sites.items():
            group = groups[stream]
            assert isinstance(group, PlainGroup)
            weights.update(zip(paths, torch.split(group.weight.double(), list(group.sizes)), strict=True))
            if group.bias is not None:
                biases.update(zip(paths, torch.split(group.bias.double(), list(group.sizes)), strict=True))

    add(layer.groups, paths_of(blueprint, index))
    for expert in range(blueprint.num_experts(index)):
        assert layer.experts is not None
        add(layer.experts(expert), expert_paths(blueprint, index, expert))
    return LayerTensors(weights, biases, {name: tensor.double() for name, tensor in layer.tensors.items()})


def paths_of(blueprint: Blueprint, index: int) -> dict[Stream, list[str]]:
    streams = {**blueprint.streams(index, Half.ATTENTION), **blueprint.streams(index, Half.MLP)}
    return {stream: [site.path for site in sites] for stream, sites in streams.items()}


def expert_paths(blueprint: Blueprint, index: int, expert: int) -> dict[Stream, list[str]]:
    return {
        stream: [site.path.replace("{expert}", str(expert)) for site in sites]
        for stream, sites in blueprint.expert_streams(index).items()
    }


def put_together(parts: LayerTensors, index: int, blueprint: Blueprint) -> Layer:
    def groups(streams: Mapping[Stream, list[str]]) -> dict[Stream, LinearGroup]:
        made: dict[Stream, LinearGroup] = {}
        for stream, paths in streams.items():
            group = fuse([parts.weights[path] for path in paths], [parts.biases.get(path) for path in paths])
            made[stream] = group
        return made

    count = blueprint.num_experts(index)
    members = tuple(groups(expert_paths(blueprint, index, expert)) for expert in range(count))
    return Layer(
        groups(paths_of(blueprint, index)), parts.tensors, ResidentExperts(members) if members else None
    )


def pairs_outside(blueprint: Blueprint, index: int) -> list[ScalePair]:
    return [pair for half in Half for pair in scale_pairs(blueprint, index, half)]


def pairs_inside(blueprint: Blueprint, index: int) -> list[ScalePair]:
    experts = range(blueprint.num_experts(index))
    return [pair.for_expert(expert) for expert in experts for pair in expert_scale_pairs(blueprint, index)]


def tiny(folder: Path, family: str) -> Model:
    make_tiny(folder, family)
    return load_model(ModelReader(open_source(folder)))


def output(model: Model, index: int, parts: LayerTensors, hidden: Tensor) -> Tensor:
    layer = put_together(parts, index, model.blueprint)
    return run_layer(hidden, layer, index, model.blueprint, model.rotary)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_no_pair_changes_a_layer(family: str, tmp_path: Path) -> None:
    """In float64: the pairs one by one, those inside experts and all of them together."""
    model = tiny(tmp_path, family)
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, 20, 64, generator=generator, dtype=torch.float64)
    for index, layer in enumerate(model.layers):
        parts = take_apart(layer, index, model.blueprint)
        expected = output(model, index, parts, hidden)
        assert expected.dtype == torch.float64
        experts = range(model.blueprint.num_experts(index))
        outside, inside = pairs_outside(model.blueprint, index), pairs_inside(model.blueprint, index)
        for pairs in (*([pair] for pair in outside), inside, outside + inside):
            changed = parts
            for pair in pairs:
                scale = 0.5 + 1.5 * torch.rand(pair.features, generator=generator, dtype=torch.float64)
                changed = changed.changed(apply_pair(changed, pair, scale, experts))
            found = output(model, index, changed, hidden)
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "qwen2-moe", "deepseek-v3.2", "qwen3-next"])
@torch.inference_mode()
def test_every_entry_of_a_pair_is_needed(family: str, tmp_path: Path) -> None:
    """Leaving the producer or a reader as it was shows in the output, so the test above can fail."""
    model = tiny(tmp_path, family)
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(2, 40, 64, generator=generator, dtype=torch.float64)
    last = model.blueprint.num_layers - 1
    for index in (last - 1, last):  # every kind of half that the family has is in one of the two
        parts = take_apart(model.layers[index], index, model.blueprint)
        expected = output(model, index, parts, hidden)
        experts = range(model.blueprint.num_experts(index))
        for pair in [*pairs_outside(model.blueprint, index), *pairs_inside(model.blueprint, index)[:1]]:
            scale = 0.5 + 1.5 * torch.rand(pair.features, generator=generator, dtype=torch.float64)
            changes = apply_pair(parts, pair, scale, experts)
            names = [path for path in changes.weights if "experts." not in path or "experts.0." in path]
            for name in names:
                weights = {**changes.weights, name: parts.weights[name]}
                left = LayerTensors(weights, changes.biases, changes.tensors)
                off = output(model, index, parts.changed(left), hidden) - expected
                assert off.abs().max() > 1e-6, name
            for name in changes.tensors:
                tensors = {**changes.tensors, name: parts.tensors[name]}
                left = LayerTensors(changes.weights, changes.biases, tensors)
                off = output(model, index, parts.changed(left), hidden) - expected
                assert off.abs().max() > 1e-6, name


EXPECTED: dict[str, tuple[set[str], set[str]]] = {
    # The streams with a pair in a layer's halves: those of the first layer, those of the last.
    "llama": (
        {"attention_input", "attention_output", "mlp_input", "mlp_hidden"},
        {"attention_input", "attention_output", "mlp_input", "mlp_hidden"},
    ),
    "mixtral": (
        {"attention_input", "attention_output", "expert_input", "expert_hidden"},
        {"attention_input", "attention_output", "expert_input", "expert_hidden"},
    ),
    "qwen2-moe": (
        {"attention_input", "attention_output", "expert_input", "shared_hidden", "expert_hidden"},
        {"attention_input", "attention_output", "expert_input", "shared_hidden", "expert_hidden"},
    ),
    "deepseek-v3": (
        {
            "attention_input", "query_latent", "key_value_latent", "attention_output", "mlp_input",
            "mlp_hidden",
        },
        {
            "attention_input", "query_latent", "key_value_latent", "attention_output", "expert_input",
            "shared_hidden", "expert_hidden",
        },
    ),
    "deepseek-v2-lite": (
        {
            "attention_input", "key_value_latent", "attention_output", "expert_input", "shared_hidden",
            "expert_hidden",
        },
        {
            "attention_input", "key_value_latent", "attention_output", "expert_input", "shared_hidden",
            "expert_hidden",
        },
    ),
    "qwen3.5": (
        {"attention_input", "attention_output", "mlp_input", "mlp_hidden"},
        {"attention_input", "attention_output", "mlp_input", "mlp_hidden"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(EXPECTED))
def test_streams_with_a_pair(family: str, tmp_path: Path) -> None:
    blueprint = tiny(tmp_path, family).blueprint
    for index, expected in zip((0, blueprint.num_layers - 1), EXPECTED[family], strict=True):
        pairs = [pair for half in Half for pair in scale_pairs(blueprint, index, half)]
        pairs += expert_scale_pairs(blueprint, index)
        assert [pair.stream.value for pair in pairs] == sorted(
            expected, key=[stream.value for stream in pairs_order()].index
        )


def pairs_order() -> tuple[Stream, ...]:
    """Streams as halves run them; what every expert reads comes before what is inside the shared one."""
    return (
        Stream.ATTENTION_INPUT, Stream.QUERY_LATENT, Stream.KEY_VALUE_LATENT, Stream.ATTENTION_OUTPUT,
        Stream.MLP_INPUT, Stream.MLP_HIDDEN, Stream.EXPERT_INPUT, Stream.SHARED_HIDDEN, Stream.EXPERT_HIDDEN,
    )  # fmt: skip


def test_every_column_of_a_stream_belongs_to_a_pair(tmp_path: Path) -> None:
    """A pair's factors cover the whole input of its readers, tied or not, and name every reader of it."""
    for family in sorted(FAMILIES):
        blueprint = tiny(tmp_path / family, family).blueprint
        for index in range(blueprint.num_layers):
            for half in Half:
                for pair in scale_pairs(blueprint, index, half):
                    tie = tie_of(pair)
                    columns = pair.features if tie is None else tie.numel()
                    shapes = [blueprint.linear_shape(site, index) for site in pair.readers]
                    assert {shape[1] for shape in shapes} == {columns}
                    if tie is not None:
                        assert sorted(set(tie.tolist())) == list(range(pair.features))
                    streams = {site.stream for site in pair.readers}
                    sites = (*blueprint.sites(index, half), *blueprint.expert_sites(index))
                    named = {site.path for site in pair.readers}
                    assert named == {site.path for site in sites if site.stream in streams}


def test_values_tie_the_query_heads_that_share_them(tmp_path: Path) -> None:
    """Four query heads on two heads of keys and values, 16 features each."""
    (pair,) = [
        pair
        for pair in scale_pairs(tiny(tmp_path, "llama").blueprint, 0, Half.ATTENTION)
        if pair.stream is Stream.ATTENTION_OUTPUT
    ]
    assert pair.tie == SharedFeatures(2, 2, 16)
    features = pair.tie.features()
    assert features[:16] == features[16:32] == tuple(range(16))
    assert features[32:48] == features[48:] == tuple(range(16, 32))


def test_untied_heads_would_change_the_layer(tmp_path: Path) -> None:
    """The trap: under grouped queries a factor for every column of the output projection has no producer."""
    model = tiny(tmp_path, "llama")
    parts = take_apart(model.layers[0], 0, model.blueprint)
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = output(model, 0, parts, hidden)
    scale = torch.linspace(0.5, 2, 64, dtype=torch.float64)
    weights = dict(parts.weights)
    weights["self_attn.o_proj"] = weights["self_attn.o_proj"] * scale
    weights["self_attn.v_proj"] = weights["self_attn.v_proj"] / scale.view(2, 2, 16)[:, 0].reshape(32, 1)
    after = output(model, 0, LayerTensors(weights, parts.biases, parts.tensors), hidden)
    assert (after - before).abs().max() > 1e-3


def test_values_of_latent_attention_are_rows_of_the_expansion(tmp_path: Path) -> None:
    """16 rows of keys and 12 of values for each of four heads."""
    (pair,) = [
        pair
        for pair in scale_pairs(tiny(tmp_path, "deepseek-v2").blueprint, 0, Half.ATTENTION)
        if pair.stream is Stream.ATTENTION_OUTPUT
    ]
    assert isinstance(pair.producer, RowsProducer)
    assert pair.producer.site.path == "self_attn.kv_b_proj"
    expected = [28 * head + 16 + row for head in range(4) for row in range(12)]
    assert list(pair.producer.rows()) == expected


def test_routers_and_gates_are_readers(tmp_path: Path) -> None:
    families = {
        "mixtral": ("block_sparse_moe.gate.weight",),
        "qwen2-moe": ("mlp.gate.weight", "mlp.shared_expert_gate.weight"),
    }
    for family, expected in families.items():
        pair = scale_pairs(tiny(tmp_path / family, family).blueprint, 0, Half.MLP)[0]
        assert pair.tensor_readers == expected
    pair = scale_pairs(tiny(tmp_path / "next", "qwen3-next").blueprint, 0, Half.ATTENTION)[0]
    assert pair.tensor_readers == ("linear_attn.in_proj_ba.weight",)
    pair = scale_pairs(tiny(tmp_path / "v32", "deepseek-v3.2").blueprint, 0, Half.ATTENTION)[0]
    assert pair.tensor_readers == ("self_attn.indexer.weights_proj.weight",)


def test_stored_norms_less_one(tmp_path: Path) -> None:
    """A norm that the checkpoint holds less one is divided as what it stands for."""
    model = tiny(tmp_path, "gemma3")
    pair = scale_pairs(model.blueprint, 0, Half.MLP)[0]
    assert pair.producer == NormProducer("pre_feedforward_layernorm.weight", 1.0)
    scale = torch.linspace(0.5, 2, 64)
    held = torch.linspace(-0.9, 1.5, 64)
    stored = LayerTensors(tensors={pair.producer.suffix: held})
    used = LayerTensors(tensors={pair.producer.suffix: held + 1})
    one = divide_producer(stored, pair, scale, stored=True).tensors[pair.producer.suffix]
    other = divide_producer(used, pair, scale).tensors[pair.producer.suffix]
    torch.testing.assert_close(one + 1, other)


def test_norms_and_rows_by_hand() -> None:
    found = divided_norm(torch.tensor([0.0, 1.0, -0.5]), torch.tensor([2.0, 4.0, 0.5]), 1.0)
    assert found.tolist() == [-0.5, -0.5, 0.0]
    weight = torch.arange(6.0).view(3, 2)
    divided = divided_rows(weight, torch.tensor([2, 0]), torch.tensor([2.0, 4.0]))
    assert divided.tolist() == [[0.0, 0.25], [2.0, 3.0], [2.0, 2.5]]
    assert weight[2, 0] == 4  # the given one stays


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_storable_scale_divides_a_norm_exactly(offset: float) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(500, generator=generator) * 0.3 + 1 - offset).bfloat16().float()
    weight[3] = -offset  # nothing passes that feature: any factor does
    scale = torch.rand(500, generator=generator) * 3 + 0.2
    found = storable_scale(weight, scale, torch.bfloat16, offset)
    stored = divided_norm(weight, found, offset).bfloat16()
    again = (stored.double() + offset) * found.double()
    torch.testing.assert_close(again.float(), weight + offset, rtol=1e-6, atol=1e-7)
    assert found[3] == scale[3]
    # It is the scale that was asked for, within half a step of BF16 (of the number that is stored).
    step = (stored.double().abs() * 2**-8).clamp(min=1e-30) / (stored.double() + offset).abs()
    assert bool(((found / scale - 1).abs() <= step.float() * 1.01)[weight != -offset].all())
    # Without it the division is off by BF16's rounding.
    plain = divided_norm(weight, scale, offset).bfloat16().double() + offset
    assert (plain * scale - (weight + offset)).abs().max() > 1e-3


def test_experts_one_by_one_are_the_experts_together(tmp_path: Path) -> None:
    model = tiny(tmp_path, "qwen2-moe")
    parts = take_apart(model.layers[0], 0, model.blueprint)
    pair = scale_pairs(model.blueprint, 0, Half.MLP)[0]
    scale = torch.linspace(0.5, 2, 64)
    experts = range(model.blueprint.num_experts(0))
    together = multiply_readers(parts, pair, scale, experts)
    alone = multiply_readers(parts, pair, scale)
    assert set(alone.tensors) == {"mlp.gate.weight", "mlp.shared_expert_gate.weight"}
    assert not any("experts." in path for path in alone.weights)
    for expert in experts:
        alone = alone.changed(multiply_expert_readers(parts, pair, scale, expert))
    assert set(alone.weights) == set(together.weights)
    assert all(torch.equal(alone.weights[path], together.weights[path]) for path in alone.weights)


def test_scales_that_cannot_be_divided_by_are_refused() -> None:
    site = LinearSite("mlp.down_proj", Stream.MLP_HIDDEN)
    pair = ScalePair(Stream.MLP_HIDDEN, (site,), NormProducer("norm.weight"), 2)
    layer = LayerTensors({site.path: torch.ones(3, 2)}, tensors={"norm.weight": torch.ones(2)})
    for scale in (torch.tensor([1.0, 0.0]), torch.tensor([1.0, float("inf")]), torch.tensor([1.0, -1.0])):
        with pytest.raises(ValueError, match="not positive"):
            apply_pair(layer, pair, scale)
    with pytest.raises(ValueError, match="2 features"):
        apply_pair(layer, pair, torch.ones(3))
    with pytest.raises(KeyError):
        apply_pair(LayerTensors(), pair, torch.ones(2))
