"""The key-value cache of a quantization run: calibrated on the weights that were written, stored beside them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from qwen_quantize.checkpoint.ascend_packing import kv_cache_tensors
from qwen_quantize.checkpoint.kv_side import KV_FILE, kv_file_bytes, scale_values
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import KvKind, parse_kv_scheme
from qwen_quantize.pipeline.kv_cache import plan_kv_cache
from qwen_quantize.pipeline.kv_observe import Room
from qwen_quantize.pipeline.kv_tensors import reads_channel_scales, scale_names
from qwen_quantize.pipeline.memory import observed_windows
from qwen_quantize.pipeline.run import StagedRun, read_calibration
from qwen_quantize.pipeline.texts import CalibrationTokens

Progress = Callable[[str, int, int], None]


def write_kv_cache(staged: StagedRun, progress: Progress) -> KvPlan:
    """Decide on the cache of the model that lies in the staging folder; write its file and engines' scales.

    Keys and values are those of the written weights, with activations in full precision, on the run's own text.
    """
    plan, folder = staged.plan, staged.folder
    if plan.kv_scheme is None:
        raise ValueError("the plan has no key-value scheme")
    reader = ModelReader(open_source(folder.staging))
    recipe = plan.recipe
    auto = recipe.kv_cache is not None and parse_kv_scheme(recipe.kv_cache).kind is KvKind.AUTO
    at_once = observed_windows(recipe.max_memory, reader.blueprint, recipe.length, plan.kv_scheme.gradient)
    kv = plan_kv_cache(
        plan.kv_scheme,
        reader,
        plan.resolution.profile,
        _windows(staged, reader),
        None,
        progress,
        spare_biased=auto,
        room=Room(at_once, folder.staging / "work"),  # where the states of calibration lay, and were counted
    )
    channels = _channel_tensors(kv, reader) if reads_channel_scales(plan.layout) else {}
    for output in plan.kv_outputs:
        found = channels.get(output.name)
        folder.write(output.name, _scale(kv, reader, output.name) if found is None else found)
    folder.sync()
    folder.add_file(KV_FILE, kv_file_bytes(kv))
    return kv


def _channel_tensors(kv: KvPlan, reader: ModelReader) -> dict[str, Tensor]:
    """C8's scales and offsets of every layer, by name; {} for a cache that is not C8's."""
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(kv.layers):
        scales = [] if layer is None else [tensor.parts[0].scale for tensor in (layer.keys, layer.values)]
        if len(scales) == 2 and scales[0] is not None and scales[1] is not None:
            attention = reader.blueprint.layer_name(number, "self_attn")
            found |= kv_cache_tensors(attention, scales[0], scales[1])[0]
    return found


def _windows(staged: StagedRun, reader: ModelReader) -> Tensor | None:
    calibration = staged.calibration
    if isinstance(calibration, CalibrationTokens):
        return calibration.tokens
    found = read_calibration(staged.plan.recipe, reader)
    return None if found is None else found.tokens


def _scale(kv: KvPlan, reader: ModelReader, name: str) -> Tensor:
    config = reader.blueprint.config
    for number, layer in enumerate(kv.layers):
        if layer is not None and name in scale_names(reader.blueprint, number):
            tensor = layer.keys if name == scale_names(reader.blueprint, number)[0] else layer.values
            return scale_values(tensor, kv.scheme, config.num_kv_heads)
    raise ValueError(f"no layer has {name}")
