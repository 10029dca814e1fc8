"""AWQ and GPTQ: bytes from the descriptions of the formats, and what other tools write in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from qwen_quantize.checkpoint.awq_layout import AWQ, AwqConfig, pack_interleaved, unpack_interleaved
from qwen_quantize.checkpoint.gptq_layout import GPTQ, GptqConfig
from qwen_quantize.checkpoint.layouts import parse_quantization
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.packing import pack_awq, pack_gptq_weight, pack_gptq_zeros
from qwen_quantize.formats.schemes import SCHEMES

NAME = "model.layers.0.self_attn.q_proj"
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": False, "sym": True}


def words(*rows: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.uint32).view(np.int32))


def reader(folder: Path, quantization: dict[str, Any], **tensors: torch.Tensor) -> LinearReader:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    named = {f"{NAME}.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}
    save_file(named | {"lm_head.weight": torch.ones(2, 2)}, folder / "model.safetensors")
    return LinearReader(open_source(folder))


def ramp(scheme_bits: int, rows: int, columns: int) -> torch.Tensor:
    return (torch.arange(rows * columns).view(rows, columns) % (1 << scheme_bits)).to(torch.uint8)


def test_golden_awq() -> None:
    """Logical columns 0 .. 7 of a row are the word 0x75316420; a zero point of 8 - 8 is stored as 8."""
    scheme = SCHEMES["w4a16"].with_group(8)
    codes = (torch.arange(8, dtype=torch.int8)[:, None] - 8).expand(8, 8).contiguous()
    quantized = QuantizedTensor(
        codes, torch.full((8, 1), 0.5), None, scheme.weight.format, scheme.weight.granularity, (8, 8)
    )
    found = AWQ.pack("m", quantized, scheme)
    assert torch.equal(found["m.qweight"], words(*[[0x75316420]] * 8))
    assert torch.equal(found["m.qzeros"], words([0x88888888]))
    assert found["m.scales"].view(torch.int16).tolist() == [[0x3800] * 8]


def test_golden_gptq() -> None:
    """Words go down the columns; version 1 stores the zero point 8 as 7."""
    scheme = SCHEMES["w4a16"].with_group(32)
    codes = (torch.arange(32) % 16 - 8).to(torch.int8).expand(32, 32).contiguous()
    quantized = QuantizedTensor(
        codes, torch.full((32, 1), 0.5), None, scheme.weight.format, scheme.weight.granularity, (32, 32)
    )
    found = GPTQ.pack("m", quantized, scheme)
    low, high = [0x76543210] * 32, [0xFEDCBA98] * 32
    assert torch.equal(found["m.qweight"], words(low, high, low, high))
    assert torch.equal(found["m.qzeros"], words([0x77777777] * 4))
    assert found["m.scales"].view(torch.int16).tolist() == [[0x3800] * 32]
    assert found["m.g_idx"].tolist() == [0] * 32


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(0, 2**31))
def test_interleaving_equals_packing_bit_by_bit(eights: int, columns: int, seed: int) -> None:
    codes = torch.randint(0, 16, (8 * eights, columns), generator=torch.Generator().manual_seed(seed))
    narrow = codes.to(torch.uint8)
    assert torch.equal(pack_interleaved(narrow.t()), pack_awq(narrow))
    assert torch.equal(unpack_interleaved(pack_awq(narrow)), narrow.t())


def values(
    codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, group: torch.Tensor
) -> torch.Tensor:
    """[N, K] of codes [N, K], zeros [N, groups], scales [groups, N] and each column's group."""
    return (codes.float() - zeros.float()[:, group]) * scales.float().t()[:, group]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [8, 16, -1])
def test_awq_of_others(tmp_path: Path, dtype: torch.dtype, size: int) -> None:
    codes, groups = ramp(4, 24, 32), 1 if size == -1 else 32 // size
    zeros = ramp(4, 24, groups)
    scales = torch.linspace(0.1, 2, 24 * groups).view(groups, 24).to(dtype)
    linears = reader(
        tmp_path, AWQ_CONFIG | {"group_size": size, "version": "GEMM"},
        qweight=pack_awq(codes), qzeros=pack_awq(zeros), scales=scales,
    )  # fmt: skip
    expected = values(codes, zeros, scales, torch.arange(32) // (32 // groups))
    assert linears.describe(NAME, (24, 32)).kind is StoredKind.AWQ
    assert torch.equal(linears.read(NAME), expected)
    assert torch.equal(linears.read_rows(NAME, 5, 18), expected[5:18])
    assert linears.loss_warning is not None
    assert "int4 of AutoAWQ" in linears.loss_warning


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("ordered", ["no index", "index", "shuffled"])
def test_gptq_of_others(tmp_path: Path, version: int, bits: int, ordered: str) -> None:
    """Asymmetric, of every width, in the order of activations: more than is written here."""
    codes, zeros = ramp(bits, 32, 64), ramp(bits, 32, 4)
    scales = torch.linspace(0.1, 2, 128).view(4, 32).half()
    group = torch.arange(64) // 16
    extra = {}
    if ordered != "no index":
        group = (
            group[torch.randperm(64, generator=torch.Generator().manual_seed(3))]
            if ordered == "shuffled"
            else group
        )
        extra["g_idx"] = group.to(torch.int32)
    config = GPTQ_CONFIG | {
        "bits": bits, "group_size": 16, "sym": False, "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "desc_act": ordered == "shuffled",
    }  # fmt: skip
    linears = reader(
        tmp_path, config, qweight=pack_gptq_weight(codes, bits), scales=scales,
        qzeros=pack_gptq_zeros(zeros, bits, version=version), **extra,
    )  # fmt: skip
    expected = values(codes, zeros, scales, group)
    assert linears.describe(NAME, (32, 64)).kind is StoredKind.GPTQ
    assert torch.equal(linears.read(NAME), expected)
    assert torch.equal(linears.read_rows(NAME, 7, 20), expected[7:20])
    assert f"int{bits} of GPTQ" in str(linears.loss_warning)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (AWQ_CONFIG, AwqConfig(8)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, AwqConfig(128)),
        (AWQ_CONFIG | {"group_size": -1, "modules_to_not_convert": ["visual"]}, AwqConfig(None)),
        (GPTQ_CONFIG, GptqConfig(4, 8, 1)),
        (GPTQ_CONFIG | {"format": "gptq_v2", "dynamic": {"-:.*gate$": {}}}, GptqConfig(4, 8, 2)),
        (GPTQ_CONFIG | {"dynamic": {"+:.*up": {"bits": 4, "group_size": 8}}}, GptqConfig(4, 8, 1)),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True,
             "packing_format": "auto_round:auto_gptq", "extra_config": {"lm_head": {"bits": 16}}},
            GptqConfig(4, 128, 1),
        ),
        ({"quant_method": "auto-round", "bits": 2, "group_size": -1}, GptqConfig(2, None, 1)),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "auto_round:auto_awq"},
            AwqConfig(32),
        ),
    ],
)  # fmt: skip
def test_configs(config: dict[str, Any], expected: object) -> None:
    assert parse_quantization({"quantization_config": config}) == expected


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (AWQ_CONFIG | {"version": "gemv"}, "gemv"),
        (AWQ_CONFIG | {"version": 3}, "version"),
        (AWQ_CONFIG | {"version": None, "format": "gemv_fast"}, "gemv_fast"),
        (AWQ_CONFIG | {"bits": 8}, "bits"),
        (AWQ_CONFIG | {"bits": None}, "bits"),
        (AWQ_CONFIG | {"group_size": 0}, "group_size"),
        (AWQ_CONFIG | {"group_size": True}, "group_size"),
        ({"quant_method": "awq", "bits": 4}, "group_size"),
        (GPTQ_CONFIG | {"bits": 5}, "bits"),
        (GPTQ_CONFIG | {"bits": "4"}, "bits"),
        (GPTQ_CONFIG | {"checkpoint_format": "marlin"}, "marlin"),
        (GPTQ_CONFIG | {"checkpoint_format": ["gptq"]}, "checkpoint_format"),
        (GPTQ_CONFIG | {"pack_dtype": "int16"}, "int16"),
        (GPTQ_CONFIG | {"dynamic": {"+:.*up": {"bits": 8}}}, "several ways"),
        (GPTQ_CONFIG | {"dynamic": {".*up": {"group_size": 64}}}, "several ways"),
        (GPTQ_CONFIG | {"dynamic": ["x"]}, "dynamic"),
        (GPTQ_CONFIG | {"dynamic": {"x": 3}}, "dynamic"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 8, "packing_format": "auto_round:fp8"}, "fp8"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 8, "packing_format": [1]}, "packing_format"),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 8, "extra_config": {"x.up": {"bits": 8}}},
            "several ways",
        ),
        ({"quant_method": "hif8", "activation_scheme": "static"}, "activation_scheme"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read(config: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: .*{word}"):
        parse_quantization({"quantization_config": config})


AWQ_TENSORS = {
    "qweight": pack_awq(ramp(4, 8, 16)), "qzeros": pack_awq(ramp(4, 8, 2)), "scales": torch.ones(2, 8).half(),
}  # fmt: skip
GPTQ_TENSORS = {
    "qweight": pack_gptq_weight(ramp(4, 32, 16), 4), "scales": torch.ones(2, 32).half(),
    "qzeros": pack_gptq_zeros(ramp(4, 32, 2), 4, version=1), "g_idx": torch.arange(16).to(torch.int32) // 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"scales": None}, ("scales", "missing")),
        ({"qzeros": None}, ("qzeros", "missing")),
        ({"qweight": torch.ones(16, 1)}, ("qweight", "F32")),
        ({"qweight": torch.ones(16, dtype=torch.int32)}, ("qweight", "two dimensions")),
        ({"scales": torch.ones(3, 8).half()}, ("scales", "[3, 8]", "[2, 8]")),
        ({"scales": torch.ones(2, 8, dtype=torch.int32)}, ("scales", "I32")),
        ({"qzeros": torch.ones(2, 2, dtype=torch.int32)}, ("qzeros", "[2, 2]", "[2, 1]")),
        ({"weight": torch.ones(8, 16)}, ("weight", "qweight", "twice")),
    ],
)  # fmt: skip
def test_awq_that_does_not_fit(
    tmp_path: Path, change: dict[str, torch.Tensor | None], expected: tuple[str, ...]
) -> None:
    tensors = {name: tensor for name, tensor in (AWQ_TENSORS | change).items() if tensor is not None}
    with pytest.raises(UserError) as caught:
        reader(tmp_path, AWQ_CONFIG, **tensors).describe(NAME)
    for word in (NAME, *expected):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"qzeros": torch.ones(2, 3, dtype=torch.int32)}, ("qzeros", "[2, 3]", "[2, 4]")),
        ({"g_idx": torch.zeros(15, dtype=torch.int32)}, ("g_idx", "[15]", "16")),
        ({"g_idx": torch.zeros(16)}, ("g_idx", "F32")),
        ({"g_idx": torch.arange(16, dtype=torch.int32)}, ("g_idx", "0 .. 15", "2")),
        ({"g_idx": -torch.arange(16, dtype=torch.int32)}, ("g_idx", "-15 .. 0")),
    ],
)  # fmt: skip
def test_gptq_that_does_not_fit(
    tmp_path: Path, change: dict[str, torch.Tensor], expected: tuple[str, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        reader(tmp_path, GPTQ_CONFIG, **(GPTQ_TENSORS | change)).read(NAME)
    for word in (NAME, *expected):
        assert word in str(caught.value)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_words_of_nothing(tmp_path: Path, shape: tuple[int, int]) -> None:
    columns, rows = shape[0] * 8, shape[1]
    tensors = {
        "qweight": torch.ones(shape, dtype=torch.int32), "scales": torch.ones(columns // 8, rows),
        "qzeros": torch.ones(columns // 8, rows // 8, dtype=torch.int32),
    }  # fmt: skip
    with pytest.raises(UserError, match=r"qweight.*empty|qzeros"):
        reader(tmp_path, GPTQ_CONFIG, **tensors).describe(NAME)


def test_words_that_are_not_full_of_codes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"qweight.*3 bits"):
        reader(tmp_path, GPTQ_CONFIG | {"bits": 3}, **GPTQ_TENSORS).describe(NAME)


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8", "weight_block_size": [8, 8]}])
def test_words_without_a_config(tmp_path: Path, quantization: Any) -> None:
    with pytest.raises(UserError, match=r"qweight.*'awq'.*'gptq'"):
        reader(tmp_path, quantization, **AWQ_TENSORS).describe(NAME)


def test_a_weight_of_another_shape_than_the_model_has(tmp_path: Path) -> None:
    for name, config, tensors, shape in (
        ("awq", AWQ_CONFIG, AWQ_TENSORS, (16, 8)), ("gptq", GPTQ_CONFIG, GPTQ_TENSORS, (16, 32)),
    ):  # fmt: skip
        with pytest.raises(UserError, match=rf"{NAME}.qweight.*transposed"):
            reader(tmp_path / name, config, **tensors).describe(NAME, shape)


def test_zero_points_and_orders_that_a_symmetric_scheme_has_not() -> None:
    scheme = SCHEMES["w4a16"].with_group(8)
    for layout, tensors, shape in ((AWQ, AWQ_TENSORS, (8, 16)), (GPTQ, GPTQ_TENSORS, (32, 32))):
        named = {f"m.{name}": tensor for name, tensor in tensors.items()}
        if layout is GPTQ:
            named["m.qweight"] = pack_gptq_weight(ramp(4, 32, 32), 4)
            named |= {"m.scales": torch.ones(4, 32).half(), "m.g_idx": torch.arange(32).to(torch.int32) // 8}
            named["m.qzeros"] = pack_gptq_zeros(ramp(4, 32, 4), 4, version=1)
        with pytest.raises(UserError, match="zero points"):
            layout.unpack("m", named, shape, scheme)
    middle = torch.full((32, 4), 8, dtype=torch.uint8)
    named["m.qzeros"] = pack_gptq_zeros(middle, 4, version=1)
    assert GPTQ.unpack("m", named, (32, 32), scheme).zero_point is None
    named["m.g_idx"] = named["m.g_idx"].flip(0)
    with pytest.raises(UserError, match="g_idx"):
        GPTQ.unpack("m", named, (32, 32), scheme)
