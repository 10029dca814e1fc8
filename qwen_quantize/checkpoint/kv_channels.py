"""C8 of vLLM Ascend: an int8 key-value cache with a fixed scale for each channel, whose scales stand in the checkpoint.

`k_proj.kv_cache_scale` and `kv_cache_offset` [key-value heads * head size] of each layer, the same of `v_proj`, each
with the type C8 in the description, and `kv_cache_type` there. A layer without them is cached in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.checkpoint.ascend_description import KV_TYPE, KV_TYPE_KEYS
from qwen_quantize.checkpoint.safetensors_folder import SafetensorsFolder
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_plan import KvLayer, KvPart, KvPlan, KvTensor
from qwen_quantize.formats.kv_scheme import KvElement, KvKind, KvScaling, KvScheme, parse_kv_scheme
from qwen_quantize.formats.tables import BF16, FP16, INT8
from qwen_quantize.models.blueprint import Blueprint

_ELEMENT = KvElement(INT8, KvScaling.CHANNEL)


def has_channel_scales(scheme: KvScheme) -> bool:
    """Whether C8 is this cache: fixed scales of channels, and no token that stays in 16 bits."""
    fixed = scheme.kind is KvKind.INT8 and scheme.scaling is KvScaling.CHANNEL
    return fixed and not scheme.window and not scheme.sinks


def channel_scale_names(blueprint: Blueprint, layer: int) -> tuple[str, ...]:
    """What vLLM Ascend calls a layer's scales and offsets: of the keys, then of the values."""
    return tuple(
        blueprint.layer_name(layer, f"self_attn.{projection}.kv_cache_{part}")
        for projection in ("k_proj", "v_proj")
        for part in ("scale", "offset")
    )


def channel_kv_plan(source: CheckpointSource, blueprint: Blueprint) -> KvPlan | None:
    """The cache that a folder's description and scales name; None where they name none.

    UserError for scales that are no positive numbers or not one for each channel, and for offsets, which decoding on
    the chip leaves out.
    """
    config = blueprint.config
    if not isinstance(source, SafetensorsFolder) or config.latent is not None:
        return None
    described = source.description or {}
    if not any(described.get(key) == KV_TYPE for key in KV_TYPE_KEYS):
        return None
    names = set(source.names())
    wide = KvElement(BF16 if config.dtype == "bfloat16" else FP16)
    widths = (config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_dim)
    layers: list[KvLayer | None] = []
    for layer in range(config.num_layers):
        if config.is_delta(layer):
            layers.append(None)
            continue
        scales = channel_scale_names(blueprint, layer)
        if scales[0] not in names:
            layers.append(KvLayer(*(KvTensor(width, (KvPart(wide, width),)) for width in widths)))
            continue
        parts = [
            KvPart(_ELEMENT, width, scale=_read_scale(source, names, scale, offset, width))
            for width, scale, offset in zip(widths, scales[0::2], scales[1::2], strict=True)
        ]
        layers.append(KvLayer(*(KvTensor(part.count, (part,)) for part in parts)))
    if not any(layer is not None and layer.keys.parts[0].scale is not None for layer in layers):
        raise UserError(
            f"{source.path}: the description says kv_cache_type {KV_TYPE} and no layer has a kv_cache_scale; name a "
            "cache with --kv-cache"
        )
    return KvPlan(parse_kv_scheme("int8"), tuple(layers))


def _read_scale(source: SafetensorsFolder, names: set[str], scale: str, offset: str, width: int) -> Tensor:
    """float32 [width]; one number stands for all channels."""
    for name in (scale, offset):
        if name not in names:
            if name == offset:
                continue
            raise UserError(f"{source.path}: the tensor {name!r} is missing; name a cache with --kv-cache")
        info = source.info(name)
        if info.dtype not in ("F32", "BF16", "F16") or tuple(info.shape) not in ((width,), (1,)):
            raise UserError(
                f"{source.path}: tensor {name!r} is {info.dtype} {list(info.shape)}; scales of a cache are floats "
                f"[{width}]"
            )
    if offset in names and bool(source.read(offset).float().any()):
        raise UserError(
            f"{source.path}: tensor {offset!r} holds offsets, which decoding on the chip leaves out; name a cache with "
            "--kv-cache"
        )
    found = source.read(scale).float()
    if not bool((found.isfinite() & (found > 0)).all()):
        raise UserError(f"{source.path}: tensor {scale!r} holds scales that are no positive numbers")
    return torch.empty(width).copy_(found.expand(width))
