"""Finding out how a device casts float32 to a narrower type.

Every rule that can be written down (rounding, overflow, subnormals, NaN, and a type in between) is held against the
device: first on inputs that show one thing each, then on a dense sample with every boundary of the format.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.chip_profiles.probe_decide import MEASURED, NOT_APPLICABLE, UNKNOWN, Parameter
from qwen_quantize.chip_profiles.probe_device import ProbedDevice
from qwen_quantize.formats.cast_path import CastStep, encode_along
from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, encode
from qwen_quantize.formats.spec import FloatFormat, Format, IntFormat
from qwen_quantize.formats.tables import BF16, FORMATS, FP16, HIF8

Path = tuple[CastStep, ...]
_ROUNDINGS = (Rounding.RNE, Rounding.RNA, Rounding.RTZ, Rounding.FLOOR, Rounding.CEIL, Rounding.ODD)
_REPEATS = 1024
_UNEXPLAINED = 20


@dataclass(frozen=True, slots=True)
class CastFinding:
    """What was found of the cast to `target`; `path` is the best rule, None where casts differ from run to run."""

    target: str
    path: Path | None
    parameters: tuple[Parameter, ...]
    explained_fraction: float
    inputs: int
    unexplained: tuple[dict[str, object], ...]
    codes: Tensor  # of the whole sample, for hashing


def probe_cast(device: ProbedDevice, target: str) -> CastFinding:
    """The rule of the cast float32 -> target; Unavailable where the device has none."""
    fmt = FORMATS[target]
    x = sample(fmt)
    codes = device.cast(x, target)
    if _varies(device, target, fmt):
        return _stochastic(device, target, fmt, x, codes)
    few = torch.cat((torch.arange(0, x.numel(), 17), torch.arange(x.numel() - 811, x.numel())))
    some, of_some = x[few], codes[few]
    parts = {name: mask for name, mask in _parts(some, fmt).items() if bool(mask.any())}
    best, reached = None, -1.0
    explaining: list[tuple[Path, dict[str, float]]] = []
    for path in _paths(fmt):
        same = _same(encode_along(some, path), of_some, fmt)
        shares = {name: float(same[mask].double().mean()) for name, mask in parts.items()}
        explaining.append((path, shares))
        if sum(shares.values()) > reached:
            best, reached = path, sum(shares.values())
    assert best is not None
    agreed = _same(encode_along(x, best), codes, fmt)
    parameters = _parameters(best, explaining, parts, agreed, _parts(x, fmt), fmt)
    parameters += _seen_directly(device, target, fmt)
    wrong = (~agreed).nonzero().flatten()[:_UNEXPLAINED]
    ours = encode_along(x, best)
    unexplained: tuple[dict[str, object], ...] = tuple(
        {"input": float(x[i]), "device": int(codes[i]), "model": int(ours[i])} for i in wrong.tolist()
    )
    fraction = float(agreed.double().mean())
    return CastFinding(target, best, tuple(parameters), fraction, x.numel(), unexplained, codes)


def sample(fmt: Format) -> Tensor:
    """float32 inputs [n]: all boundaries of `fmt` with their neighbours, and a dense seeded sample."""
    generator = torch.Generator().manual_seed(11)
    if isinstance(fmt, IntFormat):
        grid = torch.arange(fmt.minimum * 2 - 2, fmt.maximum * 2 + 4, dtype=torch.float32) / 2
    elif fmt.bits <= 8:
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        values = decode(codes, fmt)
        values = torch.tensor(sorted(set(values[values.isfinite()].tolist())))
        grid = torch.cat((values, (values[1:] + values[:-1]) / 2))
    else:
        exponents = torch.arange(-150, 128)
        steps = torch.arange(0, 2 ** (_mantissa(fmt) + 2), 2 ** max(_mantissa(fmt) - 3, 0) + 1)
        significands = 1 + steps.to(torch.float64) / 2 ** (_mantissa(fmt) + 2)
        grid = torch.outer(significands, 2.0 ** exponents.to(torch.float64)).to(torch.float32).flatten()
    around = _neighbours(grid, fmt)
    powers = torch.randint(-24, 17, (40000,), generator=generator)
    scale = ((powers + 127) << 23).to(torch.int32).view(torch.float32)
    drawn = torch.randn(40000, generator=generator) * scale
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=generator, dtype=torch.int64).to(torch.int32)
    top = torch.tensor(fmt.max, dtype=torch.float32)
    edges = torch.cat([top * f for f in torch.linspace(0.5, 2.5, 401)[:, None]])
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e30, -1e30, 1e-40, -1e-40])
    return torch.cat((around, -around, drawn, bits.view(torch.float32), edges, -edges, special)).contiguous()


def _neighbours(grid: Tensor, fmt: Format) -> Tensor:
    """Each value, the float32 beside it, and those that fp16 and bf16 would take for it."""
    infinity = torch.full_like(grid, math.inf)
    near = [grid, torch.nextafter(grid, infinity), torch.nextafter(grid, -infinity)]
    if fmt.bits <= 8:
        near += [grid * (1 + sign * 2.0**-bits) for bits in (8, 9, 10, 11, 12, 13) for sign in (1.0, -1.0)]
    return torch.cat(near)


def _mantissa(fmt: Format) -> int:
    return fmt.mantissa_bits if isinstance(fmt, FloatFormat) else 3


def _paths(fmt: Format) -> Iterable[Path]:
    """Every rule, the direct ones first."""
    between: list[Path] = [()]
    if fmt.bits <= 8:
        for wide in (FP16, BF16):
            for rounding, overflow in (
                (Rounding.RNE, Overflow.NONSATURATE),
                (Rounding.RTZ, Overflow.NONSATURATE),
                (Rounding.RNE, Overflow.SATURATE),
            ):
                between.append((CastStep(wide, CastRule(rounding, overflow, Subnormals.KEEP)),))
    roundings = (*_ROUNDINGS, Rounding.HYBRID) if fmt is HIF8 else _ROUNDINGS
    integer = isinstance(fmt, IntFormat)
    subnormals = (Subnormals.KEEP,) if integer else tuple(Subnormals)
    overflows = (Overflow.SATURATE,) if integer else tuple(Overflow)  # integers have nothing else to become
    nans = (NanResult.PROPAGATE,) if integer else tuple(NanResult)
    for first in between:
        for fields in itertools.product(roundings, overflows, subnormals, nans):
            yield (*first, CastStep(fmt, CastRule(*fields)))


def _parts(x: Tensor, fmt: Format) -> dict[str, Tensor]:
    """Which inputs show what."""
    size = x.abs()
    small = fmt.min_normal if not isinstance(fmt, IntFormat) else 0.0
    return {
        "normal": (size >= small) & (size <= fmt.max),
        "subnormal": size < small,
        "beyond": (size > fmt.max) & x.isfinite(),
        "infinity": x.isinf(),
        "nan": x.isnan(),
    }


# What shows each field; infinities follow the finite values in every rule that can be written down.
_SHOWN_BY = {
    "rounding": ("normal", "subnormal"),
    "overflow": ("beyond", "infinity"),
    "subnormals": ("subnormal",),
    "nan": ("nan",),
    "path": ("normal", "subnormal", "beyond"),
}


def _parameters(
    best: Path,
    explaining: Sequence[tuple[Path, dict[str, float]]],
    parts: dict[str, Tensor],
    agreed: Tensor,
    all_parts: dict[str, Tensor],
    fmt: Format,
) -> list[Parameter]:
    """A field is measured if the rules that explain all that the best one explains wholly agree on it."""
    whole = [name for name in parts if bool(agreed[all_parts[name]].all())]
    rivals = [path for path, shares in explaining if all(shares[name] == 1.0 for name in whole)]
    found, own = [], _fields(best)
    for name, shown_by in _SHOWN_BY.items():
        if isinstance(fmt, IntFormat) and name in ("subnormals", "nan"):
            found.append(Parameter(name, None, NOT_APPLICABLE, "integers have none"))
            continue
        kinds = [part for part in shown_by if part in parts]
        values = sorted({_fields(path)[name] for path in rivals})
        broken = [part for part in kinds if part not in whole]
        if not kinds:
            found.append(Parameter(name, None, UNKNOWN, "no float32 input shows it"))
        elif broken:
            share = min(float(agreed[all_parts[part]].double().mean()) for part in broken)
            why = f"no rule explains all inputs of the kind {', '.join(broken)}; the best {share:.2%} of them"
            found.append(Parameter(name, None, UNKNOWN, why))
        elif values == [own[name]]:
            inputs = sum(int(all_parts[part].sum()) for part in kinds)
            why = f"the only value that explains all {inputs} inputs of the kind {', '.join(kinds)}"
            found.append(Parameter(name, own[name], MEASURED, why))
        elif name == "path" and "direct" in values:
            same = ", ".join(value for value in values if value != "direct")
            found.append(
                Parameter(name, "direct", MEASURED, f"no second rounding shows ({same}: the same codes)")
            )
        else:
            found.append(Parameter(name, None, UNKNOWN, f"{' and '.join(values)} give the same codes"))
    return found


def _fields(path: Path) -> dict[str, str]:
    rule = path[-1].rule
    steps = [
        step.format.name + ("" if step.rule.rounding is Rounding.RNE else f" {step.rule.rounding}")
        for step in path[:-1]
    ]
    return {
        "rounding": str(rule.rounding),
        "overflow": str(rule.overflow),
        "subnormals": str(rule.subnormals),
        "nan": str(rule.nan),
        "path": " ".join(steps) or "direct",
    }


def _same(ours: Tensor, theirs: Tensor, fmt: Format) -> Tensor:
    """Equal codes; the NaN codes of one sign-insensitive NaN count as equal."""
    same = ours == theirs
    if isinstance(fmt, IntFormat):
        return same
    return same | (decode(ours, fmt).isnan() & decode(theirs, fmt).isnan())


def _seen_directly(device: ProbedDevice, target: str, fmt: Format) -> list[Parameter]:
    """Codes of single inputs, as the device gives them."""
    x = torch.tensor([math.inf, math.nan, -0.0, 1.0, 300.0, 240.0, 448.0], dtype=torch.float32)
    codes = device.cast(x, target)
    values = codes.to(torch.float32) if isinstance(fmt, IntFormat) else decode(codes, fmt)
    found = [
        Parameter("infinity_becomes", f"{float(values[0]):g}", MEASURED, "the cast of infinity"),
        Parameter("nan_becomes", f"{float(values[1]):g}", MEASURED, "the cast of NaN"),
    ]
    if isinstance(fmt, IntFormat):
        found.append(Parameter("300_becomes", f"{int(codes[4])}", MEASURED, "the cast of 300"))
        return found
    zero = "kept" if int(codes[2]) != 0 and float(values[2]) == 0 else "lost"
    found.append(Parameter("sign_of_zero", zero, MEASURED, f"-0 has the code {int(codes[2]) & 0xFFFF:#x}"))
    if target.startswith("e4m3"):
        found.append(_flavour(int(codes[3]) & 0xFF, float(values[6]), target))
    return found


def _flavour(one: int, top: float, target: str) -> Parameter:
    bias = {0x38: 7, 0x40: 8, 0x58: 11}.get(one)
    if bias is None:
        return Parameter("e4m3_flavour", None, UNKNOWN, f"1.0 has the code {one:#x}, which no e4m3 has")
    flavour = "fnuz" if bias == 8 else "fn" if top == 448.0 or target == "e4m3fn" else "ieee"
    return Parameter("e4m3_flavour", flavour, MEASURED, f"1.0 has the code {one:#x}, 448 becomes {top:g}")


# ---- casts that draw lots ----


def _varies(device: ProbedDevice, target: str, fmt: Format) -> bool:
    x = _between(fmt).repeat(64)
    first = device.cast(x, target)
    return bool((first != first[0]).any()) or not torch.equal(first, device.cast(x, target))


def _between(fmt: Format) -> Tensor:
    """A value a quarter of the way from one to the next larger value."""
    step = 1.0 if isinstance(fmt, IntFormat) else 2.0 ** -_mantissa(fmt)
    return torch.tensor([1.0 + step / 4])


def _stochastic(device: ProbedDevice, target: str, fmt: Format, x: Tensor, codes: Tensor) -> CastFinding:
    drawn = device.cast(_between(fmt).repeat(_REPEATS), target)
    values = drawn.to(torch.float32) if isinstance(fmt, IntFormat) else decode(drawn, fmt)
    share = float((values > 1.0).double().mean())
    below, above = (
        encode(x, fmt, CastRule(rounding, Overflow.SATURATE, Subnormals.KEEP))
        for rounding in (Rounding.FLOOR, Rounding.CEIL)
    )
    agreed = _same(below, codes, fmt) | _same(above, codes, fmt)
    fits = abs(share - 0.25) < 0.06
    why = f"{share:.3f} of {_REPEATS} casts of a value a quarter of the way went up"
    rounding = Parameter("rounding", "stochastic" if fits else None, MEASURED if fits else UNKNOWN, why)
    others = [
        Parameter(name, None, UNKNOWN, "the cast differs from run to run") for name in list(_SHOWN_BY)[1:]
    ]
    fraction = float(agreed.double().mean())
    finding = (rounding, *others, *_seen_directly(device, target, fmt))
    return CastFinding(target, None, finding, fraction, x.numel(), (), codes)
