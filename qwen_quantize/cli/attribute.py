"""`qwen_quantize eval --attribute`: the settings of the engine that switch each part of a loss on and off."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from qwen_quantize.cli.console import StageProgress
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.attribution import Part, Setting, Share, attribute
from qwen_quantize.formats.tables import FP32
from qwen_quantize.pipeline.texts import EvaluationTokens


def attribution_record(
    reader: ModelReader,
    reference: ModelReader,
    chip: ChipCompute | None,
    windows: EvaluationTokens,
    progress: StageProgress,
) -> dict[str, Any]:
    """What stands under `attribution` in the record of `eval`; chip None: only the weights are quantized."""
    original = ModelReader(reference.source, quantized_as=reader)

    def build(setting: Setting) -> StreamedModel:
        weights = reader if Part.WEIGHTS in setting else original
        return StreamedModel(weights, chip_with(chip, setting))

    found = attribute(lambda: StreamedModel(reference), build, parts_of(chip), windows.windows, progress)
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


def parts_of(chip: ChipCompute | None) -> tuple[Part, ...]:
    """The parts that this chip's way of computing has."""
    parts = [Part.WEIGHTS]
    if chip is not None and chip.cast is not None:
        parts += [Part.ACTIVATIONS, Part.SCALES]
    if chip is not None and chip.unit is not None:
        parts.append(Part.SUMS)
    return tuple(parts)


def chip_with(chip: ChipCompute | None, setting: Setting) -> ChipCompute | None:
    """The chip with only some of its parts on. What is no code any more enters its unit as float32."""
    if chip is None:
        return None
    cast = chip.cast if Part.ACTIVATIONS in setting else None
    if cast is not None and Part.SCALES not in setting:
        cast = replace(cast, unrounded_scales=True)
    unit = chip.unit if Part.SUMS in setting else None
    if unit is not None and not {Part.ACTIVATIONS, Part.SCALES} <= setting:
        unit = replace(unit, a_format=FP32)
    if unit is not None and Part.WEIGHTS not in setting:
        unit = replace(unit, b_format=FP32)
    return ChipCompute(cast, unit)


def _share(share: Share) -> dict[str, Any]:
    names = [part.value for part in share.parts]
    record: dict[str, Any] = {"part": " x ".join(names), **asdict(share.effect)}
    if len(names) > 1:
        record["parts"] = names
    if share.recovered is not None:
        record["recovered"] = asdict(share.recovered)
    return record
