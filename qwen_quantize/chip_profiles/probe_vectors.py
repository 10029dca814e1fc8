"""Dot products that each show one thing about a matrix unit.

The sum before the first product is always zero: through a framework nothing else can be set. So a large product P
comes first, the term under test second and -P last; what survives is the accumulator's view of the small term, and
it fits any output type. P is a power of two; P225 = 2.25 P has the same product exponent but a larger value. (The
tests of Fasi et al., PeerJ CS 7:e330; Khattak and Mikaitis, arXiv 2512.07004; FTTN, arXiv 2403.00232, rewritten for
sums that start from zero.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.dot_units import TF32
from qwen_quantize.formats.spec import FloatFormat

FAR = 64  # products of one step at most: what stands so far apart is never in one step
DEEPEST = 40  # bits below P that are looked at
Term = tuple[float, float]  # the two factors of a product


@dataclass(frozen=True, slots=True)
class Vectors:
    """Rows a, b [n, K] whose products with each other are asked for, and what each row is."""

    name: str
    a: Tensor
    b: Tensor
    labels: tuple[str, ...]


class Powers:
    """Products of two powers of two in a format, both factors normal."""

    def __init__(self, fmt: FloatFormat) -> None:
        self.low = fmt.min_exponent
        self.high = min(7, fmt.emax - 1)  # one more bit of room, for 1.5 and the like
        self.top = 2 * self.high  # the exponent of P

    def term(self, exponent: int, factor: float = 1.0) -> Term | None:
        """factor * 2^exponent, the factor (1 or 1.5, with a sign) in the first operand; None: out of range."""
        if not 2 * self.low <= exponent <= self.top + 1:
            return None
        second = min(max(exponent // 2, self.low), self.high)
        if not self.low <= exponent - second <= self.high + 1:
            second = max(min(exponent - self.low, self.high), self.low)
        return factor * 2.0 ** (exponent - second), 2.0**second

    def big(self, factor: float = 1.0) -> Term:
        return factor * 2.0**self.high, 2.0**self.high

    def big225(self, sign: float = 1.0) -> Term:
        return sign * 1.5 * 2.0**self.high, 1.5 * 2.0**self.high


def targeted(fmt: FloatFormat, wide_output: bool) -> list[Vectors]:
    """The groups that need nothing known beforehand; `wide_output`: results may need more than fp16's range."""
    powers = Powers(fmt)
    groups = [
        _depth("1 depth", powers, powers.big(), powers.big(-1.0)),
        _depth("1b depth below 2.25 P", powers, powers.big225(), powers.big225(-1.0)),
        _shifts(powers),
        _final_rounding(powers),
        _small_first(powers),
        _swamped(powers),
        _specials(fmt),
        _output_rounding(powers),
        _largest(fmt),
    ]
    if fmt.mantissa_bits == 23 or fmt is TF32:
        groups.append(_wide_inputs())
    if fmt.exponent_bits >= 5:
        groups.append(_half_range(powers))
    groups.append(_subnormals(fmt, wide_output))
    return [group for group in groups if group.labels]


def step_width(fmt: FloatFormat, exponents: Iterable[int]) -> Vectors:
    """Vector 3: at which distance -2.25 P no longer meets the small term 2^exponent."""
    powers = Powers(fmt)
    rows: dict[str, Mapping[int, Term]] = {}
    for exponent in exponents:
        small = powers.term(exponent)
        for distance in range(2, 2 * FAR) if small is not None else ():
            assert small is not None
            rows[f"2^{exponent} {distance}"] = {0: powers.big225(), 1: small, distance: powers.big225(-1.0)}
    return _vectors("3 step width", rows, 2 * FAR)


def _depth(name: str, powers: Powers, first: Term, last: Term) -> Vectors:
    rows = {}
    for depth in range(1, DEEPEST + 1):
        for sign in (1.0, -1.0):
            small = powers.term(powers.top - depth, sign)
            if small is not None:
                rows[f"{sign * depth:+.0f}"] = {0: first, 1: small, 2: last}
    return _vectors(name, rows, 16)


def _shifts(powers: Powers) -> Vectors:
    """k u with k = .75, .5, 1.5 and their negatives, for each possible last place u."""
    rows = {}
    for depth in range(1, DEEPEST + 1):
        for shift, factor in ((-1, 1.5), (0, 1.5), (-1, 1.0), (1, 1.5)):
            for sign in (1.0, -1.0):
                small = powers.term(powers.top - depth + shift, sign * factor)
                if small is not None:
                    rows[f"{sign * factor * 2.0**shift:+g}u{depth}"] = {
                        0: powers.big(),
                        1: small,
                        2: powers.big(-1.0),
                    }
    return _vectors("2 shift rounding", rows, 16)


def _final_rounding(powers: Powers) -> Vectors:
    """3 P + k U, then -3 P far away: U is the last place of an accumulator that keeps the bits down to it."""
    rows = {}
    for bits in range(5, 26):
        for factor, shift in ((1.5, 1), (1.0, 0), (1.5, 0), (1.0, -1)):
            for sign in (1.0, -1.0):
                small = powers.term(powers.top - bits + shift, sign * factor)
                if small is None:
                    continue
                for side in (1.0, -1.0):
                    big, back = powers.big(1.5 * side), powers.big(-1.5 * side)
                    rows[f"{side:+.0f} {sign * factor * 2.0**shift:+g}U{bits}"] = {
                        0: big,
                        1: big,
                        2: small,
                        FAR: back,
                        FAR + 1: back,
                    }
    return _vectors("4 final rounding", rows, 2 * FAR)


def _small_first(powers: Powers) -> Vectors:
    """A small sum left by an earlier step, then 1.5 P and a small term, then -1.5 P: how the sum is aligned."""
    rows = {}
    for depth in range(8, 34):
        for other in (13, 23, 24):
            for sign in (1.0, -1.0):
                early = powers.term(powers.top - depth, sign)
                late = powers.term(powers.top - other)
                if early is not None and late is not None:
                    rows[f"{sign * depth:+.0f} {other}"] = {
                        0: early,
                        FAR: powers.big(1.5),
                        FAR + 1: late,
                        2 * FAR: powers.big(-1.5),
                    }
    return _vectors("5 sum so far", rows, 3 * FAR)


def _swamped(powers: Powers) -> Vectors:
    """P, many terms too small for it, -P: each swallowed alone, or added to each other first."""
    rows = {}
    for depth in (9, 11, 12, 13, 14, 15, 16, 22, 23, 24, 25, 26, 27):
        small = powers.term(powers.top - depth)
        if small is not None:
            terms = {0: powers.big(), **dict.fromkeys(range(1, FAR + 1), small), 2 * FAR: powers.big(-1.0)}
            rows[str(depth)] = terms
    return _vectors("8 swamped terms", rows, 3 * FAR)


def _subnormals(fmt: FloatFormat, wide_output: bool) -> Vectors:
    """Subnormal factors times normal ones, and products and sums that are subnormal in the accumulator."""
    smallest, normal = fmt.min_subnormal, fmt.min_normal
    one = 2.0 ** min(7, fmt.emax - 1)
    rows = {}
    for label, tiny in (("smallest", smallest), ("largest", normal - smallest), ("normal", normal)):
        rows[f"in {label}"] = {0: (tiny, one)}
        rows[f"in {label}, right"] = {0: (one, tiny)}
        rows[f"in {label}, late"] = {FAR: (tiny, one), FAR + 1: (one, 1.0)}
        if fmt.exponent_bits >= 8:  # so large a partner that an fp16 sum can hold the product
            rows[f"in {label}, large partner"] = {0: (tiny, 2.0**120)}
    for exponent in range(-150, -10) if wide_output else ():
        half = exponent // 2
        if half >= fmt.min_exponent:
            term = (1.5 * 2.0**half, 2.0 ** (exponent - half))
            rows[f"out {exponent}"] = {0: term, 1: (1.0 * 2.0**half, 2.0**half)}
            rows[f"out {exponent} far"] = {0: term, FAR: (-1.0 * 2.0**half, 2.0**half)}
    return _vectors("6 subnormals", rows, 2 * FAR)


def _half_range(powers: Powers) -> Vectors:
    """Sums that an fp16 accumulator cannot hold, in range or in precision."""
    third = powers.big(1.5)  # 1.5 * 2^14
    rows: dict[str, Mapping[int, Term]] = {
        "3 * 2^15 and back": {0: third, 1: third, 2: third, 3: third, FAR: powers.big(-1.0), **{
            FAR + i: powers.big(-1.0) for i in range(1, 5)}},
        "-3 * 2^15": {i: powers.big(-1.5) for i in range(4)},
    }  # fmt: skip
    return _vectors("7 range of fp16", rows, 2 * FAR)


def _largest(fmt: FloatFormat) -> Vectors:
    """Very many of the largest products, of one sign, and then taken back."""
    top = fmt.max if fmt.mantissa_bits < 23 else 2.0**63
    count = 256
    while count < 4096 and top * top * count / 2 < 4 * 65504:
        count *= 2
    rows: dict[str, Mapping[int, Term]] = {}
    for sign in (1.0, -1.0):
        rows[f"{sign:+.0f} all"] = dict.fromkeys(range(count), (sign * top, top))
        rows[f"{sign:+.0f} then back"] = {
            k: (sign * top if k < count // 2 + FAR else -sign * top, top) for k in range(count)
        }
    return _vectors("7b largest sums", rows, count)


def _specials(fmt: FloatFormat) -> Vectors:
    inf, nan = math.inf, math.nan
    rows: dict[str, Mapping[int, Term]] = {
        "nan": {0: (nan, 1.0)},
        "-0 all": dict.fromkeys(range(2 * FAR), (-0.0, 1.0)),
        "1 - 1": {0: (1.0, 1.0), 1: (-1.0, 1.0)},
    }
    if fmt.has_infinity:
        rows |= {
            "inf": {0: (inf, 1.0)},
            "-inf": {0: (-inf, 1.0)},
            "inf - inf": {0: (inf, 1.0), 1: (-inf, 1.0)},
            "inf * 0": {0: (inf, 0.0)},
        }
    return _vectors("12 NaN and infinity", rows, 2 * FAR)


def _output_rounding(powers: Powers) -> Vectors:
    """1 + k 2^-j: ties and near ties of the output type, in one sum of two or three terms."""
    rows = {}
    for bits in range(4, 25):
        for sign in (1.0, -1.0):
            for factor, shift in ((1.0, 0), (1.5, 1), (1.5, 0), (1.5, -1)):
                small = powers.term(-bits + shift, sign * factor)
                if small is not None:
                    rows[f"{sign:+.0f} {factor * 2.0**shift:g}/2^{bits}"] = {0: (sign, 1.0), 1: small}
    return _vectors("13 output rounding", rows, 16)


def _wide_inputs() -> Vectors:
    """float32 factors with more bits than TF32 or bfloat16 keep."""
    rows = {}
    for bits in range(4, 24):
        for factor in (1.0, 3.0, 1.5):
            for sign in (1.0, -1.0):
                value = sign * (1 + factor * 2.0**-bits)
                rows[f"{sign:+.0f} 1 + {factor:g}/2^{bits}"] = {0: (value, 1.0)}
                rows[f"{sign:+.0f} 1 + {factor:g}/2^{bits} right"] = {0: (1.0, value)}
    return _vectors("10 wide inputs", rows, 16)


def _vectors(name: str, rows: Mapping[str, Mapping[int, Term]], length: int) -> Vectors:
    a, b = torch.zeros(len(rows), length), torch.zeros(len(rows), length)
    for index, terms in enumerate(rows.values()):
        places = list(terms)
        values = torch.tensor(list(terms.values()), dtype=torch.float32)
        a[index, places], b[index, places] = values[:, 0], values[:, 1]
    return Vectors(name, a, b, tuple(rows))
