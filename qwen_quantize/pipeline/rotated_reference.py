"""The unquantized model beside a rotated one: its hidden states turned, so that the two can be compared by layers."""

from __future__ import annotations

from torch import Tensor

from qwen_quantize.calibrators.rotation import Rotation
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel


class RotatedReference(StreamedModel):
    """Computes with the model's own weights; what goes in and comes out of its layers is turned, in float64."""

    def __init__(self, reader: ModelReader, rotation: Rotation) -> None:
        super().__init__(reader)
        self._rotation = rotation

    def embed(self, tokens: Tensor) -> Tensor:
        return self._rotation.turn(super().embed(tokens)).float()

    def run_layer(self, hidden: Tensor) -> Tensor:
        return self._rotation.turn(super().run_layer(self._own(hidden))).float()

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        return super().log_probabilities(self._own(hidden))

    def _own(self, hidden: Tensor) -> Tensor:
        return self._rotation.turn(hidden, back=True).float()
