"""What decides the bits of a matrix product: the record `DotUnit`. Its meaning is described in dot.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.spec import FloatFormat, IntFormat

MOST_PRODUCTS = 64  # as in dot.c
DOT_ROUNDINGS = (Rounding.RNE, Rounding.RNA, Rounding.RTZ, Rounding.FLOOR, Rounding.CEIL)
# As many fraction bits as still add exactly in a double, 64 products at a time.
_TWO_STAGE_FRACTION_BITS = 44


class Order(StrEnum):
    """In which order, and with which operation, the products of a dot product come together."""

    ALIGNED = "aligned"  # blocks of `products`, each one aligned sum, chained through the register
    FMA = "fma"  # a float32 fused multiply-add for each product
    PAIRWISE = "pairwise"  # products rounded to float32; blocks of `products` (None: all) added as a tree
    UNSPECIFIED = "unspecified"  # float32 additions in whatever order is fastest: nothing is known


class Joining(StrEnum):
    """Where the sum so far joins the products of an ALIGNED step."""

    WITH_PRODUCTS = "with_products"  # it is one of the aligned terms
    TWO_STAGE = "two_stage"  # the products' sum is aligned with it a second time, see `TwoStage`
    SEPARATE = "separate"  # the products' sum is rounded to the register, and then added to it and rounded


class Register(StrEnum):
    """The type that sums are kept in."""

    FP32 = "fp32"
    FP16 = "fp16"
    INT32 = "int32"


class SumOverflow(StrEnum):
    """What becomes of a sum beyond the largest value of the register."""

    INFINITY = "infinity"  # under every rounding, truncation included
    SATURATE = "saturate"  # the largest value of its sign, after every step
    WRAP = "wrap"  # integers only: modulo 2^32


@dataclass(frozen=True, slots=True)
class TwoStage:
    """The second alignment of CDNA3: products' sum and register to their common exponent, by `rounding`.

    `rounding` also aligns the sums of two lanes with each other. A register more than `dropped_below`
    exponents below the common one counts as zero.
    """

    sum_fraction_bits: int
    register_fraction_bits: int
    rounding: Rounding
    dropped_below: int | None = None


@dataclass(frozen=True, slots=True)
class DotUnit:
    """A matrix unit for one pair of operand types; dot.py says how its fields act.

    `products` is the number of products that are added together (L). `lanes` = 2 sums the even and the odd
    products of a block apart (TWO_STAGE only). With `promotion_interval`, the register starts at zero for
    every so many products, and is added to a float32 sum by a float32 addition; c starts that sum.
    `products_overflow`: a product of 2^128 or more is an infinity. `input_rounding`: inputs are raw float32 and
    the unit rounds them; otherwise they must be representable. `flush_inputs` makes subnormal inputs, and c,
    +0; `flush_outputs` makes every subnormal result of an addition a zero of its sign. `mantissa_bits` may be
    fewer than the register stores. `nan_bits` is the float32 pattern of every NaN result.
    """

    name: str = field(compare=False)
    a_format: FloatFormat | IntFormat
    b_format: FloatFormat | IntFormat
    order: Order
    products: int | None = None
    fraction_bits: int | None = None
    alignment_rounding: Rounding = Rounding.RTZ
    products_normalised: bool = False
    products_overflow: bool = False
    lanes: int = 1
    joining: Joining = Joining.WITH_PRODUCTS
    two_stage: TwoStage | None = None
    min_alignment_exponent: int | None = None
    register: Register = Register.FP32
    mantissa_bits: int = 23
    final_rounding: Rounding = Rounding.RNE
    overflow: SumOverflow = SumOverflow.INFINITY
    promotion_interval: int | None = None
    input_rounding: Rounding | None = None
    flush_inputs: bool = False
    flush_outputs: bool = False
    nan_bits: int = 0x7FC00000
    source: str = field(default="", compare=False)  # who published these numbers

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise ValueError(f"dot unit {self.name}: {problem}")

    def _problems(self) -> Iterator[str]:
        integers = {isinstance(fmt, IntFormat) for fmt in (self.a_format, self.b_format)}
        integer_sum = self.register is Register.INT32
        if integers != {integer_sum}:
            yield "two integer operands need an int32 register, and only they can have one"
        if self.overflow is (SumOverflow.INFINITY if integer_sum else SumOverflow.WRAP):
            yield f"a register of type {self.register} cannot overflow by {self.overflow}"
        if self.products is not None and not 1 <= self.products <= MOST_PRODUCTS:
            yield f"products must be 1 .. {MOST_PRODUCTS}, not {self.products}"
        if self.promotion_interval is not None and self.promotion_interval < 1:
            yield f"promotion_interval must be positive, not {self.promotion_interval}"
        if integer_sum:
            return
        if self.order is not Order.ALIGNED:
            if not self._is_float32():
                yield f"order {self.order} is float32 arithmetic, rounded to nearest, and has no alignment"
            return
        if self.products is None:
            yield "an aligned sum needs products"
        if self.fraction_bits is not None and not 1 <= self.fraction_bits <= 63:
            yield f"fraction_bits must be 1 .. 63, not {self.fraction_bits}"
        if not 1 <= self.mantissa_bits <= (10 if self.register is Register.FP16 else 23):
            yield f"a register of type {self.register} has no {self.mantissa_bits} mantissa bits"
        if (self.two_stage is not None) != (self.joining is Joining.TWO_STAGE):
            yield "two_stage must be given for joining two_stage, and for no other"
        if self.two_stage is not None and (self.fraction_bits or 64) > _TWO_STAGE_FRACTION_BITS:
            yield f"a two-stage sum needs fraction_bits, {_TWO_STAGE_FRACTION_BITS} at most"
        if self.lanes not in (1, 2) or (self.lanes == 2 and self.two_stage is None):
            yield "lanes must be 1, or 2 with joining two_stage"
        used = [self.alignment_rounding, self.final_rounding]
        used += [] if self.two_stage is None else [self.two_stage.rounding]
        for rounding in used:
            if rounding not in DOT_ROUNDINGS:
                yield f"rounding {rounding} is not one of {', '.join(DOT_ROUNDINGS)}"

    def _is_float32(self) -> bool:
        return (
            self.fraction_bits is None
            and self.two_stage is None
            and (self.register, self.mantissa_bits) == (Register.FP32, 23)
            and (self.final_rounding, self.overflow) == (Rounding.RNE, SumOverflow.INFINITY)
        )

    @property
    def is_plain(self) -> bool:
        """Whether any float32 product of matrices will do: no bits are known, or there are none to lose."""
        return self.order is Order.UNSPECIFIED

    @property
    def min_exponent(self) -> int:
        """The exponent of the register's smallest normal value."""
        return -14 if self.register is Register.FP16 else -126

    @property
    def max_value(self) -> float:
        """The largest finite value of the register."""
        top = 15 if self.register is Register.FP16 else 127
        return 2.0**top * (2 - 2.0**-self.mantissa_bits)
