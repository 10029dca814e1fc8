"""Every cast against the exact reference wherever a decision is made, native and torch twin alike."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import code_dtype, decode, decode_table, encode
from qwen_quantize.formats.kernel_calls import native_library
from qwen_quantize.formats.reference import decode_scalar, encode_scalar
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.seeds import draw_seed
from qwen_quantize.formats.spec import Format, IntFormat, TableFormat
from qwen_quantize.formats.tables import BF16, E5M2, E8M0, FORMATS, FP16, FP32, HIF8
from qwen_quantize.formats.twin import random_words

NARROW = [fmt for fmt in FORMATS.values() if fmt.bits <= 8]
DETERMINISTIC = [r for r in Rounding if r not in (Rounding.STOCHASTIC, Rounding.HYBRID)]


def codes_of(fmt: Format) -> list[int]:
    if isinstance(fmt, IntFormat):
        return list(range(fmt.minimum, fmt.maximum + 1))
    return list(range(1 << fmt.bits))


def decision_points(fmt: Format) -> torch.Tensor:
    """All values, midpoints and quarter points with float32 neighbours, and special values; both signs."""
    magnitudes = sorted({abs(v) for c in codes_of(fmt) if math.isfinite(v := decode_scalar(c, fmt))} | {0.0})
    magnitudes += [fmt.beyond_max, 2 * fmt.beyond_max, 1024 * fmt.beyond_max]
    points = set(magnitudes)
    for low, high in itertools.pairwise(magnitudes):
        points |= {low + (high - low) * part for part in (0.25, 0.5, 0.75)}
    smallest = magnitudes[1]
    points |= {smallest * 2.0**-i for i in (2, 3, 7, 8, 9, 10, 11, 30)} | {
        1e-45,
        2.0**-126,
        2.0**-127,
        2.0**-128,
    }
    with np.errstate(over="ignore", under="ignore"):
        exact = np.array(sorted(points)).astype(np.float32)
    exact = exact[np.isfinite(exact)]
    near = np.concatenate([exact, np.nextafter(exact, np.float32(0)), np.nextafter(exact, np.float32(3e38))])
    if isinstance(fmt, TableFormat):  # HYBRID reads the low 14 bits of the float32, so give them many values
        noise = near.view(np.int32) ^ np.random.default_rng(1).integers(0, 1 << 15, near.size, dtype=np.int32)
        near = np.concatenate([near, noise.view(np.float32)])
    positive = np.unique(np.concatenate([near, np.array([np.inf, np.nan, 3.4028235e38], np.float32)]))
    return torch.from_numpy(np.concatenate([positive, -positive]))


def rules(fmt: Format) -> list[CastRule]:
    roundings = [*DETERMINISTIC, *([Rounding.HYBRID] if isinstance(fmt, TableFormat) else [])]
    return [CastRule(*parts) for parts in itertools.product(roundings, Overflow, Subnormals)]


def both_paths(monkeypatch: pytest.MonkeyPatch, function, *arguments, **named) -> torch.Tensor:
    """The result of the native path, after checking that the torch twin gives the same bits."""
    assert native_library() is not None, "these tests need a C compiler"
    native = function(*arguments, **named)
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    assert native_library() is None
    twin = function(*arguments, **named)
    monkeypatch.delenv("QWEN_QUANTIZE_NATIVE")
    as_bits = {torch.float32: torch.int32, torch.float64: torch.int64}.get(native.dtype, native.dtype)
    different = native.view(as_bits) != twin.view(as_bits)
    assert native.dtype == twin.dtype
    assert not bool(different.any()), (
        f"{int(different.sum())} differ: {native[different][:5]} {twin[different][:5]}"
    )
    return native


def assert_codes(
    fmt: Format, rule: CastRule, x: torch.Tensor, found: torch.Tensor, expected: list[int]
) -> None:
    wrong = [
        (value, hex(code), hex(right))
        for value, code, right in zip(x.tolist(), found.tolist(), expected, strict=True)
        if code != right
    ]
    assert not wrong, f"{fmt.name} {rule}: {len(wrong)} wrong (x, found, expected), first {wrong[:5]}"


@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_every_decision_against_the_reference(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x = decision_points(fmt)
    values = [float(v) for v in x]
    for rule in rules(fmt):
        found = both_paths(monkeypatch, encode, x, fmt, rule)
        assert found.dtype == code_dtype(fmt)
        assert_codes(fmt, rule, x, found, [encode_scalar(v, fmt, rule) for v in values])
        quantized = both_paths(monkeypatch, quantize_values, x, fmt, rule)
        assert torch.equal(quantized.view(torch.int32), decode(found, fmt).view(torch.int32)), (
            fmt.name,
            rule,
        )


@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_nan_as_zero(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0, -0.0, 1.0])
    for overflow in Overflow:
        rule = CastRule(Rounding.RNE, overflow, Subnormals.KEEP, NanResult.ZERO)
        found = both_paths(monkeypatch, encode, x, fmt, rule)
        assert_codes(fmt, rule, x, found, [encode_scalar(float(v), fmt, rule) for v in x])
        quantized = both_paths(monkeypatch, quantize_values, x, fmt, rule)
        assert torch.equal(quantized.view(torch.int32), decode(found, fmt).view(torch.int32)), (
            fmt.name,
            rule,
        )


@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_stochastic_follows_the_random_words(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    x = decision_points(fmt)
    for overflow in Overflow:
        rule = CastRule(Rounding.STOCHASTIC, overflow, Subnormals.KEEP)
        seed = draw_seed(rule, torch.Generator().manual_seed(5))
        words = random_words(seed, 0, x.numel(), x.device).tolist()

        def encode_once(rule: CastRule = rule) -> torch.Tensor:
            return encode(x, fmt, rule, generator=torch.Generator().manual_seed(5))

        found = both_paths(monkeypatch, encode_once)
        expected = [encode_scalar(float(v), fmt, rule, random_word=w) for v, w in zip(x, words, strict=True)]
        assert_codes(fmt, rule, x, found, expected)


@pytest.mark.parametrize("fmt", [FP16, BF16], ids=lambda fmt: fmt.name)
def test_sixteen_bit_formats_on_a_sample(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    edges = [0, 1, 2, 3, fmt.max_code - 1, fmt.max_code, (1 << fmt.mantissa_bits) - 1, 1 << fmt.mantissa_bits]
    low = np.array([*edges, *rng.integers(0, fmt.max_code, 40)])
    exact = np.array([decode_scalar(int(c), fmt) for c in low], np.float32)
    up = np.array([decode_scalar(min(int(c) + 1, fmt.max_code), fmt) for c in low], np.float32)
    middle = exact + (up - exact) / 2
    edge = np.array(
        [fmt.max + (fmt.beyond_max - fmt.max) / 2, 3.4e38, np.inf, np.nan, 1e-45, 1e-39], np.float32
    )
    positive = np.concatenate(
        [exact, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(3e38)), edge]
    )
    x = torch.from_numpy(np.concatenate([positive, -positive]).astype(np.float32))
    for rule in rules(fmt):
        found = encode(x, fmt, rule).to(torch.int64) & 0xFFFF
        assert_codes(fmt, rule, x, found, [encode_scalar(float(v), fmt, rule) for v in x])
        quantized = both_paths(monkeypatch, quantize_values, x, fmt, rule)
        decoded = decode(encode(x, fmt, rule), fmt)
        assert torch.equal(quantized.isnan(), decoded.isnan())  # the payload may differ
        assert torch.equal(quantized[~x.isnan()].view(torch.int32), decoded[~x.isnan()].view(torch.int32))


def test_fp32_keeps_every_value_and_obeys_the_rule() -> None:
    x = torch.tensor([0.0, -0.0, 1e-45, -1e-39, 1.5, math.inf, -math.inf, math.nan])
    keep = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
    assert torch.equal(encode(x, FP32, keep), x.view(torch.int32))
    strict = CastRule(Rounding.RNE, Overflow.SATURATE, Subnormals.FLUSH, NanResult.ZERO)
    expected = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.5, FP32.max, -FP32.max, 0.0])
    assert torch.equal(quantize_values(x, FP32, strict).view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("fmt", NARROW, ids=lambda fmt: fmt.name)
def test_all_codes_decode_as_the_reference_says(fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = torch.tensor(codes_of(fmt), dtype=code_dtype(fmt))
    values = both_paths(monkeypatch, decode, codes, fmt)
    expected = torch.tensor([decode_scalar(int(code), fmt) for code in codes])
    assert torch.equal(values.nan_to_num(-1e9), expected.nan_to_num(-1e9))
    assert torch.equal(torch.signbit(values[values == 0]), torch.signbit(expected[expected == 0]))
    table = decode_table(fmt)
    assert table.shape == (1 << fmt.bits,)
    index = codes.to(torch.int64) & ((1 << fmt.bits) - 1)
    assert torch.equal(table[index].nan_to_num(-1e9), expected.nan_to_num(-1e9))


def test_large_tensors_and_thread_counts_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0)) * 100
    rule = CastRule(Rounding.STOCHASTIC, Overflow.SATURATE, Subnormals.KEEP)

    def cast() -> torch.Tensor:
        return encode(x.t(), E5M2, rule, generator=torch.Generator().manual_seed(3))

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = both_paths(monkeypatch, cast)
        torch.set_num_threads(3)
        assert torch.equal(one, cast())
    finally:
        torch.set_num_threads(threads)
    assert one.shape == (70_001, 3)


def test_refusals() -> None:
    x = torch.zeros(4)
    hybrid = CastRule(Rounding.HYBRID, Overflow.SATURATE, Subnormals.KEEP)
    for fmt in FORMATS.values():
        if fmt is not HIF8:
            with pytest.raises(ValueError, match="hybrid"):
                encode(x, fmt, hybrid)
    with pytest.raises(ValueError, match="generator"):
        encode(x, E5M2, CastRule(Rounding.STOCHASTIC, Overflow.SATURATE, Subnormals.KEEP))
    with pytest.raises(ValueError, match="float32"):
        encode(x.to(torch.bfloat16), E5M2, hybrid)
    with pytest.raises(ValueError, match="uint8"):
        decode(torch.zeros(3, dtype=torch.int64), E5M2)
    with pytest.raises(ValueError, match="out must be"):
        quantize_values(
            x, E5M2, CastRule(Rounding.RNE, Overflow.SATURATE, Subnormals.KEEP), out=torch.zeros(5)
        )


def test_quantize_in_place_and_empty() -> None:
    rule = CastRule(Rounding.RNE, Overflow.SATURATE, Subnormals.KEEP)
    x = torch.randn(1000, generator=torch.Generator().manual_seed(2))
    expected = quantize_values(x, E5M2, rule)
    assert quantize_values(x, E5M2, rule, out=x) is x
    assert torch.equal(x, expected)
    assert encode(torch.zeros(0, 3), E5M2, rule).shape == (0, 3)
    assert encode(torch.zeros(()), E8M0, rule).shape == ()
