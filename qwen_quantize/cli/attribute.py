"""`qwen_quantize eval --attribute`: the settings of the engine that switch each part of a loss on and off."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from qwen_quantize.checkpoint.stored_linears import StoredLinear
from qwen_quantize.cli.console import StageProgress
from qwen_quantize.engine.compute import Compute, computed_as
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.attribution import Part, Setting, Share, attribute
from qwen_quantize.formats.tables import FP32
from qwen_quantize.pipeline.texts import EvaluationTokens


def attribution_record(
    reader: ModelReader,
    reference: ModelReader,
    chip: Compute | None,
    windows: EvaluationTokens,
    progress: StageProgress,
) -> dict[str, Any]:
    """What stands under `attribution` in the record of `eval`; chip None: only the weights are quantized."""
    original = ModelReader(reference.source, quantized_as=reader)

    def build(setting: Setting) -> StreamedModel:
        weights = reader if Part.WEIGHTS in setting else original
        return StreamedModel(weights, rule_with(chip, setting))

    ways = [way for stored in reader.quantized_linears() if (way := computed_as(chip, stored)) is not None]
    found = attribute(lambda: StreamedModel(reference), build, parts_of(ways), windows.windows, progress)
    return {
        "parts": [_share(share) for share in found.parts],
        "interactions": [_share(share) for share in found.interactions],
        "total": asdict(found.total),
        "tokens": found.tokens,
        "windows": found.windows,
        "perplexity": found.perplexity,
        "reference_perplexity": found.reference_perplexity,
        "everything_off_is_the_reference": found.restored,
    }


def parts_of(ways: Iterable[ChipCompute]) -> tuple[Part, ...]:
    """The parts that these ways of computing have, one or more for each kind of linear."""
    found = {Part.WEIGHTS}
    for way in ways:
        if way.cast is not None:
            found.add(Part.ACTIVATIONS)
            found |= {Part.SCALES} if way.cast.rounds_scales else set()
        if way.unit is not None or way.sum_scale_format is not None:
            found.add(Part.SUMS)
    return tuple(part for part in Part if part in found)


def rule_with(chip: Compute | None, setting: Setting) -> Compute | None:
    """The chip with only some of its parts on, whatever it does with each linear."""
    if chip is None or isinstance(chip, ChipCompute):
        return None if chip is None else chip_with(chip, setting)

    def rule(stored: StoredLinear) -> ChipCompute | None:
        way = computed_as(chip, stored)
        return None if way is None else chip_with(way, setting)

    return rule


def chip_with(chip: ChipCompute, setting: Setting) -> ChipCompute:
    """One way of computing with only some of its parts on. What is no code any more enters its unit as float32."""
    cast = chip.cast if Part.ACTIVATIONS in setting else None
    exact = cast is not None and cast.rounds_scales and Part.SCALES not in setting
    if cast is not None and exact:
        cast = cast.unrounded()
    unit = chip.unit if Part.SUMS in setting else None
    if unit is not None and (cast is None or exact):
        unit = replace(unit, a_format=FP32)
    if unit is not None and Part.WEIGHTS not in setting:
        unit = replace(unit, b_format=FP32)
    kept = chip.sum_scale_format if Part.SUMS in setting else None
    return ChipCompute(cast, unit, chip.bare and (unit is not None or kept is not None), kept)


def _share(share: Share) -> dict[str, Any]:
    names = [part.value for part in share.parts]
    record: dict[str, Any] = {"part": " x ".join(names), **asdict(share.effect)}
    if len(names) > 1:
        record["parts"] = names
    if share.recovered is not None:
        record["recovered"] = asdict(share.recovered)
    return record
