"""Finding the model that explains a device's products.

The width of a step is read off first, from something that holds for every aligned sum: two products may change
places without any effect exactly when they belong to one step. Fraction bits and the rounding of the shift are then
tried out together on vectors that stay within one step, register and final rounding on sums of two steps, and what
remains in turn. Float32 additions in some order are tried when no step shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from qwen_quantize.chip_profiles.probe_corpus import operands, swapped
from qwen_quantize.chip_profiles.probe_device import Pair, ProbedDevice, operand_format
from qwen_quantize.chip_profiles.probe_model import (
    ROWS,
    Seen,
    SumModel,
    ask,
    ask_paired,
    explained,
    score,
    thinned,
    with_unit,
)
from qwen_quantize.chip_profiles.probe_options import (
    flushes,
    intervals,
    output_rules,
    ranges,
    registers,
    second_shifts,
    shifts,
)
from qwen_quantize.chip_profiles.probe_vectors import FAR, step_width, targeted
from qwen_quantize.formats.cast_rule import Rounding
from qwen_quantize.formats.dot_record import (
    DotUnit,
    Joining,
    Order,
    SumOverflow,
    TwoStage,
)
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import FP32

LONGEST = 4096  # products of the longest sums that are looked at
_CORPORA = (
    ("mixed", 64),
    ("zero_sum", 128),
    ("normal", 128),
    ("same_sign", 192),
    ("sparse", 128),
    ("tiny", 128),
)
_ENOUGH = 1.0
_LEAST = 1e-12
_FINALISTS = 4
_HOPELESS = 0.6  # a structure that explains less is another one
# Fields that only special inputs show: their values, and the groups that show them.
DETAILS: tuple[tuple[str, tuple[object, ...], tuple[str, ...]], ...] = (
    ("flush_inputs", (False, True), ("6", "random tiny")),
    ("flush_outputs", (False, True), ("6", "random tiny")),
    ("nan_bits", (0x7FC00000, 0x7FFFFFFF, 0xFFC00000, 0x7FFFE000, 0xFFFFFFFF), ("12",)),
    ("min_alignment_exponent", (None, *range(-160, -100)), ("6", "random tiny")),
    ("products_overflow", (False, True), ("7", "12")),
    ("overflow", (SumOverflow.INFINITY, SumOverflow.SATURATE), ("7",)),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """The best model, what was asked for it, and the distances at which two products may change places."""

    model: SumModel
    groups: tuple[Seen, ...]
    interchangeable: tuple[int, ...]

    @property
    def whole(self) -> tuple[Seen, ...]:
        """The groups that the model explains to the last bit."""
        return tuple(seen for seen in self.groups if explained(self.model, seen) == _ENOUGH)


def fit(device: ProbedDevice, pair: Pair) -> Fit:
    """The model that explains most of what `device` gives; Unavailable where it gives nothing."""
    fmt = operand_format(pair.operands)
    if not isinstance(fmt, FloatFormat):
        raise ValueError(f"{pair.name} has no float operands of one width")
    groups = [
        ask_paired(device, pair, item.name, item.a, item.b, item.labels)
        for item in targeted(fmt, pair.output != "fp16")
    ]
    for kind, k in _CORPORA:
        groups.append(ask(device, pair, f"random {kind}", *operands(fmt, kind, ROWS, ROWS, k, seed=1)))
    same = _interchangeable(device, pair, fmt)
    groups += _two_steps(device, pair, fmt, same)
    searched = [seen for seen in groups if seen.name.startswith(("1", "2", "4", "5", "8", "random"))]
    searched = [seen for seen in searched if seen.name[:2] not in ("12", "13")]
    output = [seen for seen in groups if seen.name.startswith("13")]
    best, reached = None, -1.0
    for start in _starts(fmt, pair, same, groups):
        model = _search(start, searched, output)
        found = score(model, searched)
        if best is None or found > reached:
            best, reached = model, found
        if found == _ENOUGH:
            break
    assert best is not None
    long = [
        ask(device, pair, f"random long {kind}", *operands(fmt, kind, ROWS, ROWS, LONGEST // 2, seed=2))
        for kind in ("zero_sum", "normal")
    ]
    best = _details(_best(best, ranges(best), [seen for seen in groups if seen.name.startswith("7")]), groups)
    best = _promoted(device, pair, fmt, best, [*searched, *long])
    depth = [best.unit.fraction_bits] if best.unit.fraction_bits else [23]
    powers = {2 * min(7, fmt.emax - 1) - bits + shift for bits in depth for shift in (0, 1)}
    width = step_width(fmt, sorted(powers))
    if width.labels:
        groups.append(ask_paired(device, pair, width.name, width.a, width.b, width.labels))
    groups += long
    return Fit(_details(best, groups), tuple(groups), same)


def _interchangeable(device: ProbedDevice, pair: Pair, fmt: FloatFormat) -> tuple[int, ...]:
    """The k for which products 0 and k can change places in thousands of random sums without any effect.

    No further k is tried once an odd and an even one have failed.
    """
    sums = []
    for kind, k in (("zero_sum", 3 * FAR), ("mixed", 2 * FAR)):
        a, b = operands(fmt, kind, ROWS, ROWS, k, seed=3)
        sums.append((a, b, device.matmul(a, b, pair)))
    found: list[int] = []
    open_gaps = {0, 1}  # the parities of k for which no k has failed yet
    for k in range(1, FAR + 1):
        if all(_equal(device.matmul(swapped(a, 0, k), swapped(b, 0, k), pair), out) for a, b, out in sums):
            found.append(k)
        else:
            open_gaps.discard(k % 2)
        if not open_gaps:
            break
    return tuple(found)


def _gap(same: Sequence[int]) -> int:
    """The smallest distance at which two products may not change places."""
    return next((k for k in range(1, FAR + 1) if k not in same), FAR)


def _two_steps(device: ProbedDevice, pair: Pair, fmt: FloatFormat, same: Sequence[int]) -> list[Seen]:
    """Sums so short that no more than two steps and hardly a promotion take part."""
    width = _gap(same)
    kinds = ("mixed", "zero_sum", "same_sign", "normal")
    asked = [(kind, operands(fmt, kind, ROWS, ROWS, 2 * width, seed=4)) for kind in kinds]
    return [ask(device, pair, f"random short {kind}", a, b) for kind, (a, b) in asked]


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return bool((x.contiguous().view(torch.int32) == y.contiguous().view(torch.int32)).all())


# ---- where the search starts ----


def _starts(fmt: FloatFormat, pair: Pair, same: Sequence[int], groups: Sequence[Seen]) -> Iterable[SumModel]:
    gap = _gap(same)
    even_gap = next((k for k in range(2, FAR + 1, 2) if k not in same), FAR)
    if gap == 1 and even_gap > 2:  # even and odd products are added apart
        yield _two_stage(fmt, pair, even_gap, lanes=2)
    short = gap <= 2
    if short:
        yield from _float32_orders(fmt, pair, groups)
    widths = (gap,) if not short else (1, 2)
    for width in widths:
        unit = DotUnit("found", fmt, fmt, Order.ALIGNED, products=width, fraction_bits=24)
        yield _with_inputs(SumModel(unit, pair.output), pair, groups)
    for width in widths:
        yield _with_inputs(_two_stage(fmt, pair, width), pair, groups)
        separate = DotUnit(
            "found", fmt, fmt, Order.ALIGNED, products=width, fraction_bits=24, joining=Joining.SEPARATE
        )
        yield SumModel(separate, pair.output)
    if not short:
        yield from _float32_orders(fmt, pair, groups)


def _two_stage(fmt: FloatFormat, pair: Pair, width: int, lanes: int = 1) -> SumModel:
    unit = DotUnit(
        "found", fmt, fmt, Order.ALIGNED, products=width, fraction_bits=24, lanes=lanes,
        joining=Joining.TWO_STAGE, two_stage=TwoStage(31, 24, Rounding.FLOOR), min_alignment_exponent=-126,
    )  # fmt: skip
    return SumModel(unit, pair.output)


def _with_inputs(model: SumModel, pair: Pair, groups: Sequence[Seen]) -> SumModel:
    """The model with the rounding of its inputs, which products of one factor 1 show whatever the sums are."""
    wide = [seen for seen in groups if seen.name.startswith("10")]
    start = with_unit(model, input_rounding=Rounding.RTZ) if pair.operands == "tf32" else None
    if start is None:
        return model
    return _best(start, (with_unit(model, input_rounding=how) for how in (Rounding.RNE, Rounding.RNA)), wide)


def _float32_orders(fmt: FloatFormat, pair: Pair, groups: Sequence[Seen]) -> list[SumModel]:
    """The two best of many orders of float32 additions."""
    operand = FP32 if pair.operands == "tf32" else fmt
    found = []
    for flush in (False, True):

        def make(
            order: Order, products: int | None = None, every: int | None = None, flush: bool = flush
        ) -> DotUnit:
            return DotUnit(
                "found", operand, operand, order, products=products, promotion_interval=every,
                flush_inputs=flush, flush_outputs=flush,
            )  # fmt: skip

        found += [SumModel(make(Order.FMA, every=n), pair.output) for n in (None, 32, 64, 128)]
        found += [SumModel(make(Order.PAIRWISE, n), pair.output) for n in (None, 2, 4, 8, 16, 32, 64)]
        for lanes, block in itertools.product((2, 4, 8, 16), (None, 16, 32, 64)):
            found.append(SumModel(make(Order.FMA), pair.output, lanes=lanes, block=block))
    few = [
        thinned(seen)
        for seen in groups
        if seen.name.startswith(("random mixed", "random zero", "random sparse", "8"))
    ]
    return sorted(found, key=lambda model: -score(model, few))[:2]


# ---- the search ----


def _search(model: SumModel, groups: Sequence[Seen], output: Sequence[Seen]) -> SumModel:
    near, two = _named(groups, "1 ", "1b", "2"), _named(groups, "random short")
    steps = [*two, *_named(groups, "4", "5", "random mixed", "random zero", "random same")]
    tiny = _named(groups, "random tiny", "random normal")
    if model.output != "fp32":
        model = _best(model, output_rules(model), output)
    if model.unit.order is not Order.ALIGNED or score(model, groups) == _ENOUGH:
        return model
    width = model.unit.products or 1
    depths = _depths(near) if width > 2 else ()
    if width < 3:
        near = [*near, *steps]
    if model.unit.two_stage is not None:
        return _search_two_stage(model, near, groups, depths)
    for attempt in range(3):
        before = model
        model = _best(model, shifts(model, depths), near if attempt == 0 else [*near, *steps])
        if attempt == 0:  # two steps are over before most intervals are
            model = _best(model, registers(model, (None, width)), two)
        model = _best(model, intervals(model), steps)
        model = _best(model, registers(model, (model.unit.promotion_interval,)), steps)
        model = _best(model, ranges(model), groups)
        model = _best(model, flushes(model), tiny)
        model = _best(model, intervals(model), groups)
        if model.output != "fp32":
            model = _best(model, output_rules(model), output)
        reached = score(model, groups)
        if model == before or reached == _ENOUGH or reached < _HOPELESS:
            break
    return model


def _named(groups: Sequence[Seen], *starts: str) -> list[Seen]:
    return [seen for seen in groups if seen.name.startswith(starts)]


def _depths(near: Sequence[Seen]) -> list[int]:
    """How deep a term below P survives, in the less lasting of its two signs; empty where none is lost."""
    found = []
    for seen in _named(near, "1 ", "1b"):
        last = {}
        for sign in "+-":
            alive = [int(label) for label, out in zip(seen.labels, seen.out.tolist(), strict=True) if out]
            last[sign] = max((abs(n) for n in alive if (n > 0) == (sign == "+")), default=0)
        if min(last.values()) < max(abs(int(label)) for label in seen.labels):
            found.append(min(last.values()))
    return found


def _search_two_stage(
    model: SumModel, near: Sequence[Seen], groups: Sequence[Seen], depths: Sequence[int]
) -> SumModel:
    model = _best(model, shifts(model, depths), near)
    for _ in range(2):
        before = model
        model = _best(model, second_shifts(model), groups)
        model = _best(model, registers(model, (None,)), groups)
        if model == before or score(model, groups) == _ENOUGH:
            break
    return model


def _best(model: SumModel, options: Iterable[SumModel | None], groups: Sequence[Seen]) -> SumModel:
    """The option that explains most of `groups`; `model` itself unless one is better.

    All are ranked on a part of each group; only the first few are held against the whole.
    """
    reached = score(model, groups)
    if reached == _ENOUGH:
        return model
    part = [thinned(seen) for seen in groups]
    ranked: list[tuple[float, SumModel]] = []
    for option in options:
        if option is None or option == model:
            continue
        bar = ranked[_FINALISTS - 1][0] if len(ranked) >= _FINALISTS else -1.0
        found = _score_above(option, part, bar)
        if found <= bar:
            continue
        ranked = sorted([*ranked, (found, option)], key=lambda pair: -pair[0])[:_FINALISTS]
        if found == _ENOUGH and _score_above(option, groups, 1.0 - _LEAST) == _ENOUGH:
            return option
    for _, option in ranked:
        found = _score_above(option, groups, reached)
        if found > reached:
            model, reached = option, found
    return model


def _score_above(model: SumModel, groups: Sequence[Seen], bar: float) -> float:
    """The score, or -1 as soon as it is certain that it is not above `bar`."""
    total = 0.0
    for index, seen in enumerate(groups):
        total += explained(model, seen)
        if total + len(groups) - index - 1 <= bar * len(groups):
            return -1.0
    return total / max(len(groups), 1)


def _promoted(
    device: ProbedDevice, pair: Pair, fmt: FloatFormat, model: SumModel, groups: Sequence[Seen]
) -> SumModel:
    """The interval after which partial sums move on, where longer sums contradict the model."""
    long = [seen for seen in groups if seen.name.startswith("random long")]
    if model.lanes > 1 or model.unit.promotion_interval or score(model, long) == _ENOUGH:
        return model
    holds, fails = max(k for _, k in _CORPORA), LONGEST // 2
    while fails - holds > 1:  # the shortest sum that the model misses
        k = (holds + fails) // 2
        a, b = operands(fmt, "mixed", ROWS, ROWS, k + k % 2, seed=5)
        a[:, k:], b[:, k:] = 0, 0
        if explained(model, ask(device, pair, "length", a, b)) == _ENOUGH:
            holds = k
        else:
            fails = k
    near = range(fails - 1, max(fails - FAR, 1), -1)
    intervals = [every for every in near if fails - every <= 3 or every % 16 == 0]
    found = _best(model, (with_unit(model, promotion_interval=every) for every in intervals), long)
    return found if score(found, long) == _ENOUGH else model  # a split that follows from the length is none


def _details(model: SumModel, groups: Sequence[Seen]) -> SumModel:
    """What only special inputs show: subnormals, NaN, overflow, the floor of the alignment."""
    for field, options, shown_by in DETAILS:
        few = [seen for seen in groups if seen.name.startswith(shown_by)]
        model = _best(model, (with_unit(model, **{field: value}) for value in options), few)
    return model
