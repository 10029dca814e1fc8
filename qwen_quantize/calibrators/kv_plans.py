"""From a `--kv-cache` scheme to what becomes of each layer's keys and values, where nothing has to be weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule
from qwen_quantize.formats.kv_plan import KvLayer, KvPart, KvPlan, KvTensor
from qwen_quantize.formats.kv_scheme import KvElement, KvScaling, KvScheme
from qwen_quantize.formats.tables import BF16, FP16
from qwen_quantize.models.config import ModelConfig

_SMALLEST_SCALE = 2.0**-100


@dataclass(frozen=True, slots=True, eq=False)
class KvRange:
    """The largest magnitudes that calibration saw in one layer, [kv_heads, key_dim] and [kv_heads, value_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KvFindings:
    """What is known of a model's keys and values beside its config.

    ranges: by layer, from calibration; wide: layers whose keys stay in 16 bits, whatever the scheme.
    """

    ranges: Mapping[int, KvRange] = field(default_factory=dict)
    wide: frozenset[int] = frozenset()


def uniform_plan(
    scheme: KvScheme,
    config: ModelConfig,
    findings: KvFindings | None = None,
    rule: CastRule = RNE_SATURATE,
) -> KvPlan:
    """The same element in every layer; fixed scales are 1 where nothing was found, as serving engines have it.

    UserError for what a model's attention cannot have, ValueError for schemes that are decided from statistics.
    """
    findings = findings or KvFindings()
    if config.latent is not None:
        return _latent_plan(scheme, config, rule)
    layers = tuple(
        None if config.is_delta(layer) else _layer(scheme, config, findings, layer)
        for layer in range(config.num_layers)
    )
    require_attention(layers)
    return KvPlan(scheme, layers, rule=rule, notes=_scale_notes(scheme, findings))


def require_attention(layers: tuple[KvLayer | None, ...]) -> None:
    """UserError if there is nothing to remember keys of."""
    if all(layer is None for layer in layers):
        raise UserError("--kv-cache: no layer of this model has attention, so there is no cache to quantize")


def _layer(scheme: KvScheme, config: ModelConfig, findings: KvFindings, layer: int) -> KvLayer:
    heads = config.num_kv_heads
    seen = findings.ranges.get(layer)
    key = scheme.key_element(config.head_dim)
    if layer in findings.wide:
        key = wide_element(config)
    return KvLayer(
        _tensor(key, heads, config.head_dim, None if seen is None else seen.keys),
        _tensor(
            scheme.value_element(config.value_dim),
            heads,
            config.value_dim,
            None if seen is None else seen.values,
        ),
    )


def wide_element(config: ModelConfig) -> KvElement:
    """Sixteen bits as the model has them: FP16, whose mantissa is longer, unless its numbers may be too large."""
    return KvElement(BF16 if config.dtype == "bfloat16" else FP16)


def _tensor(element: KvElement, heads: int, dim: int, largest: Tensor | None) -> KvTensor:
    require_even(element, heads * dim)
    scale = None
    if element.scaling.static:
        scale = static_scale(element, heads, dim, largest)
    return KvTensor(heads * dim, (KvPart(element, heads * dim, scale=scale),))


def require_even(element: KvElement, channels: int) -> None:
    """UserError where 4-bit codes do not fill whole bytes."""
    if element.format.bits == 4 and channels % 2:
        raise UserError(
            f"--kv-cache: {channels} channels of 4 bits do not fill whole bytes; take int8 or fp8"
        )


def static_scale(element: KvElement, heads: int, dim: int, largest: Tensor | None) -> Tensor:
    """float32 [heads * dim], each channel's scale: largest magnitude / largest code; ones without calibration."""
    if largest is None:
        return torch.ones(heads * dim)
    match element.scaling:
        case KvScaling.TENSOR:
            largest = largest.amax().expand(heads, dim)
        case KvScaling.HEAD:
            largest = largest.amax(dim=1, keepdim=True).expand(heads, dim)
    return (largest.float() / element.format.max).clamp(min=_SMALLEST_SCALE).flatten()


def _scale_notes(scheme: KvScheme, findings: KvFindings) -> tuple[str, ...]:
    if scheme.needs_scales and not findings.ranges:
        return (
            f"the scales of the {scheme.kind} cache are all 1, as serving engines take them that find none: "
            "calibrate, or let scales be found per token",
        )
    return ()


def _latent_plan(scheme: KvScheme, config: ModelConfig, rule: CastRule) -> KvPlan:
    """Latents in tiles that share a scale; the few channels that carry the position stay bf16."""
    latent = config.latent
    assert latent is not None
    require_rotated(scheme)
    element = scheme.latent_element(latent.key_value_rank)
    require_even(element, latent.key_value_rank)
    layer = KvLayer(
        KvTensor(latent.key_value_rank, (KvPart(element, latent.key_value_rank),)),
        positional_tensor(latent.rotary_dim),
    )
    return KvPlan(scheme, (layer,) * config.num_layers, latent=True, rule=rule)


def require_rotated(scheme: KvScheme) -> None:
    """UserError if latents were to be kept unrotated, which they are anyway."""
    if scheme.unrotated:
        raise UserError(
            "--kv-cache keys=pre-rope: latent attention rotates no latent, and keeps what it rotates in 16 bits; leave "
            "it out"
        )


def positional_tensor(channels: int) -> KvTensor:
    """What carries the position beside a latent: few channels, of large and unequal numbers."""
    return KvTensor(channels, (KvPart(KvElement(BF16), channels),))
