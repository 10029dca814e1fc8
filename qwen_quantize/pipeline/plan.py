"""From recipe, chip and model to what becomes of every tensor: pure, printable, made before any weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen_quantize.calibrators.methods import METHODS, Method
from qwen_quantize.checkpoint.completeness import check_tensors, stacked_experts
from qwen_quantize.checkpoint.layouts import DEEPSEEK_FP8, BlockLayout
from qwen_quantize.checkpoint.planned_source import PlannedSource
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.checkpoint.writer import OutputTensor
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.devices import Resolution, resolve_device
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of
from qwen_quantize.chip_profiles.legality import Legality
from qwen_quantize.engine.linear import ActivationCast, ChipCompute
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.spec import TableFormat
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.models.by_name import linear_modules_by_name
from qwen_quantize.models.config_values import shown
from qwen_quantize.models.lookup import BY_ARCHITECTURE, architecture_of, find_blueprint
from qwen_quantize.pipeline.memory import MemoryPlan, plan_memory
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.selection import Candidates, Selection, candidates_of, select_linears
from qwen_quantize.pipeline.tensors import TensorPlan, plan_tensors

_BLOCK_SIZES = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the first weight is read. Sizes in bytes."""

    recipe: Recipe
    resolution: Resolution
    arithmetic: Arithmetic
    method: Method
    scheme: Scheme
    layout: BlockLayout
    architecture: str
    blueprint: Blueprint | None  # None: only conversion without data, from tensor names
    selection: Selection
    block: tuple[int, int]
    tensors: tuple[TensorPlan, ...]
    notes: tuple[str, ...]
    memory: MemoryPlan
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

    def chip_compute(self) -> ChipCompute:
        """How this chip runs a quantized linear: that cast, and its matrix unit where sums are narrow."""
        cast = self.activation_cast()
        weight, activation = self.scheme.weight.format, cast.format
        assert not isinstance(weight, TableFormat)
        assert not isinstance(activation, TableFormat)
        return ChipCompute(cast, dot_unit_of(self.arithmetic, weight, activation, self.block[1]))


def make_plan(recipe: Recipe, source: CheckpointSource) -> Plan:
    """Decide everything; raises UserError for what cannot be done."""
    method = METHODS.get(recipe.method)
    if method is None:
        raise UserError(
            f"--quant-method {recipe.method!r} is not one of the methods here: {', '.join(sorted(METHODS))}"
        )
    scheme = SCHEMES[method.scheme]
    resolution = resolve_device(
        recipe.device,
        scheme,
        versions=dict(recipe.versions),
        with_claims=recipe.with_claims,
        allow_unsupported=recipe.allow_unsupported,
    )
    arithmetic = resolve_arithmetic(resolution.profile, scheme, dict(recipe.assume))
    architecture, blueprint = architecture_of(source.config), find_blueprint(source.config)
    linears = LinearReader(source)
    if recipe.dataset is None and stacked_experts(source.names()) is not None:
        blueprint = None  # no forward pass reads them, but converting needs none
    found = check_tensors(source, linears, blueprint) if blueprint is not None else ()
    if blueprint is None and recipe.dataset is not None:
        raise UserError(
            f"config.json: the architecture {shown(architecture)} has no forward pass here, which calibration needs "
            f"(there is one for {', '.join(sorted(BY_ARCHITECTURE))}); leave out --calibration-dataset to quantize "
            "it from its weights alone"
        )
    candidates = (
        _candidates_by_name(source) if blueprint is None else candidates_of(blueprint, source.names())
    )
    selection = select_linears(candidates, recipe.ignore, recipe.include)
    layout = DEEPSEEK_FP8
    block, block_note = _choose_block(selection, linears, recipe.block_size)
    tensors, notes = plan_tensors(source, linears, blueprint, selection, layout, block)
    output_bytes = sum(output.nbytes for tensor in tensors for output in tensor.outputs)
    hidden = 0
    if recipe.dataset is not None and blueprint is not None:
        hidden = 2 * 4 * recipe.samples * recipe.length * blueprint.config.hidden_size
    loss = linears.loss_warning
    largest = max(math.prod(output.shape) for tensor in tensors for output in tensor.outputs)
    memory = plan_memory(recipe, blueprint, largest, prepared=arithmetic.accumulator.narrow)
    return Plan(
        recipe=recipe,
        resolution=resolution,
        arithmetic=arithmetic,
        method=method,
        scheme=scheme.with_block(*block),
        layout=layout,
        architecture=architecture,
        blueprint=blueprint,
        selection=selection,
        block=block,
        tensors=tensors,
        notes=(
            *_support_notes(resolution),
            *(source.notes if isinstance(source, PlannedSource) else ()),
            *found,
            *([loss] if loss is not None else []),
            *block_note,
            *selection.notes,
            *notes,
            *_next_token_notes(blueprint, candidates),
        ),
        memory=memory,
        output_bytes=output_bytes,
        disk_bytes=output_bytes + hidden,
        peak_memory_bytes=memory.peak,
    )


def _candidates_by_name(source: CheckpointSource) -> Candidates:
    modules = linear_modules_by_name({name: source.info(name).shape for name in source.names()})
    if not modules:
        raise UserError(
            f"{source.path}: no tensor looks like a linear of a numbered layer, and the architecture "
            f"{architecture_of(source.config)!r} has no blueprint here; there is nothing to quantize"
        )
    return Candidates(modules, {}, None, None, None, tied=False)


def _next_token_notes(blueprint: Blueprint | None, candidates: Candidates) -> tuple[str, ...]:
    if blueprint is None:
        return (
            "quantized from tensor names: this architecture has no forward pass here, so it is not validated",
        )
    if candidates.next_token:
        count = len(blueprint.next_token_layers)
        return (f"{count} layer{'s' * (count > 1)} for multi-token prediction quantized without data",)
    return ()


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
    selection: Selection, linears: LinearReader, asked: int | None
) -> tuple[tuple[int, int], tuple[str, ...]]:
    """The source's own blocks; else blocks of 128, unless some dimension is not a multiple of it.

    Readers disagree about partial blocks: transformers on a CPU derives the block from the grid, so that it
    refuses 576 columns in 5 blocks and misreads 192 rows in 2; vLLM's shards and groups must divide too. The
    576 rows of DeepSeek's kv_a_proj_with_mqa are the exception: their published form has the partial block.
    """
    if asked is not None:
        if asked not in _BLOCK_SIZES:
            raise UserError(f"--block-size must be 32, 64 or 128, found {asked}")
        return (asked, asked), ()
    own = _source_block(selection, linears)
    if own is not None:
        return own, ()
    sizes = {
        module: shape for module, shape in selection.quantized.items() if shape[0] % 128 or shape[1] % 128
    }
    if not sizes:
        return (128, 128), ()
    if all(module.endswith(".kv_a_proj_with_mqa") and not shape[1] % 128 for module, shape in sizes.items()):
        return (128, 128), (
            "the last block of kv_a_proj_with_mqa is partial, as in DeepSeek's own checkpoints, which vLLM and SGLang "
            "read; transformers on a CPU may refuse it",
        )
    odd = min(size for shape in sizes.values() for size in shape if size % 128)
    for size in _BLOCK_SIZES[1:]:
        if all(shape[0] % size == 0 and shape[1] % size == 0 for shape in sizes.values()):
            return (size, size), (
                f"blocks of {size}x{size}: {odd} features are no multiple of 128, and transformers cannot read "
                "partial blocks; --block-size 128 writes them for vLLM and SGLang",
            )
    return (128, 128), (
        "partial blocks: some dimensions are no multiple of 32, so transformers on a CPU will refuse the folder",
    )


def _source_block(selection: Selection, linears: LinearReader) -> tuple[int, int] | None:
    """The block of a source that is in block FP8 already: whatever reads it reads the result."""
    for module in selection.quantized:
        if linears.is_quantized(module):
            stored = linears.describe(module)
            if stored.kind is StoredKind.BLOCK_FP8 and stored.block in [
                (size, size) for size in _BLOCK_SIZES
            ]:
                return stored.block
            return None
    return None
