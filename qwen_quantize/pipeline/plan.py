"""From recipe, chip and model to what becomes of every tensor: pure, printable, made before any weight is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from qwen_quantize.calibrators.experts import ExpertPolicy
from qwen_quantize.calibrators.gain import is_biased
from qwen_quantize.calibrators.methods import METHODS, Method
from qwen_quantize.checkpoint.completeness import check_tensors, stacked_experts
from qwen_quantize.checkpoint.layouts import DEFAULT_LAYOUT, LAYOUTS, BlockLayout, Layout
from qwen_quantize.checkpoint.planned_source import PlannedSource
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputTensor
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, resolve_arithmetic
from qwen_quantize.chip_profiles.devices import Resolution, resolve_device
from qwen_quantize.chip_profiles.headroom import require_headroom
from qwen_quantize.chip_profiles.legality import Legality
from qwen_quantize.engine.compute import compute_for
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_scheme import KvScheme
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.models.by_name import linear_modules_by_name
from qwen_quantize.models.config_values import shown
from qwen_quantize.models.lookup import BY_ARCHITECTURE, architecture_of, find_blueprint
from qwen_quantize.pipeline.kv_tensors import plan_kv_tensors
from qwen_quantize.pipeline.memory import MemoryPlan, plan_memory
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.scheme_choice import base_scheme, fit_scheme, needs_input_amax
from qwen_quantize.pipeline.selection import Candidates, Selection, candidates_of, select_linears
from qwen_quantize.pipeline.tensors import TensorPlan, float_dtype, plan_tensors


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the first weight is read. Sizes in bytes."""

    recipe: Recipe
    resolution: Resolution
    arithmetic: Arithmetic
    method: Method
    scheme: Scheme
    layout: Layout
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
    kv_scheme: KvScheme | None = None  # never `auto`
    kv_outputs: tuple[
        OutputTensor, ...
    ] = ()  # its scales, where serving engines read them from the checkpoint

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return (*(output for tensor in self.tensors for output in tensor.outputs), *self.kv_outputs)

    @property
    def converts_by_pieces(self) -> bool:
        """Whether linears without data go block row by block row through the compiled converter."""
        return isinstance(self.layout, BlockLayout)

    def chip_compute(self) -> ChipCompute:
        """How this chip runs a quantized linear: the cast of its input, and its matrix unit where sums are narrow."""
        return compute_for(self.scheme, self.arithmetic)


def make_plan(recipe: Recipe, source: CheckpointSource) -> Plan:
    """Decide everything; raises UserError for what cannot be done."""
    if recipe.statistics is not None and recipe.expert_policy is ExpertPolicy.FORCED:
        raise UserError(
            "--expert-policy forced sends every expert tokens that the router did not, which takes a forward pass; "
            "give --calibration-dataset in place of --from-statistics"
        )
    method = METHODS.get(recipe.method)
    if method is None:
        raise UserError(
            f"--quant-method {recipe.method!r} is not one of the methods here: {', '.join(sorted(METHODS))}"
        )
    scheme = base_scheme(recipe, method)
    resolution = resolve_device(
        recipe.device,
        scheme,
        versions=dict(recipe.versions),
        with_claims=recipe.with_claims,
        allow_unsupported=recipe.allow_unsupported,
    )
    arithmetic = resolve_arithmetic(resolution.profile, scheme, dict(recipe.assume))
    require_headroom(arithmetic, scheme, resolution.profile)
    architecture, blueprint = architecture_of(source.config), find_blueprint(source.config)
    linears = LinearReader(source)
    if not recipe.calibrates and stacked_experts(source.names()) is not None:
        blueprint = None  # no forward pass reads them, but converting needs none
    found = check_tensors(source, linears, blueprint) if blueprint is not None else ()
    if blueprint is None and recipe.calibrates:
        raise UserError(
            f"config.json: the architecture {shown(architecture)} has no forward pass here, which calibration needs "
            f"(there is one for {', '.join(sorted(BY_ARCHITECTURE))}); leave out --calibration-dataset to quantize "
            "it from its weights alone"
        )
    candidates = (
        _candidates_by_name(source) if blueprint is None else candidates_of(blueprint, source.names())
    )
    unseen: tuple[str, ...] = ()
    if needs_input_amax(scheme) and recipe.calibrates:
        candidates, unseen = _only_calibrated(candidates, scheme)
    selection = select_linears(candidates, recipe.ignore, recipe.include)
    if unseen and candidates.head in selection.quantized:
        raise UserError(
            f"--include: no text reaches the head in calibration, and {scheme.name} needs its inputs' size"
        )
    layout = _choose_layout(recipe.layout, scheme)
    choice = fit_scheme(recipe, scheme, selection, linears, float_dtype(source))
    tensors, notes = plan_tensors(source, linears, blueprint, selection, layout, choice.scheme)
    kv = plan_kv_tensors(recipe, resolution.profile, blueprint, layout)
    output_bytes = sum(output.nbytes for tensor in tensors for output in tensor.outputs)
    output_bytes += sum(output.nbytes for output in kv.outputs)
    hidden = 0
    if recipe.dataset is not None and blueprint is not None:
        hidden = 2 * 4 * recipe.samples * recipe.length * blueprint.config.hidden_size
    loss = linears.loss_warning
    largest = max(math.prod(output.shape) for tensor in tensors for output in tensor.outputs)
    whole = 0
    if not isinstance(layout, BlockLayout):
        whole = max(math.prod(shape) for shape in selection.quantized.values())
    memory = plan_memory(
        recipe,
        blueprint,
        largest,
        whole,
        prepared=arithmetic.accumulator.narrow,
        crossed=is_biased(arithmetic.activation_cast),
        threads=torch.get_num_threads(),
    )
    return Plan(
        recipe=recipe,
        resolution=resolution,
        arithmetic=arithmetic,
        method=method,
        scheme=choice.scheme,
        layout=layout,
        architecture=architecture,
        blueprint=blueprint,
        selection=selection,
        block=choice.block,
        tensors=tensors,
        notes=(
            *_support_notes(resolution),
            *(source.notes if isinstance(source, PlannedSource) else ()),
            *found,
            *([loss] if loss is not None else []),
            *choice.notes,
            *unseen,
            *selection.notes,
            *notes,
            *_next_token_notes(blueprint, candidates),
            *kv.notes,
        ),
        memory=memory,
        output_bytes=output_bytes,
        disk_bytes=output_bytes + hidden,
        peak_memory_bytes=memory.peak,
        kv_scheme=kv.scheme,
        kv_outputs=kv.outputs,
    )


def _only_calibrated(candidates: Candidates, scheme: Scheme) -> tuple[Candidates, tuple[str, ...]]:
    """(the linears that calibration text reaches, what to say of the others)."""
    note = f"{scheme.name} stores the size of each linear's inputs, which only calibration finds"
    if candidates.next_token:
        note += "; layers for multi-token prediction see no text and stay as they are"
    return replace(candidates, next_token={}), (note,)


def _choose_layout(asked: str | None, scheme: Scheme) -> Layout:
    if asked is None:
        return LAYOUTS[DEFAULT_LAYOUT[scheme.name]]
    if asked not in LAYOUTS:
        raise UserError(f"--layout {asked!r} is not one of the layouts: {', '.join(LAYOUTS)}")
    return LAYOUTS[asked]


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
