"""Hadamard matrices of every kind, and rotations that change no output."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.calibrators.hadamard import hadamard_signs, has_hadamard
from qwen_quantize.calibrators.pair_scaling import LayerTensors
from qwen_quantize.calibrators.rotation import (
    MX_BLOCK,
    fold_norm,
    hadamard_rotation,
    rotate,
    rotate_outputs,
    rotate_residual,
    rotate_values,
    signed_rotation,
)
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model, run_attention, run_layer
from qwen_quantize.models.blueprint import RESIDUAL_WRITERS, Half, Stream
from qwen_quantize.models.scale_pairs import (
    residual_rotation_refusal,
    scale_pairs,
    value_rotation_pair,
)
from tests.models.test_scale_pairs import put_together, take_apart
from tests.tiny_models import FAMILIES, make_tiny

# Doubling; q + 1 with q = 3, 11, 19, 27, 343; 2 (q + 1) with q = 5, 13, 17, 25, 49; products.
ORDERS = [1, 2, 4, 8, 32, 64, 12, 20, 28, 344, 36, 52, 100, 40, 60, 108, 140, 148, 144, 576, 1536]


@pytest.mark.parametrize("order", ORDERS)
def test_hadamard_matrices(order: int) -> None:
    signs = hadamard_signs(order)
    assert signs.shape == (order, order)
    assert set(signs.unique().tolist()) <= {-1, 1}
    wide = signs.double()
    assert torch.equal(wide @ wide.T, order * torch.eye(order, dtype=torch.float64))


def test_orders_without_a_construction_are_refused() -> None:
    for order, why in (
        (0, "multiple of 4"),
        (6, "multiple of 4"),
        (-4, "multiple of 4"),
        (92, "Paley"),
        (172, "Paley"),
    ):
        assert not has_hadamard(order)
        with pytest.raises(ValueError, match=f"order {order} can be built: .*{why}"):
            hadamard_signs(order)
    # The odd factors, times four, of hidden and intermediate sizes of released models.
    for order in (4, 12, 20, 28, 36, 60, 76, 108, 140, 148):
        assert has_hadamard(order)


def test_powers_of_two_come_by_doubling() -> None:
    expected = torch.tensor([[1]], dtype=torch.int8)
    for order in (2, 4, 8, 16, 32):
        expected = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.int8), expected)
        assert torch.equal(hadamard_signs(order), expected)


def test_random_signs_come_from_the_generator() -> None:
    one, same, other = (hadamard_rotation(20, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert (one @ one.T - torch.eye(20, dtype=torch.float64)).abs().max() < 1e-14


@pytest.mark.parametrize("size", [MX_BLOCK, 12, 96])
def test_a_rotated_input_meets_a_rotated_weight(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 96, generator=generator, dtype=torch.float64)
    weight = torch.randn(5, 96, generator=generator, dtype=torch.float64)
    bias = torch.randn(5, generator=generator, dtype=torch.float64)
    rotation = hadamard_rotation(size, generator)
    found = functional.linear(rotate(x, rotation), rotate(weight, rotation), bias)
    torch.testing.assert_close(found, functional.linear(x, weight, bias), rtol=1e-10, atol=1e-10)
    dense = torch.block_diag(*[rotation] * (96 // size))
    torch.testing.assert_close(rotate(x, rotation), x @ dense, rtol=1e-12, atol=1e-12)
    # Of a linear in front: its outputs, weight and bias alike.
    before = torch.randn(96, 11, generator=generator, dtype=torch.float64)
    shift = torch.randn(96, generator=generator, dtype=torch.float64)
    y = torch.randn(7, 11, generator=generator, dtype=torch.float64)
    turned = functional.linear(y, rotate_outputs(before, rotation), rotate_outputs(shift, rotation))
    expected = rotate(functional.linear(y, before, shift), rotation)
    torch.testing.assert_close(turned, expected, rtol=1e-10, atol=1e-10)


def test_a_rotation_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="48 features are no multiple of the rotation's 32"):
        rotate(torch.zeros(2, 48), hadamard_rotation(32))


def test_blocks_of_32_keep_an_outlier_to_its_own_block() -> None:
    """The trap with power-of-two scales: a rotation of all features puts one loud one into every block."""
    x = 0.01 * torch.ones(1, 256)
    x[0, 5] = 100
    blocks = rotate(x, hadamard_rotation(MX_BLOCK)).view(8, 32).abs().amax(dim=1)
    assert float(blocks[1:].max()) < 0.1
    assert float(blocks[0]) < 20
    everywhere = rotate(x, hadamard_rotation(256)).view(8, 32).abs().amax(dim=1)
    assert float(everywhere.min()) > 5


def tiny(folder: Path, family: str, **overrides: object) -> Model:
    make_tiny(folder, family, **overrides)
    return load_model(ModelReader(open_source(folder)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_turned_values_change_no_layer(family: str, tmp_path: Path) -> None:
    """R2 in float64, and that a pair is refused only where it would change the layer."""
    model = tiny(tmp_path, family)
    blueprint, generator = model.blueprint, torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 12, 64, generator=generator, dtype=torch.float64)
    rotation = hadamard_rotation(4, generator)
    for index, layer in enumerate(model.layers):
        parts = take_apart(layer, index, blueprint)
        expected = run_attention(
            hidden, put_together(parts, index, blueprint), index, blueprint, model.rotary
        )
        pair = value_rotation_pair(blueprint, index)
        if pair is None:
            assert blueprint.config.output_gate or blueprint.config.is_delta(index)
            continue
        turned = parts.changed(rotate_values(parts, pair, rotation))
        found = run_attention(hidden, put_together(turned, index, blueprint), index, blueprint, model.rotary)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert not torch.equal(turned.weights[pair.readers[0].path], parts.weights[pair.readers[0].path])


@torch.inference_mode()
def test_a_gate_lets_no_rotation_through(tmp_path: Path) -> None:
    model = tiny(tmp_path, "qwen3.5")
    blueprint, index = model.blueprint, 1
    assert value_rotation_pair(blueprint, index) is None
    (pair,) = [
        pair
        for pair in scale_pairs(blueprint, index, Half.ATTENTION)
        if pair.stream is Stream.ATTENTION_OUTPUT
    ]
    parts = take_apart(model.layers[index], index, blueprint)
    hidden = torch.randn(1, 9, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = run_attention(hidden, put_together(parts, index, blueprint), index, blueprint, model.rotary)
    parts = parts.changed(rotate_values(parts, pair, hadamard_rotation(4)))
    after = run_attention(hidden, put_together(parts, index, blueprint), index, blueprint, model.rotary)
    assert (after - before).abs().max() > 1e-3


def split(parts: LayerTensors, index: int, model: Model) -> tuple[LayerTensors, LayerTensors]:
    """(what reads the normed residual, what writes to it)."""
    blueprint = model.blueprint
    hidden = blueprint.config.hidden_size
    inputs = (Stream.ATTENTION_INPUT, Stream.MLP_INPUT, Stream.SHARED_INPUT, Stream.EXPERT_INPUT)
    streams: dict[str, Stream] = {}
    for half in Half:
        streams |= {site.path: site.stream for site in blueprint.sites(index, half)}
    for expert in range(blueprint.num_experts(index)):
        streams |= {
            site.path.replace("{expert}", str(expert)): site.stream for site in blueprint.expert_sites(index)
        }
    readers = {path: weight for path, weight in parts.weights.items() if streams[path] in inputs}
    writers = {path: weight for path, weight in parts.weights.items() if streams[path] in RESIDUAL_WRITERS}
    biases = {path: bias for path, bias in parts.biases.items() if path in writers}
    matrices = {
        suffix: matrix
        for suffix, matrix in parts.tensors.items()
        if matrix.dim() == 2 and matrix.shape[1] == hidden
    }
    return LayerTensors(readers, tensors=matrices), LayerTensors(writers, biases)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_a_turned_residual_stream_changes_no_logits(family: str, tmp_path: Path) -> None:
    """R1 with norms folded, embedding to head, in float64; tied models turn the embedding once and untie the head."""
    model = tiny(tmp_path, family)
    blueprint, config = model.blueprint, model.blueprint.config
    refusal = residual_rotation_refusal(blueprint)
    if refusal is not None:
        assert family in ("gemma2", "gemma3", "glm4")
        assert "norms what each half adds" in refusal
        return
    rotation = hadamard_rotation(64, torch.Generator().manual_seed(4))
    tokens = torch.randint(160, (2, 16), generator=torch.Generator().manual_seed(5))
    embedding = model.embedding.double()
    plain, turned = embedding[tokens], rotate(embedding, rotation)[tokens]
    names = blueprint.family
    for index, layer in enumerate(model.layers):
        parts = take_apart(layer, index, blueprint)
        plain = run_layer(plain, put_together(parts, index, blueprint), index, blueprint, model.rotary)
        changed = fold_both(parts, index, model, names.input_norm, names.mlp_norm)
        readers, writers = split(changed, index, model)
        changed = changed.changed(rotate_residual(readers, writers, rotation))
        turned = run_layer(turned, put_together(changed, index, blueprint), index, blueprint, model.rotary)
        torch.testing.assert_close(turned, rotate(plain, rotation), rtol=1e-10, atol=1e-10)
    head = embedding if config.tie_word_embeddings else model.head.weight.double()  # type: ignore[attr-defined]
    norm = model.final_norm.double()
    expected = normed(plain, norm, config.rms_norm_eps) @ head.T
    one, folded = fold_norm(norm, LayerTensors({"head": head}))
    found = normed(turned, one, config.rms_norm_eps) @ rotate(folded.weights["head"], rotation).T
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    # Turning the tied head a second time with the embedding is the trap.
    wrong = normed(turned, norm, config.rms_norm_eps) @ rotate(embedding, rotation).T
    if config.tie_word_embeddings:
        assert (wrong - expected).abs().max() > 1e-3


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def fold_both(parts: LayerTensors, index: int, model: Model, first: str, second: str) -> LayerTensors:
    """Both norms of a layer folded into what reads them."""
    blueprint = model.blueprint
    for norm, half in ((first, Half.ATTENTION), (second, Half.MLP)):
        readers, _ = split(parts, index, model)
        mine = {site.path.split("{expert}")[0] for site in blueprint.sites(index, half)}
        if half is Half.MLP:
            mine |= {site.path.split("{expert}")[0] for site in blueprint.expert_sites(index)}
        names = {path: w for path, w in readers.weights.items() if any(path.startswith(p) for p in mine)}
        suffixes = blueprint.layer_tensors(index, half)
        tensors = {suffix: matrix for suffix, matrix in readers.tensors.items() if suffix in suffixes}
        one, folded = fold_norm(parts.tensors[norm], LayerTensors(names, tensors=tensors))
        parts = parts.changed(folded).changed(LayerTensors(tensors={norm: one}))
    return parts


def test_norms_stored_less_one_fold_to_zero() -> None:
    stored, matrix = torch.tensor([0.5, -0.5]), torch.ones(3, 2)
    one, folded = fold_norm(stored, LayerTensors({"reader": matrix}), offset=1.0)
    assert one.tolist() == [0.0, 0.0]
    assert folded.weights["reader"].tolist() == [[1.5, 0.5]] * 3


@pytest.mark.parametrize(
    ("size", "orders"), [(1, [1]), (4, [4]), (12, [12]), (32, [16, 2]), (96, [96]), (576, [16, 36])]
)
def test_a_rotation_in_factors_is_a_signed_hadamard_matrix(size: int, orders: list[int]) -> None:
    rotation = signed_rotation(size, torch.Generator().manual_seed(7))
    assert [factor.shape[0] for factor in rotation.factors] == orders
    dense = rotation.turn(torch.eye(size, dtype=torch.float64))
    assert (dense @ dense.T - torch.eye(size, dtype=torch.float64)).abs().max() < 1e-13
    assert (dense.abs() - size**-0.5).abs().max() < 1e-14
    x = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    torch.testing.assert_close(rotation.turn(x), rotate(x, dense), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rotation.turn(rotation.turn(x), back=True), x, rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="no multiple of the rotation's"):
        signed_rotation(4, torch.Generator()).turn(torch.zeros(2, 6))
