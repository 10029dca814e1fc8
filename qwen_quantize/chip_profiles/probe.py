"""Finding out how a device computes, and saying how much of what it does is thereby explained.

Each product and each cast is asked for what shows one thing at a time, a model is fitted, and the model is then held
against at least 10^5 random dot products, bit for bit. What the model misses is counted and kept as examples. A
parameter that other values would have explained as well is `unknown`, with the reason.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_quantize.chip_profiles.probe_casts import CastFinding, probe_cast
from qwen_quantize.chip_profiles.probe_corpus import operands
from qwen_quantize.chip_profiles.probe_decide import MEASURED, UNKNOWN, Parameter, decide
from qwen_quantize.chip_profiles.probe_device import Pair, ProbedDevice, Unavailable, operand_format
from qwen_quantize.chip_profiles.probe_fit import Fit, fit
from qwen_quantize.chip_profiles.probe_integer import probe_integer
from qwen_quantize.chip_profiles.probe_model import SumModel, agreement, ask
from qwen_quantize.formats.spec import FloatFormat, IntFormat

# rows, columns, K and kind of what certifies a model: 122,880 dot products.
_CORPUS = (
    *((128, 160, 96, kind) for kind in ("mixed", "zero_sum", "normal", "same_sign", "sparse")),
    *((64, 64, 160, kind) for kind in ("tiny", "mixed", "zero_sum")),
    *((64, 64, 1024, kind) for kind in ("zero_sum", "normal")),
)
_UNEXPLAINED = 20
_BATCHES = (1, 2, 8, 16, 64, 128)
Say = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class MatmulFinding:
    """What was found of one product; `model` is None for integers. `unexplained`: dot products and both results."""

    pair: Pair
    parameters: tuple[Parameter, ...]
    explained_fraction: float
    dots: int
    unexplained: tuple[dict[str, object], ...]
    model: SumModel | None
    hashes: Mapping[str, str]
    seconds: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """All that a probe found; `unavailable` says why a product or cast has no finding."""

    device: str
    about: Mapping[str, str]
    products: tuple[MatmulFinding, ...]
    casts: tuple[CastFinding, ...]
    unavailable: Mapping[str, str]
    seconds: float
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def fractions(self) -> dict[str, float]:
        """The explained fraction of every product and cast."""
        found = {item.pair.name: item.explained_fraction for item in self.products}
        return found | {f"fp32->{item.target}": item.explained_fraction for item in self.casts}

    def parameters(self) -> dict[str, dict[str, Parameter]]:
        """By product or cast, by name."""
        found = {item.pair.name: {p.name: p for p in item.parameters} for item in self.products}
        return found | {f"fp32->{item.target}": {p.name: p for p in item.parameters} for item in self.casts}


def probe(device: ProbedDevice, *, quick: bool = False, say: Say | None = None) -> ProbeResult:
    """Everything `device` offers; quick: one output type for each operand type and a tenth of the corpus."""
    begun = time.monotonic()
    pairs, targets = device.pairs(), device.casts()
    if quick:
        pairs = tuple({pair.operands: pair for pair in reversed(pairs)}.values())[::-1]
    products: list[MatmulFinding] = []
    casts: list[CastFinding] = []
    unavailable: dict[str, str] = {}
    timings: dict[str, float] = {}
    total = len(pairs) + len(targets)
    wanted: list[Pair | str] = [*pairs, *targets]
    for index, name in enumerate(wanted):
        label = name.name if isinstance(name, Pair) else f"fp32->{name}"
        if say is not None:
            say(label, index, total)
        start = time.monotonic()
        try:
            if isinstance(name, Pair):
                products.append(probe_matmul(device, name, quick=quick))
            else:
                casts.append(probe_cast(device, name))
        except Unavailable as error:
            unavailable[label] = str(error)
        timings[label] = time.monotonic() - start
    seconds = time.monotonic() - begun
    about = dict(device.about())
    return ProbeResult(device.name, about, tuple(products), tuple(casts), unavailable, seconds, timings)


def probe_matmul(device: ProbedDevice, pair: Pair, *, quick: bool = False) -> MatmulFinding:
    """One product; Unavailable where the device does not compute it."""
    begun = time.monotonic()
    fmt = operand_format(pair.operands)
    if isinstance(fmt, IntFormat):
        parameters, fraction, dots, out = probe_integer(device, pair, 10_000 if quick else 100_000)
        hashes = {"corpus": hash_of(out)}
        return MatmulFinding(pair, parameters, fraction, dots, (), None, hashes, time.monotonic() - begun)
    if not isinstance(fmt, FloatFormat):
        raise Unavailable(f"{fmt.name} values have no exponent field of one width, which the probe needs")
    found = fit(device, pair)
    fraction, dots, unexplained, corpus = _certify(device, pair, found, quick=quick)
    parameters = (*decide(found), _batches(device, pair, fmt), _repeats(device, pair, fmt))
    hashes = {seen.name: hash_of(seen.out) for seen in found.groups} | {"corpus": corpus}
    seconds = time.monotonic() - begun
    return MatmulFinding(pair, parameters, fraction, dots, unexplained, found.model, hashes, seconds)


def hash_of(x: Tensor) -> str:
    """SHA-256 (hex) of a tensor's bytes."""
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _certify(
    device: ProbedDevice, pair: Pair, found: Fit, *, quick: bool
) -> tuple[float, int, tuple[dict[str, object], ...], str]:
    """The fraction of the corpus that the model explains, its size, what it misses, and the hash of its bits."""
    fmt = operand_format(pair.operands)
    assert isinstance(fmt, FloatFormat)
    right, dots = 0, 0
    missed: list[dict[str, object]] = []
    digest = hashlib.sha256()
    for index, (rows, columns, k, kind) in enumerate(_CORPUS):
        if quick:
            rows, columns = rows // 2, columns // 4
        a, b = operands(fmt, kind, rows, columns, k, seed=100 + index)
        seen = ask(device, pair, f"{kind}, K = {k}", a, b)
        same = agreement(found.model, seen)
        digest.update(seen.out.contiguous().numpy().tobytes())
        right, dots = right + int(same.sum()), dots + same.numel()
        wrong = (~same).nonzero()[: max(_UNEXPLAINED - len(missed), 0) and 4]
        if wrong.numel():
            ours = found.model.matmul(a, b)
            for i, j in wrong.tolist():
                missed.append(
                    {
                        "corpus": seen.name,
                        "row": i,
                        "column": j,
                        "device": float(seen.out[i, j]),
                        "model": float(ours[i, j]),
                        "a": a[i].tolist() if k <= 160 else f"seed {100 + index}",
                        "b": b[j].tolist() if k <= 160 else f"seed {100 + index}",
                    }
                )
    return right / dots, dots, tuple(missed[:_UNEXPLAINED]), digest.hexdigest()


def _batches(device: ProbedDevice, pair: Pair, fmt: FloatFormat) -> Parameter:
    """Vector 15: whether a row's result depends on how many rows there are, or on its place among them."""
    a, b = operands(fmt, "zero_sum", max(_BATCHES), 64, 256, seed=7)
    whole = device.matmul(a, b, pair)
    differing = [
        count
        for count in _BATCHES
        if not _equal(device.matmul(a[:count].contiguous(), b, pair), whole[:count])
    ]
    if not _equal(device.matmul(a.flip(0).contiguous(), b, pair).flip(0), whole):
        return Parameter("batch_invariant", False, MEASURED, "a row's bits depend on its place in the batch")
    if differing:
        sizes = ", ".join(map(str, differing))
        return Parameter(
            "batch_invariant", False, MEASURED, f"M = {sizes} give other bits than M = {max(_BATCHES)}"
        )
    sizes = ", ".join(map(str, _BATCHES))
    return Parameter(
        "batch_invariant", True, MEASURED, f"the same bits for M = {sizes} and for rows in other order"
    )


def _repeats(device: ProbedDevice, pair: Pair, fmt: FloatFormat) -> Parameter:
    a, b = operands(fmt, "zero_sum", 64, 64, 512, seed=8)
    first = device.matmul(a, b, pair)
    same = all(_equal(device.matmul(a, b, pair), first) for _ in range(9))
    if same:
        return Parameter("repeatable", True, MEASURED, "ten calls gave the same bits")
    return Parameter("repeatable", None if same else False, MEASURED, "ten calls gave different bits")


def _equal(x: Tensor, y: Tensor) -> bool:
    same = x.contiguous().view(torch.int32) == y.contiguous().view(torch.int32)
    return bool((same | (x.isnan() & y.isnan())).all())


__all__ = ["MEASURED", "UNKNOWN", "MatmulFinding", "ProbeResult", "hash_of", "probe", "probe_matmul"]
