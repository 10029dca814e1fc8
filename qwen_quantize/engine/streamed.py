"""A model run one layer at a time over many windows: memory holds one layer, never the model."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.linear import ActivationCast, LinearGroup
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.model import Layer, rms_norm, run_layer


class StreamedModel:
    """Holds at most one open layer or the head. `cast` makes quantized linears compute as the chip does."""

    def __init__(self, reader: ModelReader, cast: ActivationCast | None = None) -> None:
        self.reader = reader
        self.cast = cast
        self._layer: Layer | None = None
        self._index = -1
        self._head: tuple[Tensor, LinearGroup] | None = None

    @property
    def num_layers(self) -> int:
        return self.reader.blueprint.config.num_layers

    @property
    def vocab_size(self) -> int:
        return self.reader.blueprint.config.vocab_size

    def embed(self, tokens: Tensor) -> Tensor:
        return self.reader.embed(tokens)

    def open_layer(self, index: int) -> None:
        self._layer = None  # freed before the next one is read
        self._layer = self.reader.read_layer(index, self.cast)
        self._index = index

    def run_layer(self, hidden: Tensor) -> Tensor:
        if self._layer is None:
            raise ValueError("open_layer comes before run_layer")
        return run_layer(hidden, self._layer, self._index, self.reader.blueprint, self.reader.rotary)

    def open_head(self) -> None:
        self._layer = None
        self._head = self.reader.read_head(self.cast)

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        if self._head is None:
            raise ValueError("open_head comes before log_probabilities")
        norm, head = self._head
        normed = rms_norm(hidden, norm, self.reader.blueprint.config.rms_norm_eps)
        (logits,) = head(normed)
        return functional.log_softmax(logits, dim=-1)
