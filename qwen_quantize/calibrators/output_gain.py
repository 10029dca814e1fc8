"""What a narrow accumulator takes from every output on average, given back in the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_quantize.calibrators.observers import TokenSample
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.formats.blocks import Granularity, QuantizedTensor, block_amax
from qwen_quantize.formats.codec import decode
from qwen_quantize.formats.dot import emulated_matmul, prepare_right
from qwen_quantize.formats.dot_record import DotUnit
from qwen_quantize.formats.scales import ScaleRule, scale_exponents
from qwen_quantize.formats.spec import FloatFormat

SAMPLE_TOKENS = 512  # of a linear's input that are kept for it: half to fit the gain, half to check it
_FEWEST_TOKENS = 64  # below it nothing is fitted
_PRIOR_TOKENS = 256.0  # an output's own gain counts as much as the layer's common one after so many tokens
_HALF_MAX = 65504.0
_WIDEST_PIECE = 1 << 24  # values of running sums that are looked at together


@dataclass(frozen=True, slots=True)
class _Products:
    """One half of the sample through one linear: W q in float32 and as the unit adds it, [n, out] each."""

    exact: Tensor
    emulated: Tensor
    weight: Tensor  # [n]


def output_gain(exact: Tensor, emulated: Tensor, weight: Tensor) -> Tensor:
    """[out] float32: h that minimises sum w (exact - h emulated)^2, for each output.

    exact, emulated: [n, out] float32, the same products without and with the accumulator's loss; weight: [n].
    A unit that drops the bits which alignment shifts out shrinks its sums. Each output's gain is drawn toward
    the common one of all outputs as if that had been seen on 256 tokens; an output that is always zero gets it.
    """
    cross = (weight.unsqueeze(1) * exact * emulated).sum(dim=0, dtype=torch.float64)
    squares = (weight.unsqueeze(1) * emulated.square()).sum(dim=0, dtype=torch.float64)
    total = float(squares.sum())
    if not total > 0:
        return torch.ones(exact.shape[1])
    common = float(cross.sum()) / total
    own = exact.shape[0] / (exact.shape[0] + _PRIOR_TOKENS)
    return torch.where(squares > 0, own * cross / squares + (1 - own) * common, common).float()


def solve_with_output_gain(
    problem: LayerProblem,
    solve: Callable[[LayerProblem], LayerSolution],
    unit: DotUnit,
    sample: TokenSample,
) -> LayerSolution:
    """The solution of `problem`, for weights that make up for what `unit` loses, where that is shown to help.

    The gain is fitted on every other token of the
    sample, with weights that are quantized already, so that only the accumulator's loss is in it, and folded
    into the weight before it is rounded again. Both the gain alone and the weights that come of it must bring
    the unit's outputs nearer to the exact ones on the tokens that were not used; else the plain solution stays.
    The notes say which.
    """
    plain = solve(problem)
    if sample.inputs.shape[0] < _FEWEST_TOKENS:
        note = f"no output gain: {sample.inputs.shape[0]} tokens are too few to fit one"
        return replace(plain, notes=(*plain.notes, note))
    fit, check = sample.every_other(0), sample.every_other(1)
    values = plain.quantized.dequantize()
    seen = _products(values, values, fit, unit)
    gain = output_gain(seen.exact, seen.emulated, seen.weight)
    mean = float(gain.double().mean())
    unseen = _products(values, values, check, unit)
    lost = _error(unseen.exact, unseen.emulated, unseen.weight)
    left = _error(unseen.exact, unseen.emulated * gain, unseen.weight)
    if not left < lost:
        return replace(
            plain, notes=(*plain.notes, f"output gain {mean:.5f} refused: sums lose nothing steady")
        )
    gained = solve(replace(problem, weight=problem.weight * gain.unsqueeze(1)))
    target = problem.towards(problem.weight)
    before = _products(target, values, check, unit)
    after = _products(target, gained.quantized.dequantize(), check, unit)
    old = _error(before.exact, before.emulated, before.weight)
    new = _error(after.exact, after.emulated, after.weight)
    if not new < old:
        note = f"output gain {mean:.5f} refused: with the weights rounded anew the outputs are no nearer"
        return replace(plain, notes=(*plain.notes, note))
    note = f"output gain {mean:.5f} for what the accumulator drops: output error {new / old - 1:+.2%} on unseen tokens"
    return replace(gained, notes=(*gained.notes, note))


def half_headroom(sample: TokenSample, weight: QuantizedTensor, group: int, step: int) -> float:
    """The largest running sum of codes over the largest fp16 number: above 1 an fp16 register overflows.

    Codes are added within a group of `group` features only, `step` products at a time: their scales differ
    elsewhere. The inputs' scales are found again from their values, by the rceil rule.
    """
    inputs, rows = sample.inputs, sample.inputs.shape[0]
    assert isinstance(weight.format, FloatFormat)
    codes = decode(weight.codes, weight.format)
    exponents = scale_exponents(block_amax(inputs, Granularity.group(group)), weight.format, ScaleRule.RCEIL)
    outputs = max(1, _WIDEST_PIECE // max(rows, 1))
    largest = torch.zeros(())
    for number, first in enumerate(range(0, inputs.shape[1], group)):
        last = min(first + group, inputs.shape[1])
        left = torch.ldexp(inputs[:, first:last], -exponents[:, number : number + 1])
        for begin in range(0, codes.shape[0], outputs):
            right = codes[begin : begin + outputs, first:last]
            running = torch.zeros(rows, right.shape[0])
            for at in range(0, last - first, step):
                running.addmm_(left[:, at : at + step], right[:, at : at + step].T)
                largest = torch.maximum(largest, running.abs().max())
    return float(largest) / _HALF_MAX


def _products(target: Tensor, values: Tensor, sample: TokenSample, unit: DotUnit) -> _Products:
    exact = sample.inputs @ target.T
    emulated = emulated_matmul(sample.inputs, prepare_right(values, unit), unit)
    return _Products(exact, emulated, sample.weight)


def _error(exact: Tensor, emulated: Tensor, weight: Tensor) -> float:
    """The weighted sum of squares of what the unit's outputs are off."""
    return float((weight.unsqueeze(1) * (exact - emulated).square()).sum(dtype=torch.float64))
