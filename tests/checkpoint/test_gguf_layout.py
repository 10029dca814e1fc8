"""Blocks of GGUF hold our codes bit for bit, and gguf's own reader decodes them as we do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from qwen_quantize.checkpoint.gguf import unpermute
from qwen_quantize.checkpoint.gguf_config import gguf_name
from qwen_quantize.checkpoint.gguf_layout import BLOCK_SPECS, GGUF, GgufLayout, Kind
from qwen_quantize.checkpoint.gguf_vocabulary import read_vocabulary
from qwen_quantize.checkpoint.layout_parts import Destination
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import E2M1, INT4
from tests.checkpoint.quantized_samples import same, sample
from tests.tiny_models import make_tiny

SHAPE = (8, 96)
UP = "model.layers.1.mlp.up_proj"


def scheme_of(kind: Kind) -> Scheme:
    return Scheme(kind.name, BLOCK_SPECS[kind], None, False, "")


KINDS = pytest.mark.parametrize("kind", BLOCK_SPECS, ids=lambda kind: kind.name)


@KINDS
def test_codes_come_back_and_gguf_decodes_them_alike(kind: Kind) -> None:
    scheme = scheme_of(kind)
    quantized = sample(scheme, SHAPE)
    if kind != Kind.MXFP4:  # a calibrated int4 scale may be negative, and one of a dead group zero
        scale = quantized.scale.clone()
        scale[0, 0], scale[1, 1] = -scale[0, 0], 0.0
        quantized = replace(quantized, scale=scale)
    layout = replace(GGUF, architecture="qwen3")
    packed = layout.pack(UP, quantized, scheme)
    (output,) = layout.outputs(UP, SHAPE, scheme)
    assert [*packed] == [output.name]
    assert tuple(packed[output.name].shape) == output.shape
    assert same(layout.unpack(UP, packed, SHAPE, scheme), quantized)
    theirs = torch.from_numpy(gguf.quants.dequantize(packed[output.name].numpy(), kind))
    assert torch.equal(theirs, quantized.dequantize())


def test_one_block_of_each_kind_by_hand() -> None:
    grid = Granularity.group(32)
    codes = torch.zeros(1, 32, dtype=torch.int8)
    codes[0, 0], codes[0, 1], codes[0, 16], codes[0, 31] = -8, 7, 1, -1
    int4 = QuantizedTensor(codes, torch.tensor([[-0.5]]), None, INT4, grid, (1, 32))
    packed = GGUF.pack(UP, int4, scheme_of(Kind.Q4_0))[f"{UP}.weight"]
    assert packed.numpy().tobytes() == bytes.fromhex("00b8908f" + "88" * 13 + "78")
    int8 = sample(scheme_of(Kind.Q8_0), (1, 32))
    int8 = replace(int8, codes=codes, scale=torch.tensor([[1.0]]))
    packed = GGUF.pack(UP, int8, scheme_of(Kind.Q8_0))[f"{UP}.weight"]
    assert packed.numpy().tobytes() == bytes.fromhex("003cf807" + "00" * 14 + "01" + "00" * 14 + "ff")
    floats = torch.zeros(1, 32, dtype=torch.uint8)  # .5, -1 at 0 and 1, 6 and 4 at 16 and 17
    floats[0, 0], floats[0, 1], floats[0, 16], floats[0, 17] = 1, 10, 7, 6
    mx = QuantizedTensor(floats, torch.tensor([[1.0]]), None, E2M1, grid, (1, 32))
    packed = GGUF.pack(UP, mx, scheme_of(Kind.MXFP4))[f"{UP}.weight"]
    assert packed.numpy().tobytes() == bytes.fromhex("7f716a" + "00" * 14)


@KINDS
def test_the_rows_of_a_llama_move_as_its_converter_moves_them(kind: Kind) -> None:
    layout = GgufLayout("gguf", (), "llama", ((".q_proj", 2), (".k_proj", 1)))
    scheme, module = scheme_of(kind), "model.layers.0.self_attn.q_proj"
    quantized = sample(scheme, SHAPE)
    packed = layout.pack(module, quantized, scheme)
    assert same(layout.unpack(module, packed, SHAPE, scheme), quantized)
    rows = gguf.quants.dequantize(packed[f"{module}.weight"].numpy(), kind)
    assert not np.array_equal(rows, quantized.dequantize().numpy())
    assert np.array_equal(unpermute(rows, 2), quantized.dequantize().numpy())
    assert layout.permuted_heads("model.layers.0.self_attn.v_proj") is None
    with pytest.raises(UserError, match="6 rows, which 2 heads cannot share"):
        layout.stored_rows(module, torch.zeros(6, 1))


@pytest.mark.parametrize("name", [*SCHEMES])
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="take w4a16, w8a16 or mxfp4"):
        GGUF.outputs(UP, SHAPE, SCHEMES[name])


def test_more_refusals() -> None:
    scheme = scheme_of(Kind.Q4_0)
    with pytest.raises(UserError, match="no multiple of its group of 32"):
        GGUF.outputs(UP, (8, 48), scheme)
    with pytest.raises(UserError, match="zero points"):
        GGUF.outputs(UP, SHAPE, scheme.with_zero_point())
    with pytest.raises(UserError, match="no place in a GGUF"):
        replace(GGUF, architecture="qwen3").outputs("model.layers.0.mlp.experts.0.up_proj", SHAPE, scheme)
    quantized = sample(scheme, SHAPE)
    with pytest.raises(ValueError, match="do not fit F16 exactly"):
        GGUF.pack(UP, replace(quantized, scale=quantized.scale + 1e-5), scheme)


@pytest.mark.parametrize(
    ("family", "words"),
    [("qwen2-sliding", "sliding window"), ("deepseek-v3", "not for Deepseek"), ("phi3", "not for Phi3")],
)
def test_models_that_gguf_cannot_describe_here(tmp_path: Path, family: str, words: str) -> None:
    make_tiny(tmp_path, family)
    with pytest.raises(UserError, match=words):
        GGUF.fitted(Destination(json.loads((tmp_path / "config.json").read_text()), "BF16", "cpu", None))


def test_names_are_those_of_llama_cpp() -> None:
    tables = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    for name in (
        "model.embed_tokens", "model.norm", "lm_head", "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.k_norm", "model.layers.1.mlp.down_proj", "model.layers.0.input_layernorm",
    ):  # fmt: skip
        assert gguf_name(f"{name}.weight") == f"{tables.get_name(name)}.weight"
    assert gguf_name("model.layers.0.mlp.gate.weight") is None
    assert gguf_name("model.layers.01.mlp.up_proj.weight") is None


def test_a_tokenizer_that_gguf_has_no_name_for_is_refused() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    files = {"tokenizer.json": tokenizer.to_str().encode()}
    with pytest.raises(UserError, match="cuts text in a way that has no name"):
        read_vocabulary(files, {}, 2)
    with pytest.raises(UserError, match="2 tokens and the embedding 1 rows"):
        read_vocabulary(files, {}, 1)
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="only tokenizers of the kind BPE"):
        read_vocabulary({"tokenizer.json": words.to_str().encode()}, {}, 2)
    assert read_vocabulary({}, {}, 2) is None
