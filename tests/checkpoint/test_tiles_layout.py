"""Tiles of a matrix unit: where each element stands, and folders of tiled weights through the command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from qwen_quantize.checkpoint.layout_parts import Destination
from qwen_quantize.checkpoint.linear_parts import Tiles
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.tiles_layout import (
    TILES,
    elements_of_tiles,
    pack_int4_tiles,
    pack_tiles,
    tiles_of,
    unpack_int4_tiles,
    unpack_tiles,
)
from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.loader import load_profile
from qwen_quantize.cli.main import app
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import FP32
from tests.checkpoint.ascend_samples import make_reference, sample
from tests.tiny_models import make_tiny, make_tokenizer, words

NZ = Tiles(16, 32)
ASCEND_950 = Destination({}, "BF16", "ascend-950", "FRACTAL_NZ (format 29): 16 rows x 32 bytes")
ONTO = TILES.fitted(ASCEND_950)


def place(k: int, n: int, depth: int, across: int) -> int:
    """The flat index of element (k, n) of a weight with `depth` rows k, as CANN's documents have it."""
    return ((n // across) * -(-depth // 16) + k // 16) * 16 * across + (k % 16) * across + n % across


@pytest.mark.parametrize(
    ("dtype", "across"),
    [(torch.int8, 32), (torch.float8_e4m3fn, 32), (torch.float16, 16), (torch.bfloat16, 16)],
)
def test_golden_places(dtype: torch.dtype, across: int) -> None:
    rows, depth = 40, 35  # neither fills its tiles
    values = torch.arange(rows * depth).view(rows, depth) % 100 + 1
    weight = values.to(torch.int8).view(dtype) if across == 32 else values.to(torch.float32).to(dtype)
    tiled = pack_tiles(weight, NZ)
    assert tuple(tiled.shape) == (-(-rows // across), 3, 16, across)
    raw = tiled.view(torch.int8 if across == 32 else torch.int16).flatten()
    own = weight.view(raw.dtype)
    filled = set()
    for n in range(rows):
        for k in range(depth):
            index = place(k, n, depth, across)
            filled.add(index)
            assert raw[index] == own[n, k]
    padding = [index for index in range(raw.numel()) if index not in filled]
    assert not raw[padding].any()
    assert torch.equal(unpack_tiles(tiled, (rows, depth)).view(raw.dtype), own)


def test_golden_words_of_int4() -> None:
    codes = torch.zeros(64, 16, dtype=torch.int8)
    codes[:8, 0] = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])
    codes[8:16, 1] = torch.tensor([-8, -7, -6, -5, -4, -3, -2, -1])
    words_ = pack_int4_tiles(codes, NZ)
    assert tuple(words_.shape) == (1, 1, 16, 8)
    assert int(words_[0, 0, 0, 0]) == 0x76543210  # eight columns n of row k = 0, the first in the lowest bits
    assert int(words_[0, 0, 1, 1]) & 0xFFFFFFFF == 0xFEDCBA98
    assert int(words_.count_nonzero()) == 2


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 80),
    st.integers(1, 50),
    st.sampled_from((torch.int8, torch.float8_e4m3fn, torch.float16, torch.bfloat16, None)),
    st.sampled_from((NZ, Tiles(8, 64), Tiles(1, 4))),
)
def test_unpacking_tiles_is_the_inverse(
    rows: int, depth: int, dtype: torch.dtype | None, tiles: Tiles
) -> None:
    generator = torch.Generator().manual_seed(rows * 100 + depth)
    octets = torch.randint(-8, 8, (rows, depth, 2), generator=generator).to(torch.int8)
    if dtype is None:
        codes = octets[..., 0].contiguous()
        assert torch.equal(unpack_int4_tiles(pack_int4_tiles(codes, tiles), (rows, depth)), codes)
        return
    weight = octets[..., 0].contiguous().view(dtype) if dtype.itemsize == 1 else octets.view(dtype)[..., 0]
    bits = torch.int8 if dtype.itemsize == 1 else torch.int16
    found = unpack_tiles(pack_tiles(weight, tiles), (rows, depth))
    assert found.dtype == dtype
    assert torch.equal(found.view(bits), weight.contiguous().view(bits))


SCHEMES_HERE: dict[str, Scheme] = {
    "w8a8": SCHEMES["w8a8"],
    "w8a8_static": SCHEMES["w8a8_static"],
    "fp8": SCHEMES["fp8"],
    "mxfp8": SCHEMES["mxfp8"],
    "w4a8": SCHEMES["w4a8"].with_group(32),
    "w4a16": replace(
        SCHEMES["w4a16"].with_group(32),
        weight=replace(SCHEMES["w4a16"].with_group(32).weight, scale_format=FP32),
    ),
}


@pytest.mark.parametrize("name", SCHEMES_HERE)
def test_the_layout_holds_each_scheme_and_gives_it_back(name: str) -> None:
    scheme, shape = SCHEMES_HERE[name], (70, 96)
    quantized = sample(scheme, *shape, seed=3)
    packed = ONTO.pack("m", quantized, scheme, 3.0)
    outputs = ONTO.outputs("m", shape, scheme)
    assert [output.name for output in outputs] == ["m.weight", *[it.name for it in outputs[1:]]]
    for output in outputs:
        assert tuple(packed[output.name].shape) == output.shape
    assert set(packed) == {output.name for output in outputs}
    found = ONTO.unpack("m", packed, shape, scheme)
    assert torch.equal(found.codes, quantized.codes)
    assert torch.equal(found.dequantize(), quantized.dequantize())
    assert ("m.input_scale" in packed) == (name == "w8a8_static")


def test_what_has_no_tiles_is_refused() -> None:
    for name in ("nvfp4", "mxfp4", "mxfp6", "hif8"):
        with pytest.raises(UserError, match="choose another --layout"):
            ONTO.outputs("m", (64, 64), SCHEMES[name])
    with pytest.raises(UserError, match="no public document"):
        TILES.fitted(Destination({}, "BF16", "nvidia-h100", None))
    with pytest.raises(UserError, match="FRACTAL_NZ alone"):
        TILES.fitted(Destination({}, "BF16", "example", "rows of K"))


def test_every_ascend_profile_states_tiles_and_no_other_is_misread() -> None:
    for name in ("ascend-310p", "ascend-910b", "ascend-910c", "ascend-950"):
        stated = load_profile(name).facts.tiles.weight_layout.text()
        assert not isinstance(stated, Absent)
        assert tiles_of(stated) == NZ
    assert tiles_of("rows of K") is None
    assert tiles_of("ND, not FRACTAL_NZ: 16 rows x 32 bytes") is None


CASES = {
    "int8": ("ascend-910b", ("--quant-method", "w8a8", "--scheme", "w8a8_static")),
    "int4": ("ascend-910b", ("--quant-method", "gptq", "--group-size", "32")),
    "mxfp8": ("ascend-950", ("--quant-method", "rtn", "--scheme", "mxfp8")),
    "blocks": ("ascend-950", ("--quant-method", "ue8m0")),
}


def dequantized(kind: str, tensors: dict[str, Tensor], module: str) -> Tensor:
    """By the places of the format and the formulas of the scales."""
    tiled, (rows, depth) = tensors[f"{module}.weight"], tensors[f"{module}.weight_shape"].tolist()
    if kind == "int4":
        shifts = torch.arange(0, 32, 4)
        nibbles = (tiled.to(torch.int64)[..., None] >> shifts) & 15
        raw = torch.where(nibbles > 7, nibbles - 16, nibbles).flatten()
        across = 64
    else:
        raw, across = tiled.flatten().float(), 32
    index = torch.tensor([[place(k, n, depth, across) for k in range(depth)] for n in range(rows)])
    values = raw[index].double()
    scale = tensors[f"{module}.weight_scale"]
    scale = torch.exp2(scale.double() - 127) if scale.dtype == torch.uint8 else scale.double()
    if kind == "blocks":
        side = 128 // next(s for s in (1, 2, 4) if -(-rows // (128 // s)) == scale.shape[0])
        scale = scale.repeat_interleave(side, 0)[:rows].repeat_interleave(side, 1)[:, :depth]
        return values * scale
    return (values.view(rows, scale.shape[1], -1) * scale[..., None]).flatten(1)


@pytest.mark.parametrize("kind", CASES)
def test_a_model_becomes_tiles_and_is_read_back(kind: str, tmp_path: Path) -> None:
    device, method = CASES[kind]
    model, out = tmp_path / "model", tmp_path / "out"
    make_tiny(model, "qwen3", num_hidden_layers=1, seed=9)
    make_tokenizer(model)
    text, held_out = tmp_path / "calib.jsonl", tmp_path / "text.txt"
    text.write_text("".join(f'{{"text": "{words(60, seed)}"}}\n' for seed in range(6)))
    held_out.write_text(words(200, seed=50))
    result = CliRunner().invoke(
        app,
        [
            str(argument)
            for argument in (
                "--model-path", model, "--output-path", out, "--device", device, *method, "--layout", "tiles",
                "--calibration-dataset", text, "--calibration-length", 32, "--calibration-samples", 6,
                "--validation-text", held_out, "--validation-tokens", 96, "--json",
            )
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert 0 < record["validation"]["kl_mean"] < 0.2
    assert any("vLLM Ascend and SGLang tile weights themselves" in note for note in record["notes"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "qwen_quantize-tiles", "a name that no engine takes for its own"
    assert config["tiles"] == {"layout": "FRACTAL_NZ", "rows": 16, "bytes": 32}
    tensors = load_file(out / "model.safetensors")
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"]]
    assert len(linears) == 7
    reader = ModelReader(open_source(out))
    plain = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.float32}
    for linear in linears:
        module = linear["name"]
        wanted = dequantized(kind, tensors, module)
        assert torch.equal(reader.read_linear(module), wanted.float())
        assert torch.equal(reader.linears.read_rows(module, 32, 50), wanted.float()[32:50])
        codes = elements_of_tiles(tensors[f"{module}.weight"], tuple(wanted.shape))
        assert hashlib.sha256(codes.numpy().tobytes()).hexdigest() == linear["sha256"]
        plain[f"{module}.weight"] = wanted.float()
    plain = {name: tensor for name, tensor in plain.items() if not name.endswith("_scale")}
    reference = tmp_path / "reference"
    make_reference(model, reference, plain)
    tokens = torch.randint(1, 160, (2, 24), generator=torch.Generator().manual_seed(1))
    found = load_model(reader).forward(tokens)
    assert torch.equal(found, load_model(ModelReader(open_source(reference))).forward(tokens))


@pytest.mark.parametrize("name", ["fp8", "w8a8"])
def test_codes_of_tiles_come_in_the_order_of_rows(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    quantized = sample(scheme, 70, 64, seed=1)
    tensors = ONTO.pack("m", quantized, scheme)
    config = ONTO.quantization_config({"m": scheme}, [])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, tmp_path / "model.safetensors")
    linears = LinearReader(open_source(tmp_path))
    assert torch.equal(linears.read_quantized("m").codes, quantized.codes)
    if name == "fp8":
        assert torch.equal(linears.read_row_codes("m")[0], quantized.codes)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = {
    "other tiles": (lambda c, _: c["tiles"].update(layout="ZZ"), "FRACTAL_NZ can be read"),
    "tiles of no size": (lambda c, _: c["tiles"].update(rows=0), "tile's size"),
    "tiles of half a word": (lambda c, _: c["tiles"].update(bytes=30), "tile's size"),
    "tiles without an end": (lambda c, _: c["tiles"].update(rows=1 << 40), "tile's size"),
    "no shape": (lambda _, t: t.pop("m.weight_shape"), "is missing"),
    "a shape that is none": (lambda _, t: t.update({"m.weight_shape": torch.tensor([0, -1])}), "no shape"),
    "a shape of other tiles": (
        lambda _, t: t.update({"m.weight_shape": torch.tensor([700, 64])}),
        "tiles of a weight",
    ),
    "no scale": (lambda _, t: t.pop("m.weight_scale"), "is missing"),
    "a type without tiles": (
        lambda _, t: t.update({"m.weight": torch.zeros(3, 4, 16, 32, dtype=torch.int16)}),
        "I16",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_refused_by_name(tmp_path: Path, how: str) -> None:
    scheme = SCHEMES["w8a8"]
    tensors = ONTO.pack("m", sample(scheme, 70, 64, seed=1), scheme)
    config = ONTO.quantization_config({"m": scheme}, [])
    change, message = BROKEN[how]
    change(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        LinearReader(open_source(tmp_path)).read("m")
