"""The key-value cache in a plan: its scheme, and the scales that stand in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from qwen_quantize.calibrators.kv_cache import budget_line
from qwen_quantize.calibrators.kv_plans import uniform_plan
from qwen_quantize.calibrators.kv_sides import mixed_elements
from qwen_quantize.checkpoint.ascend_layout import AscendLayout
from qwen_quantize.checkpoint.compressed_tensors import CompressedTensorsLayout
from qwen_quantize.checkpoint.kv_channels import channel_scale_names, has_channel_scales
from qwen_quantize.checkpoint.kv_side import engine_scales, scale_shape
from qwen_quantize.checkpoint.layouts import BlockLayout, Layout
from qwen_quantize.checkpoint.writer import OutputTensor
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_scheme import KvKind, KvScheme, parse_kv_scheme
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.pipeline.kv_cache import choose_scheme, kv_context, kv_lines, looks_at_text
from qwen_quantize.pipeline.kv_gradient import require_way_back
from qwen_quantize.pipeline.memory import observed_windows, observing_memory
from qwen_quantize.pipeline.recipe import Recipe


@dataclass(frozen=True, slots=True)
class KvTensors:
    """What a plan knows of the cache before a weight is read. peak_memory_bytes: of looking at keys and values."""

    scheme: KvScheme | None = None
    outputs: tuple[OutputTensor, ...] = ()
    notes: tuple[str, ...] = ()
    peak_memory_bytes: int = 0


def plan_kv_tensors(
    recipe: Recipe, profile: ChipProfile, blueprint: Blueprint | None, layout: Layout
) -> KvTensors:
    """The scheme, and the scales that go into the checkpoint; UserError for what cannot be."""
    if recipe.kv_cache is None:
        return KvTensors()
    scheme = parse_kv_scheme(recipe.kv_cache)
    if recipe.statistics is not None:
        raise UserError(
            "--kv-cache looks at keys and values, which --from-statistics has none of; give --calibration-dataset"
        )
    if blueprint is None:
        raise UserError(
            "--kv-cache: this architecture has no forward pass here, so its keys cannot be looked at"
        )
    if scheme.kind is KvKind.MIXED and recipe.dataset is None:
        raise UserError(
            "--kv-cache mixed weighs channels by what a text needs of them; give --calibration-dataset"
        )
    choice = choose_scheme(scheme, profile, blueprint.config.dtype, recipe.dataset is not None)
    notes = (*choice.notes, *_expected(choice.scheme, blueprint))
    peak = 0
    fixed = choice.scheme.needs_scales and blueprint.config.latent is not None  # latents have none of those
    if recipe.dataset is not None and looks_at_text(choice.scheme) and not fixed:
        gradient = choice.scheme.gradient
        windows = min(recipe.samples, observed_windows(recipe.max_memory, blueprint, recipe.length, gradient))
        peak = observing_memory(blueprint, recipe.length, windows, gradient)
    if reads_channel_scales(layout):
        outputs, said = _channel_outputs(choice.scheme, blueprint, recipe, auto=scheme.kind is KvKind.AUTO)
        return KvTensors(choice.scheme, outputs, (*notes, *said), peak)
    return KvTensors(choice.scheme, _outputs(choice.scheme, blueprint, layout), notes, peak)


def _expected(scheme: KvScheme, blueprint: Blueprint) -> tuple[str, ...]:
    """What the cache will take; UserError where the model's attention cannot have it."""
    context = kv_context(blueprint)
    if scheme.kind is not KvKind.MIXED:
        return (kv_lines(uniform_plan(scheme, blueprint.config), context)[0],)
    assert scheme.bits is not None
    mixed_elements(scheme, blueprint.config)
    if scheme.gradient:
        require_way_back(blueprint.config)
    return (budget_line(scheme.bits),)


def _outputs(scheme: KvScheme, blueprint: Blueprint, layout: Layout) -> tuple[OutputTensor, ...]:
    """`self_attn.k_scale` and `v_scale` of each layer, in the layouts whose readers look for them."""
    if not engine_scales(scheme) or not reads_kv_scales(layout):
        return ()
    config = blueprint.config
    if config.latent is not None:
        return ()
    shape = scale_shape(scheme, config.num_kv_heads)
    return tuple(
        OutputTensor(name, "F32", shape)
        for layer in range(config.num_layers)
        if not config.is_delta(layer)
        for name in scale_names(blueprint, layer)
    )


def _channel_outputs(
    scheme: KvScheme, blueprint: Blueprint, recipe: Recipe, *, auto: bool
) -> tuple[tuple[OutputTensor, ...], tuple[str, ...]]:
    """(C8's scales and offsets of each layer, what to say); none where the engine would do otherwise than the plan."""
    config = blueprint.config
    layers = [layer for layer in range(config.num_layers) if not config.is_delta(layer)]
    why = None
    if config.latent is not None:
        why = "latent attention has no keys of its own"
    elif not has_channel_scales(scheme):
        why = f"it has fixed scales of channels, and {scheme.name} has not"
    elif recipe.dataset is None:
        why = "its scales take text; give --calibration-dataset"
    elif auto and any(_biased(blueprint, layer) for layer in layers):
        why = "auto may keep keys of large bias in 16 bits; --kv-cache int8 writes it for all layers"
    if why is not None:
        return (), (f"no C8 in the description: {why}; vLLM Ascend then keeps its cache in 16 bits",)
    widths = (config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_dim)
    return tuple(
        OutputTensor(name, "F32", (width,))
        for layer in layers
        for name, width in zip(
            channel_scale_names(blueprint, layer), (widths[0], widths[0], widths[1], widths[1]), strict=True
        )
    ), ()


def _biased(blueprint: Blueprint, layer: int) -> bool:
    sites = blueprint.streams(layer, Half.ATTENTION).get(Stream.ATTENTION_INPUT, ())
    return any(blueprint.has_bias(site) for site in sites)


def reads_kv_scales(layout: Layout) -> bool:
    """Whether the layout's engines look for scales of keys and values among its tensors."""
    return isinstance(layout, BlockLayout | CompressedTensorsLayout)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is called as vLLM and SGLang call the scale of a layer's keys or values."""
    return name.endswith((".self_attn.k_scale", ".self_attn.v_scale"))


def reads_channel_scales(layout: Layout) -> bool:
    """Whether the layout's engines look for C8's scales, one for each channel of an int8 cache."""
    return isinstance(layout, AscendLayout)


def is_channel_scale(name: str) -> bool:
    """Whether a tensor is called as vLLM Ascend calls the scales and offsets of an int8 cache's channels."""
    return name.endswith((".kv_cache_scale", ".kv_cache_offset"))


def scale_names(blueprint: Blueprint, layer: int) -> tuple[str, str]:
    """What vLLM and SGLang call the scales of a layer's keys and values."""
    return blueprint.layer_name(layer, "self_attn.k_scale"), blueprint.layer_name(layer, "self_attn.v_scale")
