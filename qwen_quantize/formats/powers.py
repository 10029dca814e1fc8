"""Casting to E8M0, whose codes are the powers of two 2^-127 .. 2^127: no sign, no zero, no mantissa.

What the cast of each input is:

- a negative value is not representable and counts as a NaN; a NaN is 0xFF, or what zero is under
  NanResult.ZERO;
- zero is 0x00 (2^-127, the nearest there is) when saturating, else 0xFF, as in ml_dtypes;
- a positive value below 2^-127 is 0x00 under every rule;
- above 2^127: 0xFE when saturating, else 0xFF; RTZ, FLOOR and ODD keep finite values at 0xFE;
- RNE sends ties up as ml_dtypes does: there is no mantissa bit that could be even. RTZ and FLOOR drop the
  mantissa, which is what Ascend's bfloat16 cast does. ODD goes by the last bit of the code.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding
from qwen_quantize.formats.twin import Seed, random_words, round_randomly, round_significand

_NAN = 0xFF
_MAX = 0xFE


def cast_to_powers(x: Tensor, rule: CastRule, seed: Seed) -> Tensor:
    """E8M0 codes (int64, x's shape) of float32 values; ValueError for HYBRID.

    No subnormals exist to flush.
    """
    if rule.rounding is Rounding.HYBRID:
        raise ValueError("rounding hybrid exists for hif8 only, not for e8m0")
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    magnitude = bits & 0x7FFFFFFF
    field = magnitude >> 23
    # Code = field for normal inputs. 2^-127 is a float32 subnormal: there the spacing is 22 bits of the
    # integer, and "code -1" stands for zero.
    shift = torch.where(field == 0, 22, 23)
    significand = (magnitude & 0x7FFFFF) | ((field != 0).to(torch.int64) << 23)
    base = field - 1
    if rule.rounding is Rounding.STOCHASTIC:
        words = random_words(seed, 0, x.numel(), x.device).reshape(x.shape)
        code = round_randomly(significand, shift, base, words)
    else:
        rounding = Rounding.RNA if rule.rounding is Rounding.RNE else rule.rounding
        code = round_significand(significand, shift, base, torch.zeros_like(shift), rounding)
    saturates = rule.overflow is Overflow.SATURATE
    toward_zero = rule.rounding in (Rounding.RTZ, Rounding.FLOOR, Rounding.ODD)
    code = code.clamp(0, _MAX if saturates or toward_zero else _NAN)
    code = torch.where(magnitude == 0x7F800000, _MAX if saturates else _NAN, code)
    of_zero = 0 if saturates else _NAN
    code = torch.where(magnitude == 0, of_zero, code)
    nan = (magnitude > 0x7F800000) | ((bits < 0) & (magnitude != 0))
    return torch.where(nan, of_zero if rule.nan is NanResult.ZERO else _NAN, code)
