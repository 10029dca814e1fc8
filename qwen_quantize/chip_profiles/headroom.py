"""Whether a chip's cast of activations can overflow under the rule that chooses their scales, and what helps.

A saturating cast clips what its scale leaves too large. One that does not saturate makes it NaN (E4M3) or infinity
(E5M2), and one such activation is the end of the sequence. The rule is chosen where the model is served, so no
weight makes up for it. Weights never overflow: they are cast on the host, saturating.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen_quantize.chip_profiles.leaf import Absent
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import CastRule, Overflow, Rounding

if TYPE_CHECKING:  # these import torch, and `chips` must not
    from qwen_quantize.chip_profiles.arithmetic import Arithmetic
    from qwen_quantize.chip_profiles.schema import ChipProfile
    from qwen_quantize.formats.scales import ScaleRule
    from qwen_quantize.formats.schemes import Scheme, TensorSpec

_RANDOM = (Rounding.STOCHASTIC, Rounding.HYBRID)
_SAFEST = ("rceil", "ceil")  # rules that may help, the more precise first


def cast_overflows(scheme: Scheme, cast: CastRule, rule: ScaleRule) -> bool:
    """Whether some finite activation becomes NaN or infinity: cast at the largest magnitude that the scale leaves.

    rule: of power-of-two scales; other scales are amax / max in float32, which leaves at most one rounding above.
    """
    import torch

    from qwen_quantize.formats.rounding import quantize_values
    from qwen_quantize.formats.spec import FloatFormat

    spec = scheme.activation
    if spec is None or cast.overflow is not Overflow.NONSATURATE or not isinstance(spec.format, FloatFormat):
        return False
    largest = largest_scaled(spec, rule)
    if cast.rounding in _RANDOM:
        return largest > spec.format.max and (spec.format.has_infinity or bool(spec.format.nan_codes))
    ends = torch.tensor([largest, -largest], dtype=torch.float32)
    return not bool(quantize_values(ends, spec.format, cast).isfinite().all())


def largest_scaled(spec: TensorSpec, rule: ScaleRule) -> float:
    """The largest magnitude over its scale that the cast can meet, exactly."""
    import numpy as np

    from qwen_quantize.formats.scales import scale_threshold

    if spec.scale_rule is None:
        return float(np.nextafter(np.float32(spec.format.max), np.float32(np.inf)))
    limits = scale_threshold(spec.format, rule)
    return float(2.0**limits.offset * (1 + limits.fraction_threshold / (1 << 23)))


def rule_with_headroom(profile: ChipProfile, scheme: Scheme, cast: CastRule) -> str | None:
    """A scale rule under which the cast never overflows: one that the chip is known to offer, else one that is
    merely safe; None where there is none."""
    from qwen_quantize.formats.scales import ScaleRule

    if scheme.activation is None or scheme.activation.scale_rule is None:
        return None
    offered = profile.arithmetic.scale.dynamic_rules.texts()
    known = () if isinstance(offered, Absent) else offered
    safe = [rule for rule in _SAFEST if not cast_overflows(scheme, cast, ScaleRule(rule))]
    return next((rule for rule in safe if rule in known), safe[0] if safe else None)


def overflow_words(arithmetic: Arithmetic, scheme: Scheme) -> str | None:
    """What happens where the arithmetic's cast can overflow, as a clause; None where it cannot."""
    cast, rule = arithmetic.activation_cast, arithmetic.activation_scale_rule
    if scheme.activation is None or not cast_overflows(scheme, cast, rule):
        return None
    fmt = scheme.activation.format
    scales = f"the scale rule {rule}" if scheme.activation.scale_rule is not None else "float32 scales"
    return (
        f"{scales} leaves activations of up to {largest_scaled(scheme.activation, rule):.6g} times their scale, and "
        f"the cast to {fmt.name}, which does not saturate, makes those above {fmt.max:g} NaN or infinity"
    )


def require_headroom(arithmetic: Arithmetic, scheme: Scheme, profile: ChipProfile) -> None:
    """UserError where activations would overflow: nothing can be calibrated for that, and the chip would answer NaN."""
    words = overflow_words(arithmetic, scheme)
    if words is None:
        return
    rule = rule_with_headroom(profile, scheme, arithmetic.activation_cast)
    remedy = (
        "let the cast saturate and say so with --assume cast.overflow=saturate"
        if rule is None
        else f"choose the rule {rule} where the model is served, and say so with --assume scale.rule={rule}"
    )
    raise UserError(f"{arithmetic.chip}: {words}; {remedy}")
