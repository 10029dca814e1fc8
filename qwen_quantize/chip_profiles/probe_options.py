"""The other models that a search tries beside the one it has: what may vary together varies together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from qwen_quantize.chip_profiles.probe_model import SumModel, with_unit
from qwen_quantize.formats.cast_rule import Overflow, Rounding
from qwen_quantize.formats.dot_record import DOT_ROUNDINGS, Register, SumOverflow

DEEPEST_FRACTION = 45
_AROUND = 4  # fraction bits tried on either side of what the depth suggests


def shifts(model: SumModel, depths: Sequence[int]) -> Iterable[SumModel | None]:
    """Fraction bits (the nearest to what `depths` suggest first; none given: all), with every rounding."""
    bits: Sequence[int] = (*range(8, DEEPEST_FRACTION + 1), *range(1, 8))
    if depths:
        away = {n: min(abs(n - depth) for depth in depths) for n in range(1, DEEPEST_FRACTION + 1)}
        bits = sorted((n for n, distance in away.items() if distance <= _AROUND), key=lambda n: away[n])
    yield with_unit(model, fraction_bits=None, alignment_rounding=Rounding.RTZ, products_normalised=False)
    for count, normalised, rounding in itertools.product(bits, (False, True), DOT_ROUNDINGS):
        yield with_unit(
            model, fraction_bits=count, alignment_rounding=rounding, products_normalised=normalised
        )


def registers(model: SumModel, every: Iterable[int | None]) -> Iterable[SumModel | None]:
    """All registers and roundings, each with the promotion intervals `every`."""
    for interval, (register, bits) in itertools.product(every, ((Register.FP32, 23), (Register.FP16, 10))):
        for kept, rounding in itertools.product(range(bits, 0, -1), DOT_ROUNDINGS):
            yield with_unit(
                model,
                register=register,
                mantissa_bits=kept,
                final_rounding=rounding,
                promotion_interval=interval,
            )


def ranges(model: SumModel) -> Iterable[SumModel | None]:
    """The registers that keep equally many bits, which only large sums tell apart."""
    for register, overflow in itertools.product((Register.FP32, Register.FP16), ("infinity", "saturate")):
        yield with_unit(model, register=register, overflow=SumOverflow(overflow))


def flushes(model: SumModel) -> Iterable[SumModel | None]:
    for inputs, outputs in itertools.product((False, True), repeat=2):
        yield with_unit(model, flush_inputs=inputs, flush_outputs=outputs)


def intervals(model: SumModel) -> Iterable[SumModel | None]:
    width = model.unit.products or 1
    for every in dict.fromkeys((None, 16, 32, 64, 128, 96, width, 2 * width, 3 * width, 4 * width)):
        yield with_unit(model, promotion_interval=every)


def second_shifts(model: SumModel) -> Iterable[SumModel | None]:
    stage = model.unit.two_stage
    if stage is None:
        return
    for rounding in DOT_ROUNDINGS:
        yield with_unit(model, two_stage=replace(stage, rounding=rounding))
    for bits in range(20, 41):
        yield with_unit(model, two_stage=replace(stage, sum_fraction_bits=bits))
        yield with_unit(model, two_stage=replace(stage, register_fraction_bits=bits))
    for lost in (None, *range(20, 32)):
        yield with_unit(model, two_stage=replace(stage, dropped_below=lost))


def output_rules(model: SumModel) -> Iterable[SumModel]:
    for rounding in (*DOT_ROUNDINGS, Rounding.ODD):
        for overflow in (Overflow.NONSATURATE, Overflow.SATURATE):
            rule = replace(model.output_rule, rounding=rounding, overflow=overflow)
            yield replace(model, output_rule=rule)
