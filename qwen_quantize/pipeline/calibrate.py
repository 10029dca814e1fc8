"""A calibrated run over the halves of all layers, each durable before the next begins."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from qwen_quantize.models.blueprint import Half
from qwen_quantize.pipeline.calibration import Calibration
from qwen_quantize.pipeline.expert_stream import quantize_experts_half
from qwen_quantize.pipeline.in_turn import quantize_in_turn, runs_in_turn
from qwen_quantize.pipeline.stream import (
    Progress,
    check_written,
    embed,
    half_step,
    half_unit,
    quantize_half,
    require_states,
    unfinished_halves,
)


def calibrate(run: Calibration, tokens: Tensor, progress: Progress) -> None:
    """Go on from the first unfinished half of a layer. tokens: [windows, T] int64 calibration windows."""
    total = len(Half) * run.blueprint.num_layers
    rest = unfinished_halves(run.blueprint, run.journal)
    check_written(run, rest)
    done = total - len(rest)
    if rest and done == 0:  # whatever lies there may come from another request
        embed(run, tokens)
    for step in range(done):
        run.states.remove(step)
    for layer, half in rest:
        require_states(run, layer, half)
        record = _quantize(run, layer, half)
        run.folder.sync()
        run.journal.finish(half_unit(layer, half), record)
        run.states.remove(half_step(layer, half))
        done += 1
        progress("half layers", done, total)
    run.states.remove(total)


def _quantize(run: Calibration, layer: int, half: Half) -> dict[str, Any]:
    if half is Half.MLP and run.blueprint.num_experts(layer):
        return quantize_experts_half(run, layer)
    if runs_in_turn(run.plan, run.blueprint, layer, half):
        return quantize_in_turn(run, layer, half)
    return quantize_half(run, layer, half)
