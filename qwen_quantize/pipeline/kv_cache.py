"""What `--kv-cache` becomes for one model: observe what the scheme needs to know, choose, and say what it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from qwen_quantize.calibrators.kv_cache import mixed_plan
from qwen_quantize.calibrators.kv_plans import KvFindings, KvRange, uniform_plan
from qwen_quantize.calibrators.kv_statistics import KvStatistics
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Rounding
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import KvKind, KvScheme, parse_kv_scheme
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.models.config import ModelConfig
from qwen_quantize.pipeline.kv_gradient import observe_gradient
from qwen_quantize.pipeline.kv_observe import Progress, Room, observe

BIASED_KEYS = 8.0  # a key bias this many times what the projection itself gives leaves few codes for the rest
# What serving engines call their caches in the profiles, by the kind that it is here.
_SERVED = {"int8": KvKind.INT8, "e4m3": KvKind.FP8, "fp8": KvKind.FP8, "int4": KvKind.INT4}
_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class KvChoice:
    """A scheme that needs no more choosing, and why it is this one."""

    scheme: KvScheme
    notes: tuple[str, ...] = ()


def served_kinds(profile: ChipProfile) -> tuple[KvKind, ...]:
    """The quantized caches that the documents of a chip's serving engines name, in the order of `_SERVED`."""
    named: list[str] = []
    for stack in profile.facts.serving.values():
        if stack.kv_cache.known and isinstance(stack.kv_cache.value, tuple):
            named += [str(text).lower() for text in stack.kv_cache.value]
    found = [kind for word, kind in _SERVED.items() if any(word in text for text in named)]
    return tuple(dict.fromkeys(found))


def choose_scheme(scheme: KvScheme, profile: ChipProfile, dtype: str, calibrates: bool) -> KvChoice:
    """What `auto` stands for on a chip: of the quantized caches that it can serve the one that loses least.

    That is INT8 (a scale for each channel where text is there to find it, else for each token), then FP8, then
    INT4. On the bundled engine's own chip every kind is served; where no document names any, the cache stays in
    the model's 16 bits.
    """
    if scheme.kind is not KvKind.AUTO:
        return KvChoice(scheme)
    kinds = (KvKind.INT8,) if profile.chip.family == "cpu" else served_kinds(profile)
    where = "the bundled engine" if profile.chip.family == "cpu" else profile.name
    if not kinds:
        plain = parse_kv_scheme("bf16" if dtype == "bfloat16" else "fp16")
        return KvChoice(plain, (f"--kv-cache auto: no document names a quantized cache of {where}; it stays "
                                f"in {plain.kind}",))  # fmt: skip
    kind = next(kind for kind in (KvKind.INT8, KvKind.FP8, KvKind.INT4) if kind in kinds)
    words = {KvKind.INT8: "int8" if calibrates else "int8:token", KvKind.FP8: "fp8", KvKind.INT4: "int4"}[
        kind
    ]
    if kind is KvKind.FP8 and not calibrates:
        words = "fp8:token"
    chosen = parse_kv_scheme(words)
    return KvChoice(chosen, (f"--kv-cache auto: {words}, which loses least of what {where} serves",))


def biased_key_layers(reader: ModelReader) -> dict[int, float]:
    """Layers whose keys are mostly bias: the largest |bias| over the size of what the projection gives beside it.

    The size is estimated from weights alone: the root mean square over channels of the norm of a row times the
    input norm's gain, which is what inputs of independent elements of size one give.
    """
    blueprint = reader.blueprint
    found: dict[int, float] = {}
    config = blueprint.config
    if config.latent is not None:
        return {}
    for layer in range(blueprint.num_layers):
        sites = blueprint.streams(layer, Half.ATTENTION).get(Stream.ATTENTION_INPUT, ())
        if config.is_delta(layer) or len(sites) != 3 or not blueprint.has_bias(sites[1]):
            continue
        module = blueprint.module_name(layer, sites[1])
        suffix = blueprint.family.input_norm
        norm = reader.read(blueprint.layer_name(layer, suffix)) + blueprint.norm_offset(suffix)
        size = float((reader.read_linear(module) * norm).norm(dim=1).square().mean().sqrt())
        ratio = float(reader.read(f"{module}.bias").abs().max()) / max(size, 1e-30)
        if ratio > BIASED_KEYS:
            found[layer] = ratio
    return found


def cast_rule(profile: ChipProfile, scheme: KvScheme) -> CastRule:
    """The chip's cast to what the cache holds, where its profile states one; else to nearest, saturating."""
    target = {KvKind.FP8: "e4m3fn", KvKind.INT8: "int8"}.get(scheme.kind, "int4")
    cast = profile.arithmetic.casts.get(f"fp32->{target}")
    if cast is None or not cast.rounding.known or str(cast.rounding.value) not in tuple(Rounding):
        return RNE_SATURATE
    rounding = Rounding(str(cast.rounding.value))
    if rounding in (Rounding.STOCHASTIC, Rounding.HYBRID):
        return RNE_SATURATE
    return replace(RNE_SATURATE, rounding=rounding)


def plan_kv_cache(
    scheme: KvScheme,
    reader: ModelReader,
    profile: ChipProfile,
    windows: Tensor | None,
    chip: Compute | None = None,
    progress: Progress = lambda *_: None,
    spare_biased: bool = False,
    room: Room | None = None,
) -> KvPlan:
    """What `scheme` becomes for a model. windows: text [n, T] to calibrate on; None leaves fixed scales at 1.

    spare_biased: keep keys of large bias in 16 bits, as `auto` does anyway.

    UserError for mixed precision without text, and for what the model's attention cannot have.
    """
    asked = scheme
    config = reader.blueprint.config
    choice = choose_scheme(scheme, profile, config.dtype, windows is not None)
    scheme, rule = choice.scheme, cast_rule(profile, choice.scheme)
    if config.latent is not None and scheme.kind is not KvKind.MIXED:
        return _noted(uniform_plan(scheme, config, rule=rule), choice.notes)
    if scheme.kind is KvKind.MIXED and windows is None:
        raise UserError(
            "--kv-cache mixed weighs channels by what a text needs of them; give --calibration-dataset"
        )
    biased = biased_key_layers(reader) if scheme.kind not in (KvKind.FP16, KvKind.BF16) else {}
    wide = frozenset(biased) if spare_biased or asked.kind is KvKind.AUTO else frozenset()
    notes = (*choice.notes, *_bias_notes(biased, wide))
    statistics: Mapping[int, KvStatistics] = {}
    if windows is not None and looks_at_text(scheme):
        look = observe_gradient if scheme.gradient else observe
        statistics = look(reader, windows, scheme, chip, progress, room or Room())
    if scheme.kind is KvKind.MIXED:
        return _noted(mixed_plan(scheme, config, statistics, rule), notes)
    ranges = {layer: _range(seen) for layer, seen in statistics.items()}
    return _noted(uniform_plan(scheme, config, KvFindings(ranges, wide), rule), notes)


def _range(seen: KvStatistics) -> KvRange:
    assert seen.values is not None
    return KvRange(seen.keys.largest, seen.values.largest)


def looks_at_text(scheme: KvScheme) -> bool:
    """Whether text has to say something before the scheme can be had: fixed scales, or which channels matter."""
    return scheme.needs_scales or scheme.kind is KvKind.MIXED


def _noted(plan: KvPlan, notes: tuple[str, ...]) -> KvPlan:
    return replace(plan, notes=(*notes, *plan.notes))


def _bias_notes(biased: Mapping[int, float], wide: frozenset[int]) -> tuple[str, ...]:
    if not biased:
        return ()
    largest = max(biased, key=lambda layer: biased[layer])
    text = (
        f"keys of {len(biased)} layers carry large biases (layer {largest}: {biased[largest]:.0f} times what its "
        "projection gives beside it)"
    )
    if wide:
        return (f"{text}; they stay in 16 bits",)
    return (f"{text}, which narrow keys lose; --kv-cache auto keeps those wide",)


def kv_record(plan: KvPlan, context: int) -> dict[str, object]:
    """What manifests and --json say of a cache; context: tokens of the example."""
    layers = plan.attention_layers
    values = sum(layer.width for layer in layers)
    return {
        "scheme": plan.scheme.name,
        "bits": plan.bits,
        "bytes_per_token": plan.bits * values / 8,
        "fp16_bytes_per_token": 2 * values,
        "context": context,
        "bits_at_context": plan.bits_at(context),
        "bytes_at_context": plan.bytes_at(1, context),
        "rounding": plan.rule.rounding.value,
        "notes": list(plan.notes),
    }


def kv_lines(plan: KvPlan, context: int) -> list[str]:
    """The same in words."""
    scheme = plan.scheme
    kept = f", the first {scheme.sinks} and newest {scheme.window} tokens in FP16" if plan.keeps_tail else ""
    return [
        f"key-value cache: {scheme.name}, {plan.bits:.2f} bits of a value with scales{kept}; at {context} "
        f"tokens {plan.bits_at(context):.2f} bits, {plan.bytes_at(1, context) / 2**20:.2f} MiB, where FP16 "
        f"takes {2 * sum(layer.width for layer in plan.attention_layers) * context / 2**20:.2f} MiB",
        *(f"note: {note}" for note in plan.notes),
    ]


def kv_context(blueprint: Blueprint | None) -> int:
    """The tokens for which a cache's bytes are told: 4096, or the model's whole context if that is shorter."""
    return _CONTEXT if blueprint is None else min(_CONTEXT, blueprint.config.max_position)


def check_kv_plan(plan: KvPlan, config: ModelConfig, path: str) -> None:
    """UserError if a stored plan is not for this model."""
    latent = config.latent
    widths = (config.num_kv_heads * config.head_dim, config.num_kv_heads * config.value_dim)
    if latent is not None:
        widths = (latent.key_value_rank, latent.rotary_dim)
    kinds = [config.is_delta(layer) for layer in range(config.num_layers)]
    same = [layer is None for layer in plan.layers] == kinds and plan.latent == (latent is not None)
    if not same or any((layer.keys.width, layer.values.width) != widths for layer in plan.attention_layers):
        raise UserError(
            f"{path}: its key-value cache is described for another model; name one with --kv-cache"
        )
