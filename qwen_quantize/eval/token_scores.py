"""What a model said of every token of a text: enough to compare two runs in pairs, and small enough to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TOP_K = 8


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """n predictions in w windows, in the order of the text; every window has n / w of them.

    log_probability: float32 [n], of the token that came, in nats; targets: int64 [n], that token;
    top_ids: int64 [n, k] and top_log_probabilities: float32 [n, k], most likely first;
    window_documents: int64 [w], which of `documents` each window begins in.
    """

    log_probability: Tensor
    targets: Tensor
    top_ids: Tensor
    top_log_probabilities: Tensor
    window_documents: Tensor
    documents: tuple[str, ...]

    @property
    def tokens(self) -> int:
        return self.log_probability.numel()

    @property
    def windows(self) -> int:
        return self.window_documents.numel()

    @property
    def window_tokens(self) -> int:
        """Predictions in a window: one less than its tokens."""
        return self.tokens // self.windows


class ScoreRecorder:
    """Collects the scores of a model batch by batch; its `add` is what `evaluate` takes as `watch`."""

    def __init__(self, top_k: int = TOP_K) -> None:
        self._top_k = top_k
        self._parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    def add(self, log_probabilities: Tensor, targets: Tensor) -> None:
        """[rows, vocab] float32 and [rows] int64."""
        own = log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
        top = log_probabilities.topk(min(self._top_k, log_probabilities.shape[1]), dim=1)
        self._parts.append((own.cpu(), targets.cpu(), top.indices.cpu(), top.values.cpu()))

    def scores(self, document_ids: Sequence[str]) -> TokenScores:
        """document_ids: one for each window, as `evaluation_windows` gives them."""
        documents = tuple(dict.fromkeys(document_ids))
        number = {document: index for index, document in enumerate(documents)}
        own, targets, ids, values = (torch.cat(part) for part in zip(*self._parts, strict=True))
        windows = torch.tensor([number[document] for document in document_ids], dtype=torch.int64)
        return TokenScores(own, targets, ids, values, windows, documents)
