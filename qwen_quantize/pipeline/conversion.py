"""A quantized checkpoint in another layout: the same codes, read from one and packed by the other.

Every linear is read as codes, scales and zero points, and written where the other layout has a scheme that holds
them bit by bit. Where it has none the conversion is refused, or the linear is quantized again from its values, and
what that costs is measured. What was written is read back and held against the source before it is published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from qwen_quantize.calibrators.methods import METHODS
from qwen_quantize.calibrators.problem import LayerProblem
from qwen_quantize.checkpoint.gguf import GgufSource
from qwen_quantize.checkpoint.gguf_layout import GROUP, GgufLayout
from qwen_quantize.checkpoint.layout_parts import Destination
from qwen_quantize.checkpoint.layouts import DEEPSEEK_FP8, LAYOUTS, Layout
from qwen_quantize.checkpoint.linear_parts import StoredKind
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.checkpoint.tiles_layout import TilesLayout
from qwen_quantize.checkpoint.writer import OutputTensor
from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.chip_profiles.schema import ChipProfile
from qwen_quantize.engine.compute import scheme_of_form
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import BF16, E4M3FN, E8M0, FP16, FP32
from qwen_quantize.models.lookup import find_blueprint
from qwen_quantize.pipeline.conversion_fit import Fit, Inputs, fit_linear, global_amax, static_amax
from qwen_quantize.pipeline.kv_tensors import (
    is_channel_scale,
    is_kv_scale,
    reads_channel_scales,
    reads_kv_scales,
)
from qwen_quantize.pipeline.tensors import (
    Action,
    TensorPlan,
    float_dtype,
    kept_dtype_in,
    kept_matrices,
    module_of,
)

_SCALE_FORMATS: dict[str, Format] = {
    "F16": FP16, "BF16": BF16, "F32": FP32, "U8": E8M0, "F8_E8M0": E8M0, "F8_E4M3": E4M3FN,
}  # fmt: skip
_GROUPS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class Conversion:
    """What becomes of every tensor. schemes: by module; requantized: those that no scheme holds exactly.

    zero_points: whether integers are written with zero points. casts_dropped: modules whose inputs were cast under
    the old layout and stay as they are under the new one. scales_dropped: tensors with scales of the key-value cache
    that the new layout's engines do not look for.
    """

    layout: Layout
    schemes: Mapping[str, Scheme]
    shapes: Mapping[str, tuple[int, int]]
    requantized: frozenset[str]
    zero_points: bool
    casts_dropped: tuple[str, ...]
    scales_dropped: tuple[str, ...]
    tensors: tuple[TensorPlan, ...]
    kept: tuple[str, ...]

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return tuple(output for tensor in self.tensors for output in tensor.outputs)


class StoredCodes:
    """The quantized linears of a checkpoint as codes, whether its files or a GGUF hold them."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.linears = LinearReader(source)

    def modules(self) -> dict[str, str]:
        """Module -> the tensor with its elements, for every linear that is stored in codes."""
        companions = self.linears.companions()
        found = {}
        for name in self.source.names():
            module = module_of(name)
            if module is not None and name not in companions and self._has_codes(name, module):
                found[module] = name
        return found

    def _has_codes(self, name: str, module: str) -> bool:
        if isinstance(self.source, GgufSource):
            return self.source.has_codes(name)
        return self.linears.is_quantized(module)

    def read(self, module: str) -> QuantizedTensor:
        if isinstance(self.source, GgufSource):
            found = self.source.read_quantized(f"{module}.weight")
            assert found is not None
            return found
        return self.linears.read_quantized(module)

    def scale_format(self, module: str, quantized: QuantizedTensor) -> Format:
        """The format of the stored scales; power-of-two blocks count as such whatever type they are written in."""
        if isinstance(self.source, GgufSource):
            return self.source.scale_format(f"{module}.weight")
        stored = self.linears.describe(module)
        if stored.kind is StoredKind.BLOCK_FP8:
            mantissa, _ = torch.frexp(quantized.scale)
            return E8M0 if bool((mantissa == 0.5).all()) else FP32
        assert stored.scale is not None
        return _SCALE_FORMATS[self.source.info(stored.scale).dtype]

    def inputs(self, module: str) -> Inputs:
        """What becomes of the linear's input; UserError for a static scale that no other file can hold."""
        form = None if isinstance(self.source, GgufSource) else self.linears.describe(module).activation
        if form is None:
            return Inputs()
        spec = scheme_of_form(form, self.linears.describe(module).kind).activation
        try:
            return Inputs(spec, form.dynamic, self._amax(form))
        except ValueError as error:
            raise UserError(f"{self.source.path}: {module!r}: {error}") from error

    def _amax(self, form: ActivationForm) -> float | None:
        if form.input_zero_point is not None:
            raise ValueError("a static input zero point has no place in another layout")
        if form.global_scale is not None:
            return global_amax(float(self.source.read(form.global_scale).float()))
        if form.input_scale is not None:
            return static_amax(float(self.source.read(form.input_scale).float()), form.format.max)
        return None


def plan_conversion(
    source: CheckpointSource,
    name: str,
    *,
    requantize: bool,
    scheme: str | None,
    chip: ChipProfile | None = None,
) -> Conversion:
    """Decide for every tensor; all codes are read once. UserError where something does not fit.

    name: of the layout. requantize: quantize again what does not fit. scheme: to which, by name. chip: whose tiles are
    written, for the layout that has some.
    """
    layout = _layout(name, source, chip)
    stored = StoredCodes(source)
    modules = stored.modules()
    if not modules:
        raise UserError(
            f"--from {source.path}: no linear there is quantized; quantize it with --model-path and --quant-method"
        )
    zero_points = _any_zero_points(stored, modules)
    schemes, shapes, reasons, dropped = {}, {}, {}, []
    for module in modules:
        try:
            shapes[module] = stored.linears.describe(module).shape
            fit = fit_codes(stored, layout, module, zero_points=zero_points)
        except UserError as error:
            reasons[module] = str(error)
            _require_separate_bias(stored, module, error)
            continue
        schemes[module] = fit.scheme
        if not fit.keeps_inputs:
            dropped.append(module)
    if reasons:
        if not requantize:
            module, why = next(iter(reasons.items()))
            raise UserError(
                f"--from {source.path}: {len(reasons)} of {len(modules)} linears have no exact form in layout {name}, "
                f"the first is {module!r}: {why}. --requantize quantizes them again and states the loss"
            )
        again = _requantized_scheme(layout, scheme, stored, shapes)
        schemes = {module: schemes.get(module, again) for module in modules}
    tensors = _tensors(stored, layout, modules, schemes, shapes)
    kept = _kept(source, modules, tensors)
    try:
        layout.quantization_config(schemes, kept)
    except UserError:
        if not reasons:
            raise
        reasons = dict.fromkeys(modules, "")  # one scheme for all, so all are quantized again
        schemes = dict.fromkeys(modules, again)
        tensors = _tensors(stored, layout, modules, schemes, shapes)
    return Conversion(
        layout=layout,
        schemes=schemes,
        shapes=shapes,
        requantized=frozenset(reasons),
        zero_points=zero_points,
        casts_dropped=tuple(dropped),
        scales_dropped=tuple(name for name in source.names() if _is_dropped_scale(name, layout)),
        tensors=tensors,
        kept=kept,
    )


def _require_separate_bias(stored: StoredCodes, module: str, why: UserError) -> None:
    """UserError where a bias lies in the linear's own parts, so that quantizing its weight again would lose it."""
    if isinstance(stored.source, GgufSource) or f"{module}.bias" in stored.source.names():
        return
    bias = stored.linears.integer_bias(module)
    if bias is not None and bool(bias.any()):
        raise UserError(
            f"{why}; and quantizing it again would lose that bias, so begin from the original model"
        )


def fit_codes(stored: StoredCodes, layout: Layout, module: str, *, zero_points: bool) -> Fit:
    """The linear in the other layout; UserError says why there is no exact form."""
    quantized = stored.read(module)
    scales = stored.scale_format(module, quantized)
    return fit_linear(layout, module, quantized, scales, stored.inputs(module), zero_points=zero_points)


def requantize_linear(stored: StoredCodes, module: str, scheme: Scheme) -> tuple[QuantizedTensor, float]:
    """(the linear rounded to another scheme, the squared error of that relative to the stored weights)."""
    weight = stored.linears.read(module)
    method = METHODS["ue8m0" if scheme.name == "ue8m0" else "rtn"]
    solved = method.solve(LayerProblem(module, weight, scheme, RNE_SATURATE)).quantized
    total = float(weight.double().square().sum())
    error = float((solved.dequantize().double() - weight.double()).square().sum())
    return solved, error / total if total > 0 else 0.0


def _layout(name: str, source: CheckpointSource, chip: ChipProfile | None) -> Layout:
    if name not in LAYOUTS:
        raise UserError(f"--layout {name!r} is not one of the layouts: {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    if isinstance(layout, TilesLayout) != (chip is not None):
        raise UserError(
            f"--layout {name} has the tiles of one chip; name it with --device"
            if chip is None
            else f"--device says nothing beside --from and --layout {name}, which is the same for every chip; leave it "
            "out"
        )
    wanted = None if chip is None else chip.facts.tiles.weight_layout.text()
    return layout.fitted(
        Destination(
            source.config,
            float_dtype(source),
            "any chip" if chip is None else chip.name,
            None if isinstance(wanted, Absent) else wanted,
        )
    )


def _any_zero_points(stored: StoredCodes, modules: Mapping[str, str]) -> bool:
    """Whether any linear has zero points other than 0: config files state for all linears alike if they have some."""
    for module in modules:
        if isinstance(stored.source, GgufSource):
            return False
        if stored.linears.describe(module).zero_point is None:
            continue
        try:
            if stored.read(module).zero_point is not None:
                return True
        except UserError:  # said when the linear itself is converted
            continue
    return False


def _requantized_scheme(
    layout: Layout, asked: str | None, stored: StoredCodes, shapes: Mapping[str, tuple[int, int]]
) -> Scheme:
    """To what linears are quantized again: the scheme asked for, else the layout's own."""
    if asked is None:
        asked = "ue8m0" if layout.name == DEEPSEEK_FP8.name else "w4a16"
        if layout.name == "gguf" and min(_bits(stored, module) for module in shapes) > 4:
            asked = "w8a16"
    if asked not in SCHEMES:
        raise UserError(f"--scheme {asked!r} is not one of the schemes: {', '.join(SCHEMES)}")
    scheme = SCHEMES[asked]
    if isinstance(layout, GgufLayout):
        scheme = replace(scheme, activation=None, dynamic=False)
    if scheme.weight.granularity.kind is GranularityKind.GROUP and scheme.weight.granularity.cols > GROUP:
        sizes = (GROUP,) if isinstance(layout, GgufLayout) else _GROUPS
        size = next((size for size in sizes if all(shape[1] % size == 0 for shape in shapes.values())), None)
        scheme = scheme.with_group(size)
    for module, shape in shapes.items():
        layout.outputs(module, shape, scheme)
    return scheme


def _bits(stored: StoredCodes, module: str) -> int:
    kind = stored.linears.describe(module).kind
    return 4 if kind in (StoredKind.INT4, StoredKind.AWQ, StoredKind.MXFP4, StoredKind.NVFP4) else 8


def _kept(
    source: CheckpointSource, modules: Mapping[str, str], tensors: Sequence[TensorPlan]
) -> tuple[str, ...]:
    """Modules with a matrix that stays, which a reader may take for a linear; the head too where it is tied."""
    blueprint = find_blueprint(source.config)
    head = [] if blueprint is None else [blueprint.family.head.removesuffix(".weight")]
    found = dict.fromkeys((*head, *kept_matrices(tensors)))
    return tuple(module for module in found if module not in modules)


def _tensors(
    stored: StoredCodes,
    layout: Layout,
    modules: Mapping[str, str],
    schemes: Mapping[str, Scheme],
    shapes: Mapping[str, tuple[int, int]],
) -> tuple[TensorPlan, ...]:
    source, companions = stored.source, stored.linears.companions()
    by_tensor = {tensor: module for module, tensor in modules.items()}
    plans = []
    for name in source.names():
        own = name in companions and not is_channel_scale(
            name
        )  # of the cache, though it stands beside a weight
        if own or _is_dropped_scale(name, layout):
            continue
        if name in by_tensor:
            module = by_tensor[name]
            outputs = layout.outputs(module, shapes[module], schemes[module])
            plans.append(TensorPlan(name, Action.QUANTIZE, outputs, "converted", module))
            continue
        info = source.info(name)
        dtype = kept_dtype_in(layout, name, _kept_dtype(source, name), info.shape)
        plans.append(
            TensorPlan(name, Action.KEEP, (OutputTensor(name, dtype, tuple(info.shape)),), "as it was stored")
        )
    return tuple(plans)


def _is_dropped_scale(name: str, layout: Layout) -> bool:
    """Whether a tensor is a scale of the key-value cache that the layout's engines call otherwise, or have not."""
    if is_channel_scale(name):
        return not reads_channel_scales(layout)
    return is_kv_scale(name) and not reads_kv_scales(layout)


def _kept_dtype(source: CheckpointSource, name: str) -> str:
    """Its own; what a GGUF has in blocks that are not converted stays as the float32 values of those blocks."""
    if isinstance(source, GgufSource):
        return source.stored_dtype(name) or "F32"
    dtype = source.info(name).dtype
    assert dtype in DTYPES
    return dtype
