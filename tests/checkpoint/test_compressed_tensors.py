"""Checkpoints of compressed-tensors, their bytes written by hand from the description of the format.

A packed word holds its codes from the lowest bits up, each as code + 2^(bits - 1): the codes -8 .. 7 are
0x76543210, 0xFEDCBA98. Zero points are packed alike, down the rows. Values are (code - zero) * scale.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from safetensors.torch import save_file

from qwen_quantize.checkpoint.compressed_config import CompressedTensors, parse_compressed_tensors
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.errors import UserError

NAME = "model.layers.3.mlp.experts.7.up_proj"


def words(*rows: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def settings(format_: str | None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def reader(folder: Path, quantization: dict[str, Any], **tensors: torch.Tensor) -> LinearReader:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    named = {f"{NAME}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(named | {"lm_head.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    return LinearReader(open_source(folder))


def same(linears: LinearReader, kind: StoredKind, expected: torch.Tensor) -> None:
    shape = (expected.shape[0], expected.shape[1])
    stored = linears.describe(NAME, shape)
    assert (stored.kind, stored.shape) == (kind, shape)
    assert set(stored.parts) == {name for name in linears.source.names() if name.startswith(NAME)}
    assert linears.companions() == set(stored.parts) - {stored.weight}
    assert torch.equal(linears.read(NAME), expected)
    for start in range(shape[0]):
        assert torch.equal(linears.read_rows(NAME, start, shape[0]), expected[start:])
        assert torch.equal(linears.read_rows(NAME, start, start + 1), expected[start : start + 1])
    assert linears.is_quantized(NAME)
    assert not linears.is_quantized("lm_head")


INT4 = settings("pack-quantized", num_bits=4, type="int", symmetric=True, strategy="group", group_size=8)
RAMP = torch.arange(-8.0, 8.0)
PACKED = {
    "weight_packed": words([0x76543210, 0xFEDCBA98], [0xFEDCBA98, 0x88888888]),
    "weight_scale": torch.tensor([[0.5, 2.0], [3.0, 7.0]], dtype=torch.bfloat16),
    "weight_shape": torch.tensor([2, 16]),
}
INT4_VALUES = torch.stack(
    [RAMP * torch.tensor([0.5] * 8 + [2.0] * 8), torch.cat([RAMP[8:] * 3.0, torch.zeros(8)])]
)


def test_int4_in_groups(tmp_path: Path) -> None:
    linears = reader(tmp_path, INT4, **PACKED)
    same(linears, StoredKind.INT4, INT4_VALUES)
    assert linears.loss_warning is not None
    assert "int4 (pack-quantized) of compressed-tensors" in linears.loss_warning


def test_int4_zero_points_are_packed_down_the_rows(tmp_path: Path) -> None:
    """Zeros -8 and 7 of the first group are nibbles 0 and F, 1 and -1 of the second 9 and 7."""
    linears = reader(tmp_path, INT4, **PACKED, weight_zero_point=words([0xF0, 0x79]))
    zeros = torch.tensor([[-8.0] * 8 + [1.0] * 8, [7.0] * 8 + [-1.0] * 8])
    scales = torch.tensor([[0.5] * 8 + [2.0] * 8, [3.0] * 8 + [7.0] * 8])
    codes = torch.stack([RAMP, torch.cat([RAMP[8:], torch.zeros(8)])])
    same(linears, StoredKind.INT4, (codes - zeros) * scales)


def test_int4_zero_points_of_many_rows(tmp_path: Path) -> None:
    """Ten rows need two words; the ninth row is the lowest nibble of the second."""
    linears = reader(
        tmp_path, INT4,
        weight_packed=words(*[[0x88888888]] * 10), weight_scale=torch.ones(10, 1), weight_shape=torch.tensor([10, 8]),
        weight_zero_point=words([0x76543210], [0x000000F8]),
    )  # fmt: skip
    zeros = torch.tensor([-8.0, -7, -6, -5, -4, -3, -2, -1, 0, 7])
    same(linears, StoredKind.INT4, -zeros[:, None].expand(10, 8))


def test_int4_columns_in_another_order(tmp_path: Path) -> None:
    index = torch.tensor([0, 1] * 8, dtype=torch.int32)
    linears = reader(tmp_path, INT4, **PACKED, weight_g_idx=index)
    codes = torch.stack([RAMP, torch.cat([RAMP[8:], torch.zeros(8)])])
    scales = torch.tensor([[0.5, 2.0] * 8, [3.0, 7.0] * 8])
    same(linears, StoredKind.INT4, codes * scales)
    unset = torch.full((16,), -1, dtype=torch.int32)
    same(reader(tmp_path, INT4, **PACKED, weight_g_idx=unset), StoredKind.INT4, INT4_VALUES)
    with pytest.raises(UserError, match=r"weight_g_idx.*0 \.\. 2"):
        reader(tmp_path, INT4, **PACKED, weight_g_idx=index * 2).read(NAME)


def test_int4_in_one_group_for_a_row_that_fills_no_word(tmp_path: Path) -> None:
    channel = settings("pack-quantized", num_bits=4, strategy="channel", group_size=None)
    linears = reader(
        tmp_path, channel,
        weight_packed=words([0x00000210]), weight_scale=torch.tensor([[0.1]]), weight_shape=torch.tensor([1, 3]),
    )  # fmt: skip
    same(linears, StoredKind.INT4, torch.tensor([[-8.0, -7.0, -6.0]]) * torch.tensor(0.1))


def test_a_partial_last_group(tmp_path: Path) -> None:
    linears = reader(
        tmp_path, INT4,
        weight_packed=words([0x99999999, 0x9999]), weight_scale=torch.tensor([[2.0, 4.0]]),
        weight_shape=torch.tensor([1, 12]),
    )  # fmt: skip
    same(linears, StoredKind.INT4, torch.tensor([[2.0] * 8 + [4.0] * 4]))


def test_packed_int8(tmp_path: Path) -> None:
    quantization = settings("pack-quantized", num_bits=8, strategy="group", group_size=4)
    linears = reader(
        tmp_path, quantization,
        weight_packed=words([0xFF817F00, 0x80828384]), weight_scale=torch.tensor([[0.25, 1.0]]),
        weight_shape=torch.tensor([1, 8]),
    )  # fmt: skip
    same(linears, StoredKind.INT8, torch.tensor([[-32.0, -0.25, 0.25, 31.75, 4.0, 3.0, 2.0, 0.0]]))


@pytest.mark.parametrize("format_", ["int-quantized", "naive-quantized", None])
@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_int8(tmp_path: Path, format_: str | None, strategy: str) -> None:
    quantization = settings(
        format_, num_bits=8, strategy=strategy, group_size=2 if strategy == "group" else None
    )
    codes = torch.tensor([[-128, 127, 0, 5], [1, 2, 3, 4]], dtype=torch.int8)
    scale = {
        "tensor": torch.tensor([0.5]), "channel": torch.tensor([[0.5], [3.0]]),
        "group": torch.tensor([[0.5, 2.0], [3.0, 0.1]]),
    }[strategy]  # fmt: skip
    scales = scale if strategy != "group" else scale.repeat_interleave(2, 1)
    linears = reader(tmp_path / "symmetric", quantization, weight=codes, weight_scale=scale)
    same(linears, StoredKind.INT8, codes.float() * scales)
    zero = torch.arange(1, scale.numel() + 1, dtype=torch.int8).view(scale.shape)
    zeros = zero if strategy != "group" else zero.repeat_interleave(2, 1)
    linears = reader(tmp_path / "not", quantization, weight=codes, weight_scale=scale, weight_zero_point=zero)
    same(linears, StoredKind.INT8, (codes.float() - zeros.float()) * scales)


FP8_CODES = torch.tensor([[0x38, 0x40, 0xC4], [0x7E, 0x01, 0x38]], dtype=torch.uint8).view(
    torch.float8_e4m3fn
)
FP8_VALUES = torch.tensor([[1.0, 2.0, -3.0], [448.0, 2.0**-9, 1.0]])


@pytest.mark.parametrize(
    ("strategy", "scale"),
    [
        ("tensor", torch.tensor(0.1)), ("tensor", torch.tensor([0.1])),
        ("channel", torch.tensor([[0.1], [3.0]])), ("channel", torch.tensor([0.1, 3.0])),
    ],
)  # fmt: skip
@pytest.mark.parametrize("format_", ["float-quantized", "naive-quantized"])
def test_fp8_by_row(tmp_path: Path, strategy: str, scale: torch.Tensor, format_: str) -> None:
    quantization = settings(format_, num_bits=8, type="float", strategy=strategy)
    for dtype in (torch.float32, torch.bfloat16):
        stored = scale.to(dtype)
        linears = reader(tmp_path / str(dtype), quantization, weight=FP8_CODES, weight_scale=stored)
        by_row = stored.float().reshape(-1, 1)
        same(linears, StoredKind.CHANNEL_FP8, FP8_VALUES * by_row)
        assert linears.describe(NAME).block is None
        assert linears.loss_warning is not None
        assert f"fp8 ({format_})" in linears.loss_warning


@pytest.mark.parametrize("structure", [[1, 2], "1x2"])
def test_fp8_in_blocks(tmp_path: Path, structure: object) -> None:
    quantization = settings(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=structure
    )
    scale = torch.tensor([[0.5, 2.0], [0.1, 4.0]])
    linears = reader(tmp_path, quantization, weight=FP8_CODES, weight_scale=scale)
    same(linears, StoredKind.BLOCK_FP8, FP8_VALUES * scale.repeat_interleave(2, 1)[:, :3])
    assert linears.describe(NAME).block == (1, 2)
    assert torch.equal(linears.read_codes(NAME, 1, 2)[1], scale[1:])


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP4_BYTES = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2] * 2, dtype=torch.uint8)
MX_SCALES = torch.tensor([[127], [130]], dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4(tmp_path: Path, dtype: torch.dtype) -> None:
    quantization = settings(
        "mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32,
        scale_dtype="torch.uint8",
    )  # fmt: skip
    linears = reader(tmp_path, quantization, weight_packed=FP4_BYTES, weight_scale=MX_SCALES.view(dtype))
    same(linears, StoredKind.MXFP4, torch.stack([E2M1.repeat(2), E2M1.repeat(2) * 8]))
    assert linears.loss_warning is not None
    assert "fp4 (mxfp4-pack-quantized)" in linears.loss_warning


def test_mxfp6(tmp_path: Path) -> None:
    """Bytes 81 30 FC hold the codes 1, 2, 3 and 63: 1/8, 1/4, 3/8 and -7.5."""
    quantization = settings(None, num_bits=6, type="float", strategy="group", group_size=32)
    packed = torch.tensor([[0x81, 0x30, 0xFC] * 8] * 2, dtype=torch.uint8)
    linears = reader(tmp_path, quantization, weight_packed=packed, weight_scale=MX_SCALES)
    row = torch.tensor([0.125, 0.25, 0.375, -7.5] * 8)
    same(linears, StoredKind.MXFP6, torch.stack([row, row * 8]))


def test_mxfp8(tmp_path: Path) -> None:
    quantization = settings(
        "mxfp8-quantized",
        num_bits=8,
        type="float",
        strategy="group",
        group_size=32,
        scale_dtype="torch.uint8",
    )
    codes = torch.tensor([[0x38, 0xC4] * 16] * 2, dtype=torch.uint8).view(torch.float8_e4m3fn)
    linears = reader(tmp_path, quantization, weight=codes, weight_scale=MX_SCALES)
    row = torch.tensor([1.0, -3.0] * 16)
    same(linears, StoredKind.MXFP8, torch.stack([row, row * 8]))


NVFP4 = settings(
    "nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16,
    scale_dtype="torch.float8_e4m3fn",
)  # fmt: skip
NVFP4_TENSORS = {
    "weight_packed": FP4_BYTES,
    "weight_scale": torch.tensor([[1.0, 2.0], [240.0, 0.5]]).to(torch.float8_e4m3fn),
    "weight_global_scale": torch.tensor([4.0]),
}


def test_nvfp4(tmp_path: Path) -> None:
    """The scale of the whole weight divides."""
    linears = reader(tmp_path, NVFP4, **NVFP4_TENSORS)
    rows = torch.stack([torch.cat([E2M1, E2M1 * 2]), torch.cat([E2M1 * 240, E2M1 / 2])])
    same(linears, StoredKind.NVFP4, rows / 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight_scale": None}, ("weight_scale", "missing")),
        ({"weight_global_scale": None}, ("weight_global_scale", "missing")),
        ({"weight_global_scale": torch.ones(2)}, ("weight_global_scale", "[2]")),
        ({"weight_global_scale": torch.ones(1).half()}, ("weight_global_scale", "F16")),
        ({"weight_global_scale": torch.zeros(1)}, ("weight_global_scale", "0.0")),
        ({"weight_global_scale": torch.tensor([float("nan")])}, ("weight_global_scale", "nan")),
        ({"weight_global_scale": -torch.ones(1)}, ("weight_global_scale", "-1.0")),
        ({"weight_scale": torch.ones(2, 2)}, ("weight_scale", "F32", "F8_E4M3")),
        ({"weight_scale": torch.ones(2, 3).to(torch.float8_e4m3fn)}, ("weight_scale", "[2, 3]", "tensor_group")),
        ({"weight_packed": FP4_BYTES[:, :-1]}, ("weight_scale", "[2, 15]")),
        ({"weight_packed": FP4_BYTES[0]}, ("weight_packed", "two dimensions")),
        ({"weight_packed": FP4_BYTES.view(torch.int8)}, ("weight_packed", "I8")),
        ({"weight_zero_point": torch.zeros(2, 2)}, ("weight_zero_point", "left over")),
    ],
)  # fmt: skip
def test_nvfp4_that_does_not_fit(
    tmp_path: Path, change: dict[str, torch.Tensor | None], expected: tuple[str, ...]
) -> None:
    tensors = {name: tensor for name, tensor in (NVFP4_TENSORS | change).items() if tensor is not None}
    with pytest.raises(UserError) as caught:
        reader(tmp_path, NVFP4, **tensors).read(NAME)
    for word in (NAME, *expected):
        assert word in str(caught.value)


def test_static_scales_of_activations_go_with_the_old_weight(tmp_path: Path) -> None:
    quantization = settings("float-quantized", num_bits=8, type="float", strategy="tensor")
    scale = torch.tensor([0.1])
    linears = reader(tmp_path, quantization, weight=FP8_CODES, weight_scale=scale, input_scale=scale.clone())
    assert linears.describe(NAME).parts == (f"{NAME}.weight", f"{NAME}.weight_scale")
    assert linears.companions() == {f"{NAME}.weight_scale", f"{NAME}.input_scale"}


def test_two_groups_of_a_mixed_checkpoint(tmp_path: Path) -> None:
    """Packed int4 and FP8 side by side: the tensors say which is which."""
    quantization = settings("mixed-precision", num_bits=4, strategy="group", group_size=8)
    quantization["config_groups"]["group_0"]["format"] = "pack-quantized"
    quantization["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj"], "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
    }  # fmt: skip
    quantization["config_groups"]["group_2"] = {"targets": ["Attention"], "weights": None}
    linears = reader(tmp_path / "int4", quantization, **PACKED)
    same(linears, StoredKind.INT4, INT4_VALUES)
    assert linears.loss_warning is not None
    assert "fp8 (float-quantized) and int4 (pack-quantized)" in linears.loss_warning
    scale = torch.tensor([[1.0], [2.0]])
    linears = reader(tmp_path / "fp8", quantization, weight=FP8_CODES, weight_scale=scale)
    same(linears, StoredKind.CHANNEL_FP8, FP8_VALUES * scale)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"weight_scale": None}, ("weight_scale", "missing")),
        ({"weight_shape": None}, ("weight_shape", "missing")),
        ({"weight_packed": torch.ones(2, 2)}, ("weight_packed", "F32", "I32")),
        ({"weight_shape": torch.tensor([2, 17])}, ("weight_packed", "[2, 2]", "[2, 17]")),
        ({"weight_shape": torch.tensor([3, 16])}, ("weight_packed", "[3, 16]")),
        ({"weight_shape": torch.tensor([-1, 16])}, ("weight_shape", "-1")),
        ({"weight_shape": torch.tensor([2.0, 16.0])}, ("weight_shape", "F32")),
        ({"weight_scale": torch.ones(2, 3)}, ("weight_scale", "[2, 3]", "group")),
        ({"weight_scale": torch.ones(2, 1)}, ("weight_scale", "[2, 1]", "group")),
        ({"weight_scale": torch.ones(2, 2, dtype=torch.int32)}, ("weight_scale", "I32")),
        ({"weight_zero_point": torch.ones(2, 1, dtype=torch.int32)}, ("weight_zero_point", "[2, 1]")),
        ({"weight_g_idx": torch.zeros(15, dtype=torch.int32)}, ("weight_g_idx", "[15]", "16")),
        ({"weight": torch.ones(2, 16)}, ("weight_packed", "twice")),
    ],
)  # fmt: skip
def test_packed_weights_that_do_not_fit(
    tmp_path: Path, change: dict[str, torch.Tensor | None], expected: tuple[str, ...]
) -> None:
    tensors = {suffix: tensor for suffix, tensor in (PACKED | change).items() if tensor is not None}
    with pytest.raises(UserError) as caught:
        reader(tmp_path, INT4, **tensors).describe(NAME)
    for word in (NAME, *expected):
        assert word in str(caught.value)


def test_a_packed_weight_of_another_shape_than_the_model_has(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{NAME}.weight_packed.*\[2, 16\].*\[16, 2\].*transposed"):
        reader(tmp_path, INT4, **PACKED).describe(NAME, (16, 2))


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_a_scale_that_the_config_does_not_admit(tmp_path: Path, strategy: str) -> None:
    quantization = settings("float-quantized", num_bits=8, type="float", strategy=strategy)
    scale = torch.ones(2, 1) if strategy == "tensor" else torch.ones(1)
    with pytest.raises(UserError, match=rf"weight_scale.*{strategy}"):
        reader(tmp_path, quantization, weight=FP8_CODES, weight_scale=scale).describe(NAME)


REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (settings(format_, num_bits=4, type="float", strategy="group", group_size=32), format_)
        for format_ in (
            "nvfp4-e5m3-pack-quantized", "sparse-24-bitmask", "marlin-24", "x"
        )
    ),
    (settings(None, num_bits=3, strategy="channel"), "num_bits"),
    (settings(None, num_bits=True, strategy="channel"), "num_bits"),
    (settings(None, num_bits=5, type="float", strategy="channel"), "num_bits"),
    (settings(None, num_bits=4, type="float", strategy="channel"), "strategy"),
    (settings(None, num_bits=6, type="float", strategy="tensor_group", group_size=16), "strategy"),
    (settings(None, num_bits=4, type="float", strategy="tensor_group"), "group_size"),
    (settings(None, num_bits=8, type="complex"), "type"),
    (settings(None, num_bits=8, type=["int"]), "type"),
    (settings(None, num_bits=8, strategy="block", block_structure=[2, 2]), "strategy"),
    (settings(None, num_bits=8, strategy="group"), "group_size"),
    (settings(None, num_bits=8, group_size=-2), "group_size"),
    (settings(None, num_bits=8, group_size=10**400), "group_size"),
    (settings(None, num_bits=8, type="float", strategy="block", block_structure=[0, 2]), "block_structure"),
    (settings(None, num_bits=8, type="float", strategy="block", block_structure="axb"), "block_structure"),
    (settings(None, num_bits=8, type="float", strategy="channel", scale_dtype="torch.uint8"), "MX"),
    ({**settings(None), "config_groups": []}, "config_groups"),
    ({**settings(None), "config_groups": {"a": 3}}, "config_groups.a"),
    ({**settings(None), "config_groups": {"a": {"weights": 3}}}, "config_groups.a.weights"),
    ({**settings(None), "sparsity_config": {"format": "sparse-bitmask"}}, "sparse"),
    ({**settings(None), "transform_config": {"config_groups": {"v": {}}}}, "rotated"),
]  # fmt: skip


@pytest.mark.parametrize(("quantization", "word"), REFUSED, ids=lambda it: it if isinstance(it, str) else "")
def test_schemes_that_cannot_be_read(tmp_path: Path, quantization: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: ") as caught:
        reader(tmp_path, quantization, weight=torch.ones(2, 2))
    assert word in str(caught.value)


VALUES = (
    st.none()
    | st.booleans()
    | st.sampled_from(
        [4, 6, 8, -1, 0, 32, 10**400, 0.5, "int", "float", "tensor", "channel", "group", "block"]
    )
    | st.sampled_from(
        ["token", "tensor_group", "local", "torch.uint8", "torch.float8_e4m3fn", ["Linear"], "re:["]
    )
    | st.sampled_from(
        ["128x128", "x", "٣x٣", "pack-quantized", "dense", [128, 128], [], [True, 1], ["a", 1], {}]
    )
)
WEIGHTS = st.dictionaries(
    st.sampled_from(
        [
            "num_bits",
            "type",
            "strategy",
            "group_size",
            "block_structure",
            "scale_dtype",
            "dynamic",
            "symmetric",
        ]
    ),
    VALUES,
)
GROUP = st.fixed_dictionaries(
    {},
    optional={
        "weights": VALUES | WEIGHTS, "input_activations": VALUES | WEIGHTS, "format": VALUES, "targets": VALUES,
    },
)  # fmt: skip


@effort(max_examples=300, deadline=None)
@given(
    st.fixed_dictionaries(
        {"config_groups": VALUES | st.dictionaries(st.text(max_size=3), VALUES | GROUP, max_size=3)},
        optional={"format": VALUES, "sparsity_config": VALUES, "transform_config": VALUES},
    )
)
def test_any_config_is_read_or_refused(found: dict[str, Any]) -> None:
    refusal, parsed = "", CompressedTensors(())
    try:
        parsed = parse_compressed_tensors(found)
    except UserError as error:
        refusal = str(error)
    assert refusal == "" or refusal.startswith("config.json: ")
    assert "\n" not in refusal
    for weights in parsed.weights:
        assert weights.bits in (4, 6, 8)
        assert (weights.strategy in ("group", "tensor_group")) == (weights.group_size is not None)
        assert (weights.strategy == "block") == (weights.block is not None)
