"""`quant_model_description.json` of msModelSlim: what each tensor of an Ascend checkpoint is, read and written.

A flat object: a few settings of the whole model, then the name of every tensor with the type of its quantization.
vLLM Ascend looks a linear up by the entry of its weight, and does not start where that is missing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.formats.tables import BF16, FP16
from qwen_quantize.models.config_values import shown

DESCRIPTION_FILE = "quant_model_description.json"
WEIGHTS_STEM = "quant_model_weights"
MAX_DESCRIPTION_BYTES = 64_000_000  # a model of 200,000 tensors has one of some 20 MB
FLOAT = "FLOAT"
KV_TYPE = "C8"  # of the scales of an int8 key-value cache, and what the whole model then says of its cache
KV_TYPE_KEYS = ("kv_cache_type", "kv_quant_type")
MX_GROUP = 32  # elements that share an exponent in the MX types

_VERSION = "1.0.0"  # of the format; the one that msModelSlim writes
_LARGEST_GROUP = 1 << 20
_LONGEST_TYPE = 64

# From what msModelSlim ranks lowest: of several types the last one is that of the whole model.
TYPES = (
    FLOAT, "W8A16", "W8A8_DYNAMIC", "W8A8", "W8A8_MXFP8", "W4A16", "W4A8_DYNAMIC", "W4A8_MXFP", "W4A4_DYNAMIC",
    "W4A4_MXFP4",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AscendDescription:
    """types: tensor name to type; group_size: columns that share a scale, 0 where none is stated.

    scale_format: the model's dtype, which the engine holds the scales of inputs in.
    """

    types: Mapping[str, str]
    group_size: int
    scale_format: FloatFormat

    def describe(self) -> str:
        kinds = sorted(
            {kind for name, kind in self.types.items() if name.endswith(".weight") and kind != FLOAT}
        )
        return f"{' and '.join(kinds[:4]) or FLOAT} of msModelSlim"


def parse_description(found: Mapping[str, Any], config: Mapping[str, Any]) -> AscendDescription:
    """The record of a description; config: config.json. UserError for entries that are no types."""
    types: dict[str, str] = {}
    for key, value in found.items():
        if isinstance(value, str):
            types[key] = value[:_LONGEST_TYPE]
        elif key.endswith(".weight"):
            raise UserError(
                f"{DESCRIPTION_FILE}: {shown(key)} must have a type such as 'FLOAT', found {shown(value)}"
            )
    if not any(key.endswith(".weight") for key in types):
        raise UserError(f"{DESCRIPTION_FILE} names the type of no weight; download the model again")
    size = found.get("group_size", 0)
    if type(size) is not int or not 0 <= size <= _LARGEST_GROUP:
        raise UserError(
            f"{DESCRIPTION_FILE}: 'group_size' must be 0 or a positive number, found {shown(size)}"
        )
    return AscendDescription(types, size, model_format(config))


def model_format(config: Mapping[str, Any]) -> FloatFormat:
    """What Ascend computes a model in: FP16 if config.json says so, else BF16, for there is no FP32 there."""
    return FP16 if (config.get("dtype") or config.get("torch_dtype")) == "float16" else BF16


def description_bytes(types: Mapping[str, str], group_size: int, extra: Mapping[str, str]) -> bytes:
    """The file: settings first, then every tensor. extra: further settings, such as `kv_cache_type`."""
    ranked = max((kind for kind in types.values() if kind != KV_TYPE), key=TYPES.index, default=FLOAT)
    settings: dict[str, object] = {
        "model_quant_type": ranked,
        "version": _VERSION,
        "group_size": group_size,
        **extra,
    }
    return (json.dumps({**settings, **types}, indent=2, ensure_ascii=False) + "\n").encode()


def entries(names: Iterable[str], quantized: Mapping[str, str]) -> dict[str, str]:
    """Tensor name to type: that of its own where it belongs to a quantized linear, else FLOAT."""
    return {name: quantized.get(name, FLOAT) for name in names}
