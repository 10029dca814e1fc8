"""From recipe, chip and model to what becomes of every tensor: pure, printable, made before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from qwen_quantize.calibrators.methods import METHODS, Method
from qwen_quantize.checkpoint.layouts import DEEPSEEK_FP8, BlockLayout, parse_quantization_config
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.writer import OutputTensor
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.devices import Resolution, resolve_device
from qwen_quantize.chip_profiles.legality import Legality
from qwen_quantize.engine.linear import ActivationCast
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.models.lookup import require_blueprint
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.selection import Selection, select_linears

_CONFIG_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_BASE_MEMORY = 450_000_000  # the interpreter with torch and this package, measured and rounded up
_BATCH_TOKENS = 4096


class Action(StrEnum):
    """What becomes of a tensor."""

    QUANTIZE = "quantize"
    KEEP = "keep"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One source tensor and what is written for it."""

    name: str
    action: Action
    outputs: tuple[OutputTensor, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the first weight is read. Sizes in bytes."""

    recipe: Recipe
    resolution: Resolution
    arithmetic: Arithmetic
    method: Method
    scheme: Scheme
    layout: BlockLayout
    blueprint: Blueprint
    selection: Selection
    block: tuple[int, int]
    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...]
    batch_windows: int
    output_bytes: int
    disk_bytes: int
    peak_memory_bytes: int

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return tuple(output for tensor in self.tensors for output in tensor.outputs)

    def activation_cast(self) -> ActivationCast:
        """The dynamic cast of every quantized linear's input on this chip."""
        activation = self.scheme.activation
        assert activation is not None
        return ActivationCast(
            activation.format,
            self.arithmetic.activation_cast,
            self.arithmetic.activation_scale_rule,
            self.block[1],
        )


def make_plan(recipe: Recipe, source: CheckpointSource) -> Plan:
    """Decide everything; raises UserError for what cannot be done."""
    method = METHODS.get(recipe.method)
    if method is None:
        raise UserError(
            f"--quant-method {recipe.method!r} is not one of the methods here: {', '.join(sorted(METHODS))}"
        )
    scheme = SCHEMES[method.scheme]
    versions = dict(recipe.versions)
    resolution = resolve_device(
        recipe.device,
        scheme,
        versions=versions,
        with_claims=recipe.with_claims,
        allow_unsupported=recipe.allow_unsupported,
    )
    arithmetic = resolve_arithmetic(resolution.profile, scheme, dict(recipe.assume))
    blueprint = require_blueprint(source.config)
    selection = select_linears(blueprint, recipe.ignore, recipe.include)
    layout = DEEPSEEK_FP8
    support = _support_notes(resolution)
    block, block_note = _choose_block(blueprint, selection, recipe.block_size)
    scheme = scheme.with_block(*block)
    tensors, notes = _plan_tensors(source, blueprint, selection, layout, block)
    output_bytes = sum(output.nbytes for tensor in tensors for output in tensor.outputs)
    batch_windows, peak = _plan_memory(recipe, blueprint)
    config = blueprint.config
    hidden = recipe.samples * recipe.length * config.hidden_size * 4 if recipe.dataset else 0
    return Plan(
        recipe=recipe,
        resolution=resolution,
        arithmetic=arithmetic,
        method=method,
        scheme=scheme,
        layout=layout,
        blueprint=blueprint,
        selection=selection,
        block=block,
        tensors=tensors,
        notes=(*support, *block_note, *selection.notes, *notes),
        batch_windows=batch_windows,
        output_bytes=output_bytes,
        disk_bytes=output_bytes + 2 * hidden,
        peak_memory_bytes=peak,
    )


def _support_notes(resolution: Resolution) -> tuple[str, ...]:
    """What a chip that does not plainly run the method will do with the result."""
    verdict, name = resolution.verdict, resolution.profile.name
    match verdict.status:
        case Legality.UNSUPPORTED:
            return (
                f"{name} cannot run this natively: {verdict.reason}; it will have to dequantize the weights",
            )
        case Legality.UNKNOWN:
            return (f"whether {name} runs this natively is not known: {verdict.reason}",)
        case Legality.EMULATED:
            return (f"{name} emulates this: {verdict.reason}",)
    return ()


def _choose_block(
    blueprint: Blueprint, selection: Selection, asked: int | None
) -> tuple[tuple[int, int], tuple[str, ...]]:
    """Blocks of 128, unless some dimension is not a multiple of it.

    Readers disagree about partial blocks: transformers on a CPU derives the block from the grid, so that it
    refuses 576 columns in 5 blocks and misreads 192 rows in 2; vLLM's shards and groups must divide too.
    """
    if asked is not None:
        if asked not in (32, 64, 128):
            raise UserError(f"--block-size must be 32, 64 or 128, found {asked}")
        return (asked, asked), ()
    shapes = _quantized_shapes(blueprint, selection)
    odd = sorted({size for shape in shapes.values() for size in shape if size % 128})
    if not odd:
        return (128, 128), ()
    for size in (64, 32):
        if all(shape[0] % size == 0 and shape[1] % size == 0 for shape in shapes.values()):
            return (size, size), (
                f"blocks of {size}x{size}: {odd[0]} features are no multiple of 128, and transformers "
                "cannot read partial blocks; --block-size 128 writes them for vLLM and SGLang",
            )
    return (128, 128), (
        "partial blocks: some dimensions are no multiple of 32, so transformers on a CPU will refuse the folder",
    )


def _quantized_shapes(blueprint: Blueprint, selection: Selection) -> dict[str, tuple[int, int]]:
    chosen = set(selection.quantized)
    shapes = {
        name: blueprint.linear_shape(site)
        for layer in range(blueprint.config.num_layers)
        for site in blueprint.family.linears
        if (name := blueprint.layer_name(layer, site.path)) in chosen
    }
    head = blueprint.family.head.removesuffix(".weight")
    if head in chosen:
        shapes[head] = (blueprint.config.vocab_size, blueprint.config.hidden_size)
    if not shapes:
        raise UserError("the patterns leave no linear to quantize")
    return shapes


def _plan_tensors(
    source: CheckpointSource,
    blueprint: Blueprint,
    selection: Selection,
    layout: BlockLayout,
    block: tuple[int, int],
) -> tuple[tuple[TensorPlan, ...], tuple[str, ...]]:
    shapes = _quantized_shapes(blueprint, selection)
    quantized_source = parse_quantization_config(source.config) is not None
    kept_dtype = _CONFIG_DTYPES.get(blueprint.config.dtype, "BF16") if source.kind == "gguf" else None
    expected = blueprint.expected_tensors()
    plans: dict[str, TensorPlan] = {}
    notes = []
    for name in source.names():
        info = source.info(name)
        module = name.removesuffix(".weight")
        if name.endswith(layout.scale_suffix) and quantized_source:
            plans[name] = TensorPlan(name, Action.DROP, (), "scale of a source block, used while reading")
        elif module in shapes and name.endswith(".weight"):
            shape = shapes[module]
            outputs = (
                OutputTensor(layout.weight_name(module), layout.weight_dtype, shape),
                OutputTensor(layout.scale_name(module), layout.scale_dtype, layout.scale_shape(shape, block)),
            )
            plans[name] = TensorPlan(name, Action.QUANTIZE, outputs, "linear of a decoder layer")
        elif name == blueprint.family.head and blueprint.config.tie_word_embeddings:
            plans[name] = TensorPlan(name, Action.DROP, (), "tied to the embedding, stored once")
            notes.append(f"{name} is tied to the embedding and is stored once")
        else:
            dtype = kept_dtype or info.dtype
            if info.dtype.startswith("F8"):
                dtype = _CONFIG_DTYPES.get(blueprint.config.dtype, "BF16")
            why = _why_kept(name, blueprint) if name in expected else "not part of the decoder; copied"
            plans[name] = TensorPlan(name, Action.KEEP, (OutputTensor(name, dtype, tuple(info.shape)),), why)
    return tuple(plans[name] for name in _writing_order(plans, expected)), tuple(notes)


def _why_kept(name: str, blueprint: Blueprint) -> str:
    if name == blueprint.family.embedding:
        return "embedding"
    if name == blueprint.family.head:
        return "head"
    return "norm" if "norm" in name else "bias" if name.endswith(".bias") else "kept by a pattern"


def _writing_order(plans: Mapping[str, TensorPlan], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The model's own order, then whatever else the source holds, by name."""
    ordered = [name for name in expected if name in plans]
    return ordered + sorted(set(plans) - set(ordered))


def layer_memory(blueprint: Blueprint) -> int:
    """Bytes of one layer's linears as float32, and of the largest second moment beside its factor."""
    shapes = [blueprint.linear_shape(site) for site in blueprint.family.linears]
    weights = sum(4 * out_features * in_features for out_features, in_features in shapes)
    largest = max(in_features for _, in_features in shapes)
    moments = sum(8 * in_features**2 for in_features in {shape[1] for shape in shapes})
    return 3 * weights + moments + 4 * 8 * largest**2


def validation_memory(blueprint: Blueprint, tokens: int, head_batch_bytes: int) -> int:
    """Expected peak in bytes of comparing two models in lockstep: a layer and a head of each, all states."""
    config = blueprint.config
    shapes = [blueprint.linear_shape(site) for site in blueprint.family.linears]
    layers = 2 * 2 * sum(4 * out_features * in_features for out_features, in_features in shapes)
    heads = (2 * 4 + 2) * config.vocab_size * config.hidden_size
    states = 3 * 4 * tokens * config.hidden_size
    return _BASE_MEMORY + max(layers, heads + 6 * head_batch_bytes) + states


def _plan_memory(recipe: Recipe, blueprint: Blueprint) -> tuple[int, int]:
    """(windows per batch, expected peak in bytes); refuses a ceiling that nothing fits under."""
    config = blueprint.config
    embedding = 6 * config.vocab_size * config.hidden_size  # read as stored, checked, written
    fixed = _BASE_MEMORY + max(layer_memory(blueprint), embedding)
    widest = 6 * config.hidden_size + 4 * config.intermediate_size + 4 * config.num_heads * config.head_dim
    per_window = 4 * recipe.length * (widest + config.num_heads * min(recipe.length, 64))
    batch = max(1, _BATCH_TOKENS // recipe.length)
    if recipe.dataset is not None and recipe.length > config.max_position:
        raise UserError(
            f"--calibration-length {recipe.length} is more than this model's context of {config.max_position}"
        )
    if recipe.dataset is None:
        batch, per_window = 1, 0
    if recipe.max_memory is not None:
        room = recipe.max_memory - fixed
        if room < per_window:
            raise UserError(
                f"--max-memory {recipe.max_memory} bytes is too little: one layer of this model with one "
                f"calibration window of {recipe.length} tokens needs about {fixed + per_window} bytes"
            )
        batch = min(batch, room // per_window) if per_window else batch
    return batch, fixed + batch * per_window
