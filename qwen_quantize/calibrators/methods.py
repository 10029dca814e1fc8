"""The methods that `--quant-method` offers. A new one is a solver in its own file and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from qwen_quantize.calibrators.block_fp8 import solve_block_fp8
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution


@dataclass(frozen=True, slots=True)
class Method:
    """A solver, the named scheme it fills, and whether it gains from second moments of the inputs."""

    name: str
    scheme: str
    solve: Callable[[LayerProblem], LayerSolution]
    uses_second_moments: bool
    description: str


METHODS: dict[str, Method] = {
    "ue8m0": Method(
        "ue8m0",
        "ue8m0",
        solve_block_fp8,
        uses_second_moments=True,
        description="E4M3 weights in blocks with power-of-two scales, scales searched, rounding compensated",
    ),
}
