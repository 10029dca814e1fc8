"""The record of what was done: everything in it is reproducible, so it holds no times."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import qwen_quantize
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.chip_profiles.behaviour import behaviour_of
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.statistics_folder import StatisticsFolder
from qwen_quantize.pipeline.texts import CalibrationTokens

MANIFEST_NAME = "qwen_quantize.json"

_LAYER = re.compile(r"\.(\d+)\.")


def build_manifest(
    plan: Plan,
    journal: Journal,
    calibration: CalibrationTokens | StatisticsFolder | None,
    source: CheckpointSource,
    validation: Mapping[str, Any] | None,
    mixed: Mapping[str, Any] | None = None,
    kv_cache: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Chip, method, data, assumptions, and the error of every linear.

    mixed: how mixed precision chose. `request` can be run again with `--recipe`.
    """
    arithmetic, profile = plan.arithmetic, plan.resolution.profile
    cast, activation = arithmetic.activation_cast, plan.scheme.activation
    actions = [tensor.action.value for tensor in plan.tensors]
    local = Path(plan.recipe.model_path)
    notes = list(plan.notes)
    used = None if calibration is None else _calibration(plan, calibration)
    if used is not None and used["note"]:
        notes.append(f"calibration text: {used['note']}")
    layers, outside = layer_records(plan, journal)
    return {
        "tool": {"name": "qwen_quantize", "version": qwen_quantize.__version__},
        "source": {
            "path": str(local.resolve() if local.exists() else local),
            "kind": source.kind,
            "architecture": plan.architecture,
            "fingerprint": source.fingerprint(),
            "parameters": _parameters(plan),
        },
        "request": plan.recipe.as_record(),
        "chip": {
            "name": profile.name,
            "vendor": profile.chip.vendor,
            "asked": plan.recipe.device,
            "why": plan.resolution.alias_explanation,
            "versions": dict(profile.versions),
            "fingerprint": arithmetic.fingerprint,
            "fingerprints": {
                choice.scheme.name: choice.arithmetic.fingerprint for choice in plan.distinct_choices
            },
            "activation_cast": {
                "rounding": cast.rounding.value,
                "overflow": cast.overflow.value,
                "subnormals": cast.subnormals.value,
                "nan": cast.nan.value,
            },
            "activation_scale_rule": arithmetic.activation_scale_rule.value,
            "accumulator": arithmetic.accumulator.format,
            "arithmetic": arithmetic.fields(),
            "behaviour": behaviour_of(arithmetic, plan.scheme, profile.versions).record(),
            "support": plan.resolution.verdict.status.value,
            "support_reason": plan.resolution.verdict.reason,
        },
        "method": plan.method.name,
        "layout": plan.layout.name,
        "block": list(plan.block),
        "scheme": {
            "name": plan.scheme.name,
            "region": plan.scheme.weight.granularity.describe(),
            "group_size": plan.scheme.weight.granularity.cols,
            "symmetric": plan.scheme.weight.symmetric,
            "weight": plan.scheme.weight.format.name,
            "activation": None if activation is None else activation.format.name,
            "scale": plan.scheme.weight.scale_format.name,
        },
        "calibration": used,
        "assumptions": [asdict(assumption) for assumption in plan.assumptions],
        "notes": notes,
        "tensors": {
            "quantized": actions.count("quantize"),
            "kept": actions.count("keep"),
            "dropped": actions.count("drop"),
        },
        "output_bytes": plan.output_bytes,
        "source_bytes": sum(source.info(name).nbytes for name in source.names()),
        "kv_cache": None if kv_cache is None else dict(kv_cache),
        "layers": layers,
        "head": outside,
        **({} if mixed is None else {"mixed_precision": dict(mixed)}),
        "validation": None if validation is None else dict(validation),
    }


def _calibration(plan: Plan, calibration: CalibrationTokens | StatisticsFolder) -> dict[str, Any]:
    """The text that calibration saw, itself or through `statistics`, the SHA-256 of their manifest."""
    if isinstance(calibration, CalibrationTokens):
        return {
            "dataset": plan.recipe.dataset,
            "windows": calibration.tokens.shape[0],
            "length": calibration.tokens.shape[1],
            "tokens": calibration.tokens.numel(),
            "sha256": calibration.sha256,
            "note": calibration.note,
        }
    data = calibration.manifest.data
    return {
        "dataset": ", ".join(dict.fromkeys(one.dataset for one in data)),
        "windows": sum(one.windows for one in data),
        "length": max((one.length for one in data), default=0),
        "tokens": sum(one.tokens for one in data),
        "sha256": " ".join(one.sha256 for one in data),
        "note": "; ".join(one.note for one in data if one.note),
        "statistics": calibration.sha256,
    }


def _parameters(plan: Plan) -> int:
    """Values of the model, scales not counted."""
    kept = sum(math.prod(tensor.outputs[0].shape) for tensor in plan.tensors if tensor.outputs)
    return int(kept)


def layer_records(plan: Plan, journal: Journal) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(a record per layer, the linears outside the layers), whatever unit of work each linear was part of.

    Linears stand in the model's order: threads finish them in any, and a resumed run in another.
    """
    layers: dict[int, dict[str, Any]] = {}
    outside: list[dict[str, Any]] = []

    def layer_record(layer: int) -> dict[str, Any]:
        return layers.setdefault(
            layer, {"layer": layer, "linears": [], "streams": [], "experts": [], "moves": []}
        )

    for unit, record in journal.units.items():
        for linear in record.get("linears", ()):
            found = _LAYER.search(linear["name"])
            (outside if found is None else layer_record(int(found[1]))["linears"]).append(linear)
        layer_of_unit = _LAYER.search(unit)
        if layer_of_unit is not None and "streams" in record:
            entry = layer_record(int(layer_of_unit[1]))
            entry["streams"] += record["streams"]
            entry["experts"] += record.get("experts", ())
            entry["moves"] += record.get("moves", ())
    place = {module: number for number, module in enumerate(plan.selection.quantized)}
    for linears in (outside, *(entry["linears"] for entry in layers.values())):
        linears.sort(key=lambda linear: place[linear["name"]])
        linears[:] = [{**linear, **_choice_record(plan, linear["name"])} for linear in linears]
    return [layers[layer] for layer in sorted(layers)], outside


def _choice_record(plan: Plan, module: str) -> dict[str, Any]:
    """What a linear was made into; bits: all that it takes on disk."""
    choice, shape = plan.choice_of(module), plan.selection.quantized[module]
    outputs = plan.layout.outputs(module, shape, choice.scheme)
    return {
        "method": choice.method.name,
        "scheme": choice.scheme.name,
        "region": choice.scheme.weight.granularity.describe(),
        "symmetric": choice.scheme.weight.symmetric,
        "bits": 8 * sum(output.nbytes for output in outputs),
    }
