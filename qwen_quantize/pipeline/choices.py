"""What each linear becomes: method, scheme and arithmetic, the same for linears that engines fuse."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qwen_quantize.calibrators.experts import ExpertPolicy
from qwen_quantize.calibrators.gain import is_biased
from qwen_quantize.calibrators.methods import METHODS, Method, Transform
from qwen_quantize.calibrators.problem import Effort
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.chip_profiles.arithmetic import Arithmetic, assumable_for, resolve_arithmetic
from qwen_quantize.chip_profiles.headroom import require_headroom
from qwen_quantize.chip_profiles.legality import Legality, check, unsupported_error
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.engine.compute import compute_for, compute_uncalibrated
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.models.blueprint import Blueprint, Half, Stream
from qwen_quantize.models.fusion import fusion_of
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.rules import Settings
from qwen_quantize.pipeline.scheme_choice import base_scheme, fit_scheme, needs_input_amax
from qwen_quantize.pipeline.selection import Selection, some


@dataclass(frozen=True, slots=True)
class LinearChoice:
    """How a linear is quantized and how the chip then runs it. block: (rows, columns) of its regions."""

    method: Method
    scheme: Scheme
    arithmetic: Arithmetic
    block: tuple[int, int]
    effort: Effort = Effort.NORMAL

    def chip_compute(self, input_scale: float | None = None) -> ChipCompute:
        """The cast of its input, and the chip's matrix unit where sums are narrow.

        input_scale: of a linear with static activations; without it, as far as is known before calibration.
        """
        if input_scale is None:
            return compute_uncalibrated(self.scheme, self.arithmetic)
        return compute_for(self.scheme, self.arithmetic, input_scale)

    def sees_cast(self) -> bool:
        """Whether inputs are observed as the chip casts them; before factors move, that is not known."""
        return self.method.transform is Transform.NONE and self.chip_compute().cast is not None

    def sees_bias(self) -> bool:
        """Whether they are, and are off to one side: other features then tell by how much."""
        return self.sees_cast() and is_biased(self.arithmetic.activation_cast)

    def observes(self) -> tuple[object, ...]:
        """What decides how its input is observed: linears that share one observer must agree in this."""
        return (
            self.method.transform,
            self.method.uses_second_moments,
            self.scheme.activation,
            self.scheme.dynamic,
            self.chip_compute().unit is None,
        )


@dataclass(frozen=True, slots=True)
class Choices:
    """principal: of the method asked for, or the one of most linears where none has that."""

    principal: LinearChoice
    by_module: Mapping[str, LinearChoice]
    notes: tuple[str, ...]


def method_named(name: str) -> Method:
    """The method; UserError for a name that is none."""
    method = METHODS.get(name)
    if method is None:
        raise UserError(
            f"--quant-method {name!r} is not one of the methods here: {', '.join(sorted(METHODS))}"
        )
    return method


def own_assumptions(scheme: Scheme, assume: Mapping[str, str], schemes: Iterable[Scheme]) -> dict[str, str]:
    """`assume` without what only steps of the other `schemes` have; the rest is for `resolve_arithmetic`."""
    others = {key for other in schemes if other != scheme for key in assumable_for(other)}
    return {key: value for key, value in assume.items() if key in assumable_for(scheme) or key not in others}


def choose_linears(
    recipe: Recipe,
    settings: Mapping[str, Settings],
    selection: Selection,
    linears: LinearReader,
    dtype: str,
    profile: ChipProfile,
    blueprint: Blueprint | None,
) -> Choices:
    """The choice of every selected linear; UserError for what the chip, a method or an engine cannot do.

    dtype: of the model's unquantized tensors, a safetensors name.
    """
    asked: dict[Settings, list[str]] = {}
    for module in selection.quantized:
        asked.setdefault(settings[module], []).append(module)
    base = {
        one: base_scheme(one.applied_to(recipe), method_named(one.method or recipe.method)) for one in asked
    }
    by_module: dict[str, LinearChoice] = {}
    notes: dict[str, None] = {}
    found: dict[Settings, LinearChoice] = {}
    for one, modules in asked.items():
        own, method, scheme = one.applied_to(recipe), method_named(one.method or recipe.method), base[one]
        verdict = check(profile, scheme)
        if verdict.status is Legality.UNSUPPORTED and not recipe.allow_unsupported:
            raise unsupported_error(profile, scheme, verdict)
        arithmetic = resolve_arithmetic(
            profile, scheme, own_assumptions(scheme, dict(recipe.assume), base.values())
        )
        require_headroom(arithmetic, scheme, profile)
        if needs_input_amax(scheme) and recipe.expert_policy is ExpertPolicy.ROUND:
            raise UserError(
                f"--expert-policy round leaves starved experts without statistics, and {scheme.name} stores the size "
                "of each linear's inputs; take --expert-policy shrink"
            )
        part = replace(selection, quantized={module: selection.quantized[module] for module in modules})
        fitted = fit_scheme(own, scheme, part, linears, dtype)
        choice = LinearChoice(method, fitted.scheme, arithmetic, fitted.block, recipe.effort)
        # Rules that come to the same make one choice, so that choices can be told apart by identity.
        found[one] = next((other for other in found.values() if other == choice), choice)
        by_module |= dict.fromkeys(modules, found[one])
        notes |= dict.fromkeys(fitted.notes)
    by_module = {module: by_module[module] for module in selection.quantized}
    if len(found) > 1:
        _check_units(by_module, blueprint)
    default = next((one for one in found if one.is_default), None)
    principal = found[default or max(asked, key=lambda one: len(asked[one]))]
    return Choices(principal, by_module, tuple(notes))


def units_of(modules: Sequence[str], blueprint: Blueprint | None) -> tuple[tuple[str, ...], ...]:
    """The linears that must become the same, in order: those of one input, which engines fuse or which a method
    scales together, and all routed experts of a layer."""
    streams: dict[str, str] = {}
    if blueprint is not None:
        for layer in (*range(blueprint.num_layers), *blueprint.next_token_layers):
            for half in Half:
                for stream, sites in blueprint.streams(layer, half).items():
                    names = [blueprint.module_name(layer, site) for site in sites]
                    streams |= dict.fromkeys(names, blueprint.layer_name(layer, stream.value))
    found: dict[str, list[str]] = {}
    for module in modules:
        found.setdefault(streams.get(module) or fusion_of(module) or module, []).append(module)
    return tuple(tuple(unit) for unit in found.values())


def _check_units(choices: Mapping[str, LinearChoice], blueprint: Blueprint | None) -> None:
    for unit in units_of(list(choices), blueprint):
        first = unit[0]
        other = next((module for module in unit if choices[module] is not choices[first]), None)
        if other is not None:
            raise UserError(
                f"the recipe makes {first!r} {_words(choices[first])} but {other!r} {_words(choices[other])}; "
                f"{some(unit)} read one input and engines run them as one product, so give them one rule"
            )
    if blueprint is None:
        return
    for layer in range(blueprint.num_layers):  # the input of shared and routed experts is observed once
        shared = blueprint.streams(layer, Half.MLP).get(Stream.SHARED_INPUT, ())
        if not shared or not blueprint.num_experts(layer):
            continue
        names = (
            blueprint.module_name(layer, shared[0]),
            blueprint.module_name(layer, blueprint.expert_sites(layer)[0], 0),
        )
        if all(name in choices for name in names):
            of_shared, of_routed = (choices[name] for name in names)
            if of_shared.observes() != of_routed.observes():
                raise UserError(
                    f"the recipe makes {names[0]!r} {_words(of_shared)} but {names[1]!r} {_words(of_routed)}; shared "
                    "and routed experts read one input, so give them one method, and schemes with the same activations"
                )


def _words(choice: LinearChoice) -> str:
    grid = choice.scheme.weight.granularity.describe()
    return f"{choice.method.name} {choice.scheme.name} (scales {grid})"
