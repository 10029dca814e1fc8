"""From a scheme and a chip's arithmetic to what the engine computes: one place for plans and for folders.

Weight-only schemes leave activations in the 16 bits that they have on the chip: nothing is emulated there, and sums
are float32. Nor are integer products given a unit: int32 sums are exact, which float32 ones are up to 2^24.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import StoredKind, StoredLinear
from qwen_quantize.chip_profiles.arithmetic import Arithmetic
from qwen_quantize.chip_profiles.dot_unit import dot_unit_of, with_scales_of
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_cast import (
    ActivationCast,
    GroupCast,
    NvFp4Cast,
    ShiftedCast,
    TensorCast,
    TokenCast,
    WholeCast,
)
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.cast_path import FP19
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.granularity import GranularityKind
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.schemes import SCHEMES, Scheme, TensorSpec
from qwen_quantize.formats.spec import FloatFormat, IntFormat
from qwen_quantize.formats.tables import BF16, E4M3FN, E8M0, FP16, FP32

# From one linear of a checkpoint to how the chip runs it; None where it computes in full precision.
ComputeRule = Callable[[StoredLinear], ChipCompute | None]
Compute = ChipCompute | ComputeRule

_ON_THE_WAY: dict[str, FloatFormat] = {"fp16": FP16, "bf16": BF16}
_STATIC_FORMATS: dict[str, FloatFormat] = {"fp19": FP19, "fp16": FP16, "bf16": BF16}


def compute_for(
    scheme: Scheme,
    arithmetic: Arithmetic,
    input_scale: float | None = None,
    global_scale: float | None = None,
    zero_point: int = 0,
) -> ChipCompute:
    """How a chip runs a linear of `scheme`; the scales multiply, and are those found in calibration.

    input_scale, zero_point: of a static scheme's activations. global_scale: NVFP4's second one; without it each token
    has its own. Dynamic scales for the whole tensor count as one for each token: vLLM makes that of them, and it does
    not depend on the batch. A weight-only scheme gives a chip that changes nothing. ValueError for a static scheme
    without its scale.
    """
    activation = scheme.activation
    if activation is None:
        return ChipCompute(None)
    if not scheme.dynamic and input_scale is None:
        raise ValueError(f"scheme {scheme.name} has static activations: their scale is missing")
    kept = _STATIC_FORMATS.get(arithmetic.static_scale_format or "")
    if not activation.symmetric and isinstance(activation.format, IntFormat):
        shifted = ShiftedCast(activation.format, arithmetic.activation_cast, input_scale, zero_point)
        if scheme.dynamic or kept is None:
            return ChipCompute(shifted)
        return ChipCompute(shifted, bare=True, sum_scale_format=kept)
    cast = _cast(activation, arithmetic, input_scale, global_scale)
    weight, element = scheme.weight.format, activation.format
    if isinstance(cast, GroupCast):
        return ChipCompute(cast, dot_unit_of(arithmetic, weight, element, cast.group_size))
    unit = dot_unit_of(arithmetic, weight, element)
    if isinstance(cast, NvFp4Cast) and unit is not None:
        a, b = (_scaled(spec) for spec in (activation, scheme.weight))
        unit = replace(unit, a_format=a, b_format=b)
    elif isinstance(cast, TokenCast) and cast.group_size is not None and unit is not None:
        # A kernel scales the sums of codes, group by group: alignments differ from these by less than a place.
        unit = dot_unit_of(arithmetic, weight, element, cast.group_size)
        assert unit is not None
        return ChipCompute(cast, replace(unit, a_format=FP32, b_format=FP32))
    if isinstance(cast, TensorCast) and isinstance(element, IntFormat) and kept is not None:
        return ChipCompute(cast, unit, bare=True, sum_scale_format=kept)
    return ChipCompute(cast, unit, bare=unit is not None)


def compute_uncalibrated(scheme: Scheme, arithmetic: Arithmetic) -> ChipCompute:
    """As `compute_for`, while calibration is still to find static scales: each tensor counts as the whole input."""
    activation = scheme.activation
    if activation is None or scheme.dynamic:
        return compute_for(scheme, arithmetic)
    path = tuple(_ON_THE_WAY[name] for name in arithmetic.activation_path)
    return ChipCompute(WholeCast(activation.format, arithmetic.activation_cast, path))


def _cast(
    activation: TensorSpec,
    arithmetic: Arithmetic,
    input_scale: float | None,
    global_scale: float | None,
) -> ActivationCast:
    fmt, rule, shape = activation.format, arithmetic.activation_cast, activation.granularity
    path = tuple(_ON_THE_WAY[name] for name in arithmetic.activation_path)
    scale_format = activation.scale_format
    assert isinstance(scale_format, FloatFormat)
    if input_scale is not None:
        return TensorCast(fmt, rule, input_scale, path)
    if shape.kind is not GranularityKind.GROUP:
        return TokenCast(fmt, rule, scale_format, None, path)
    if scale_format == E8M0:
        return GroupCast(fmt, rule, arithmetic.activation_scale_rule, shape.cols)
    if activation.tensor_scale_format is not None:
        return NvFp4Cast(fmt, rule, global_scale, scale_format, shape.cols)
    return TokenCast(fmt, rule, scale_format, shape.cols, path)


def _scaled(spec: TensorSpec) -> FloatFormat:
    assert isinstance(spec.format, FloatFormat)
    assert isinstance(spec.scale_format, FloatFormat)
    return with_scales_of(spec.format, spec.scale_format)


# How a weight is stored -> the named scheme, as far as its input agrees: groups of 32 alone may be two schemes'.
_BY_KIND = {
    StoredKind.BLOCK_FP8: "ue8m0",
    StoredKind.CHANNEL_FP8: "fp8",
    StoredKind.INT8: "w8a8",
    StoredKind.INT8_STATIC: "w8a8_static",
    StoredKind.INT4: "w4a8",
    StoredKind.MXFP8: "mxfp8",
    StoredKind.MXFP6: "mxfp6",
    StoredKind.MXFP4: "mxfp4",
    StoredKind.NVFP4: "nvfp4",
    StoredKind.HIF8: "hif8",
}


def scheme_of_form(form: ActivationForm, stored: StoredKind = StoredKind.PLAIN) -> Scheme:
    """The scheme whose arithmetic counts for a linear with this input: a named one, or one beside it.

    stored: how its weight is. Weights count as of the input's format: the unit has them widened to it.
    """
    kind = form.granularity.kind
    usual = SCHEMES[_BY_KIND.get(stored, "w4a16")]
    fits = usual.activation is not None and usual.activation.format == form.format
    fits = fits and usual.dynamic == form.dynamic
    named = usual if fits else _named(form)
    rule = None
    if form.scale_format == E8M0:
        own = None if named.activation is None else named.activation.scale_rule
        rule = own or ScaleRule.RCEIL
    second = FP32 if kind is GranularityKind.GROUP and form.scale_format == E4M3FN else None
    activation = TensorSpec(form.format, form.granularity, form.scale_format, rule, second, form.symmetric)
    weight = replace(activation, scale_rule=None if rule is None else ScaleRule.SEARCH, symmetric=True)
    return replace(named, weight=weight, activation=activation, dynamic=form.dynamic)


def _named(form: ActivationForm) -> Scheme:
    """The first named scheme with such an input, else the nearest that differs in the scale's region or type."""

    def distance(scheme: Scheme) -> tuple[bool, bool, bool, bool, bool, int]:
        spec = scheme.activation
        assert spec is not None
        return (
            isinstance(spec.format, IntFormat) is not isinstance(form.format, IntFormat),
            spec.format != form.format,
            scheme.dynamic is not form.dynamic,
            spec.granularity.kind is not form.granularity.kind,
            spec.scale_format != form.scale_format,
            abs(spec.granularity.cols - form.granularity.cols),
        )

    return min((scheme for scheme in SCHEMES.values() if scheme.activation is not None), key=distance)


@dataclass(frozen=True, slots=True)
class FolderCompute:
    """The `ComputeRule` of a checkpoint: each linear as its own config has it, on one chip.

    arithmetics: of every scheme that `scheme_of_form` finds there. UserError for static scales that are missing, or
    are no positive numbers.
    """

    source: CheckpointSource
    arithmetics: Mapping[Scheme, Arithmetic]

    def __call__(self, stored: StoredLinear) -> ChipCompute | None:
        form = stored.activation
        if form is None:
            return None
        scheme = scheme_of_form(form, stored.kind)
        input_scale = None if scheme.dynamic else _held_as(self._number(form.input_scale, stored), form)
        divisor = None if form.global_scale is None else self._number(form.global_scale, stored)
        return compute_for(
            scheme,
            self.arithmetics[scheme],
            input_scale,
            None if divisor is None else 1.0 / divisor,
            self._zero_point(form),
        )

    def _zero_point(self, form: ActivationForm) -> int:
        """As stored, beside a static scale; 0 where there is none."""
        if form.dynamic or form.input_zero_point is None:
            return 0
        return int(self.source.read(form.input_zero_point).flatten()[0])

    def _number(self, name: str | None, stored: StoredLinear) -> float:
        if name is None:
            raise UserError(
                f"{self.source.path}: config.json gives {stored.module!r} a static input scale and no tensor holds it"
            )
        values = self.source.read(name).float().flatten()
        if values.numel() != 1 or not 0 < float(values[0]) < float("inf"):
            raise UserError(f"{self.source.path}: tensor {name!r} must be one positive scale")
        return float(values[0])


def _held_as(scale: float, form: ActivationForm) -> float:
    """A static scale in the type that the engine holds it in."""
    if not isinstance(form.scale_format, FloatFormat) or form.scale_format == FP32:
        return scale
    return float(quantize_values(torch.tensor([scale]), form.scale_format, RNE_SATURATE))


def schemes_of(stored: Iterable[StoredLinear]) -> tuple[Scheme, ...]:
    """The schemes that the inputs of these linears have, the most frequent first; () if all stay as they are."""
    counts = Counter(
        # Without the names of tensors: what is left occurs a few times in a model of any size.
        (replace(linear.activation, input_scale=None, global_scale=None, input_zero_point=None), linear.kind)
        for linear in stored
        if linear.activation is not None
    )
    schemes: Counter[Scheme] = Counter()
    for (form, kind), count in counts.items():
        schemes[scheme_of_form(form, kind)] += count
    return tuple(scheme for scheme, _ in schemes.most_common())


def computed_as(compute: Compute | None, stored: StoredLinear) -> ChipCompute | None:
    """The chip's way with one quantized linear; None for full precision."""
    chip = compute if compute is None or isinstance(compute, ChipCompute) else compute(stored)
    return None if chip is None or chip.changes_nothing else chip
