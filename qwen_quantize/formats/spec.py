"""What a number format is: one small record, from which everything else is derived.

Three kinds exist. A `FloatFormat` is sign, exponent and mantissa with a bias; a `TableFormat` lists its
values (HiF8, whose precision tapers); an `IntFormat` is a range of integers. Two tables can never disagree,
because largest value, smallest normal and so on are computed from the record and written down nowhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FloatFormat:
    """A binary floating-point format: bit 0 is the last mantissa bit, the sign (if any) is the top bit.

    `nan_codes` lists the codes that are NaN, the one that a cast writes first. In a format with infinities
    every magnitude above infinity is NaN, so listing the written one is enough.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool
    nan_codes: tuple[int, ...]
    signed: bool = True
    has_zero: bool = True  # E8M0 has none: its code 0 is 2^-127, and it has no subnormals either
    has_negative_zero: bool = True

    @property
    def bits(self) -> int:
        """Storage bits of one code."""
        return self.exponent_bits + self.mantissa_bits + int(self.signed)

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code; 0 in an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def infinity_code(self) -> int | None:
        """The code of positive infinity."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits if self.has_infinity else None

    @property
    def nan_code(self) -> int | None:
        """The NaN that a cast writes (without sign)."""
        return self.nan_codes[0] if self.nan_codes else None

    @property
    def nan_keeps_sign(self) -> bool:
        """Whether NaN exists with both signs; FNUZ formats have one, in the place of negative zero."""
        return bool(self.sign_mask and self.nan_codes and self.nan_codes[0] != self.sign_mask)

    def is_nan(self, code: int) -> bool:
        """Whether `code` is one of the NaNs."""
        infinity = self.infinity_code
        if infinity is not None:
            return (code & (self.sign_mask - 1)) > infinity
        return code in self.nan_codes

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        infinity = self.infinity_code
        if infinity is not None:
            return infinity - 1
        code = (1 << (self.exponent_bits + self.mantissa_bits)) - 1
        while code in self.nan_codes:
            code -= 1
        return code

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value: E4M3FN 8, E2M1 2, as the MX scale rules use it."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @property
    def max(self) -> float:
        """The largest finite value."""
        fraction = self.max_code & ((1 << self.mantissa_bits) - 1)
        return math.ldexp((1 << self.mantissa_bits) + fraction, self.emax - self.mantissa_bits)

    @property
    def beyond_max(self) -> float:
        """The value that would follow `max` if the exponents went on: where overflow is decided.

        FP32's is 2^128, a double.
        """
        return self.max + math.ldexp(1.0, self.emax - self.mantissa_bits)

    @property
    def min_normal(self) -> float:
        """The smallest positive normal value."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value; the smallest normal one where there are no subnormals."""
        return math.ldexp(1.0, self.min_exponent - (self.mantissa_bits if self.has_zero else 0))

    @property
    def mantissa_bits_at_max(self) -> int:
        """Mantissa bits in the binade of `max`, the width at which the EVEN scale rule rounds."""
        return self.mantissa_bits


@dataclass(frozen=True, slots=True)
class TableFormat:
    """An eight-bit format given by the values of its 256 codes (NaN and infinities included).

    The values of each binade must be equally spaced and a power of two in number; only the spacing may change
    from binade to binade. Code and negative code differ in bit 7. There is no negative zero.
    """

    name: str
    values: tuple[float, ...] = field(repr=False)
    beyond_max: float  # see FloatFormat.beyond_max; a table cannot tell it
    min_normal: float  # below it the precision is that of subnormals, and a flushing unit gives zero

    def __post_init__(self) -> None:
        if len(self.values) != 256:
            raise ValueError(f"format {self.name}: a table has 256 values, not {len(self.values)}")

    @property
    def bits(self) -> int:
        """Storage bits of one code."""
        return 8

    @property
    def max(self) -> float:
        """The largest finite value."""
        return max(value for value in self.values if math.isfinite(value))

    @property
    def emax(self) -> int:
        """The exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @property
    def min_subnormal(self) -> float:
        """The smallest positive value."""
        return min(value for value in self.values if value > 0)

    @property
    def nan_code(self) -> int | None:
        """The code that a NaN becomes."""
        return next((code for code, value in enumerate(self.values) if math.isnan(value)), None)

    @property
    def infinity_code(self) -> int | None:
        """The code of positive infinity."""
        return next((code for code, value in enumerate(self.values) if value == math.inf), None)

    @property
    def has_infinity(self) -> bool:
        """Whether overflow can become an infinity."""
        return self.infinity_code is not None

    @property
    def max_code(self) -> int:
        """The code of the largest finite value; codes are not in the order of the values."""
        return self.values.index(self.max)

    @property
    def mantissa_bits_at_max(self) -> int:
        """Mantissa bits in the binade of `max`, the width at which the EVEN scale rule rounds."""
        return self.emax - (math.frexp(self.beyond_max - self.max)[1] - 1)


@dataclass(frozen=True, slots=True)
class IntFormat:
    """A two's complement integer format, full range; restricting it (-127..127) is the caller's clamp.

    Integers have no infinity, NaN, negative zero or subnormals: NaN becomes 0 and overflow always saturates.
    """

    name: str
    bits: int
    minimum: int
    maximum: int

    @property
    def max(self) -> float:
        """The largest value."""
        return float(self.maximum)

    @property
    def emax(self) -> int:
        """The exponent of the largest value: INT8 6, INT4 2."""
        return self.maximum.bit_length() - 1

    @property
    def beyond_max(self) -> float:
        """The integer after the largest one."""
        return float(self.maximum + 1)

    @property
    def mantissa_bits_at_max(self) -> int:
        """Mantissa bits in the binade of `max`, the width at which the EVEN scale rule rounds."""
        return self.emax


Format = FloatFormat | TableFormat | IntFormat
