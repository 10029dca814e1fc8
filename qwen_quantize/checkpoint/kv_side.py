"""The file beside a model that says how its key-value cache is to be stored, and the scales that engines read.

`kv_cache.qwen_quantize` is a safetensors file: channel numbers and fixed scales, `layers.N.keys.PART.channels` and so
on, and in its metadata the scheme and the element of every part as JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import CastRule, NanResult, Overflow, Rounding, Subnormals
from qwen_quantize.formats.kv_plan import KvLayer, KvPart, KvPlan, KvTensor
from qwen_quantize.formats.kv_scheme import KvElement, KvKind, KvScaling, KvScheme, parse_kv_scheme
from qwen_quantize.formats.tables import BF16, E4M3FN, FP16, INT4, INT8

KV_FILE = "kv_cache.qwen_quantize"  # an engine that loads every *.safetensors would take it for weights
_KEY = "qwen_quantize_kv_cache"
_MOST_BYTES = 64 << 20
_MOST_GROUP = 1 << 20
_MOST_PARTS = 5  # INT4 in groups of three sizes, INT8, FP16
_FORMATS = {fmt.name: fmt for fmt in (FP16, BF16, E4M3FN, INT8, INT4)}


def kv_file_bytes(plan: KvPlan) -> bytes:
    """The file's content; the same plan gives the same bytes."""
    tensors: dict[str, Tensor] = {}
    layers: list[dict[str, Any] | None] = []
    for number, layer in enumerate(plan.layers):
        if layer is None:
            layers.append(None)
            continue
        entry = {}
        for side, tensor in (("keys", layer.keys), ("values", layer.values)):
            parts = []
            for place, part in enumerate(tensor.parts):
                element = part.element
                parts.append([element.format.name, element.scaling.value, element.group, part.count])
                for name, data in (("channels", part.channels), ("scale", part.scale)):
                    if data is not None:
                        tensors[f"layers.{number}.{side}.{place}.{name}"] = data.contiguous()
            entry[side] = {"width": tensor.width, "parts": parts}
        layers.append(entry)
    rule = [plan.rule.rounding, plan.rule.overflow, plan.rule.subnormals, plan.rule.nan]
    record = {"scheme": plan.scheme.name, "latent": plan.latent, "rule": rule, "layers": layers,
              "notes": list(plan.notes)}  # fmt: skip
    return bytes(save(tensors, {_KEY: json.dumps(record)}))


def read_kv_plan(folder: Path) -> KvPlan | None:
    """The plan beside a model; None where there is none. UserError for a file that says what cannot be."""
    path = folder / KV_FILE
    if not path.is_file():
        return None
    if path.stat().st_size > _MOST_BYTES:
        raise UserError(f"{path} is larger than any key-value scheme; remove it, or name one with --kv-cache")
    data = path.read_bytes()
    try:
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        record = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_KEY])
        return _plan(record, tensors)
    except (
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RecursionError,
        RuntimeError,
    ) as error:
        raise UserError(
            f"{path} does not describe a key-value cache ({error}); remove it, or name one with --kv-cache"
        ) from error


def _plan(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> KvPlan:
    scheme = parse_kv_scheme(str(record["scheme"]))
    if scheme.kind is KvKind.AUTO:
        raise ValueError("auto is no scheme of a cache")
    rounding, overflow, subnormals, nan = record["rule"]
    rule = CastRule(Rounding(rounding), Overflow(overflow), Subnormals(subnormals), NanResult(nan))
    if rule.rounding in (Rounding.STOCHASTIC, Rounding.HYBRID):
        raise ValueError(f"rounding {rule.rounding}")
    layers = tuple(
        None
        if entry is None
        else KvLayer(
            *(_tensor(entry[side], f"layers.{number}.{side}", tensors) for side in ("keys", "values"))
        )
        for number, entry in enumerate(record["layers"])
    )
    return KvPlan(
        scheme, layers, record["latent"] is True, rule, tuple(str(note) for note in record["notes"])
    )


def _tensor(entry: Mapping[str, Any], name: str, tensors: Mapping[str, Tensor]) -> KvTensor:
    width = _count(entry["width"])
    parts, taken = [], torch.zeros(width, dtype=torch.int64)
    for place, (fmt, scaling, group, count) in enumerate(entry["parts"]):
        element = KvElement(_FORMATS[fmt], KvScaling(scaling), _count(group))
        narrow = element.format.bits < 16
        if narrow == (element.scaling is KvScaling.NONE) or (_count(count) % 2 and element.format is INT4):
            raise ValueError(f"{name}: {fmt} with {scaling} scales")
        affine = element.scaling in (KvScaling.SPAN, KvScaling.SLICE)
        if affine != (element.format is INT4) and not (affine and element.format is INT8):
            raise ValueError(f"{name}: {fmt} with {scaling} scales")
        channels = tensors.get(f"{name}.{place}.channels")
        scale = tensors.get(f"{name}.{place}.scale")
        if channels is None:
            taken += 1
        else:
            outside = (channels < 0) | (channels >= width)
            if channels.dtype != torch.int64 or channels.shape != (count,) or bool(outside.any()):
                raise ValueError(f"{name}: the channels of part {place}")
            taken.index_add_(0, channels, torch.ones_like(channels))
        if element.scaling.static:
            usable = scale is not None and scale.dtype == torch.float32 and scale.shape == (count,)
            if scale is None or not usable or not bool((scale.isfinite() & (scale > 0)).all()):
                raise ValueError(f"{name}: the scales of part {place}")
        parts.append(KvPart(element, count, channels, scale if element.scaling.static else None))
    if (
        not parts
        or len(parts) > _MOST_PARTS
        or not bool((taken == 1).all())
        or sum(p.count for p in parts) != width
    ):
        raise ValueError(f"{name}: the parts are no permutation of {width} channels")
    return KvTensor(width, tuple(parts))


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MOST_GROUP:
        raise ValueError(f"{value!r} is no count")
    return value


def engine_scales(scheme: KvScheme) -> bool:
    """Whether serving engines read this cache's scales from the checkpoint: FP8 for a tensor or each head."""
    return scheme.kind is KvKind.FP8 and scheme.scaling in (KvScaling.TENSOR, KvScaling.HEAD)


def scale_shape(scheme: KvScheme, heads: int) -> tuple[int, ...]:
    """[1] for a tensor, [heads, 1, 1] for each head, as compressed-tensors has them."""
    return (1,) if scheme.scaling is KvScaling.TENSOR else (heads, 1, 1)


def scale_values(tensor: KvTensor, scheme: KvScheme, heads: int) -> Tensor:
    """float32 `scale_shape`: what a stored value is multiplied with."""
    scale = tensor.parts[0].scale
    if scale is None:
        raise ValueError("the part has no fixed scale")
    shape = scale_shape(scheme, heads)
    first = scale.view(heads, -1)[: math.prod(shape), 0]
    return torch.empty(shape).copy_(first.view(shape))  # with strides of its own, for writers that view bytes


def compressed_kv_scheme(scheme: KvScheme) -> dict[str, Any]:
    """`kv_cache_scheme` of a compressed-tensors config."""
    return {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor" if scheme.scaling is KvScaling.TENSOR else "attn_head",
        "symmetric": True,
        "dynamic": False,
        "observer": "static_minmax",
        "group_size": None,
        "block_structure": None,
        "actorder": None,
        "observer_kwargs": {},
    }
