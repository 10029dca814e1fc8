"""From recipe, chip and model to what becomes of every tensor: pure, printable, made before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qwen_quantize.calibrators.experts import ExpertPolicy
from qwen_quantize.calibrators.methods import METHODS, Method
from qwen_quantize.calibrators.problem import Effort
from qwen_quantize.checkpoint.completeness import check_tensors, stacked_experts
from qwen_quantize.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from qwen_quantize.checkpoint.layout_parts import Destination
from qwen_quantize.checkpoint.layouts import DEFAULT_LAYOUT, LAYOUTS, BlockLayout, Layout
from qwen_quantize.checkpoint.planned_source import PlannedSource
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputTensor
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, Assumption
from qwen_quantize.chip_profiles.devices import Resolution, resolve_device
from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.legality import Legality, check
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.errors import UserError
from qwen_quantize.formats.kv_scheme import KvScheme
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.models.by_name import linear_modules_by_name
from qwen_quantize.models.config_values import shown
from qwen_quantize.models.lookup import BY_ARCHITECTURE, architecture_of, find_blueprint
from qwen_quantize.pipeline.choices import LinearChoice, choose_linears, method_named
from qwen_quantize.pipeline.kv_tensors import plan_kv_tensors
from qwen_quantize.pipeline.memory import MemoryPlan, plan_memory, states_bytes
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.rotated_source import RotatedSource
from qwen_quantize.pipeline.rules import Settings, scheme_name, settings_of
from qwen_quantize.pipeline.scheme_choice import base_scheme, needs_input_amax
from qwen_quantize.pipeline.selection import (
    Candidates,
    Selection,
    candidates_of,
    left_by_layout,
    select_linears,
)
from qwen_quantize.pipeline.tensors import TensorPlan, float_dtype, plan_tensors


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything decided before the first weight is read. Sizes in bytes.

    choices: of every quantized linear, by module. method, scheme, arithmetic, block: those of `choices` that the
    request names, for records; what is done to a linear is decided by `choice_of`.
    """

    recipe: Recipe
    resolution: Resolution
    arithmetic: Arithmetic
    method: Method
    scheme: Scheme
    layout: Layout
    architecture: str
    blueprint: Blueprint | None  # None: only conversion without data, from tensor names
    selection: Selection
    choices: Mapping[str, LinearChoice]
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

    @property
    def principal(self) -> LinearChoice:
        return LinearChoice(self.method, self.scheme, self.arithmetic, self.block, self.recipe.effort)

    def choice_of(self, module: str) -> LinearChoice:
        """What becomes of a linear; of one that is kept, what would by default."""
        return self.choices.get(module) or self.principal

    def scheme_of(self, module: str) -> Scheme:
        return self.choice_of(module).scheme

    @property
    def schemes(self) -> dict[str, Scheme]:
        """By module, of every quantized linear."""
        return {module: choice.scheme for module, choice in self.choices.items()}

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What was assumed of the chip for any of the choices, each once."""
        found = [one for choice in self.distinct_choices for one in choice.arithmetic.assumptions]
        return tuple(dict.fromkeys((*self.arithmetic.assumptions, *found)))

    @property
    def distinct_choices(self) -> tuple[LinearChoice, ...]:
        """Each choice once, in the order of the linears."""
        return tuple({id(choice): choice for choice in self.choices.values()}.values())


def make_plan(recipe: Recipe, source: CheckpointSource) -> Plan:
    """Decide everything; raises UserError for what cannot be done."""
    if recipe.statistics is not None and recipe.expert_policy is ExpertPolicy.FORCED:
        raise UserError(
            "--expert-policy forced sends every expert tokens that the router did not, which takes a forward pass; "
            "give --calibration-dataset in place of --from-statistics"
        )
    method = method_named(recipe.method)
    _require_effort(recipe, method)
    scheme = base_scheme(recipe, method)
    resolution = resolve_device(
        recipe.device,
        scheme,
        versions=dict(recipe.versions),
        with_claims=recipe.with_claims,
        allow_unsupported=recipe.allow_unsupported,
    )
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
    settings = settings_of(recipe, list(candidates.shapes()))
    candidates, unseen = _only_calibrated(recipe, candidates, settings)
    decided = left_by_layout(recipe.layout, list(settings))
    decided |= {name: not one.ignore for name, one in settings.items() if one.ignore is not None}
    selection = select_linears(candidates, recipe.ignore, recipe.include, decided)
    _check_head(recipe, candidates, selection, settings)
    chosen = choose_linears(
        recipe, settings, selection, linears, float_dtype(source), resolution.profile, blueprint
    )
    principal, schemes = chosen.principal, {name: one.scheme for name, one in chosen.by_module.items()}
    layout = _choose_layout(recipe.layout, schemes).fitted(_destination(resolution, source))
    tensors, notes = plan_tensors(source, linears, blueprint, selection, layout, schemes)
    kv = plan_kv_tensors(recipe, resolution.profile, blueprint, layout)
    output_bytes = sum(output.nbytes for tensor in tensors for output in tensor.outputs)
    output_bytes += sum(output.nbytes for output in kv.outputs)
    choices = tuple({id(one): one for one in chosen.by_module.values()}.values())
    hidden = 0
    if recipe.dataset is not None and blueprint is not None:
        tokens, in_turn = recipe.samples * recipe.length, any(one.method.in_turn for one in choices)
        hidden = states_bytes(blueprint, tokens, in_turn=in_turn)
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
        prepared=any(one.arithmetic.accumulator.narrow for one in choices),
        crossed=any(one.sees_bias() for one in choices),
        # Choosing among schemes reads those of a folder, whatever the methods.
        moments=recipe.statistics is not None or any(one.method.uses_second_moments for one in choices),
        threads=torch.get_num_threads(),
    )
    return Plan(
        recipe=recipe,
        resolution=resolution,
        arithmetic=principal.arithmetic,
        method=principal.method,
        scheme=principal.scheme,
        layout=layout,
        architecture=architecture,
        blueprint=blueprint,
        selection=selection,
        choices=chosen.by_module,
        block=principal.block,
        tensors=tensors,
        notes=(
            *_support_notes(resolution.profile, choices),
            *(source.notes if isinstance(source, PlannedSource | RotatedSource) else ()),
            *found,
            *([loss] if loss is not None else []),
            *chosen.notes,
            *unseen,
            *selection.notes,
            *notes,
            *layout.notes(schemes),
            *_next_token_notes(blueprint, candidates),
            *kv.notes,
        ),
        memory=memory,
        output_bytes=output_bytes,
        disk_bytes=output_bytes + hidden,
        peak_memory_bytes=max(memory.peak, kv.peak_memory_bytes),
        kv_scheme=kv.scheme,
        kv_outputs=kv.outputs,
    )


def _require_effort(recipe: Recipe, method: Method) -> None:
    """UserError where high effort would change nothing."""
    if recipe.effort is Effort.NORMAL:
        return
    if not method.has_high_effort:
        able = ", ".join(name for name, one in METHODS.items() if one.has_high_effort)
        raise UserError(f"--effort high has nothing to go on with after {method.name}; it is for {able}")
    if not recipe.calibrates:
        raise UserError("--effort high works on what the inputs are like; give --calibration-dataset")


def _only_calibrated(
    recipe: Recipe, candidates: Candidates, settings: Mapping[str, Settings]
) -> tuple[Candidates, tuple[str, ...]]:
    """(the linears that calibration text reaches or that need none, what to say of the others)."""
    if not recipe.calibrates:
        return candidates, ()
    needing = {one.name for name in settings if (one := _static_scheme(recipe, settings[name])) is not None}
    if not needing:
        return candidates, ()
    note = (
        f"{', '.join(sorted(needing))} stores the size of each linear's inputs, which only calibration finds"
    )
    left = {name for name in candidates.next_token if _static_scheme(recipe, settings[name]) is not None}
    if left:
        note += "; layers for multi-token prediction see no text and stay as they are"
    rest = {name: shape for name, shape in candidates.next_token.items() if name not in left}
    return replace(candidates, next_token=rest), (note,)


def _static_scheme(recipe: Recipe, settings: Settings) -> Scheme | None:
    """The scheme of a linear, if it stores a scale of its inputs."""
    scheme = SCHEMES.get(scheme_name(recipe, settings))
    return scheme if scheme is not None and needs_input_amax(scheme) else None


def _check_head(
    recipe: Recipe, candidates: Candidates, selection: Selection, settings: Mapping[str, Settings]
) -> None:
    if not recipe.calibrates or candidates.head is None or candidates.head not in selection.quantized:
        return
    scheme = _static_scheme(recipe, settings[candidates.head])
    if scheme is not None:
        raise UserError(
            f"--include: no text reaches the head in calibration, and {scheme.name} needs its inputs' size"
        )


def _choose_layout(asked: str | None, schemes: Mapping[str, Scheme]) -> Layout:
    """schemes: by module; UserError where the layout has no room for all of them."""
    if asked is None:
        mixed = len(set(schemes.values())) > 1
        name = COMPRESSED_TENSORS.name if mixed else DEFAULT_LAYOUT[next(iter(schemes.values())).name]
        return LAYOUTS[name]
    if asked not in LAYOUTS:
        raise UserError(f"--layout {asked!r} is not one of the layouts: {', '.join(LAYOUTS)}")
    LAYOUTS[asked].quantization_config(schemes, [])  # refuses what it cannot hold together
    return LAYOUTS[asked]


def _destination(resolution: Resolution, source: CheckpointSource) -> Destination:
    words = resolution.profile.facts.tiles.weight_layout.text()
    wanted = None if isinstance(words, Absent) else words
    return Destination(source.config, float_dtype(source), resolution.profile.name, wanted)


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


def _support_notes(profile: ChipProfile, choices: Sequence[LinearChoice]) -> tuple[str, ...]:
    """What a chip that does not plainly run a scheme will do with it, each scheme of the plan once."""
    schemes = {choice.scheme.name: choice.scheme for choice in choices}
    found: dict[str, None] = {}
    for scheme in schemes.values():
        verdict = check(profile, scheme)
        this = "this" if len(schemes) == 1 else scheme.name
        match verdict.status:
            case Legality.UNSUPPORTED:
                note = (
                    f"{profile.name} cannot run {this} natively: {verdict.reason}; it will have to dequantize the "
                    "weights"
                )
            case Legality.UNKNOWN:
                note = f"whether {profile.name} runs {this} natively is not known: {verdict.reason}"
            case Legality.EMULATED:
                note = f"{profile.name} emulates {this}: {verdict.reason}"
            case _:
                continue
        found[note] = None
    return tuple(found)
