"""What every step of a calibrated run works with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from qwen_quantize.calibrators.methods import Transform
from qwen_quantize.calibrators.observers import InputObserver
from qwen_quantize.calibrators.output_gain import SAMPLE_TOKENS
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.engine.linear import Bfloat16Group, LinearGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.models.blueprint import Blueprint, LinearSite
from qwen_quantize.pipeline.hidden import HiddenStates, window_ranges
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.memory import moment_ranges
from qwen_quantize.pipeline.plan import Plan


class Batch:
    """The tokens that run through half a layer together, for whoever observes them on the way.

    hidden: the residual as it entered the half, [tokens, hidden]; tokens: their int64 positions in [windows * T].
    """

    hidden: Tensor
    tokens: Tensor


class ObservedRun(Protocol):
    """What running the tokens through half a layer needs to know of the run that it is part of."""

    @property
    def blueprint(self) -> Blueprint: ...

    @property
    def reader(self) -> ModelReader: ...

    @property
    def states(self) -> HiddenStates: ...

    def batches(self) -> list[tuple[int, int]]:
        """Ranges of windows that run together."""
        ...

    def observer(self, features: int, batch: Batch, module: str, /) -> InputObserver:
        """A new observer of the stream that `module` reads; `batch` will hold the tokens of each call."""
        ...

    def as_it_runs(self, group: LinearGroup, module: str, /) -> LinearGroup:
        """The group to which `module` belongs, with products as the tokens are to see them."""
        ...


@dataclass(frozen=True, slots=True)
class Calibration:
    """What every step of a calibrated run works with.

    kept_dtypes: safetensors names of the types in which unquantized tensors are written, by tensor. propagates:
    what is quantized runs on, so that the next half sees it; else its inputs are known already.
    """

    plan: Plan
    blueprint: Blueprint
    reader: ModelReader
    folder: OutputFolder
    journal: Journal
    states: HiddenStates
    kept_dtypes: Mapping[str, str]
    propagates: bool = True

    def batches(self) -> list[tuple[int, int]]:
        """Ranges of windows that run together."""
        return window_ranges(self.states.shape[0], self.plan.memory.windows)

    def observer(self, features: int, _batch: Batch, module: str, /) -> InputObserver:
        ranges = moment_ranges(features, self.plan.memory.most_features)
        choice = self.plan.choice_of(module)
        chip = choice.chip_compute()
        if choice.method.transform is not Transform.NONE:
            # What the chip's cast makes of an input is not known before factors have moved into it.
            smooths = choice.method.transform is Transform.SMOOTHING
            if not choice.method.uses_second_moments:
                ranges = ()
            return InputObserver(features, None, ranges, SAMPLE_TOKENS if smooths else 0, weighed=True)
        return InputObserver(
            features,
            chip.cast,
            ranges if choice.method.uses_second_moments else (),
            0 if chip.unit is None else SAMPLE_TOKENS,
            crossed=choice.sees_bias(),
        )

    def as_it_runs(self, group: LinearGroup, module: str, /) -> LinearGroup:
        """Under a method that is to be quick, 16-bit activations and the weights are multiplied as bfloat16 numbers."""
        choice = self.plan.choice_of(module)
        return Bfloat16Group(group) if choice.method.in_turn and choice.scheme.activation is None else group

    def is_last(self, layer: int) -> bool:
        """Whether nobody reads the layer's output."""
        return layer + 1 == self.blueprint.num_layers

    def modules(self, layer: int, sites: Sequence[LinearSite]) -> list[str]:
        return [self.blueprint.module_name(layer, site) for site in sites]
