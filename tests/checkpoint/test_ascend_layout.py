"""msModelSlim's layout: bytes, what vLLM Ascend's loader asks for, and folders written by others."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.checkpoint.ascend_layout import ASCEND, AscendLayout
from qwen_quantize.checkpoint.ascend_packing import (
    bias_of_steps,
    kv_cache_tensors,
    pack_int4_pairs,
    pack_scale_words,
    quant_bias,
    scale_bias,
    unpack_int4_pairs,
    unpack_scale_words,
)
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import BF16, FP16
from tests.checkpoint.ascend_samples import (
    BY_TYPE,
    DESCRIPTION,
    LOADER,
    held_as,
    sample,
)


@pytest.mark.parametrize("kind", BY_TYPE)
def test_tensors_are_those_that_the_loader_asks_for(kind: str) -> None:
    for module, shape in (
        ("model.layers.3.self_attn.q_proj", (96, 64)),
        ("model.layers.3.mlp.down_proj", (64, 192)),
    ):
        found = {output.name: output for output in ASCEND.outputs(module, shape, BY_TYPE[kind])}
        rule = dict(LOADER[kind])
        if kind == "W4A8_DYNAMIC" and module.endswith("down_proj"):
            rule["scale_bias"] = (
                ("F32",),
                lambda n, _: (n, 16),
            )  # so that up to 16 devices each sum their share
        assert set(found) == {f"{module}.{suffix}" for suffix in rule}
        for suffix, (dtypes, size) in rule.items():
            output = found[f"{module}.{suffix}"]
            assert (output.dtype in dtypes, output.shape) == (True, size(*shape))
    assert ASCEND.type_of(BY_TYPE[kind]) == kind


def test_the_scales_of_sums_are_words_in_fp16_models_alone() -> None:
    dtypes = {}
    for dtype in ("BF16", "F16", "F32"):
        outputs = replace(ASCEND, dtype=dtype).outputs("m", (32, 32), BY_TYPE["W8A8"])
        dtypes[dtype] = next(output.dtype for output in outputs if output.name == "m.deq_scale")
    assert dtypes == {"BF16": "F32", "F16": "I64", "F32": "F32"}


def test_golden_words_and_bytes() -> None:
    scales = torch.tensor([0.0123, -0.0123])
    assert pack_scale_words(scales).tolist() == [1011451376, -1136032272]
    assert torch.equal(unpack_scale_words(pack_scale_words(scales)), scales)
    with pytest.raises(ValueError, match="more than the 32 bits"):
        unpack_scale_words(torch.tensor([1 << 40]))
    pair = pack_int4_pairs(torch.tensor([[-8, 1], [7, -1]], dtype=torch.int8))
    assert pair.view(torch.uint8).tolist() == [[0x78, 0xF1]]
    codes = torch.tensor([[1, 10] * 16], dtype=torch.uint8)  # 0.5 and -1
    scheme = BY_TYPE["W4A4_MXFP4"]
    spec = scheme.weight
    quantized = QuantizedTensor(codes, torch.tensor([[0.25]]), None, spec.format, spec.granularity, (1, 32))
    found = ASCEND.pack("m", quantized, scheme)
    assert found["m.weight"].tolist() == [[0xA1] * 16]
    assert found["m.weight_scale"].tolist() == [[125]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_unpacking_is_the_inverse_of_packing(data: st.DataObject) -> None:
    scheme = BY_TYPE[data.draw(st.sampled_from(list(BY_TYPE)))]
    rows, columns = 2 * data.draw(st.integers(1, 9)), 32 * data.draw(st.integers(1, 4))
    layout, fmt = data.draw(st.sampled_from(((ASCEND, BF16), (replace(ASCEND, dtype="F16"), FP16))))
    if scheme.weight.scale_rule is None:
        scheme = held_as(scheme, fmt)
    quantized = sample(scheme, rows, columns, data.draw(st.integers(0, 1000)))
    amax = data.draw(st.floats(0.01, 1000))
    module = data.draw(st.sampled_from(("a.q_proj", "a.down_proj")))
    packed = layout.pack(module, quantized, scheme, amax)
    for output in layout.outputs(module, (rows, columns), scheme):
        assert packed[output.name].dtype == DTYPES[output.dtype].torch
        assert tuple(packed[output.name].shape) == output.shape
    found = layout.unpack(module, packed, (rows, columns), scheme)
    assert torch.equal(found.codes, quantized.codes)
    assert torch.equal(found.scale, quantized.scale)
    assert (found.zero_point is None) == (quantized.zero_point is None)
    assert torch.equal(found.dequantize(), quantized.dequantize())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(0, 1000))
def test_pairs_of_rows(pairs: int, columns: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (2 * pairs, columns), generator=torch.Generator().manual_seed(seed)).to(
        torch.int8
    )
    packed = pack_int4_pairs(codes)
    assert tuple(packed.shape) == (pairs, columns)
    assert torch.equal(unpack_int4_pairs(packed), codes)


@settings(max_examples=40, deadline=None)
@given(st.integers(-128, 127), st.integers(0, 1000))
def test_a_bias_of_steps_is_the_bias_to_half_a_step(offset: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bias, scale = torch.randn(7, generator=generator), torch.rand(7, generator=generator) * 1e-3 + 1e-5
    sums = torch.randint(-5000, 5000, (7,), generator=generator)
    steps = quant_bias(bias, scale, offset, sums)
    wanted = np.round(bias.double().numpy() / scale.double().numpy()) - offset * sums.numpy()
    assert steps.tolist() == wanted.astype(np.int64).tolist()
    found = bias_of_steps(steps, scale, offset, sums)
    assert bool(((found - bias).abs() <= scale * 0.5001 + bias.abs() * 2e-7).all())


def test_scale_bias_is_eight_times_the_sum_of_each_share() -> None:
    values = torch.arange(64, dtype=torch.float32).view(2, 32)
    assert scale_bias(values, 1).tolist() == [[8.0 * 496], [8.0 * (496 + 32 * 32)]]
    shares = scale_bias(values, 16)
    assert tuple(shares.shape) == (2, 16)
    assert shares[0, :3].tolist() == [8.0, 40.0, 72.0]
    assert torch.equal(shares.sum(dim=1, keepdim=True), scale_bias(values, 1))


def test_what_the_layout_cannot_hold_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match="group-size 0"):
        ASCEND.outputs("m", (32, 128), SCHEMES["w4a8"])
    for name in ("nvfp4", "fp8", "hif8", "mxfp6", "ue8m0"):
        with pytest.raises(UserError, match="choose another --layout"):
            ASCEND.outputs("m", (128, 128), SCHEMES[name])
    with pytest.raises(UserError, match="packs rows in pairs"):
        ASCEND.outputs("m", (33, 128), BY_TYPE["W4A8_DYNAMIC"])
    with pytest.raises(UserError, match="a share of its scale_bias"):
        ASCEND.outputs("m.down_proj", (32, 40), BY_TYPE["W4A8_DYNAMIC"])
    with pytest.raises(UserError, match="no multiple of its group of 32"):
        ASCEND.outputs("m", (32, 40), BY_TYPE["W8A8_MXFP8"])
    quantized = sample(BY_TYPE["W8A8"], 4, 32, 1)
    rough = replace(quantized, scale=quantized.scale + 1e-9)
    with pytest.raises(ValueError, match="do not multiply exactly"):
        ASCEND.pack("m", rough, SCHEMES["w8a8_static"], 3.0)
    with pytest.raises(ValueError, match="needs the largest magnitude"):
        ASCEND.pack("m", quantized, BY_TYPE["W8A8"], None)


def described(schemes: dict[str, Scheme], *kept: str, layout: AscendLayout = ASCEND) -> dict[str, Any]:
    outputs = [
        output for module, scheme in schemes.items() for output in layout.outputs(module, (32, 64), scheme)
    ]
    outputs += [replace(outputs[0], name=name, dtype="BF16") for name in kept]
    files = layout.side_files(schemes, outputs)
    assert list(files) == [DESCRIPTION]
    found: dict[str, Any] = json.loads(files[DESCRIPTION])
    assert {output.name for output in outputs} <= set(found)
    return found


def test_the_description_has_an_entry_for_every_tensor() -> None:
    kept = ("lm_head.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight", "a.q_proj.bias")
    found = described({"a.q_proj": BY_TYPE["W8A8"], "a.up_proj": BY_TYPE["W8A8_DYNAMIC"]}, *kept)
    assert {name: found[name] for name in kept} == dict.fromkeys(kept, "FLOAT")
    own = ("weight", "input_scale", "input_offset", "quant_bias", "deq_scale")
    assert [found[f"a.q_proj.{suffix}"] for suffix in own] == ["W8A8"] * 5
    assert [found[f"a.up_proj.{suffix}"] for suffix in ("weight", "weight_scale", "weight_offset")] == [
        "W8A8_DYNAMIC"
    ] * 3
    assert (found["model_quant_type"], found["version"], found["group_size"]) == ("W8A8", "1.0.0", 0)
    assert described({"a": BY_TYPE["W8A8_MXFP8"], "b": BY_TYPE["W8A8"]})["group_size"] == 32
    with pytest.raises(UserError, match="one group size for the whole model"):
        described({"a": BY_TYPE["W8A8_MXFP8"], "b": held_as(SCHEMES["w4a16"].with_group(64))})


def test_entries_of_a_quantized_cache() -> None:
    tensors, types, extra = kv_cache_tensors("m.self_attn", torch.ones(8), torch.full((8,), 0.5))
    names = [f"m.self_attn.{part}_proj.kv_cache_{what}" for part in "kv" for what in ("scale", "offset")]
    assert list(tensors) == names
    assert types == dict.fromkeys(names, "C8")
    assert extra["kv_cache_type"] == "C8"
    assert not tensors[names[1]].any()
    assert tensors[names[2]].tolist() == [0.5] * 8
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
