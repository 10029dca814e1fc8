"""Packings: the golden bytes that other tools write, and every packing with its inverse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.formats import packing
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.codec import encode
from qwen_quantize.formats.scales import exponents_to_e8m0
from qwen_quantize.formats.tables import E2M1, E4M3FN


def words(tensor: torch.Tensor) -> list[str]:
    return [f"{int(word) & 0xFFFFFFFF:08X}" for word in tensor.flatten()]


def test_golden_codes() -> None:
    fp4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -1.0, -6.0])
    assert encode(fp4, E2M1, RNE_SATURATE).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9, 0xA, 0xF]
    fp8 = torch.tensor([1.0, 448.0, -448.0, 2.0**-9, 240.0])
    assert encode(fp8, E4M3FN, RNE_SATURATE).tolist() == [0x38, 0x7E, 0xFE, 0x01, 0x77]


def test_golden_bytes() -> None:
    pair = encode(torch.tensor([0.5, -1.0]), E2M1, RNE_SATURATE)
    assert packing.pack_nibble_pairs(pair).tolist() == [0xA1]
    row = torch.arange(-8, 8, dtype=torch.int8)[None]
    assert words(packing.pack_offset_words(row, 4)) == ["76543210", "FEDCBA98"]
    assert words(packing.pack_awq(torch.arange(8, dtype=torch.uint8)[:, None])) == ["75316420"]
    eights = torch.full((8, 1), 8, dtype=torch.uint8)
    assert words(packing.pack_gptq_zeros(eights, 4, version=1)) == ["77777777"]
    assert words(packing.pack_gptq_zeros(eights, 4, version=2)) == ["88888888"]
    assert packing.pack_row_pairs(torch.tensor([[-8], [7]], dtype=torch.int8)).tolist() == [[0x78]]
    scales = torch.tensor([0.0123, -0.0123])
    assert packing.pack_deq_scale(scales).tolist() == [1011451376, -1136032272]
    exponents = exponents_to_e8m0(torch.tensor([0, 1, -1, 2], dtype=torch.int32))
    assert words(packing.pack_exponent_words(exponents)) == ["817E807F"]


def test_golden_gguf_block() -> None:
    values = torch.zeros(1, 32)
    values[0, 0], values[0, 1], values[0, 16], values[0, 17] = 0.5, -1.0, 6.0, 4.0
    codes = encode(values, E2M1, RNE_SATURATE)
    block = packing.pack_gguf_mxfp4(codes, torch.tensor([[127]], dtype=torch.uint8))
    assert bytes(block[0].tolist()) == bytes.fromhex("7f716a") + bytes(14)
    back, scale = packing.unpack_gguf_mxfp4(block)
    assert torch.equal(back, codes)
    assert scale.tolist() == [[127]]


def test_gguf_mxfp4_agrees_with_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    codes = torch.randint(0, 16, (3, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    block = packing.pack_gguf_mxfp4(codes, torch.full((3, 3), 127, dtype=torch.uint8))
    theirs = gguf.quants.dequantize(block.numpy(), gguf.GGMLQuantizationType.MXFP4)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    ours = magnitudes[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    assert torch.equal(torch.from_numpy(theirs), ours)


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 1 << 30))
def test_every_packing_has_its_inverse(rows: int, units: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator).to(torch.uint8)

    nibbles = draw(16, 2 * rows, 64 * units)
    signed = packing.signed_nibbles(nibbles)
    assert torch.equal(packing.unpack_nibble_pairs(packing.pack_nibble_pairs(nibbles)), nibbles)
    assert torch.equal(packing.pack_nibble_pairs(signed), packing.pack_nibble_pairs(nibbles))
    for block in (32, 64):
        assert torch.equal(
            packing.unpack_nibble_halves(packing.pack_nibble_halves(nibbles, block), block), nibbles
        )
    assert torch.equal(
        packing.signed_nibbles(packing.unpack_row_pairs(packing.pack_row_pairs(signed))), signed
    )
    for bits in (2, 3, 4, 5, 8):
        codes = draw(1 << bits, rows, 7 * units)
        packed = packing.pack_words(codes, bits)
        assert packed.shape == (rows, -(-7 * units * bits // 32))
        assert torch.equal(packing.unpack_words(packed, bits, 7 * units), codes)
        whole = draw(1 << bits, 32 * units, 32 * rows)
        assert torch.equal(packing.unpack_gptq_weight(packing.pack_gptq_weight(whole, bits), bits), whole)
        for version in (1, 2):
            zeros = packing.pack_gptq_zeros(whole, bits, version=version)
            assert torch.equal(packing.unpack_gptq_zeros(zeros, bits, version=version), whole)
    eights = draw(256, rows, 4 * units)
    integers = (eights.to(torch.int16) - 128).to(torch.int8)
    assert torch.equal(
        packing.unpack_offset_words(packing.pack_offset_words(integers, 8), 8, 4 * units), integers
    )
    assert torch.equal(packing.unpack_exponent_words(packing.pack_exponent_words(eights)), eights)
    columns = draw(16, 8 * units, rows)
    assert torch.equal(packing.unpack_awq(packing.pack_awq(columns)), columns)
    scale = torch.randn(rows, generator=generator)
    assert torch.equal(packing.unpack_deq_scale(packing.pack_deq_scale(scale)), scale)
    blocks, bytes_ = draw(16, rows, 32 * units), draw(256, rows, units)
    codes, scales = packing.unpack_gguf_mxfp4(packing.pack_gguf_mxfp4(blocks, bytes_))
    assert torch.equal(codes, blocks)
    assert torch.equal(scales, bytes_)


def test_packing_refusals() -> None:
    odd = torch.zeros(3, 3, dtype=torch.uint8)
    with pytest.raises(ValueError, match="even length"):
        packing.pack_nibble_pairs(odd)
    with pytest.raises(ValueError, match="even number of rows"):
        packing.pack_row_pairs(odd)
    with pytest.raises(ValueError, match=r"0 \.\. 15"):
        packing.pack_nibble_pairs(odd[:, :2] + 16)
    with pytest.raises(ValueError, match="no multiple of 32"):
        packing.pack_nibble_halves(odd)
    with pytest.raises(ValueError, match="version 3"):
        packing.pack_gptq_zeros(torch.zeros(8, 1, dtype=torch.uint8), 4, version=3)
    with pytest.raises(ValueError, match="do not fill"):
        packing.unpack_words(torch.zeros(2, dtype=torch.int32), 4, 8)
