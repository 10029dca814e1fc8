"""The fixed inputs that two makers of a behaviour must share bit for bit, whatever their torch or processor.

So the random ones come from SHAKE-256 and not from torch: its normal values differ between processors in the last
bit. Every group asks for one kind of thing, and its name says what has changed when only its outputs differ.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from qwen_quantize.formats.codec import code_dtype, decode
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat

# To be raised with every change of an input: outputs of different inputs cannot be compared.
CORPUS = "1"
_RANDOM_CASTS = 4096
_STRIDE = 61  # of the 2^16 values of a wide format one in so many is tried, of a narrow one each
_RANDOM_EXPONENTS = 14  # binades below the largest value that random inputs of a cast come from
_SIDE = 32  # rows and columns of every product: multiples of 16, which FP8 calls of torch ask for
_FEW, _MANY, _LONG = 64, 128, 256  # lengths of dot products


def cast_inputs(fmt: Format) -> dict[str, Tensor]:
    """float32 inputs [N] of a cast to `fmt`, a format of at most 16 bits, by group.

    Only `overflow` has inputs beyond the largest value, and only `nan` has NaN.
    """
    grid = _grid(fmt)
    stride = 1 if fmt.bits <= 8 else _STRIDE
    ties = (grid[1:].double() + grid[:-1].double()).div(2).float()[::stride]
    step = (grid[1:] - grid[:-1]).max()
    top = grid[-1]
    beyond = torch.stack((top + step / 2, top + step / 2 + step / 8, top + step, 2 * top, top * 1000))
    infinity = torch.full((1,), torch.inf)
    groups = {
        "values": torch.cat((grid[::stride], torch.tensor([-0.0]))),
        "ties": ties,
        "near_ties": torch.cat((torch.nextafter(ties, -infinity), torch.nextafter(ties, infinity))),
    }
    if isinstance(fmt, FloatFormat) and fmt.has_zero:
        groups["subnormals"] = torch.arange(-96, 97) / 64 * fmt.min_normal
    overflow = torch.cat((beyond, infinity))
    groups["overflow"] = torch.cat((overflow, -overflow)) if float(grid[0]) < 0 else overflow
    groups["nan"] = torch.tensor([0x7FC00000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    groups["corpus"] = _random_values(f"cast {fmt.name}", _RANDOM_CASTS, 23, *_below(float(top)))
    return groups


def dot_operands(fmt: FloatFormat | IntFormat) -> dict[str, tuple[Tensor, Tensor]]:
    """float32 a [M, K] and b [M, K], M 32 or 16, of values of `fmt` by group: every row of a meets every row of b."""
    if isinstance(fmt, IntFormat):
        return {"mixed": (_integers("a", fmt), _integers("b", fmt))}
    low, high = max(fmt.min_exponent, -9), min(fmt.emax - 1, 6)

    def random(name: str, rows: int, length: int) -> Tensor:
        values = _random_values(f"{fmt.name} {name}", rows * length, fmt.mantissa_bits, low, high)
        return values.view(rows, length)

    def cancelling(name: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
        a, b = random(f"{name} a", rows, length // 2), random(f"{name} b", rows, length // 2)
        return torch.cat((a, -a.flip(1)), 1), torch.cat((b, b.flip(1)), 1)

    return {
        # One large and one small product: in one step, and in the first and the last one.
        "step": _ladder(low, high, _SIDE, 1),
        "register": _ladder(low, high, _MANY, _MANY - 1),
        "mixed": (random("mixed a", _SIDE, _FEW), random("mixed b", _SIDE, _FEW)),
        "cancelling": cancelling("cancelling", _SIDE, _FEW),
        "long": cancelling("long", _SIDE // 2, _LONG),
    }


def _grid(fmt: Format) -> Tensor:
    """The finite values of `fmt` [N], ascending."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.int32).to(code_dtype(fmt))
    values = decode(codes, fmt)
    found: Tensor = torch.unique(values[values.isfinite()])
    return found


def _ladder(low: int, high: int, length: int, place: int) -> tuple[Tensor, Tensor]:
    """Row i and column j: 2^(2 high) plus or minus a product about i + j binades smaller, at `place`."""
    a, b = torch.zeros(_SIDE, length), torch.zeros(_SIDE, length)
    half = _SIDE // 2
    exponents = (high - torch.arange(half)).clamp(min=low)
    powers = ((exponents + 127) << 23).to(torch.int32).view(torch.float32)  # exact on every machine
    a[:, 0] = b[:half, 0] = 2.0**high
    b[half:, 0] = -(2.0**high)
    a[:, place] = torch.cat((1.5 * powers, -powers))
    b[:, place] = torch.cat((powers, powers))
    return a, b


def _random_values(name: str, count: int, mantissa_bits: int, low: int, high: int) -> Tensor:
    """float32 [count] of random signs, exponents from low to high, and `mantissa_bits` random bits."""
    drawn = _random(name, count)
    mantissa = (drawn & 0x7FFFFF) >> (23 - mantissa_bits) << (23 - mantissa_bits)
    exponent = low + (drawn >> 23 & 0xFF) * (high - low + 1) // 256
    bits = (drawn >> 31 << 31) | (exponent + 127) << 23 | mantissa
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _integers(name: str, fmt: IntFormat) -> Tensor:
    drawn = _random(f"{fmt.name} {name}", _SIDE * _FEW)
    return (drawn % (2 * fmt.maximum + 1) - fmt.maximum).float().view(_SIDE, _FEW)


def _random(name: str, count: int) -> Tensor:
    """int64 [count] of 32 random bits each; the same for the same name."""
    stream = hashlib.shake_256(f"qwen_quantize {CORPUS} {name}".encode()).digest(4 * count)
    return torch.frombuffer(bytearray(stream), dtype=torch.uint8).view(-1, 4).long() @ torch.tensor(
        [1, 1 << 8, 1 << 16, 1 << 24]
    )


def _below(top: float) -> tuple[int, int]:
    """Exponents of values below `top`, in float32's normal range."""
    high = int(torch.frexp(torch.tensor(top, dtype=torch.float64)).exponent) - 2
    return max(high - _RANDOM_EXPONENTS, -126), high
