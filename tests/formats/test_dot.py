"""Matrix units: the compiled kernel and its torch twin against exact integer arithmetic, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot import emulated_integer_matmul, emulated_matmul, prepare_right
from qwen_quantize.formats.dot_record import (
    DOT_ROUNDINGS,
    DotUnit,
    Joining,
    Order,
    Register,
    SumOverflow,
    TwoStage,
)
from qwen_quantize.formats.dot_reference import dot_reference
from qwen_quantize.formats.dot_units import FMA_FP32, PAIRWISE_FP32, PLAIN_FP32, PUBLISHED_UNITS
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, E5M2, FP16, FP32, INT8
from tests.formats.dot_samples import (
    KINDS,
    any_codes,
    bits,
    check,
    oracle,
    register_values,
    sample,
    span,
    twin,
)

UNITS = {**PUBLISHED_UNITS, "fp32-fma": FMA_FP32, "fp32-pairwise": PAIRWISE_FP32}
each_unit = pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)


def run(unit: DotUnit, kind: str, rows: int, columns: int, seed: int, k: int | None = None) -> None:
    generator = torch.Generator().manual_seed(seed)
    k = span(unit) if k is None else k
    assert isinstance(unit.a_format, FloatFormat)
    assert isinstance(unit.b_format, FloatFormat)
    a = sample(kind, (rows, k), unit.a_format, generator)
    b = sample(kind, (columns, k), unit.b_format, generator)
    c = register_values(kind, (rows, columns), unit, generator)
    check(a, b, c, unit, kind)


@each_unit
def test_published_units(unit: DotUnit) -> None:
    for seed, kind in enumerate(KINDS):
        run(unit, kind, 5, 9, seed)


@each_unit
def test_infinities_and_nan(unit: DotUnit) -> None:
    generator = torch.Generator().manual_seed(3)
    assert isinstance(unit.a_format, FloatFormat)
    assert isinstance(unit.b_format, FloatFormat)
    k = span(unit)
    for share in (0.02, 0.2):
        a, b = (
            sample("mixed", (9, k), unit.a_format, generator),
            sample("normal", (11, k), unit.b_format, generator),
        )
        a = torch.where(
            torch.rand(a.shape, generator=generator) < share, any_codes(a.shape, unit.a_format, generator), a
        )
        b = torch.where(
            torch.rand(b.shape, generator=generator) < share, any_codes(b.shape, unit.b_format, generator), b
        )
        c = register_values("normal", (9, 11), unit, generator)
        c[0, :4] = torch.tensor([math.inf, -math.inf, math.nan, -0.0])
        if unit.a_format.has_infinity:
            a[1, k // 2], b[1, k // 2], b[2, k // 2], b[3, k // 2 - 1] = math.inf, 1.0, 0.0, -math.inf
        check(a, b, c, unit, "special")


def all_parameters(base: DotUnit) -> st.SearchStrategy[DotUnit]:
    """Any ALIGNED unit with the operands of `base`."""

    @st.composite
    def draw(choose: Callable[..., object]) -> DotUnit:
        def one(strategy: st.SearchStrategy[object]) -> object:
            return choose(strategy)

        joining = one(st.sampled_from(Joining))
        fraction_bits = one(st.one_of(st.none(), st.integers(1, 63), st.sampled_from([13, 23, 25, 28, 29])))
        stage = None
        if joining is Joining.TWO_STAGE:
            fraction_bits = one(st.integers(1, 44))
            stage = TwoStage(
                one(st.integers(1, 40)),  # type: ignore[arg-type]
                one(st.integers(1, 40)),  # type: ignore[arg-type]
                one(st.sampled_from(DOT_ROUNDINGS)),  # type: ignore[arg-type]
                one(st.one_of(st.none(), st.integers(0, 40))),  # type: ignore[arg-type]
            )
        half = one(st.booleans())
        return DotUnit(
            "drawn",
            base.a_format,
            base.b_format,
            Order.ALIGNED,
            products=one(st.integers(1, 20)),  # type: ignore[arg-type]
            fraction_bits=fraction_bits,  # type: ignore[arg-type]
            alignment_rounding=one(st.sampled_from(DOT_ROUNDINGS)),  # type: ignore[arg-type]
            products_normalised=one(st.booleans()),  # type: ignore[arg-type]
            products_overflow=one(st.booleans()),  # type: ignore[arg-type]
            lanes=one(st.sampled_from((1, 2))) if stage else 1,  # type: ignore[arg-type]
            joining=joining,  # type: ignore[arg-type]
            two_stage=stage,
            min_alignment_exponent=one(st.one_of(st.none(), st.integers(-140, 0))),  # type: ignore[arg-type]
            register=Register.FP16 if half else Register.FP32,
            mantissa_bits=one(st.integers(1, 10 if half else 23)),  # type: ignore[arg-type]
            final_rounding=one(st.sampled_from(DOT_ROUNDINGS)),  # type: ignore[arg-type]
            overflow=one(st.sampled_from((SumOverflow.INFINITY, SumOverflow.SATURATE))),  # type: ignore[arg-type]
            promotion_interval=one(st.one_of(st.none(), st.integers(1, 30))),  # type: ignore[arg-type]
            flush_inputs=one(st.booleans()),  # type: ignore[arg-type]
            flush_outputs=one(st.booleans()),  # type: ignore[arg-type]
            nan_bits=0x7FFFFFFF,
        )

    return draw()


MIXED_FP8 = DotUnit("fp8", E4M3FN, E5M2, Order.ALIGNED, products=4)
drawn_units = st.one_of(
    *(
        all_parameters(unit)
        for unit in (PUBLISHED_UNITS["a100-bf16"], PUBLISHED_UNITS["v100-fp16"], MIXED_FP8)
    )
)


@settings(deadline=None, max_examples=120)
@given(drawn_units, st.sampled_from(KINDS), st.integers(0, 1 << 30), st.integers(0, 45))
def test_any_parameters(unit: DotUnit, kind: str, seed: int, k: int) -> None:
    run(unit, kind, 3, 5, seed, k)


@pytest.mark.slow
@settings(deadline=None, max_examples=3000)
@given(drawn_units, st.sampled_from(KINDS), st.integers(0, 1 << 30), st.integers(0, 70))
def test_any_parameters_at_length(unit: DotUnit, kind: str, seed: int, k: int) -> None:
    run(unit, kind, 3, 5, seed, k)


@pytest.mark.slow
@each_unit
def test_a_hundred_thousand_dot_products(unit: DotUnit) -> None:
    for seed, kind in enumerate(KINDS):
        run(unit, kind, 130, 111, seed + 100)


def test_promotion_starts_the_register_anew() -> None:
    unit = PUBLISHED_UNITS["hopper-e4m3fn-promoted"]
    run(unit, "normal", 4, 6, 1, 300)
    # 256 + 2^-9 * 2^-9: lost in a register of 13 bits, kept by the float32 sum in the next 128.
    a = torch.zeros(1, 160)
    a[0, 0], a[0, 130] = 16.0, 0.015625
    b = a.clone()
    assert emulated_matmul(a, b, unit).item() == 256 + 2.0**-12
    assert emulated_matmul(a, b, replace(unit, promotion_interval=None)).item() == 256


def test_shapes_and_prepared_operands() -> None:
    unit = PUBLISHED_UNITS["hopper-fp16"]
    generator = torch.Generator().manual_seed(5)
    for rows, columns, k in (
        (1, 1, 1),
        (1, 33, 40),
        (17, 64, 16),
        (9, 31, 7),
        (0, 3, 4),
        (3, 0, 4),
        (3, 2, 0),
    ):
        a, b = (sample("normal", (n, k), FP16, generator) for n in (rows, columns))
        c = torch.randn(rows, columns, generator=generator)
        assert torch.equal(bits(emulated_matmul(a, b, unit, c)), oracle(a, b, c, unit).view(rows, columns))
        prepared = prepare_right(b, unit)
        assert torch.equal(emulated_matmul(a, prepared, unit), emulated_matmul(a, b, unit))
    many, one = torch.get_num_threads(), 1
    a, b = sample("normal", (70, 90), FP16, generator), sample("normal", (90, 90), FP16, generator)
    first = emulated_matmul(a, b, unit)
    torch.set_num_threads(one)
    try:
        assert torch.equal(first, emulated_matmul(a, b, unit))
    finally:
        torch.set_num_threads(many)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(6)
    a, b = sample("mixed", (20, 70), E4M3FN, generator), sample("mixed", (40, 70), E4M3FN, generator)
    unit = PUBLISHED_UNITS["hopper-e4m3fn"]
    native = emulated_matmul(a, b, unit)
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", "0")
    assert torch.equal(bits(native), bits(emulated_matmul(a, b, unit)))


def test_a_sum_that_overflows_on_the_way() -> None:
    half = PUBLISHED_UNITS["v100-fp16-fp16-sum"]
    a = torch.tensor([[192.0, 192.0, 0, 0, -160.0]])  # probe 7: 3 * 2^15, then -2.5 * 2^15 in the next block
    b = torch.tensor([[256.0, 256.0, 0, 0, 512.0]])
    assert emulated_matmul(a, b, half).item() == math.inf
    assert emulated_matmul(a, b, PUBLISHED_UNITS["v100-fp16"]).item() == 16384
    assert emulated_matmul(a, b, replace(half, overflow=SumOverflow.SATURATE)).item() == 65504 - 81920
    assert twin(a, b, torch.zeros(1, 1), half).view(torch.float32).item() == math.inf


def test_plain_units_are_torchs_product() -> None:
    generator = torch.Generator().manual_seed(7)
    a, b = torch.randn(5, 30, generator=generator), torch.randn(8, 30, generator=generator)
    c = torch.randn(5, 8, generator=generator)
    assert PLAIN_FP32.is_plain
    assert torch.equal(emulated_matmul(a, b, PLAIN_FP32), a @ b.T)
    assert torch.equal(emulated_matmul(a, b, PLAIN_FP32, c), a @ b.T + c)
    with pytest.raises(ValueError, match="does not say how it adds"):
        dot_reference([1.0], [1.0], PLAIN_FP32)


def test_integers_wrap_or_saturate() -> None:
    wrap = DotUnit("int8", INT8, INT8, Order.ALIGNED, register=Register.INT32, overflow=SumOverflow.WRAP)
    saturate = replace(wrap, overflow=SumOverflow.SATURATE, products=64)
    k = 133_145  # the first K at which 127 * 127 passes 2^31 - 1
    a = torch.full((1, k), 127.0)
    assert emulated_integer_matmul(a, a, wrap).item() == k * 127 * 127 - (1 << 32)
    assert emulated_integer_matmul(a, a, saturate).item() == (1 << 31) - 1
    up = torch.full((1, 64 * 2100), 127.0)
    back = torch.cat((up, -up), 1)  # saturated on the way up, so that it does not come back to zero
    same = torch.cat((up, up), 1)
    assert emulated_integer_matmul(back, same, wrap).item() == 0
    assert emulated_integer_matmul(back, same, saturate).item() < 0
    generator = torch.Generator().manual_seed(8)
    a, b = (torch.randint(-128, 128, (4, 3000), generator=generator).float() for _ in range(2))
    for unit in (wrap, saturate, replace(saturate, products=None)):
        for scale in (1, 1 << 28):
            c = torch.randint(-4, 5, (4, 4), generator=generator).to(torch.int32) * scale
            found = emulated_integer_matmul(a, b, unit, c)
            expected = [
                [dot_reference(x, y, unit, s) for y, s in zip(b.tolist(), row, strict=True)]
                for x, row in zip(a.tolist(), c.tolist(), strict=True)
            ]
            assert torch.equal(found.double(), torch.tensor(expected, dtype=torch.float64))
            assert torch.equal(emulated_matmul(a, b, unit, c), found.float())


def test_refusals() -> None:
    fp16 = PUBLISHED_UNITS["v100-fp16"]
    a = torch.ones(2, 3)
    with pytest.raises(ValueError, match="more mantissa bits than fp16"):
        emulated_matmul(a * 1.0001, a, fp16)
    with pytest.raises(ValueError, match="a has 3 columns and b has 2"):
        emulated_matmul(a, a[:, :2], fp16)
    with pytest.raises(ValueError, match="must be float32"):
        emulated_matmul(a.double(), a, fp16)
    with pytest.raises(ValueError, match="prepared for unit v100-fp16"):
        emulated_matmul(a, prepare_right(a, fp16), PUBLISHED_UNITS["hopper-fp16"])
    with pytest.raises(ValueError, match="c must be of shape"):
        emulated_matmul(a, a, fp16, a)
    int8 = DotUnit("int8", INT8, INT8, Order.ALIGNED, register=Register.INT32, overflow=SumOverflow.WRAP)
    with pytest.raises(ValueError, match="not int8"):
        emulated_matmul(a * 1.5, a, int8)
    with pytest.raises(ValueError, match="does not add integers"):
        emulated_integer_matmul(a, a, fp16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"products": None}, "needs products"),
        ({"products": 65}, "1 .. 64"),
        ({"fraction_bits": 64}, "1 .. 63"),
        ({"mantissa_bits": 24}, "24 mantissa bits"),
        ({"register": Register.FP16}, "23 mantissa bits"),
        ({"register": Register.INT32}, "two integer operands"),
        ({"joining": Joining.TWO_STAGE}, "two_stage must be given"),
        ({"lanes": 2}, "lanes must be 1"),
        ({"alignment_rounding": Rounding.ODD}, "rounding odd"),
        ({"order": Order.FMA}, "float32 arithmetic"),
        ({"overflow": SumOverflow.WRAP}, "cannot overflow by wrap"),
        ({"promotion_interval": 0}, "must be positive"),
    ],
)
def test_impossible_units(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(PUBLISHED_UNITS["v100-fp16"], **changes)  # type: ignore[arg-type]


def test_names_and_sources_do_not_distinguish_units() -> None:
    unit = PUBLISHED_UNITS["v100-fp16"]
    assert replace(unit, name="other", source="elsewhere") == unit
    assert all(unit.source for unit in PUBLISHED_UNITS.values())


def test_float32_orders_by_hand() -> None:
    one = torch.ones(1, 3)
    x = torch.tensor([[1.0, 2.0**-24, 2.0**-24]])
    assert emulated_matmul(x, one, FMA_FP32).item() == 1.0  # each half of a last place is lost alone
    y = torch.tensor([[2.0**-24, 2.0**-24, 1.0]])
    assert emulated_matmul(y, one, FMA_FP32).item() == 1 + 2.0**-23
    fused = torch.tensor([[-1.0, 1 + 2.0**-12]]), torch.tensor([[1 + 2.0**-11, 1 + 2.0**-12]])
    assert emulated_matmul(*fused, FMA_FP32).item() == 2.0**-24  # products are not rounded
    assert emulated_matmul(*fused, PAIRWISE_FP32).item() == 0.0
    assert FP32 is FMA_FP32.a_format
    assert BF16 is PUBLISHED_UNITS["mi100-bf16"].a_format
