"""From schemes, and from the config of a folder, to what the engine computes with activations."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import StoredKind
from qwen_quantize.chip_profiles.arithmetic import assumable_for, resolve_arithmetic
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.session import ChipQuestion, chip_compute, folder_chip
from qwen_quantize.engine.compute import FolderCompute, compute_for, computed_as, scheme_of_form
from qwen_quantize.engine.linear import ChipCompute, EmulatedGroup, PlainGroup, emulated
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_cast import (
    ActivationCast,
    GroupCast,
    NvFp4Cast,
    ShiftedCast,
    TensorCast,
    TokenCast,
)
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.cast_path import static_scale
from qwen_quantize.formats.cast_rule import RNE_SATURATE, Rounding
from qwen_quantize.formats.dot_reference import dot_reference
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import E2M1, E2M3, E4M3FN, E8M0, FP16, FP32, HIF8, INT8
from qwen_quantize.models.blueprint import Stream
from tests.engine.stored_schemes import INPUT_AMAX, draw, small, static, store
from tests.tiny_models import make_tiny

R = RNE_SATURATE
ON_A_CPU: dict[str, ActivationCast | None] = {
    "ue8m0": GroupCast(E4M3FN, R, ScaleRule.RCEIL, 128),
    "mxfp8": GroupCast(E4M3FN, R, ScaleRule.RCEIL, 32),
    "mxfp6": GroupCast(E2M3, R, ScaleRule.EVEN, 32),
    "mxfp4": GroupCast(E2M1, R, ScaleRule.EVEN, 32),
    "nvfp4": NvFp4Cast(E2M1, R, None),
    "fp8": TokenCast(E4M3FN, R),
    "w8a8": TokenCast(INT8, R),
    "w4a8": TokenCast(INT8, R),
    "w4a16": None,
    "w8a16": None,
    "hif8": TokenCast(HIF8, replace(R, rounding=Rounding.RNA)),
}


def arithmetic(chip: str, scheme: Scheme, **assumed: str):  # type: ignore[no-untyped-def]
    wanted = {key.replace("__", "."): value for key, value in assumed.items()}
    return resolve_arithmetic(load_profile(chip), scheme, wanted)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_has_its_cast(name: str) -> None:
    scheme = SCHEMES[name]
    assert compute_for(scheme, arithmetic("cpu", scheme)) == ChipCompute(ON_A_CPU[name])


@pytest.mark.parametrize(
    "chip", ["cpu", "nvidia-h100", "ascend-950", "ascend-910b", "amd-mi300x", "example@1.3"]
)
@pytest.mark.parametrize("size", [128, 32])
def test_ue8m0_is_the_group_cast_and_the_units_own_sums(chip: str, size: int) -> None:
    scheme = SCHEMES["ue8m0"].with_block(size, size)
    for assumed in ({}, {"accumulator__fraction_bits": "13"}, {"accumulator__format": "fp16"}):
        found = arithmetic(chip, scheme, **assumed)
        cast = GroupCast(E4M3FN, found.activation_cast, found.activation_scale_rule, size)
        unit = dot_unit_of(found, E4M3FN, E4M3FN, size)
        assert compute_for(scheme, found) == ChipCompute(cast, unit)


def test_integers_have_no_unit_and_ascend_rounds_them_twice() -> None:
    for name in ("w8a8", "w4a8"):
        found = compute_for(SCHEMES[name], arithmetic("ascend-910b", SCHEMES[name]))
        assert found == ChipCompute(TokenCast(INT8, R, path=(FP16,)))


def test_fp8_per_token_on_a_narrow_register_adds_codes() -> None:
    """Against exact arithmetic on the codes: the scales of token and row multiply the finished sum."""
    scheme = SCHEMES["fp8"]
    chip = compute_for(scheme, arithmetic("nvidia-h100", scheme))
    assert chip.bare
    assert chip.unit is not None
    row_scale = draw(5, seed=1).abs() + 0.01
    codes = draw(5, 96, seed=2).mul(100).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    plain = PlainGroup(codes * row_scale[:, None], draw(5, seed=3), (2, 3))
    x = draw(2, 3, 96, seed=4)
    found = torch.cat(emulated(plain, chip, row_scale)(x), dim=-1)
    assert chip.cast is not None
    inputs, scale = chip.cast.operands(x.view(6, 96))
    sums = torch.tensor([[dot_reference(a, b, chip.unit) for b in codes.tolist()] for a in inputs.tolist()])
    assert scale is not None
    assert plain.bias is not None
    assert torch.equal(found.view(6, 5), sums * row_scale * scale + plain.bias)
    wide = torch.cat(emulated(plain, chip)(x), dim=-1)  # rows as float32, close to it
    assert not torch.equal(wide, found)
    torch.testing.assert_close(wide, found, rtol=2e-3, atol=0.1)
    torch.testing.assert_close(
        found, functional.linear(chip.cast(x), plain.weight, plain.bias), rtol=1e-2, atol=0.1
    )


def test_a_static_scale_of_19_bits_multiplies_integer_sums() -> None:
    scheme = static(SCHEMES["w8a8"])
    chip = compute_for(scheme, arithmetic("ascend-910b", scheme), input_scale=0.0123)
    assert chip.cast == TensorCast(INT8, R, 0.0123, (FP16,))
    codes = torch.randint(-128, 128, (4, 64), generator=torch.Generator().manual_seed(1)).float()
    row_scale = torch.tensor([0.011, 0.5, 0.0, 1.37])
    x = draw(7, 64, seed=2)
    (found,) = emulated(PlainGroup(codes * row_scale[:, None], None, (4,)), chip, row_scale)(x)
    inputs, _ = chip.cast.operands(x)
    used = row_scale > 0
    wanted = (inputs.double() @ codes.double().T).float() * static_scale(
        (row_scale * 0.0123).clamp(min=1e-30)
    )
    assert torch.equal(found[:, used], wanted[:, used])
    assert not found[:, ~used].any()
    plain = inputs.double() @ codes.double().T * (row_scale * 0.0123)
    assert not torch.equal(found.double(), plain)
    torch.testing.assert_close(found.double(), plain, rtol=2e-3, atol=0)
    with pytest.raises(ValueError, match="their scale is missing"):
        compute_for(scheme, arithmetic("ascend-910b", scheme))


def test_narrow_sums_of_the_other_floats_have_operands_that_hold_them() -> None:
    for name in ("hif8", "nvfp4"):
        scheme = SCHEMES[name]
        chip = compute_for(scheme, arithmetic("cpu", scheme, accumulator__fraction_bits="9"))
        assert chip.unit is not None
        x = draw(3, 64, seed=1)
        assert chip.cast is not None
        values, scale = chip.cast.operands(x)
        assert scale is not None
        plain = PlainGroup(values * scale, None, (3,))
        (found,) = emulated(plain, chip, scale[:, 0])(x)
        sums = torch.tensor(
            [[dot_reference(a, b, chip.unit) for b in values.tolist()] for a in values.tolist()]
        )
        assert torch.equal(found, sums * scale[:, 0] * scale)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.activation is not None])
def test_a_folder_computes_as_the_plan_that_wrote_it(name: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    scheme = small(name)
    values = store(tmp_path, scheme)
    reader = ModelReader(open_source(tmp_path))
    chip = folder_chip(ChipQuestion("cpu"), None, reader)
    second = INPUT_AMAX / 2688 if name == "nvfp4" else None
    expected = compute_for(scheme, arithmetic("cpu", scheme), global_scale=second)
    assert isinstance(chip.compute, FolderCompute)
    for stored in reader.quantized_linears():
        way = chip.compute(stored)
        if isinstance(way.cast, NvFp4Cast):  # type: ignore[union-attr]
            assert way.cast.global_scale == pytest.approx(second, rel=1e-6)  # type: ignore[union-attr]
        else:
            assert way == expected
    group = reader.read_layer(0, chip.compute).groups[Stream.MLP_HIDDEN]
    assert isinstance(group, EmulatedGroup)
    module = "model.layers.0.mlp.down_proj"
    x = draw(5, values[module].shape[1], seed=3)
    assert group.cast is not None
    assert torch.equal(group(x)[0], functional.linear(group.cast(x), values[module]))
    assert chip_compute(reader, chip.arithmetic) == chip.compute


def test_a_weight_only_folder_emulates_nothing(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    store(tmp_path, small("w4a16"))
    reader = ModelReader(open_source(tmp_path))
    chip = folder_chip(ChipQuestion("nvidia-h100"), None, reader)
    assert chip.compute is None
    assert isinstance(reader.read_layer(0, chip.compute).groups[Stream.MLP_HIDDEN], PlainGroup)


def test_each_linear_of_a_mixed_folder_has_its_own_way(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")

    def scheme_of(module: str) -> Scheme | None:
        if "layers.0" in module:
            return None if module.endswith("k_proj") else small("w8a8")
        return small("fp8") if "self_attn" in module else static(SCHEMES["w8a8"])

    store(tmp_path, scheme_of)
    reader = ModelReader(open_source(tmp_path))
    question = ChipQuestion("nvidia-h100", assume=(("accumulator.fraction_bits", "13"),))
    compute = folder_chip(question, None, reader).compute
    ways = {stored.module: computed_as(compute, stored) for stored in reader.quantized_linears()}
    token = ways["model.layers.0.self_attn.q_proj"]
    narrow = ways["model.layers.1.self_attn.o_proj"]
    fixed = ways["model.layers.1.mlp.up_proj"]
    assert "model.layers.0.self_attn.k_proj" not in ways
    assert token == ChipCompute(TokenCast(INT8, R))
    assert narrow is not None
    assert narrow.unit is not None
    assert narrow.bare
    assert fixed is not None
    assert fixed == ChipCompute(TensorCast(INT8, R, float(torch.tensor(INPUT_AMAX) / 127)))
    parts = reader.read_layer(0, compute).groups[Stream.ATTENTION_INPUT].parts  # type: ignore[attr-defined]
    assert [type(part) for part in parts] == [EmulatedGroup, PlainGroup, EmulatedGroup]
    tokens = torch.randint(160, (2, 9), generator=torch.Generator().manual_seed(1))
    on_chip = load_model(reader, compute).forward(tokens)
    plain = load_model(reader, None).forward(tokens)
    assert not torch.equal(on_chip, plain)
    torch.testing.assert_close(on_chip, plain, rtol=0.3, atol=0.3)
    with pytest.raises(UserError, match="only `eval` computes with several"):
        chip_compute(reader, arithmetic("cpu", SCHEMES["fp8"]))
    with pytest.raises(UserError, match="no such step"):
        folder_chip(ChipQuestion("cpu", assume=(("scale.rule", "floor"),)), None, reader)


def test_inputs_with_a_zero_point_and_inputs_without_their_scale(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3")
    store(tmp_path, small("w8a8"))
    config = json.loads((tmp_path / "config.json").read_text())
    inputs = config["quantization_config"]["config_groups"]["group_0"]["input_activations"]
    inputs["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader = ModelReader(open_source(tmp_path))
    group = reader.read_layer(0, folder_chip(ChipQuestion("cpu"), None, reader).compute).groups[
        Stream.MLP_HIDDEN
    ]
    assert isinstance(group, EmulatedGroup)
    assert group.cast == ShiftedCast(INT8, R)
    inputs.update(symmetric=True, dynamic=False, strategy="tensor")
    (tmp_path / "config.json").write_text(json.dumps(config))
    reader = ModelReader(open_source(tmp_path))
    with pytest.raises(UserError, match="no tensor holds it"):
        reader.read_layer(0, folder_chip(ChipQuestion("cpu"), None, reader).compute)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.activation is not None])
def test_a_form_names_the_scheme_it_came_from(name: str) -> None:
    spec = SCHEMES[name].activation
    assert spec is not None
    found = scheme_of_form(ActivationForm(spec.format, spec.granularity, spec.scale_format, dynamic=True))
    assert found.activation == spec
    assert found.name == ("w8a8" if name == "w4a8" else name)


def test_groups_of_32_are_those_of_the_weights_scheme() -> None:
    form = ActivationForm(E4M3FN, Granularity.group(32), E8M0, dynamic=True)
    blocks, groups = (scheme_of_form(form, kind) for kind in (StoredKind.BLOCK_FP8, StoredKind.MXFP8))
    assert (blocks.name, groups.name, scheme_of_form(form).name) == ("ue8m0", "mxfp8", "mxfp8")
    assert blocks.activation == groups.activation
    ints = scheme_of_form(ActivationForm(INT8, Granularity.token(), FP32, dynamic=True), StoredKind.MXFP8)
    assert ints.name == "w8a8"


def test_forms_beside_the_named_schemes() -> None:
    grouped = scheme_of_form(ActivationForm(E4M3FN, Granularity.group(128), FP32, dynamic=True))
    found = compute_for(grouped, arithmetic("cpu", grouped))
    assert found == ChipCompute(TokenCast(E4M3FN, R, group_size=128))
    odd = scheme_of_form(ActivationForm(E2M3, Granularity.group(16), E8M0, dynamic=True))
    assert compute_for(odd, arithmetic("cpu", odd)) == ChipCompute(GroupCast(E2M3, R, ScaleRule.EVEN, 16))
    tensor = scheme_of_form(ActivationForm(E4M3FN, Granularity.tensor(), FP32, dynamic=True))
    assert compute_for(tensor, arithmetic("cpu", tensor)) == ChipCompute(TokenCast(E4M3FN, R))


@pytest.mark.parametrize("name", SCHEMES)
def test_assumptions_are_taken_exactly_where_they_have_a_step(name: str) -> None:
    scheme, profile = SCHEMES[name], load_profile("cpu")
    for key, value in (
        ("cast.rounding", "rtz"),
        ("cast.overflow", "saturate"),
        ("cast.subnormals", "flush"),
        ("cast.nan", "zero"),
        ("scale.rule", "floor"),
        ("accumulator.format", "fp32"),
        ("accumulator.fraction_bits", "20"),
        ("accumulator.products_per_step", "8"),
        ("accumulator.promotion_interval", "64"),
    ):
        if key in assumable_for(scheme):
            resolve_arithmetic(profile, scheme, {key: value})
        else:
            with pytest.raises(UserError, match="no such step"):
                resolve_arithmetic(profile, scheme, {key: value})
