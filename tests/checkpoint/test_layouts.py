"""What each layout writes: names, dtypes, shapes and bytes from the descriptions of the formats, and its inverse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from qwen_quantize.checkpoint.compressed_tensors import COMPRESSED_TENSORS, settled_tensor_scale
from qwen_quantize.checkpoint.integer_weights import pack_columns, pack_rows, pack_sixes, unpack_sixes
from qwen_quantize.checkpoint.layout_parts import read_scale, stored_scale
from qwen_quantize.checkpoint.layouts import (
    DEEPSEEK_FP8,
    DEFAULT_LAYOUT,
    HIF8_PLAIN,
    LAYOUTS,
    Layout,
)
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.packing import pack_words
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import FP32, INT4
from tests.checkpoint.quantized_samples import COMPRESSED, W4A16, same, sample, weight_only, with_scales

NAME = "model.layers.3.mlp.experts.7.up_proj"
AMAX = 3.0

CASES: list[tuple[str, Layout, Scheme]] = [
    *((name, COMPRESSED_TENSORS, scheme) for name, scheme in COMPRESSED.items()),
    ("awq", LAYOUTS["awq"], W4A16.with_zero_point()),
    ("awq without zero points", LAYOUTS["awq"], W4A16),
    ("awq by row", LAYOUTS["awq"], W4A16.with_group(None).with_zero_point()),
    ("gptq", LAYOUTS["gptq"], W4A16),
    ("gptq by row", LAYOUTS["gptq"], W4A16.with_group(None)),
    ("gptq of 8 bits", LAYOUTS["gptq"], COMPRESSED["w8a16"]),
    ("deepseek", DEEPSEEK_FP8, SCHEMES["ue8m0"].with_block(32, 64)),
    ("hif8", HIF8_PLAIN, SCHEMES["hif8"]),
]
IDS = [f"{layout.name}: {name}" for name, layout, _ in CASES]


def write(folder: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> LinearReader:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    plain = {"lm_head.weight": torch.ones(2, 2), f"{NAME}.bias": torch.ones(2)}
    save_file({name: it.contiguous() for name, it in tensors.items()} | plain, folder / "model.safetensors")
    return LinearReader(open_source(folder))


@pytest.mark.parametrize(("layout", "scheme"), [case[1:] for case in CASES], ids=IDS)
@pytest.mark.parametrize("shape", [(32, 128), (96, 64)])
def test_what_is_planned_is_packed_and_comes_back(
    tmp_path: Path, layout: Layout, scheme: Scheme, shape: tuple[int, int]
) -> None:
    """As codes from `unpack`, and as values from a reader that knows only the folder."""
    quantized = sample(scheme, shape)
    outputs = layout.outputs(NAME, shape, scheme)
    tensors = layout.pack(NAME, quantized, scheme, AMAX)
    assert [output.name for output in outputs] == list(tensors)
    for output in outputs:
        assert tensors[output.name].dtype == DTYPES[output.dtype].torch
        assert tuple(tensors[output.name].shape) == output.shape
    assert same(layout.unpack(NAME, tensors, shape, scheme), quantized)

    linears = write(tmp_path, tensors, layout.quantization_config({NAME: scheme}, ["lm_head"]))
    stored, expected = linears.describe(NAME, shape), quantized.dequantize()
    assert stored.shape == shape
    assert stored.weight == outputs[0].name
    assert torch.equal(linears.read(NAME), expected)
    start = 32 if shape[0] > 32 else 0
    assert torch.equal(linears.read_rows(NAME, start, start + 9), expected[start : start + 9])
    inputs = {name for name in tensors if ".input_" in name}
    assert set(stored.parts) == set(tensors) - inputs
    assert linears.companions() == set(tensors) - {stored.weight}
    assert linears.is_quantized(NAME)
    assert not linears.is_quantized("lm_head")
    assert (linears.loss_warning is None) == (layout is DEEPSEEK_FP8)
    form, activation = stored.activation, scheme.activation
    assert (form is None) == (activation is None)
    if form is None or activation is None:
        return
    assert (form.format, form.granularity, form.dynamic) == (
        activation.format, activation.granularity, scheme.dynamic,
    )  # fmt: skip
    # compressed-tensors has no word for powers of two as scales of FP8 blocks: its readers use float32.
    in_blocks = layout is COMPRESSED_TENSORS and scheme.name == "ue8m0"
    assert form.scale_format == (FP32 if in_blocks else activation.scale_format)
    assert {form.input_scale, form.global_scale} - {None} == inputs


def test_rows_of_transposed_words_begin_anywhere(tmp_path: Path) -> None:
    for name, layout, scheme in CASES:
        if layout.name not in ("awq", "gptq"):
            continue
        quantized = sample(scheme, (64, 96))
        tensors = layout.pack(NAME, quantized, scheme)
        linears = write(tmp_path / name, tensors, layout.quantization_config({NAME: scheme}, []))
        expected = quantized.dequantize()
        for start, stop in ((0, 1), (3, 4), (7, 9), (5, 64), (63, 64)):
            assert torch.equal(linears.read_rows(NAME, start, stop), expected[start:stop])


def words(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint32).view(np.int32))


RAMP = torch.arange(-8, 8, dtype=torch.int8)


def hand_made(scheme: Scheme, codes: torch.Tensor, scale: torch.Tensor, **more: Any) -> QuantizedTensor:
    weight = scheme.weight
    return QuantizedTensor(
        codes, scale, more.pop("zero_point", None), weight.format, weight.granularity,
        (codes.shape[0], codes.shape[1]), **more,
    )  # fmt: skip


def test_golden_int4_words() -> None:
    """Codes -8 .. 7 of a row are 0x76543210, 0xFEDCBA98; zero points lie down the rows."""
    scheme = SCHEMES["w4a16"].with_group(8).with_zero_point()
    zero = torch.tensor([[-8.0, 1.0], [7.0, -1.0]])
    quantized = hand_made(scheme, torch.stack([RAMP, RAMP.flip(0)]), torch.full((2, 2), 0.5), zero_point=zero)
    found = COMPRESSED_TENSORS.pack("m", quantized, scheme)
    assert torch.equal(
        found["m.weight_packed"], words(0x76543210, 0xFEDCBA98, 0x89ABCDEF, 0x01234567).view(2, 2)
    )
    assert torch.equal(found["m.weight_zero_point"], words(0xF0, 0x79).view(1, 2))
    assert found["m.weight_shape"].tolist() == [2, 16]
    assert found["m.weight_scale"].view(torch.int16).tolist() == [[0x3800] * 2] * 2


def test_golden_fp4_and_its_scales() -> None:
    """0.5 and -1 are the codes 1 and A, together 0xA1; 2^-3 is the byte 124."""
    scheme = SCHEMES["mxfp4"]
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, :2] = torch.tensor([0x1, 0xA])
    found = COMPRESSED_TENSORS.pack("m", hand_made(scheme, codes, torch.tensor([[0.125]])), scheme)
    assert found["m.weight_packed"].tolist() == [[0xA1] + [0] * 15]
    assert found["m.weight_scale"].tolist() == [[124]]


def test_golden_nvfp4_scales() -> None:
    """An amax of 10 has the tensor scale 10 / 2688, which is stored as 268.8; 240 is 0x77 in E4M3."""
    scheme = SCHEMES["nvfp4"]
    tensor_scale = settled_tensor_scale(10 / 2688)
    quantized = hand_made(
        scheme, torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[240.0]]), tensor_scale=tensor_scale
    )
    found = COMPRESSED_TENSORS.pack("m", quantized, scheme, input_amax=10.0)
    assert found["m.weight_global_scale"].tolist() == [np.float32(268.8)]
    assert found["m.input_global_scale"].tolist() == [np.float32(268.8)]
    assert found["m.weight_scale"].view(torch.uint8).tolist() == [[0x77]]


def test_golden_sixes() -> None:
    """Codes 1, 2, 3, 63 are the bits 111111 000011 000010 000001, lowest last: bytes 81, 30, FC."""
    assert pack_sixes(torch.tensor([[1, 2, 3, 63]], dtype=torch.uint8)).tolist() == [[0x81, 0x30, 0xFC]]


def test_golden_deepseek_and_int8() -> None:
    scheme = SCHEMES["ue8m0"].with_block(2, 2)
    codes = torch.tensor([[0x38, 0x7E], [0xFE, 0x01]], dtype=torch.uint8)
    found = DEEPSEEK_FP8.pack("m", hand_made(scheme, codes, torch.tensor([[0.25]])), scheme)
    assert found["m.weight"].dtype == torch.float8_e4m3fn
    assert found["m.weight"].view(torch.uint8).tolist() == codes.tolist()
    assert found["m.weight_scale_inv"].tolist() == [[0.25]]
    scheme = SCHEMES["w8a8"]
    codes = torch.tensor([[-128, 127]], dtype=torch.int8)
    found = COMPRESSED_TENSORS.pack("m", hand_made(scheme, codes, torch.tensor([[0.1]])), scheme)
    assert found["m.weight"].tolist() == [[-128, 127]]
    assert found["m.weight_scale"].tolist() == [[np.float32(0.1)]]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.sampled_from([4, 8]), st.integers(0, 2**31))
def test_quick_packing_equals_packing_bit_by_bit(rows: int, columns: int, bits: int, seed: int) -> None:
    shift = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-shift, shift, (rows, columns), generator=generator).to(torch.int8)
    unsigned = (codes.to(torch.int16) + shift).to(torch.uint8)
    assert torch.equal(pack_columns(codes, bits), pack_words(unsigned, bits))
    assert torch.equal(pack_rows(codes, bits), pack_words(unsigned.t(), bits).t())
    sixes = torch.randint(0, 64, (rows, 4 * columns), generator=generator).to(torch.uint8)
    bytes_of_words = pack_words(sixes, 6).contiguous().view(torch.uint8)[:, : 3 * columns]
    assert torch.equal(pack_sixes(sixes), bytes_of_words)
    assert torch.equal(unpack_sixes(pack_sixes(sixes)), sixes)


@settings(max_examples=200, deadline=None)
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_a_settled_tensor_scale_is_its_own_reciprocals_reciprocal(scale: float) -> None:
    settled = np.float32(settled_tensor_scale(scale))
    assert np.float32(1) / (np.float32(1) / settled) == settled
    assert abs(float(settled) / scale - 1) < 2**-22


def test_every_exponent_is_stored_and_read() -> None:
    scale = torch.ldexp(torch.ones(255), torch.arange(-127, 128))
    assert stored_scale(scale, "U8").tolist() == list(range(255))
    assert torch.equal(read_scale(stored_scale(scale, "U8")), scale)
    assert torch.equal(read_scale(stored_scale(scale, "F8_E8M0")), scale)
    assert read_scale(torch.tensor([255], dtype=torch.uint8)).isnan().all()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(3.0, "U8"), (0.0, "U8"), (-1.0, "U8"), (2.0**-128, "U8"), (float("nan"), "U8"), (0.1, "F16"), (1e9, "F16")],
)  # fmt: skip
def test_a_scale_that_its_dtype_cannot_hold(value: float, dtype: str) -> None:
    with pytest.raises(ValueError, match="scales"):
        stored_scale(torch.tensor([1.0, value]), dtype)


def test_every_scheme_has_a_layout_that_holds_it() -> None:
    assert DEFAULT_LAYOUT.keys() == SCHEMES.keys()
    for name, layout in DEFAULT_LAYOUT.items():
        assert LAYOUTS[layout].outputs("m", (256, 256), SCHEMES[name])
    assert all(layout.name == name and layout.readers for name, layout in LAYOUTS.items())


@pytest.mark.parametrize(
    ("layout", "shape", "scheme", "words"),
    [
        ("compressed-tensors", (32, 80), W4A16, ("80", "32", "--ignore")),
        ("compressed-tensors", (32, 40), SCHEMES["nvfp4"], ("40", "16")),
        ("compressed-tensors", (32, 64), SCHEMES["hif8"], ("hif8", "--layout")),
        ("compressed-tensors", (32, 64), SCHEMES["mxfp8"].with_block(1, 64), ("e4m3fn", "group")),
        ("awq", (36, 64), W4A16, ("36", "eights")),
        ("awq", (32, 80), W4A16, ("80", "32")),
        ("awq", (32, 64), with_scales(W4A16, FP32), ("FP16", "fp32")),
        ("awq", (32, 64), SCHEMES["w4a8"], ("w4a8", "--layout")),
        ("awq", (32, 64), SCHEMES["w8a8"], ("w8a8",)),
        ("gptq", (32, 64), W4A16.with_zero_point(), ("zero points",)),
        ("gptq", (48, 64), W4A16, ("48", "32")),
        ("gptq", (32, 64), with_scales(W4A16, FP32), ("FP16",)),
        ("gptq", (32, 64), SCHEMES["fp8"], ("fp8",)),
        ("deepseek-fp8", (32, 64), SCHEMES["fp8"], ("fp32", "--layout")),
        ("deepseek-fp8", (32, 64), SCHEMES["mxfp4"], ("e2m1",)),
        ("hif8-plain", (32, 64), SCHEMES["fp8"], ("fp8",)),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_hold(
    layout: str, shape: tuple[int, int], scheme: Scheme, words: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        LAYOUTS[layout].outputs(NAME, shape, scheme)
    for word in (layout, *words):
        assert word in str(caught.value)


def test_a_static_scale_needs_the_inputs_amax() -> None:
    for name in ("nvfp4", "fp8 static", "w8a8 static"):
        quantized = sample(COMPRESSED[name], (32, 64))
        for amax in (None, 0.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="input"):
                COMPRESSED_TENSORS.pack("m", quantized, COMPRESSED[name], amax)
    found = COMPRESSED_TENSORS.pack(
        "m", sample(COMPRESSED["fp8 static"], (32, 64)), COMPRESSED["fp8 static"], 896
    )
    assert found["m.input_scale"].tolist() == [2.0]


def test_a_tensor_of_another_scheme_is_not_packed() -> None:
    for scheme in (SCHEMES["w4a16"], W4A16.with_zero_point(), SCHEMES["w8a8"]):
        with pytest.raises(ValueError, match="scheme"):
            COMPRESSED_TENSORS.pack("m", sample(W4A16, (32, 128)), scheme)
    with pytest.raises(ValueError, match="4 bits"):
        LAYOUTS["awq"].pack(
            "m", replace(sample(W4A16, (8, 32)), codes=torch.full((8, 32), 9).to(torch.int8)), W4A16
        )


@pytest.mark.parametrize(("layout", "scheme"), [case[1:] for case in CASES], ids=IDS)
def test_what_is_missing_or_another_tensors_is_not_unpacked(layout: Layout, scheme: Scheme) -> None:
    tensors = layout.pack(NAME, sample(scheme, (32, 64)), scheme, AMAX)
    for name, tensor in tensors.items():
        with pytest.raises(UserError, match=f"{name}.*missing"):
            layout.unpack(NAME, {key: it for key, it in tensors.items() if key != name}, (32, 64), scheme)
        with pytest.raises(UserError, match=name):
            layout.unpack(NAME, tensors | {name: tensor.double()}, (32, 64), scheme)
    with pytest.raises(UserError, match=NAME):
        layout.unpack(NAME, tensors, (64, 32), scheme)


def test_one_scheme_is_aimed_at_the_class() -> None:
    config = COMPRESSED_TENSORS.quantization_config({NAME: W4A16, "other": W4A16}, ["lm_head"])
    group = config["config_groups"]["group_0"]
    assert (config["format"], group["format"], group["targets"]) == (
        "pack-quantized",
        "pack-quantized",
        ["Linear"],
    )
    assert config["ignore"] == ["lm_head"]
    assert group["input_activations"] is None
    assert group["weights"] == {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False,
    }  # fmt: skip


def test_several_schemes_are_aimed_at_names(tmp_path: Path) -> None:
    """One pattern where all layers and experts agree, names where they differ or one of them stays."""
    fp8, mixed = SCHEMES["fp8"], {}
    for layer in range(3):
        mixed |= {f"model.layers.{layer}.q_proj": fp8, f"model.layers.{layer}.up.proj": W4A16}
        mixed[f"model.layers.{layer}.down_proj"] = fp8 if layer else W4A16
        if layer:
            mixed[f"model.layers.{layer}.o_proj"] = W4A16
    kept = ["lm_head", "model.layers.0.o_proj"]
    config = COMPRESSED_TENSORS.quantization_config(mixed, kept)
    assert config["format"] == "mixed-precision"
    groups = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert groups == {
        "float-quantized": [
            r"re:^model\.layers\.\d+\.q_proj$", "model.layers.1.down_proj", "model.layers.2.down_proj",
        ],
        "pack-quantized": [
            r"re:^model\.layers\.\d+\.up\.proj$", "model.layers.0.down_proj", "model.layers.1.o_proj",
            "model.layers.2.o_proj",
        ],
    }  # fmt: skip
    quantized = {name: sample(scheme, (32, 64)) for name, scheme in mixed.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in quantized.items():
        tensors |= COMPRESSED_TENSORS.pack(name, tensor, mixed[name])
    linears = write(tmp_path, tensors, config)
    for name, tensor in quantized.items():
        assert torch.equal(linears.read(name), tensor.dequantize())
        assert (linears.describe(name).activation is None) == (mixed[name] is W4A16)


def test_the_configs_of_layouts_with_room_for_one_scheme() -> None:
    two = {"a": W4A16, "b": W4A16.with_group(64)}
    for name in ("awq", "gptq", "deepseek-fp8", "hif8-plain"):
        with pytest.raises(UserError, match=f"{name}.*'a'.*'b'"):
            LAYOUTS[name].quantization_config(two, [])
        with pytest.raises(UserError, match=name):
            LAYOUTS[name].quantization_config({}, [])
    assert LAYOUTS["awq"].quantization_config({"a": W4A16}, ["lm_head"]) == {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip
    assert LAYOUTS["gptq"].quantization_config({"a": W4A16.with_group(None)}, ["lm_head", "layers.0.gate"]) == {
        "quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False, "sym": True, "lm_head": False,
        "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": {r"-:^layers\.0\.gate$": {}},
    }  # fmt: skip
    deepseek = LAYOUTS["deepseek-fp8"].quantization_config({"a": SCHEMES["ue8m0"]}, ["lm_head"])
    assert deepseek["weight_block_size"] == [128, 128]
    assert deepseek["modules_to_not_convert"] == ["lm_head"]


def test_int4_stays_int4_in_bytes_where_inputs_are_cast() -> None:
    scheme = COMPRESSED["w4a8"]
    assert scheme.weight.format == INT4
    output = COMPRESSED_TENSORS.outputs("m", (32, 64), scheme)[0]
    assert (output.name, output.dtype, output.shape) == ("m.weight", "I8", (32, 64))
    config = COMPRESSED_TENSORS.quantization_config({"m": scheme}, [])
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 4
    assert weight_only(scheme) != scheme
