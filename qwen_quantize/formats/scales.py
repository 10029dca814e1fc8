"""Power-of-two scale exponents from a block's largest magnitude, read off the bits of that number.

Every rule is one comparison. With A = 2^x * (1 + f), f the 23 fraction bits, the exponent is

    x - offset + (1 if f > threshold else 0)

and a rule is a pair (offset, threshold): FLOOR never adds, CEIL adds for any f > 0, RCEIL compares with the
fraction of the format's largest value M, RCEIL@t with that of t, EVEN adds where rounding A to the element's
mantissa width carries into the exponent. No logarithm and no division: in float32 `floor(log2(x))` is one too
high just below most powers of two.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from qwen_quantize.formats.spec import Format

MIN_EXPONENT = -127  # E8M0 holds 2^-127 .. 2^127
MAX_EXPONENT = 127
_FRACTION_MASK = 0x7FFFFF


class ScaleRule(StrEnum):
    """How a power-of-two scale follows from a block's largest magnitude A and the format's maximum M."""

    FLOOR = "floor"  # 2^floor(log2 A) / 2^emax: OCP MX text, Ascend scale algorithm 0; clips A > M
    CEIL = "ceil"  # 2^ceil(log2 A) / 2^emax: never clips, wastes up to a bit
    RCEIL = "rceil"  # smallest 2^e with A <= M 2^e: DeepGEMM, cuBLAS, Ascend algorithm 1
    EVEN = "even"  # A rounded to the mantissa width, then FLOOR: AMD Quark, compressed-tensors
    SEARCH = "search"  # smallest measured error: needs the values, see the calibrators


@dataclass(frozen=True, slots=True)
class ScaleThreshold:
    """A scale rule reduced to numbers: exponent = x - offset + (fraction > fraction_threshold)."""

    offset: int
    fraction_threshold: int  # 0 .. 2^23 - 1


def scale_threshold(fmt: Format, rule: ScaleRule, *, threshold: float | None = None) -> ScaleThreshold:
    """`rule` for `fmt` as an (offset, fraction) pair; ValueError for SEARCH and for impossible thresholds.

    `threshold` t replaces M in RCEIL: the smallest 2^e with A <= t 2^e; values between M and t then clip.
    """
    if threshold is not None and rule is not ScaleRule.RCEIL:
        raise ValueError(f"scale rule {rule}: only rceil takes a threshold, got {threshold}")
    match rule:
        case ScaleRule.FLOOR:
            return ScaleThreshold(fmt.emax, _FRACTION_MASK)
        case ScaleRule.CEIL:
            return ScaleThreshold(fmt.emax, 0)
        case ScaleRule.RCEIL:
            exponent, fraction = _split(fmt.max if threshold is None else threshold)
            return ScaleThreshold(exponent, fraction)
        case ScaleRule.EVEN:
            half_step = 1 << (22 - fmt.mantissa_bits_at_max)
            return ScaleThreshold(fmt.emax, _FRACTION_MASK - half_step)
        case ScaleRule.SEARCH:
            raise ValueError(
                "scale rule search needs the values of the block, not only the largest magnitude"
            )


def scale_exponents(amax: Tensor, fmt: Format, rule: ScaleRule, *, threshold: float | None = None) -> Tensor:
    """Unbiased exponents e (scale 2^e multiplies the codes), int32 of amax's shape, clamped to -127..127.

    amax: float32, >= 0, any shape. A zero block gets e = 0, so scale 1. Subnormal amax is exact. NaN,
    infinite or negative amax raises ValueError with the value and its index.
    """
    if amax.dtype != torch.float32:
        raise ValueError(f"amax must be float32, not {amax.dtype}")
    bits = amax.contiguous().view(torch.int32)
    bad = (bits & 0x7FFFFFFF >= 0x7F800000) | (amax < 0)
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(f"amax at {index} is {float(amax[index])}: a block scale needs finite values")
    limits = scale_threshold(fmt, rule, threshold=threshold)
    magnitude = bits & 0x7FFFFFFF
    # A subnormal 2^-149 * n: the float32 of the integer n has the normalized fraction and the exponent + 149.
    # The multiplication 2^149 would do the same, but not under flush-to-zero.
    subnormal = magnitude < 0x800000
    normalized = torch.where(subnormal, magnitude.to(torch.float32).view(torch.int32), magnitude)
    exponent = (normalized >> 23) - torch.where(subnormal, 127 + 149, 127)
    up = (normalized & _FRACTION_MASK) > limits.fraction_threshold
    result = (exponent - limits.offset + up).clamp(MIN_EXPONENT, MAX_EXPONENT)
    return torch.where(magnitude == 0, 0, result).to(torch.int32)


def exponents_to_scale(exponents: Tensor) -> Tensor:
    """float32 2^e for int32 exponents in -127..127; exact (2^-127 is a float32 subnormal)."""
    check_exponents(exponents)
    bits = torch.where(exponents == MIN_EXPONENT, 0x400000, (exponents + 127) << 23)
    return bits.to(torch.int32).view(torch.float32)


def exponents_to_e8m0(exponents: Tensor) -> Tensor:
    """E8M0 codes (uint8, exponent + 127) of int32 exponents in -127..127."""
    check_exponents(exponents)
    return (exponents + 127).to(torch.uint8)


def e8m0_to_exponents(codes: Tensor) -> Tensor:
    """int32 exponents of E8M0 codes; the inverse of `exponents_to_e8m0`. ValueError on 0xFF, which is NaN."""
    if codes.dtype != torch.uint8:
        raise ValueError(f"E8M0 codes must be uint8, not {codes.dtype}")
    if bool((codes == 0xFF).any()):
        raise ValueError("E8M0 scales hold 0xFF, which is NaN: the checkpoint's block has no scale")
    return codes.to(torch.int32) - 127


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """The second-level NVFP4 scale amax / (6 * 448), float32, a multiplier; 1 where amax is 0.

    ModelOpt stores it as `weight_scale_2`; compressed-tensors stores the inverse, 2688 / amax.
    """
    return torch.where(amax > 0, amax.to(torch.float32) / 2688.0, 1.0)


def _split(value: float) -> tuple[int, int]:
    """Exponent and 23 fraction bits of a positive normal float32 value."""
    single = np.float32(value)
    if not (np.isfinite(single) and float(single) == value and value >= 2.0**-126):
        raise ValueError(f"scale threshold {value} must be a positive float32 number")
    bits = int(single.view(np.int32))
    return (bits >> 23) - 127, bits & _FRACTION_MASK


def check_exponents(exponents: Tensor) -> None:
    """ValueError unless exponents are int32 in -127..127."""
    if exponents.dtype != torch.int32:
        raise ValueError(f"scale exponents must be int32, not {exponents.dtype}")
    if exponents.numel() and (int(exponents.min()) < MIN_EXPONENT or int(exponents.max()) > MAX_EXPONENT):
        raise ValueError(
            f"scale exponents reach {int(exponents.min())} .. {int(exponents.max())}; E8M0 holds -127 .. 127"
        )
