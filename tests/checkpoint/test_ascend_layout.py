"""msModelSlim's layout: bytes, what vLLM Ascend's loader asks for, and folders written by others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

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
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.checkpoint.writer import OutputFolder, OutputTensor, plan_shards
from qwen_quantize.cli.main import app
from qwen_quantize.cli.session import ChipQuestion, folder_chip
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import BF16, E4M3FN, FP16
from qwen_quantize.models.blueprint import Stream
from tests.tiny_models import make_tiny, make_tokenizer, words

DESCRIPTION = "quant_model_description.json"
Shape = tuple[int, ...]


def held_as(scheme: Scheme, fmt: Any = BF16) -> Scheme:
    """Plain scales in the model's dtype, as the program chooses them for this layout."""
    activation = scheme.activation
    if activation is not None and not scheme.dynamic:
        activation = replace(activation, scale_format=fmt)
    return replace(scheme, weight=replace(scheme.weight, scale_format=fmt), activation=activation)


MXFP4 = SCHEMES["mxfp4"]
BY_TYPE: dict[str, Scheme] = {
    "W8A8": held_as(SCHEMES["w8a8_static"]),
    "W8A8_DYNAMIC": held_as(SCHEMES["w8a8"]),
    "W8A16": replace(held_as(SCHEMES["w8a8"]), activation=None, dynamic=False),
    "W8A8_MXFP8": SCHEMES["mxfp8"],
    "W4A8_DYNAMIC": held_as(SCHEMES["w4a8"].with_group(None)),
    "W4A16": held_as(SCHEMES["w4a16"].with_group(32).with_zero_point()),
    "W4A4_MXFP4": MXFP4,
    "W4A8_MXFP": replace(MXFP4, activation=SCHEMES["mxfp8"].activation),
}

# What vLLM Ascend allocates for a linear [N, K], and msModelSlim's files have for it: suffix -> (dtypes, shape).
# Written down from their sources, by name, and from nothing of this program.
Rule = dict[str, tuple[tuple[str, ...], Callable[[int, int], Shape]]]
BY_ROW: Rule = {
    "weight_scale": (("F32",), lambda n, _: (n, 1)),
    "weight_offset": (("F32",), lambda n, _: (n, 1)),
}
INT8_WEIGHT: Rule = {"weight": (("I8",), lambda n, k: (n, k))}
E8M0_SCALE: Rule = {"weight_scale": (("U8",), lambda n, k: (n, k // 32))}
LOADER: dict[str, Rule] = {
    "W8A8": {
        **INT8_WEIGHT,
        "input_scale": (("F32",), lambda _, __: (1,)),
        "input_offset": (("F32",), lambda _, __: (1,)),
        "quant_bias": (("I32",), lambda n, _: (n,)),
        "deq_scale": (("F32",), lambda n, _: (n,)),
    },
    "W8A8_DYNAMIC": INT8_WEIGHT | BY_ROW,
    "W8A16": INT8_WEIGHT | BY_ROW,
    "W8A8_MXFP8": {"weight": (("F8_E4M3",), lambda n, k: (n, k)), **E8M0_SCALE},
    "W4A8_DYNAMIC": {
        "weight": (("I8",), lambda n, k: (n // 2, k)),
        **BY_ROW,
        "scale_bias": (("F32",), lambda n, _: (n, 1)),
    },
    "W4A16": {
        "weight": (("I8",), lambda n, k: (n // 2, k)),
        "weight_scale": (("F32",), lambda n, k: (n, k // 32)),
        "weight_offset": (("F32",), lambda n, k: (n, k // 32)),
    },
    "W4A4_MXFP4": {"weight": (("U8",), lambda n, k: (n, k // 2)), **E8M0_SCALE},
    "W4A8_MXFP": {"weight": (("U8",), lambda n, k: (n, k // 2)), **E8M0_SCALE},
}


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
    spec = MXFP4.weight
    quantized = QuantizedTensor(codes, torch.tensor([[0.25]]), None, spec.format, spec.granularity, (1, 32))
    found = ASCEND.pack("m", quantized, MXFP4)
    assert found["m.weight"].tolist() == [[0xA1] * 16]
    assert found["m.weight_scale"].tolist() == [[125]]


def sample(scheme: Scheme, rows: int, columns: int, seed: int) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(seed)
    spec, shape = scheme.weight, (rows, columns)
    size = spec.granularity.scale_shape(shape)
    if spec.format.bits == 8 and spec.format != E4M3FN:
        codes = torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    elif spec.format == MXFP4.weight.format:
        codes = torch.randint(0, 16, shape, generator=generator).to(torch.uint8)
    elif spec.format == E4M3FN:
        codes = torch.randint(0, 127, shape, generator=generator).to(torch.uint8)
    else:
        codes = torch.randint(-8, 8, shape, generator=generator).to(torch.int8)
    if spec.scale_rule is not None:
        scale = torch.exp2(torch.randint(-20, 20, size, generator=generator).float())
    else:
        narrow = torch.float16 if spec.scale_format == FP16 else torch.bfloat16
        scale = (torch.rand(size, generator=generator) * 0.02 + 1e-4).to(narrow).float()
    zero = None if spec.symmetric else torch.randint(-8, 8, size, generator=generator).float()
    return QuantizedTensor(codes, scale, zero, spec.format, spec.granularity, shape)


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


# ---- folders of somebody else's


def write_folder(
    folder: Path, entries: dict[str, Any], tensors: dict[str, Tensor], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"torch_dtype": "bfloat16"}))
    (folder / DESCRIPTION).write_text(json.dumps(entries))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "quant_model_weights.safetensors",
    )
    return folder


def int8(*shape: int, seed: int, low: int = -128, high: int = 128) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def static_tensors(
    module: str, rows: int, columns: int, offset: int, words_: bool, bias: Tensor
) -> dict[str, Tensor]:
    """A linear as msModelSlim writes it, by its formulas."""
    weight = int8(rows, columns, seed=rows + columns)
    input_scale = torch.tensor([0.0173])
    deq = input_scale * (torch.rand(rows, generator=torch.Generator().manual_seed(rows)) * 0.003 + 0.001)
    steps = torch.round(bias / deq - offset * weight.float().sum(dim=1)).to(torch.int32)
    return {
        f"{module}.weight": weight,
        f"{module}.input_scale": input_scale,
        f"{module}.input_offset": torch.tensor([float(offset)]),
        f"{module}.quant_bias": steps,
        f"{module}.deq_scale": deq.view(torch.int32).to(torch.int64) if words_ else deq,
    }


@pytest.mark.parametrize("words_", [False, True], ids=["bf16", "fp16"])
@pytest.mark.parametrize("offset", [0, -7])
def test_a_static_folder_computes_what_the_engine_computes(tmp_path: Path, offset: int, words_: bool) -> None:
    dtype = torch.float16 if words_ else torch.bfloat16
    make_tiny(tmp_path, "qwen2", num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    config = {
        **json.loads((tmp_path / "config.json").read_text()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    entries: dict[str, Any] = {"model_quant_type": "W8A8", "version": "1.0.0", "group_size": 0}
    biases = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        module = name.removesuffix(".weight")
        rows, columns = tensors.pop(name).shape
        bias = tensors.get(f"{module}.bias", torch.zeros(rows))
        biases[module] = bias
        own = static_tensors(module, rows, columns, offset, words_, bias)
        entries |= dict.fromkeys(own, "W8A8")
        tensors |= own
    entries |= {name: "FLOAT" for name in tensors if name not in entries}
    write_folder(tmp_path, entries, tensors, config)
    reader = ModelReader(open_source(tmp_path))
    stored = reader.linears.describe("model.layers.0.mlp.up_proj")
    assert stored.kind is StoredKind.INT8_STATIC
    compute = folder_chip(ChipQuestion("cpu"), None, reader).compute
    layer = reader.read_layer(0, compute)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) * 0.7
    for stream, names in (
        (Stream.ATTENTION_INPUT, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (Stream.MLP_INPUT, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        for found, name in zip(layer.groups[stream](x), names, strict=True):
            module = f"model.layers.0.{name}"
            scale = (
                tensors[f"{module}.input_scale"].to(dtype).double()
            )  # the engine's parameter has the model's dtype
            codes = torch.clamp(torch.round(x.double() / scale) + offset, -128, 127)
            deq = tensors[f"{module}.deq_scale"]
            deq = deq.to(torch.int32).view(torch.float32) if words_ else deq
            sums = codes @ tensors[f"{module}.weight"].double().T + tensors[f"{module}.quant_bias"]
            torch.testing.assert_close(found.double(), sums * deq.double(), rtol=1e-4, atol=1e-4)
            if biases[module].any():
                lost = sums * deq.double() - (
                    (codes - offset) @ tensors[f"{module}.weight"].double().T * deq.double()
                    + biases[module].double()
                )
                assert float(lost.abs().max()) < float(deq.max())


def linear(folder: Path, kind: str, more: dict[str, Any] | None = None, **parts: Tensor) -> LinearReader:
    tensors = {f"m.q_proj.{suffix}": tensor for suffix, tensor in parts.items()}
    entries = {"group_size": 0, **dict.fromkeys(tensors, kind), **(more or {})}
    return LinearReader(open_source(write_folder(folder, entries, tensors)))


def test_int4_is_read_in_each_of_its_orders(tmp_path: Path) -> None:
    codes = int8(6, 32, seed=1, low=-8, high=8)
    scale, zero = torch.rand(6, 2) + 0.5, int8(6, 2, seed=2, low=-3, high=4).float()
    wanted = (codes.float().view(6, 2, 16) - zero[..., None]) * scale[..., None]
    nibbles = codes.view(torch.uint8) & 15
    packings = {
        "rows": (nibbles[0::2] | (nibbles[1::2] << 4)).view(torch.int8),
        "columns": (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(torch.int8),
        "bytes": codes,
    }
    for name, weight in packings.items():
        reader = linear(
            tmp_path / name,
            "W4A16",
            {"group_size": 16},
            weight=weight,
            weight_scale=scale,
            weight_offset=zero,
        )
        stored = reader.describe("m.q_proj", (6, 32))
        assert stored.activation is None
        assert torch.equal(reader.read("m.q_proj"), wanted.view(6, 32))
        assert torch.equal(reader.read_rows("m.q_proj", 1, 4), wanted.view(6, 32)[1:4])


def test_types_of_one_folder_differ_by_module(tmp_path: Path) -> None:
    one = torch.ones(4, 1)
    tensors = {
        "a.weight": int8(4, 32, seed=1),
        "a.weight_scale": one,
        "a.weight_offset": torch.zeros(4, 1),
        "b.weight": torch.ones(4, 32).to(torch.float8_e4m3fn),
        "b.weight_scale": torch.full((4, 1), 128, dtype=torch.uint8),
        "c.weight": torch.ones(4, 32, dtype=torch.bfloat16),
        "d.weight": int8(2, 32, seed=2),
        "d.weight_scale": one.clone(),
        "d.weight_offset": torch.zeros(4, 1),
        "d.scale_bias": one.clone(),
    }
    kinds = {"a": "W8A8_DYNAMIC", "b": "W8A8_MXFP8", "c": "FLOAT", "d": "W4A8_DYNAMIC"}
    entries = {"version": "1.0.0"} | {name: kinds[name[0]] for name in tensors}
    reader = LinearReader(open_source(write_folder(tmp_path, entries, tensors)))
    found = {module: reader.describe(module) for module in kinds}
    assert [stored.kind for stored in found.values()] == [
        StoredKind.INT8,
        StoredKind.MXFP8,
        StoredKind.PLAIN,
        StoredKind.INT4,
    ]
    assert torch.equal(reader.read("b"), torch.full((4, 32), 2.0))
    assert found["c"].activation is None
    assert found["d"].shape == (4, 32)
    assert "d.scale_bias" in reader.companions()
    assert "to W4A8_DYNAMIC and W8A8_DYNAMIC and W8A8_MXFP8 of msModelSlim" in str(reader.loss_warning)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = {
    "a type that nobody reads": (lambda e, _: e.update({"m.weight": "W8A8_TIMESTEP"}), "cannot be read"),
    "no type at all": (lambda e, _: e.update({"m.weight": 3}), "must have a type"),
    "a group size that is none": (lambda e, _: e.update(group_size="32"), "'group_size' must be"),
    "an int8 weight as FLOAT": (lambda e, _: e.update({"m.weight": "FLOAT"}), "belongs to another model"),
    "a missing scale": (lambda _, t: t.pop("m.deq_scale"), "is missing"),
    "a scale of another size": (lambda _, t: t.update({"m.deq_scale": torch.ones(3)}), "must be"),
    "words beyond a scale": (
        lambda _, t: t.update({"m.deq_scale": torch.full((4,), 1 << 50)}),
        "more than the 32 bits",
    ),
    "a scale of zero": (lambda _, t: t.update({"m.deq_scale": torch.zeros(4)}), "no positive numbers"),
    "half an offset": (lambda _, t: t.update({"m.input_offset": torch.tensor([0.5])}), "a whole number"),
    "a NaN for an offset": (
        lambda _, t: t.update({"m.input_offset": torch.tensor([torch.nan])}),
        "a whole number",
    ),
    "two-level scales": (
        lambda e, t: (
            e.update({"m.weight": "W8A8_DYNAMIC"}),
            t.update({"m.weight_scale_second": torch.ones(4, 2)}),
        ),
        "two levels",
    ),
    "offsets where kernels have none": (
        lambda e, t: (
            e.update({"m.weight": "W8A8_DYNAMIC"}),
            t.update({"m.weight_scale": torch.ones(4, 1), "m.weight_offset": torch.ones(4, 1)}),
        ),
        "holds offsets",
    ),
    "MX beside another group": (
        lambda e, t: (
            e.update({"m.weight": "W8A8_MXFP8", "group_size": 64}),
            t.update({"m.weight": torch.ones(4, 32).to(torch.float8_e4m3fn)}),
        ),
        "group of all",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_refused_by_name(tmp_path: Path, how: str) -> None:
    change, message = BROKEN[how]
    tensors = static_tensors("m", 4, 32, 0, False, torch.zeros(4))
    entries: dict[str, Any] = {"group_size": 0, **dict.fromkeys(tensors, "W8A8")}
    change(entries, tensors)
    with pytest.raises(UserError, match=message):
        LinearReader(open_source(write_folder(tmp_path, entries, tensors))).read("m")


def test_shards_have_the_names_that_vllm_ascend_looks_for(tmp_path: Path) -> None:
    tensors = {f"m{number}.weight": int8(8, 32, seed=number) for number in range(3)}
    outputs = [OutputTensor(name, "I8", (8, 32)) for name in tensors]
    plan = plan_shards(outputs, 300, ASCEND.weights_stem)
    assert [shard.file for shard in plan] == [
        f"quant_model_weights-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    with OutputFolder(tmp_path / "out", plan, resume=False, overwrite=False) as folder:
        for name, tensor in tensors.items():
            folder.write(name, tensor)
        folder.add_file("config.json", b"{}")
        folder.add_file(
            DESCRIPTION, json.dumps({**dict.fromkeys(tensors, "FLOAT"), "group_size": 0}).encode()
        )
        with pytest.raises(UserError, match="cannot be the name"):
            folder.add_file("quant_model_weights.safetensors.index.json", b"{}")
        folder.finish()
    source = open_source(tmp_path / "out")
    assert {name: source.read(name).tolist() for name in source.names()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_weights_are_found_whatever_an_older_version_called_them(tmp_path: Path) -> None:
    tensors = {"m.weight": int8(4, 32, seed=1), "m.weight_scale": torch.ones(4, 1)}
    folder = write_folder(tmp_path, dict.fromkeys(tensors, "W8A8_DYNAMIC"), tensors)
    (folder / "quant_model_weights.safetensors").rename(
        folder / "quant_model_weight_w8a8_dynamic.safetensors"
    )
    assert torch.equal(LinearReader(open_source(folder)).read("m"), tensors["m.weight"].float())
    save_file({"m.weight": torch.ones(4, 32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="left over"):
        open_source(folder)
    (folder / "quant_model_weight_w8a8_dynamic.safetensors").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has neither"):
        open_source(folder)


# ---- through the command line


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def in_dtype(folder: Path, dtype: torch.dtype) -> None:
    file = folder / "model.safetensors"
    save_file(
        {name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))


CASES = {
    "W8A8": ("qwen2", torch.float16, "ascend-910b", ("--quant-method", "w8a8", "--scheme", "w8a8_static")),
    "W8A8_DYNAMIC": ("qwen3-moe", torch.bfloat16, "ascend-910b", ("--quant-method", "w8a8")),
    "W8A8_MXFP8": ("qwen2", torch.bfloat16, "ascend-950", ("--quant-method", "rtn", "--scheme", "mxfp8")),
    "W4A8_DYNAMIC": ("qwen2", torch.bfloat16, "ascend-910b", ("--quant-method", "w4a8", "--group-size", "0")),
}  # fmt: skip


def dequantized(kind: str, tensors: dict[str, Tensor], module: str) -> Tensor:
    """By the formulas of the format, from raw tensors."""
    weight = tensors[f"{module}.weight"]
    if kind == "W8A8":
        deq = tensors[f"{module}.deq_scale"].to(torch.int32).view(torch.float32)
        return weight.double() * (deq.double() / tensors[f"{module}.input_scale"].double())[:, None]
    scale = tensors[f"{module}.weight_scale"]
    if kind == "W8A8_MXFP8":
        values = weight.float().double().view(weight.shape[0], -1, 32)
        return (values * torch.exp2(scale.double() - 127)[..., None]).flatten(1)
    if kind == "W4A8_DYNAMIC":
        octets = weight.to(torch.int16) & 255
        both = torch.stack((octets & 15, octets >> 4), dim=1).flatten(0, 1)
        weight = torch.where(both > 7, both - 16, both)
    return weight.double() * scale.double()


@pytest.mark.parametrize("kind", CASES)
def test_a_model_becomes_a_folder_and_is_read_back(kind: str, tmp_path: Path) -> None:
    family, dtype, device, method = CASES[kind]
    model, out = tmp_path / "model", tmp_path / "out"
    sizes = {"num_experts": 3, "num_experts_per_tok": 2} if family == "qwen3-moe" else {}
    made = make_tiny(model, family, num_hidden_layers=1, **sizes, seed=7)
    del made
    make_tokenizer(model)
    in_dtype(model, dtype)
    text, held_out = tmp_path / "calib.jsonl", tmp_path / "text.txt"
    text.write_text("".join(f'{{"text": "{words(60, seed)}"}}\n' for seed in range(6)))
    held_out.write_text(words(200, seed=50))
    record = run(
        "--model-path", model, "--output-path", out, "--device", device, *method, "--layout", "ascend",
        "--calibration-dataset", text, "--calibration-length", 32, "--calibration-samples", 6,
        "--validation-text", held_out, "--validation-tokens", 96, "--json",
    )  # fmt: skip
    assert record["layout"] == "ascend"
    assert 0 < record["validation"]["kl_mean"] < 0.2
    names = {path.name for path in out.iterdir()}
    assert {DESCRIPTION, "quant_model_weights.safetensors"} <= names
    assert not any(name.startswith("model") for name in names)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    tensors = load_file(out / "quant_model_weights.safetensors")
    entries = json.loads((out / DESCRIPTION).read_text())
    assert set(tensors) <= set(entries), "vLLM Ascend fails on a tensor without an entry"
    quantized = [
        name.removesuffix(".weight")
        for name, value in entries.items()
        if value == kind and name.endswith(".weight")
    ]
    assert len(quantized) == (7 if family == "qwen2" else 4 + 3 * 3)
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if entries[name] == "FLOAT":
            assert tensor.dtype == dtype
            continue
        rule = LOADER[kind] | ({"deq_scale": (("I64",), lambda n, _: (n,))} if kind == "W8A8" else {})
        if suffix == "scale_bias" and module.endswith(("down_proj", "o_proj")):
            rule = rule | {"scale_bias": (("F32",), lambda n, _: (n, 16))}
        dtypes, size = rule[suffix]
        rows, columns = load_file(model / "model.safetensors")[f"{module}.weight"].shape
        assert (tuple(tensor.shape), DTYPES[dtypes[0]].torch) == (size(rows, columns), tensor.dtype)
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    linears = [*manifest["head"], *(linear for layer in manifest["layers"] for linear in layer["linears"])]
    sums = {linear["name"]: linear["sha256"] for linear in linears}
    reader = ModelReader(open_source(out))
    plain = {name: tensor for name, tensor in tensors.items() if entries[name] == "FLOAT"}
    for module in quantized:
        wanted = dequantized(kind, tensors, module)
        torch.testing.assert_close(reader.read_linear(module).double(), wanted, rtol=1e-6, atol=0)
        plain[f"{module}.weight"] = wanted.float()
        if kind == "W8A8":
            scale = tensors[f"{module}.deq_scale"].to(torch.int32).view(torch.float32)
            bias = tensors[f"{module}.quant_bias"] * scale
            known = plain.get(f"{module}.bias", torch.zeros_like(bias)).float()
            assert bool(((bias - known).abs() <= scale * 0.51).all())
            if f"{module}.bias" in plain:
                assert bool(bias.any())
                plain[f"{module}.bias"] = bias
        codes = ASCEND_CODES[kind](tensors[f"{module}.weight"])
        assert hashlib.sha256(codes.numpy().tobytes()).hexdigest() == sums[module]
    reference = tmp_path / "reference"
    make_reference(model, reference, plain)
    tokens = torch.randint(1, 160, (2, 24), generator=torch.Generator().manual_seed(1))
    found = load_model(reader).forward(tokens)
    expected = load_model(ModelReader(open_source(reference))).forward(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    on_chip = load_model(reader, folder_chip(ChipQuestion(device), None, reader).compute).forward(tokens)
    assert not torch.equal(on_chip, found)


ASCEND_CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "W8A8": lambda weight: weight,
    "W8A8_DYNAMIC": lambda weight: weight,
    "W8A8_MXFP8": lambda weight: weight.view(torch.uint8),
    "W4A8_DYNAMIC": unpack_int4_pairs,
}


def make_reference(model: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    save_file(
        {name: tensor.float().contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny(model, "qwen3", num_hidden_layers=1)
    make_tokenizer(model)
    asked = [
        "--model-path",
        model,
        "--output-path",
        tmp_path / "out",
        "--device",
        "ascend-910b",
        "--layout",
        "ascend",
    ]
    for more, message in (
        (("--quant-method", "rtn", "--scheme", "w8a8_static"), "which only text can tell"),
        (("--quant-method", "rtn", "--scheme", "w4a8"), "--group-size 0"),
        (("--quant-method", "rtn", "--scheme", "fp8", "--allow-unsupported"), "choose another --layout"),
        (("--quant-method", "fp8", "--scheme", "w8a8_static"), "makes fp8 and cannot make w8a8_static"),
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in (*asked, *more)])
        assert result.exit_code == 2
        assert message in result.output
    assert not (tmp_path / "out").exists()
