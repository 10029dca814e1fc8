"""The schemes that mixed precision chooses from, and what each would make of every linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from qwen_quantize.calibrators.methods import METHODS, Method
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.chip_profiles.legality import Legality, check
from qwen_quantize.errors import UserError
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.models.fusion import fusion_of
from qwen_quantize.pipeline.plan import Plan, make_plan
from qwen_quantize.pipeline.recipe import Recipe, Rule
from qwen_quantize.pipeline.tensors import float_dtype

KEPT = "16"
_INTEGERS = ("32", "64", "128")
_CHOOSABLE = ("w4a16", "w8a16", "w4a8")  # schemes whose groups have a size to choose
# By the scheme that is asked for: what has the same activations, so that no stream is cast in two ways without need.
_BESIDE: dict[str, tuple[str, ...]] = {
    "w4a16": (*(f"w4a16:{size}" for size in _INTEGERS), "w8a16", KEPT),
    "w8a16": (*(f"w4a16:{size}" for size in _INTEGERS), "w8a16", KEPT),
    "w8a8": (*(f"w4a8:{size}" for size in _INTEGERS), "w8a8", KEPT),
    "w4a8": (*(f"w4a8:{size}" for size in _INTEGERS), "w8a8", KEPT),
    "fp8": ("nvfp4", "fp8", KEPT),
    "nvfp4": ("nvfp4", "fp8", KEPT),
    "mxfp4": ("mxfp4", "mxfp6", "mxfp8", KEPT),
    "mxfp6": ("mxfp4", "mxfp6", "mxfp8", KEPT),
    "mxfp8": ("mxfp4", "mxfp6", "mxfp8", KEPT),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way for a linear. scheme None: it stays as it is; group_size None: the scheme's own."""

    name: str
    scheme: str | None
    method: str | None
    group_size: int | None
    symmetric: bool | None

    def rules(self, unit: Sequence[str]) -> tuple[Rule, ...]:
        """What makes the linears of a unit into this."""
        return tuple(
            Rule(match, ignore=True)
            if self.scheme is None
            else Rule(match, self.method, self.scheme, self.group_size, self.symmetric)
            for match in unit_patterns(unit)
        )


def unit_patterns(unit: Sequence[str]) -> tuple[str, ...]:
    """Patterns that match a unit's linears and no others: their names, or one for all routed experts of a layer."""
    found: dict[str, None] = {}
    for module in unit:
        fusion = fusion_of(module)
        routed = fusion is not None and fusion.endswith(".experts")
        found[f"{fusion}.*" if routed else module] = None
    return tuple(found)


def candidates_for(recipe: Recipe, plan: Plan, asked: Sequence[str]) -> tuple[Candidate, ...]:
    """What to choose from, by name as in `--candidates`; UserError for one that cannot be.

    Without a wish: the schemes with the same activations that the chip can run.
    """
    names = list(asked)
    if not names:
        if plan.scheme.name not in _BESIDE:
            raise UserError(
                f"--quant-method {recipe.method} makes {plan.scheme.name}, beside which no scheme stands by itself; "
                "name what to choose from with --candidates"
            )
        names = list(_BESIDE[plan.scheme.name])
    found = []
    for name in names:
        one = _candidate(name, recipe, plan.principal.method)
        illegal = (
            one.scheme is not None
            and check(plan.resolution.profile, SCHEMES[one.scheme]).status is Legality.UNSUPPORTED
        )
        if not (illegal and not asked and not recipe.allow_unsupported):
            found.append(one)
    return tuple(found)


def _candidate(name: str, recipe: Recipe, method: Method) -> Candidate:
    if name == KEPT:
        return Candidate(name, None, None, None, None)
    scheme, colon, size = name.partition(":")
    if scheme not in SCHEMES or (colon and not size.isdecimal()):
        raise UserError(
            f"--candidates: {name!r} is none; write a scheme ({', '.join(SCHEMES)}), with :64 for groups of 64 if its "
            f"groups can be chosen, or {KEPT} for linears that stay as they are"
        )
    asymmetric = recipe.asymmetric and scheme == "w4a16"
    group = int(size) if colon else None
    return Candidate(name, scheme, _method_for(scheme, method), group, False if asymmetric else None)


def _method_for(scheme: str, method: Method) -> str:
    """The method asked for, if it makes the scheme; else the scheme's own, else one for any."""
    if method.any_scheme or method.scheme == scheme:
        return method.name
    if scheme in METHODS:
        return scheme
    return "gptq" if method.needs_data or method.uses_second_moments else "rtn"


def candidate_plan(
    recipe: Recipe, source: CheckpointSource, candidate: Candidate, units: Sequence[Sequence[str]], base: Plan
) -> tuple[Plan, frozenset[str]]:
    """(the plan with the candidate for every unit that it divides, the first linears of those units)."""
    assert candidate.scheme is not None
    size = candidate.group_size
    if size is None:
        grid = SCHEMES[candidate.scheme].weight.granularity
        fixed = candidate.scheme not in _CHOOSABLE and grid.kind is GranularityKind.GROUP
        size = grid.cols if fixed else None
    shapes = base.selection.quantized
    fitting = [unit for unit in units if not size or all(shapes[module][1] % size == 0 for module in unit)]
    rules = tuple(rule for unit in fitting for rule in candidate.rules(unit))
    if not rules:
        return base, frozenset()
    plan = make_plan(replace(recipe, rules=(*rules, *recipe.rules)), source)
    return plan, frozenset(unit[0] for unit in fitting)


def own_first(candidates: Sequence[Candidate], base: Plan) -> list[Candidate]:
    """The candidates, first those that are what the request itself comes to: what goes with them is chosen by it."""
    scheme, grid = base.scheme, base.scheme.weight.granularity
    size = grid.cols if grid.kind is GranularityKind.GROUP else None
    return sorted(candidates, key=lambda one: one.scheme != scheme.name or one.group_size not in (None, size))


def held_together(plan: Plan, module: str, held: Sequence[Scheme]) -> list[Scheme]:
    """`held` and the scheme that a plan gives a linear; UserError where its layout cannot hold all of them at once."""
    scheme = plan.scheme_of(module)
    every = list(dict.fromkeys((*held, scheme)))
    schemes = {f"{module}.{number}": one for number, one in enumerate(every[:-1])} | {module: every[-1]}
    try:
        plan.layout.quantization_config(schemes, [])
        plan.layout.side_files(schemes, ())
    except UserError as error:
        others = " and ".join(
            f"{one.name} (scales {one.weight.granularity.describe()})" for one in every[:-1]
        )
        raise UserError(f"layout {plan.layout.name} cannot hold it beside {others}") from error
    return every


def with_own_group(
    candidate: Candidate,
    plan: Plan | None,
    units: Sequence[Sequence[str]],
    fitting: Mapping[str, frozenset[str]],
) -> Candidate:
    """The candidate with the group size that its plan came to: another one might fit the linears that get it."""
    if plan is None or candidate.group_size is not None or candidate.scheme not in _CHOOSABLE:
        return candidate
    unit = next((unit for unit in units if unit[0] in fitting[candidate.name]), None)
    if unit is None:
        return candidate
    grid = plan.scheme_of(unit[0]).weight.granularity
    return replace(candidate, group_size=grid.cols if grid.kind is GranularityKind.GROUP else 0)


def linear_bits(plan: Plan, module: str) -> int:
    """What a quantized linear takes on disk, scales and zero points and all."""
    outputs = plan.layout.outputs(module, plan.selection.quantized[module], plan.scheme_of(module))
    return 8 * sum(output.nbytes for output in outputs)


def kept_bits(source: CheckpointSource, linears: LinearReader, module: str, shape: tuple[int, int]) -> int:
    """What a linear takes on disk that stays as it is."""
    dtype = float_dtype(source)
    if source.kind != "gguf" and not linears.is_quantized(module):
        dtype = source.info(linears.describe(module).weight).dtype
    return DTYPES[dtype].bits * shape[0] * shape[1]
