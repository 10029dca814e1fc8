"""Every GGUF type that the gguf package decodes: all rows, some rows, and what is said of the loss."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.errors import UserError
from tests.checkpoint.tiny_gguf import make_model, write_gguf

Kind = gguf.GGMLQuantizationType
ROWS, COLUMNS = 6, 512
GATE = "model.layers.0.mlp.gate_proj.weight"
EXACT = (Kind.F32, Kind.F16, Kind.BF16, Kind.F64, Kind.I8, Kind.I16, Kind.I32, Kind.I64)
UNREADABLE = tuple(kind for kind in (Kind.Q8_1, Kind.Q8_K) if kind in gguf.GGML_QUANT_SIZES)


def decodes(kind: Kind) -> bool:
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        gguf.quants.dequantize(np.zeros((1, nbytes * 512 // block), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


DECODED = [
    kind for kind in Kind if kind not in EXACT and 512 % gguf.GGML_QUANT_SIZES[kind][0] == 0 and decodes(kind)
]


def write(path: Path, data: np.ndarray, kind: Kind) -> Path:
    """A header of a llama with one more matrix [ROWS, COLUMNS], whose bytes are given."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(COLUMNS)
    writer.add_feed_forward_length(ROWS)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((2, COLUMNS), np.float32))
    writer.add_tensor("blk.0.ffn_gate.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def stored_bytes(kind: Kind) -> np.ndarray:
    """Rows of blocks: made by the package where it can, else random bytes of which no scale is infinite."""
    generator = np.random.default_rng(int(kind))
    values = generator.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    try:
        made: np.ndarray = gguf.quants.quantize(values, kind)
    except NotImplementedError:
        block, nbytes = gguf.GGML_QUANT_SIZES[kind]
        made = generator.integers(0, 64, (ROWS, COLUMNS // block * nbytes), dtype=np.uint8)
    return made


def same_bits(found: Tensor, expected: Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


def test_the_types_are_the_known_ones() -> None:
    """Fails when the package learns a type, so that somebody looks at it."""
    known = {
        "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS",
        "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4",
    }  # fmt: skip
    assert known <= {kind.name for kind in DECODED}


@pytest.mark.parametrize("kind", DECODED, ids=lambda kind: kind.name)
def test_every_type(tmp_path: Path, kind: Kind) -> None:
    data = stored_bytes(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    assert expected.abs().max() > 0
    source = open_source(write(tmp_path / "m.gguf", data, kind))
    assert source.info(GATE).shape == (ROWS, COLUMNS)
    assert same_bits(source.read(GATE), expected)
    for start in range(ROWS):
        assert same_bits(source.read_rows(GATE, start, start + 1), expected[start : start + 1])
    assert same_bits(source.read_rows(GATE, 2, 5), expected[2:5])
    linears = LinearReader(source)
    module = GATE.removesuffix(".weight")
    assert linears.describe(module, (ROWS, COLUMNS)).kind is StoredKind.PLAIN
    assert same_bits(linears.read_rows(module, 2, 5), expected[2:5])
    assert linears.loss_warning is not None
    assert f" {kind.name} of GGUF" in linears.loss_warning


@pytest.mark.parametrize("kind", EXACT, ids=lambda kind: kind.name)
def test_types_without_blocks(tmp_path: Path, kind: Kind) -> None:
    values = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 100
    dtypes = {
        Kind.F64: np.float64, Kind.I8: np.int8, Kind.I16: np.int16, Kind.I32: np.int32, Kind.I64: np.int64,
    }  # fmt: skip
    data = (
        values.astype(dtypes[kind])
        if kind in dtypes
        else gguf.quants.quantize(values.astype(np.float32), kind)
    )
    source = open_source(write(tmp_path / "m.gguf", data, kind))
    assert torch.equal(source.read(GATE), torch.from_numpy(values).float())
    assert torch.equal(source.read_rows(GATE, 1, 4), torch.from_numpy(values[1:4]).float())
    assert source.lossy_types == ()
    assert LinearReader(source).loss_warning is None


@pytest.mark.parametrize("kind", UNREADABLE, ids=lambda kind: kind.name)
def test_types_that_only_exist_while_llama_cpp_runs(tmp_path: Path, kind: Kind) -> None:
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    data = np.zeros((ROWS, COLUMNS // block * nbytes), np.uint8)
    source = open_source(write(tmp_path / "m.gguf", data, kind))
    with pytest.raises(UserError, match=rf"ffn_gate.*{kind.name}"):
        source.read(GATE)


def test_a_block_of_mxfp4_by_hand(tmp_path: Path) -> None:
    """Scale 2^(byte - 128) for doubled values; low nibbles are elements 0 .. 15, high ones 16 .. 31."""
    block = np.zeros((ROWS, COLUMNS // 32, 17), np.uint8)
    block[2, 0, :3] = (0x80, 0x71, 0x6A)  # 2; elements 0 and 16 are 0.5 and 6, elements 1 and 17 -1 and 4
    source = open_source(write(tmp_path / "m.gguf", block.reshape(ROWS, -1), Kind.MXFP4))
    found = source.read_rows(GATE, 2, 3)[0]
    assert found.nonzero().flatten().tolist() == [0, 1, 16, 17]
    assert found[[0, 1, 16, 17]].tolist() == [1.0, -2.0, 12.0, 8.0]


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_any_rows_of_any_tensor(tmp_path: Path, arch: str) -> None:
    """llama.cpp permutes the rows of q and k of a llama within each head of 16."""
    source = open_source(write_gguf(tmp_path / "m.gguf", make_model(arch), Kind.Q8_0))
    for name in source.names():
        whole = source.read(name)
        count = len(whole)
        for start, stop in (
            (0, count),
            (0, 0),
            (count, count),
            (3, 4),
            (5, 17),
            (15, 33),
            (count - 1, count),
        ):
            if stop <= count:
                assert torch.equal(source.read_rows(name, start, stop), whole[start:stop]), (
                    name,
                    start,
                    stop,
                )
        with pytest.raises(ValueError, match=name):
            source.read_rows(name, 0, count + 1)


def test_rows_alone_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is decoded than the rows asked for, and the heads that they belong to."""
    source = open_source(write_gguf(tmp_path / "m.gguf", make_model("llama"), Kind.Q8_0))
    decoded: list[int] = []
    original = gguf.quants.dequantize

    def counting(data: np.ndarray, kind: Kind) -> np.ndarray:
        decoded.append(len(data))
        result: np.ndarray = original(data, kind)
        return result

    monkeypatch.setattr("gguf.quants.dequantize", counting)
    source.read_rows("model.layers.1.mlp.up_proj.weight", 10, 13)
    source.read_rows("model.layers.1.self_attn.q_proj.weight", 17, 20)
    assert decoded == [3, 16]
