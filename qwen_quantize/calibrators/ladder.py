"""The values of a format as a ladder: how far apart neighbours are at each magnitude, and where it ends."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.grid import grid_for
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat

_FIELDS = 256  # of a float32 exponent


@dataclass(frozen=True, slots=True)
class ValueLadder:
    """steps: [512] float32, the spacing at each float32 exponent field, then its reciprocals; powers of two.

    low, high: the end values. uniform: whether all steps are 1, as for integers.
    """

    steps: Tensor
    low: float
    high: float
    uniform: bool

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest value for x float32 inside low .. high, ties to the even multiple of the step."""
        if self.uniform:
            return x.round()
        field = (x.view(torch.int32) >> 23) & (_FIELDS - 1)
        step, reciprocal = self.steps[:_FIELDS][field], self.steps[_FIELDS:][field]
        return (x * reciprocal).round() * step


@functools.cache
def ladder_of(format: Format) -> ValueLadder:
    """The ladder of a format of at most 8 bits. Its tensor is shared: do not modify it."""
    grid = grid_for(format, RNE_SATURATE)
    exponents = []
    for field in range(_FIELDS):
        exponent = max(field - 127, grid.min_exponent)
        if isinstance(format, IntFormat):
            exponents.append(0)
        elif isinstance(format, FloatFormat):
            exponents.append(exponent - grid.mantissa_bits)
        else:
            assert grid.tapered is not None
            pieces = [piece for piece in grid.tapered.pieces if piece.exponent <= exponent]
            exponents.append(exponent - pieces[-1].mantissa_bits)
    # Far above the largest value the steps do not count; kept where both 2^e and 2^-e are normal numbers.
    kept = [max(-126, min(126, e)) for e in exponents]
    steps = [math.ldexp(1.0, e) for e in kept] + [math.ldexp(1.0, -e) for e in kept]
    low = float(format.minimum) if isinstance(format, IntFormat) else -format.max
    return ValueLadder(torch.tensor(steps), low, format.max, isinstance(format, IntFormat))
