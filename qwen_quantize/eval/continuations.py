"""Log-probabilities of given continuations of given contexts, layer by layer for all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.eval.compare import HEAD_BATCH_BYTES
from qwen_quantize.eval.scorer import LayeredScorer

Progress = Callable[[str, int, int], None]

TOKENS_PER_PASS = 1 << 16  # whose hidden states are held while the layers go by: 1 GiB at a width of 4096
_TOKENS_PER_BATCH = 4096
_ROWS_PER_HEAD_BATCH = 256
_PADDING = 8  # a batch's texts differ in length by at most one part in this many


@dataclass(frozen=True, slots=True)
class Continuation:
    """Token ids: what is given, at least one, and what may follow, at least one."""

    context: tuple[int, ...]
    target: tuple[int, ...]

    @property
    def input(self) -> tuple[int, ...]:
        """What the model reads: all but the last token, which it only has to predict."""
        return (*self.context, *self.target[:-1])


@dataclass(frozen=True, slots=True)
class Likelihood:
    """log_probability: of the whole continuation, in nats; greedy: whether each of its tokens is the likeliest.

    Where a cast overflowed and a probability is no number, the continuation counts as impossible.
    """

    log_probability: float
    greedy: bool


@torch.inference_mode()
def score_continuations(
    model: LayeredScorer,
    requests: Sequence[Continuation],
    progress: Progress,
    tokens_per_pass: int = TOKENS_PER_PASS,
) -> list[Likelihood]:
    """In the order of the requests. The layers are read once for every `tokens_per_pass` tokens.

    Continuations of one input, as the letters of a choice are, cost one. Shorter texts are padded behind their
    end, which no token before it sees: attention is causal and inputs are cast token by token.
    """
    by_input: dict[tuple[int, ...], list[int]] = {}
    for number, request in enumerate(requests):
        if not request.context or not request.target:
            raise ValueError("a continuation needs at least one token before it and one of its own")
        by_input.setdefault(request.input, []).append(number)
    found: dict[int, Likelihood] = {}
    passes = list(_passes(sorted(by_input, key=lambda ids: (len(ids), ids)), tokens_per_pass))
    for done, batches in enumerate(passes):
        hidden = [model.embed(_padded(batch)) for batch in batches]
        for index in range(model.num_layers):
            model.open_layer(index)
            hidden = [model.run_layer(states) for states in hidden]
            progress("layers", done * model.num_layers + index + 1, len(passes) * model.num_layers)
        numbers = [number for batch in batches for ids in batch for number in by_input[ids]]
        rows = [
            _predicting(states, requests[number])
            for batch, many in zip(batches, hidden, strict=True)
            for ids, states in zip(batch, many, strict=True)
            for number in by_input[ids]
        ]
        del hidden
        model.open_head()
        asked = [requests[number] for number in numbers]
        found |= zip(numbers, _likelihoods(model, asked, torch.cat(rows)), strict=True)
    return [found[number] for number in range(len(requests))]


def _passes(inputs: Sequence[tuple[int, ...]], tokens_per_pass: int) -> Iterator[list[list[tuple[int, ...]]]]:
    """Inputs of rising length in batches of about one length, and as many batches as may be held together."""
    batches: list[list[tuple[int, ...]]] = []
    held = 0
    batch: list[tuple[int, ...]] = []
    for ids in inputs:
        size = len(ids)
        full = (len(batch) + 1) * size > min(_TOKENS_PER_BATCH, tokens_per_pass)
        if batch and (full or size - len(batch[0]) > len(batch[0]) // _PADDING):
            batches.append(batch)
            held += len(batch) * len(batch[-1])
            batch = []
            if held + size > tokens_per_pass:
                yield batches
                batches, held = [], 0
        batch.append(ids)
    if batch:
        batches.append(batch)
    if batches:
        yield batches


def _padded(batch: Sequence[tuple[int, ...]]) -> Tensor:
    """[n, T] int64, filled up behind with each text's own last token: a token that the model surely knows."""
    longest = max(len(ids) for ids in batch)
    return torch.tensor([[*ids, *[ids[-1]] * (longest - len(ids))] for ids in batch], dtype=torch.int64)


def _predicting(states: Tensor, request: Continuation) -> Tensor:
    """[T, hidden] of a request's input, perhaps padded behind -> [targets, hidden]: a copy of what predicts them."""
    begin = len(request.context) - 1
    return states[begin : begin + len(request.target)].clone()


def _likelihoods(model: LayeredScorer, requests: Sequence[Continuation], rows: Tensor) -> list[Likelihood]:
    """rows: [all targets of all requests, hidden], in their order."""
    targets = torch.tensor([token for request in requests for token in request.target], dtype=torch.int64)
    step = max(1, min(_ROWS_PER_HEAD_BATCH, HEAD_BATCH_BYTES // (4 * model.vocab_size)))
    parts, hits = [], []
    for batch, wanted in zip(torch.split(rows, step), torch.split(targets, step), strict=True):
        scores = model.log_probabilities(batch)
        own = scores.gather(1, wanted.unsqueeze(1)).squeeze(1).double()
        parts.append(torch.where(own.isnan(), -torch.inf, own))
        hits.append((scores.argmax(dim=1) == wanted) & ~own.isnan())
    sizes = [len(request.target) for request in requests]
    return [
        Likelihood(float(part.sum()), bool(hit.all()))
        for part, hit in zip(
            torch.split(torch.cat(parts), sizes), torch.split(torch.cat(hits), sizes), strict=True
        )
    ]
