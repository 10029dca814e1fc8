"""KV schemes: what the words mean, what a value costs, and what packing leaves of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.kv_codec import empty_part, pack, requantized, rows_of, store, unpack
from qwen_quantize.formats.kv_scheme import (
    KvElement,
    KvKind,
    KvScaling,
    effective_bits,
    mixed_bits,
    parse_kv_scheme,
)
from qwen_quantize.formats.tables import BF16, E4M3FN, FP16, INT4, INT8

ELEMENTS = {
    "fp16": KvElement(FP16),
    "bf16": KvElement(BF16),
    "fp8 token": KvElement(E4M3FN, KvScaling.TOKEN, 16),
    "int8 token": KvElement(INT8, KvScaling.TOKEN, 16),
    "int8 tile": KvElement(INT8, KvScaling.TOKEN, 10),
    "int4 slice": KvElement(INT4, KvScaling.SLICE, 16),
    "int4 short slice": KvElement(INT4, KvScaling.SLICE, 20),
    "int8 slice": KvElement(INT8, KvScaling.SLICE, 16),
    "int4 span": KvElement(INT4, KvScaling.SPAN, 32),
    "int8 span": KvElement(INT8, KvScaling.SPAN, 32),
}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("fp16", "fp16"),
        ("BF16", "bf16"),
        ("fp8", "fp8,window=0,sinks=0"),
        ("fp8:head", "fp8:head,window=0,sinks=0"),
        ("int8:token,window=64", "int8:token,window=64,sinks=0"),
        ("int4", "int4:128,window=128,sinks=4"),
        ("int4:32, window=0, sinks=0", "int4:32,window=0,sinks=0"),
        ("mixed", "mixed:5.07,window=128,sinks=4"),
        ("mixed:7.6,sinks=8", "mixed:7.6,window=128,sinks=8"),
        ("auto", "auto"),
    ],
)
def test_words_name_one_scheme(text: str, name: str) -> None:
    scheme = parse_kv_scheme(text)
    assert scheme.name == name
    assert parse_kv_scheme(name) == scheme


@pytest.mark.parametrize(
    "text",
    ["", "int5", "fp16:64", "int4:48", "int4:", "int4:x", "fp8:channel", "int8:head", "mixed:4", "mixed:17",
     "mixed:nan", "int4,window=-1", "int4,window=1e3", "int4,tail=3", "bf16,window=4", "int4,window=99999999",
     "auto,sinks=4", "int4:²"],
)  # fmt: skip
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="--kv-cache"):
        parse_kv_scheme(text)


def test_bits_of_published_configurations() -> None:
    """Llama-2-7B's 32 heads of 128: bytes per token of 32 layers, as the usual tables have them."""
    int4 = parse_kv_scheme("int4:128")
    values = 32 * 128
    both = int4.key_element(128).bits_per_token(values) + int4.value_element(128).bits_per_token(values)
    assert 32 * both / 8 == 139_264
    fp16 = parse_kv_scheme("fp16").key_element(128)
    assert 2 * 32 * fp16.bits_per_token(values) / 8 == 524_288
    latent = parse_kv_scheme("fp8").latent_element(512)
    assert latent.bits_per_token(512) / 8 + 64 * 2 == 656  # FlashMLA
    bare = [KvElement(FP16), KvElement(INT4)]
    assert mixed_bits(((0.3, bare[0], 38), (0.7, bare[1], 90))) == pytest.approx(7.6)
    assert effective_bits(3.0, 8192, 128) == pytest.approx(3.2, abs=0.01)
    assert effective_bits(4.25, 100, 128) == 16


@pytest.mark.parametrize("name", ELEMENTS)
def test_packed_bytes_are_those_accounted_for(name: str) -> None:
    element = ELEMENTS[name]
    part = empty_part(element, (3,), 64, 48)
    assert part.nbytes == 3 * 64 * element.bits_per_token(48) / 8
    packed = pack(torch.randn(3, 64, 48), element)
    assert packed.nbytes == part.nbytes
    assert packed.codes.dtype == part.codes.dtype


@pytest.mark.parametrize("name", ELEMENTS)
def test_error_is_at_most_half_a_step(name: str) -> None:
    element = ELEMENTS[name]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 64, 40, generator=generator) * 3 + 5
    error = (requantized(x, element) - x).abs()
    steps = 2**element.format.bits - 1
    pieces = torch.split(x, element.group, dim=-1)
    match element.scaling:
        case KvScaling.SPAN:
            spans = x.view(2, -1, 32, 40)
            step = ((spans.amax(2) - spans.amin(2)) / steps).repeat_interleave(32, 1)
        case KvScaling.SLICE:
            reach = [piece.amax(-1, keepdim=True) - piece.amin(-1, keepdim=True) for piece in pieces]
            step = (
                torch.cat([one.expand_as(piece) for one, piece in zip(reach, pieces, strict=True)], -1)
                / steps
            )
        case KvScaling.TOKEN if element.format is INT8:
            reach = [piece.abs().amax(-1, keepdim=True) for piece in pieces]
            step = (
                torch.cat([one.expand_as(piece) for one, piece in zip(reach, pieces, strict=True)], -1) / 127
            )
        case KvScaling.TOKEN:
            step = x.abs() / 8 + 0.02
        case _:
            step = x.abs() / 128
    # FP16 scales and offsets are a part in 2048 off, at the range's far end too.
    assert (error <= 0.5 * step * 1.02 + 0.008).all()


def test_static_scales_and_a_truncating_cast() -> None:
    element = KvElement(INT8, KvScaling.CHANNEL)
    x = torch.tensor([[[1.9, -1.9, 300.0]]])
    scale = torch.tensor([1.0, 1.0, 2.0])
    assert requantized(x, element, scale).flatten().tolist() == [2, -2, 254]
    cut = CastRule(Rounding.RTZ, Overflow.SATURATE, Subnormals.KEEP)
    assert requantized(x, element, scale, cut).flatten().tolist() == [1, -1, 254]
    with pytest.raises(ValueError, match="no scale"):
        pack(x, element)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.sampled_from(sorted(ELEMENTS)), st.integers(0, 2**32 - 1))
def test_rows_are_packed_on_their_own(spans: int, name: str, seed: int) -> None:
    """What a token becomes does not depend on what is packed with it, its span apart."""
    element = ELEMENTS[name]
    generator = torch.Generator().manual_seed(seed)
    tokens = spans * element.tokens
    x = torch.randn(1, tokens, 24, generator=generator).exp()
    room = empty_part(element, (1,), tokens, 24)
    for begin in range(0, tokens, element.tokens):
        end = begin + element.tokens
        store(rows_of(room, element, begin, end), pack(x[:, begin:end], element))
    torch.testing.assert_close(unpack(room, element), requantized(x, element), rtol=0, atol=0)


def test_constant_and_huge_values_stay_finite() -> None:
    for element in (ELEMENTS["int4 span"], ELEMENTS["int4 slice"], ELEMENTS["int8 token"]):
        for value in (0.0, 7.0, -3e5, 1e-30):
            x = torch.full((1, 32, 16), value)
            found = requantized(x, element)
            assert found.isfinite().all()
            assert (found - x).abs().max() <= max(0.005 * abs(value), 3e5 - 65504 if value < -65504 else 1e-6)


def test_four_bits_need_whole_bytes() -> None:
    with pytest.raises(ValueError, match="whole bytes"):
        empty_part(ELEMENTS["int4 span"], (1,), 32, 7)


def test_kinds_without_an_element() -> None:
    assert parse_kv_scheme("auto").kind is KvKind.AUTO
    with pytest.raises(ValueError, match="decided for each model"):
        parse_kv_scheme("auto").key_element(64)
