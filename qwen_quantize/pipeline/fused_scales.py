"""The second scale of NVFP4 for linears that are solved one at a time and run as one matrix."""

from __future__ import annotations

from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.models.fusion import product_of
from qwen_quantize.pipeline.plan import Plan
from qwen_quantize.pipeline.solving import shared_tensor_scale


class FusedScales:
    """Engines keep one tensor scale for a product, so its linears must have the same; their weights are read for it.

    One weight is held at a time. None for schemes without such a scale, and for linears that run by themselves,
    whose solver then chooses.
    """

    def __init__(self, plan: Plan, linears: LinearReader) -> None:
        self._plan = plan
        self._linears = linears
        self._found: dict[str, float | None] = {}
        self._members: dict[str, list[str]] = {}
        for module in plan.selection.quantized:
            product = product_of(module)
            if product is not None and plan.scheme_of(module).weight.tensor_scale_format is not None:
                self._members.setdefault(product, []).append(module)

    def of(self, module: str) -> float | None:
        product = product_of(module)
        if product is None or product not in self._members:
            return None
        if product not in self._found:
            # The largest magnitude is all that the scale depends on.
            peaks = (self._linears.read(member).abs().amax() for member in self._members[product])
            self._found[product] = shared_tensor_scale(self._plan.scheme_of(module), max(peaks))
        return self._found[product]
