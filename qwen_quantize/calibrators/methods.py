"""The methods that `--quant-method` offers. A new one is a solver in its own file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from qwen_quantize.calibrators.block_fp8 import solve_block_fp8
from qwen_quantize.calibrators.grid_weights import solve_compensated, solve_rounding
from qwen_quantize.calibrators.hessian import DAMPING, GRID_DAMPING, GRID_FLOOR
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution


class Transform(StrEnum):
    """What is done to the weights before they are rounded; the model computes the same function."""

    NONE = "none"
    AWQ = "awq"  # input channels scaled by their activations' size, for weights alone
    SMOOTHING = "smoothing"  # the same where activations are quantized too (SmoothQuant)


@dataclass(frozen=True, slots=True)
class Method:
    """A solver, the named scheme it fills, and what it needs.

    uses_second_moments: of the inputs, for the solver or the transform, where mean squares are not enough.
    compensates: the solver wants their factors. damping, damping_floor: of those factors, see `factorize`.
    any_scheme: it fills every scheme without a method of its own. needs_data: it means nothing without text.
    also: schemes beside its own that it fills. in_turn: to be quick, the last linear of half a layer is calibrated on
    what comes out of the others quantized, so that each runs once, on bfloat16 products, and factors moved into it go
    through the rounding before it.
    """

    name: str
    scheme: str
    solve: Callable[[LayerProblem], LayerSolution]
    uses_second_moments: bool
    description: str
    transform: Transform = Transform.NONE
    any_scheme: bool = False
    needs_data: bool = False
    also: tuple[str, ...] = ()
    compensates: bool = True
    damping: float = GRID_DAMPING
    damping_floor: float = GRID_FLOOR
    in_turn: bool = False

    @property
    def has_high_effort(self) -> bool:
        """Whether its solver goes on where it is asked to; with data, as it works on second moments."""
        return self.solve is solve_compensated


def _narrow(scheme: str, description: str) -> Method:
    return Method(scheme, scheme, solve_compensated, True, description)


def _eight_bit(
    scheme: str, description: str, transform: Transform = Transform.NONE, also: tuple[str, ...] = ()
) -> Method:
    """Eight bits leave little to win, so that damping protects what there is (see `DAMPING`)."""
    return Method(
        scheme,
        scheme,
        solve_compensated,
        True,
        description,
        transform,
        also=also,
        damping=DAMPING,
        damping_floor=0.0,
    )


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            "ue8m0",
            "ue8m0",
            solve_block_fp8,
            uses_second_moments=True,
            description="E4M3 weights in blocks with power-of-two scales, scales searched, rounding compensated",
            damping=DAMPING,
            damping_floor=0.0,
        ),
        Method(
            "rtn",
            "w4a16",
            solve_rounding,
            uses_second_moments=False,
            description="rounding to nearest with searched scales, for any --scheme; needs no text",
            any_scheme=True,
            compensates=False,
        ),
        Method(
            "gptq",
            "w4a16",
            solve_compensated,
            uses_second_moments=True,
            description="each rounding error compensated in the columns still to be rounded, for any --scheme",
            any_scheme=True,
            needs_data=True,
        ),
        Method(
            "awq",
            "w4a16",
            solve_rounding,
            uses_second_moments=False,
            description="4-bit weights, input channels scaled by their activations, ranges searched",
            transform=Transform.AWQ,
            needs_data=True,
            compensates=False,
            in_turn=True,
        ),
        Method(
            "awq_v2",
            "w4a16",
            solve_compensated,
            uses_second_moments=True,
            description="awq's scaling and ranges, then rounding with error compensation",
            transform=Transform.AWQ,
            needs_data=True,
        ),
        _eight_bit(
            "w8a8",
            "INT8 weights and activations; outliers moved into the weights by a searched strength",
            Transform.SMOOTHING,
            also=("w8a8_static",),
        ),
        Method(
            "w4a8",
            "w4a8",
            solve_compensated,
            uses_second_moments=True,
            description="INT4 weights in groups, INT8 activations, smoothed like w8a8",
            transform=Transform.SMOOTHING,
        ),
        _eight_bit("fp8", "E4M3 weights per output channel, E4M3 activations per token"),
        _eight_bit("mxfp8", "OCP MXFP8 weights and activations, power-of-two scales searched"),
        _narrow("mxfp6", "OCP MXFP6 (E2M3) weights and activations, power-of-two scales searched"),
        _narrow("mxfp4", "OCP MXFP4 weights and activations, power-of-two scales searched"),
        _narrow("nvfp4", "NVFP4 weights and activations, block scales for 6 or 4 as fits better"),
        _eight_bit("hif8", "HiFloat8 weights and activations, each output channel centred"),
    )
}
