"""Block FP8 linears: what they are made of, and their values row by row."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.errors import UserError
from tests.checkpoint.tiny_deepseek import make_tensors, write_folder

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [2, 3]}
NAME = "model.layers.0.mlp.up_proj"


def reader(
    folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None = None
) -> LinearReader:
    folder.mkdir(parents=True, exist_ok=True)
    config = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return LinearReader(open_source(folder))


def codes(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8).view(torch.float8_e4m3fn)


# E4M3: 0x38 is 1, 0x40 is 2, 0xC4 is -3, 0x7E is 448, 0x01 is 2^-9.
WEIGHT = codes([0x38, 0x40, 0xC4, 0x7E], [0x01, 0x00, 0x38, 0x38], [0x40, 0x40, 0x40, 0xB8])
SCALE = torch.tensor([[0.5, 3.0], [-1.0, 0.1]])
VALUES = torch.tensor(
    [[0.5, 1.0, -1.5, 1344.0], [2.0**-10, 0.0, 0.5, 3.0], [-2.0, -2.0, -2.0, -np.float32(0.1)]],
)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_by_hand(tmp_path: Path, suffix: str, dtype: torch.dtype) -> None:
    linears = reader(tmp_path, {f"{NAME}.weight": WEIGHT, f"{NAME}.{suffix}": SCALE.to(dtype)}, FP8)
    stored = linears.describe(NAME, (3, 4))
    assert (stored.kind, stored.shape, stored.block) == (StoredKind.BLOCK_FP8, (3, 4), (2, 3))
    assert (stored.weight, stored.scale) == (f"{NAME}.weight", f"{NAME}.{suffix}")
    assert stored.parts == (stored.weight, stored.scale)
    expected = VALUES.clone()
    expected[2, 3] = -SCALE.to(dtype)[1, 1].float()
    assert torch.equal(linears.read(NAME), expected)
    assert torch.equal(linears.read_rows(NAME, 0, 1), expected[:1])
    assert torch.equal(linears.read_rows(NAME, 2, 3), expected[2:])
    found, scale = linears.read_codes(NAME, 2, 3)
    assert torch.equal(found, WEIGHT[2:].view(torch.uint8))
    assert torch.equal(scale, SCALE[1:].to(dtype).float())
    assert linears.companions() == {f"{NAME}.{suffix}"}
    assert linears.is_quantized(NAME)
    assert linears.loss_warning is None


def test_exponent_scales(tmp_path: Path) -> None:
    """F8_E8M0: a byte is 2^(byte - 127), its smallest a float32 subnormal, 0xFF is NaN."""
    scale = torch.tensor([[0, 127], [130, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    linears = reader(
        tmp_path, {f"{NAME}.weight": WEIGHT, f"{NAME}.scale": scale}, FP8 | {"scale_fmt": "ue8m0"}
    )
    found = linears.read(NAME)
    assert found[0].tolist() == [2.0**-127, 2.0**-126, -3 * 2.0**-127, 448.0]
    assert found[2, :3].tolist() == [16.0, 16.0, 16.0]
    assert found[2, 3].isnan()
    assert linears.read_codes(NAME, 0, 3)[1][:, 0].tolist() == [2.0**-127, 8.0]


def test_a_product_is_rounded_once(tmp_path: Path) -> None:
    """Against exact products in float64, of which float32 keeps one rounding."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(0, 127, (32, 48), generator=generator, dtype=torch.uint8)
    scale = torch.rand(16, 16, generator=generator)
    linears = reader(
        tmp_path, {f"{NAME}.weight": weight.view(torch.float8_e4m3fn), f"{NAME}.weight_scale_inv": scale}, FP8
    )
    exact = weight.view(torch.float8_e4m3fn).double() * scale.double().repeat_interleave(
        2, 0
    ).repeat_interleave(3, 1)
    assert torch.equal(linears.read(NAME), exact.float())


def test_rows_begin_at_blocks(tmp_path: Path) -> None:
    linears = reader(tmp_path, {f"{NAME}.weight": WEIGHT, f"{NAME}.weight_scale_inv": SCALE}, FP8)
    for call in (linears.read_rows, linears.read_codes):
        with pytest.raises(ValueError, match=r"multiples of 2.*1"):
            call(NAME, 1, 2)
        with pytest.raises(ValueError, match=NAME):
            call(NAME, 2, 4)


def test_a_scale_in_another_shard_and_partial_blocks(tmp_path: Path) -> None:
    tensors = make_tensors()
    linears = LinearReader(open_source(write_folder(tmp_path, tensors)))
    name = "model.layers.1.mlp.experts.1.down_proj"
    weight, scale = tensors[f"{name}.weight"].float(), tensors[f"{name}.weight_scale_inv"]
    expected = weight * scale.repeat_interleave(16, 0)[:40].repeat_interleave(16, 1)[:, :24]
    info = linears.source.info
    assert info(f"{name}.weight").file != info(f"{name}.weight_scale_inv").file
    assert torch.equal(linears.read(name), expected)
    assert torch.equal(
        torch.cat([linears.read_rows(name, at, min(at + 16, 40)) for at in (0, 16, 32)]), expected
    )
    assert linears.companions() == {name for name in tensors if name.endswith("_inv")}


def test_threads_read_at_once(tmp_path: Path) -> None:
    tensors = make_tensors()
    linears = LinearReader(open_source(write_folder(tmp_path, tensors)))
    names = [name.removesuffix(".weight") for name in tensors if f"{name}_scale_inv" in tensors]
    expected = [linears.read(name) for name in names]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(linears.read, names * 5))
    assert all(torch.equal(one, other) for one, other in zip(found, expected * 5, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_plain_linears(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        f"{NAME}.weight": VALUES.to(dtype),
        f"{NAME}.bias": torch.ones(3),
        "norm.weight": torch.ones(4),
    }
    linears = reader(tmp_path, tensors, FP8)  # a kept module of a quantized model
    assert linears.describe(NAME).kind is StoredKind.PLAIN
    assert torch.equal(linears.read(NAME), VALUES.to(dtype).float())
    assert torch.equal(linears.read_rows(NAME, 1, 3), VALUES.to(dtype).float()[1:3])
    assert not linears.is_quantized(NAME)
    assert not linears.is_quantized("norm")
    assert linears.companions() == frozenset()
    with pytest.raises(ValueError, match="no blocks"):
        linears.read_codes(NAME, 0, 2)


def test_a_scale_of_something_else_is_no_companion(tmp_path: Path) -> None:
    tensors = {
        "attention.scale": torch.ones(1), "norm.weight": torch.ones(4), "norm.scale": torch.ones(4),
        "lost.weight_scale_inv": torch.ones(1, 1),
    }  # fmt: skip
    linears = reader(tmp_path, tensors, FP8)
    assert linears.companions() == frozenset()
    assert not linears.is_quantized("norm")


@pytest.mark.parametrize(
    ("tensors", "quantization", "words"),
    [
        ({"weight": torch.ones(2, 3, 4)}, None, (f"{NAME}.weight", "[2, 3, 4]", "two dimensions")),
        ({"weight": torch.ones(3, 4)}, None, ("[3, 4]", "[4, 3]", "transposed")),
        ({"weight": torch.ones(3, 3)}, None, ("[3, 3]", "[4, 3]")),
        ({"bias": torch.ones(4)}, None, (f"{NAME}.weight", "missing")),
        ({"weight": torch.ones(4, 3, dtype=torch.int32)}, FP8, ("I32",)),
        ({"weight": torch.ones(4, 3).to(torch.float8_e5m2)}, FP8, ("F8_E5M2",)),
        (
            {"weight": torch.ones(4, 3, dtype=torch.int8), "scale": torch.ones(2, 1).to(torch.float8_e8m0fnu)},
            FP8, (f"{NAME}.weight", "FP4", f"{NAME}.scale"),
        ),
        ({"weight": torch.ones(4, 3).to(torch.float8_e4m3fn)}, FP8, (f"{NAME}.weight_scale_inv", "missing")),
        (
            {"weight": torch.ones(4, 3).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 1)},
            None, ("F8_E4M3", "quantization_config"),
        ),
    ],
)  # fmt: skip
def test_refusals(
    tmp_path: Path,
    tensors: dict[str, torch.Tensor],
    quantization: dict[str, Any] | None,
    words: tuple[str, ...],
) -> None:
    linears = reader(
        tmp_path, {f"{NAME}.{suffix}": tensor for suffix, tensor in tensors.items()}, quantization
    )
    with pytest.raises(UserError) as caught:
        linears.describe(NAME, (4, 3))
    for word in (str(tmp_path), *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("method", ["modelopt", "quark", None, ["gptq"]])
def test_other_methods_are_refused_when_opened(tmp_path: Path, method: object) -> None:
    with pytest.raises(UserError, match=rf"{re.escape(str(method))}.*'fp8'.*compressed-tensors.*awq.*gptq"):
        reader(tmp_path, {f"{NAME}.weight": VALUES}, {"quant_method": method})
