"""INT8 products: how wide their sum is, and what happens when it does not fit."""

from __future__ import annotations

import torch

from qwen_quantize.chip_profiles.probe_decide import MEASURED, UNKNOWN, Parameter
from qwen_quantize.chip_profiles.probe_device import Pair, ProbedDevice

_ROWS = 32
_PAST = 131_072 + 64  # products of 128 * 128 that pass 2^31 by 2^20
_LARGEST = (1 << 31) - 1


def probe_integer(
    device: ProbedDevice, pair: Pair, dots: int
) -> tuple[tuple[Parameter, ...], float, int, torch.Tensor]:
    """The parameters, the fraction of random sums that are exact, how many there were, and their bits."""
    generator = torch.Generator().manual_seed(21)
    side = max(int(dots**0.5), _ROWS)
    a = torch.randint(-128, 128, (side, 512), generator=generator).to(torch.float32)
    b = torch.randint(-128, 128, (side, 512), generator=generator).to(torch.float32)
    out = device.matmul(a, b, pair)
    exact = (a.double() @ b.double().T).to(torch.int64)
    same = out.to(torch.int64) == exact
    fraction = float(same.double().mean())
    full = torch.full((_ROWS, _PAST), -128.0)
    sums = device.matmul(full, full, pair)
    true = 128 * 128 * _PAST
    wrapped = (true + (1 << 31)) % (1 << 32) - (1 << 31)
    seen = int(sums[0, 0])
    words = {wrapped: "wrap", _LARGEST: "saturate"}
    if seen in words and bool((sums == seen).all()):
        overflow = Parameter("overflow", words[seen], MEASURED, f"a sum of {true} came out as {seen}")
    else:
        overflow = Parameter("overflow", None, UNKNOWN, f"a sum of {true} came out as {seen}")
    kind = pair.output
    if fraction == 1.0 and overflow.status == MEASURED:
        why = f"{same.numel()} sums of 512 products are exact, and a sum beyond 2^31 does not fit"
        accumulator = Parameter("accumulator", kind, MEASURED, why)
    else:
        accumulator = Parameter(
            "accumulator", None, UNKNOWN, f"{fraction:.2%} of the sums of 512 products are exact"
        )
    return (accumulator, overflow), fraction, same.numel(), out
