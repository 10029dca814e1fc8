"""What eval needs of an engine: hidden states layer by layer, then log-probabilities."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LayeredScorer(Protocol):
    """A model that is run one layer at a time, so that two can be compared inside each layer."""

    @property
    def num_layers(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def last_routing(self) -> Tensor | None:
        """[tokens, k] int64: the experts that each token of the last `run_layer` visited, ascending, or None."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: [n, T] int64 -> hidden states [n, T, hidden] float32."""
        ...

    def open_layer(self, index: int) -> None:
        """Load layer `index`, dropping the one before it."""
        ...

    def run_layer(self, hidden: Tensor) -> Tensor:
        """[n, T, hidden] -> [n, T, hidden] through the open layer, in batches as the model sees fit."""
        ...

    def open_head(self) -> None: ...

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32 log-probabilities of the next token."""
        ...
