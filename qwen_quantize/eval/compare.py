"""One pass over a text through a model, or through two in lockstep, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.eval.divergence import LayerError, agreement, log_histogram, quantiles, token_kl
from qwen_quantize.eval.perplexity import (
    concatenated,
    paired_rise,
    perplexity,
    rows_to_score,
    targets_of,
    token_nll,
)
from qwen_quantize.eval.scorer import LayeredScorer

Progress = Callable[[str, int, int], None]  # (what is done, steps done, steps in all)
Watch = Callable[[Tensor, Tensor], None]  # (log-probabilities [rows, vocab], targets [rows]), batch by batch

_ROWS_PER_HEAD_BATCH = 256
LOST_DB = -999.0  # stands for hidden states that are no numbers: JSON has no infinity
HEAD_BATCH_BYTES = 64 << 20  # of one model's log-probabilities; about five such tensors live at a time


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """Cumulative error of the hidden states after a layer, against the reference's.

    router_agreement: of the experts that the reference sends a token to, the share that this model picks too,
    in the mean; None for a layer without routed experts.
    """

    layer: int
    sqnr_db: float
    cosine: float
    router_agreement: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A model measured on a text; the second half of the fields needs a reference and is None without.

    tokens: scored predictions; lost_predictions: those whose probabilities are no numbers, because an overflow
    became NaN on the way: perplexity and KL are infinite then. KL in nats of KL(reference || model) per token.
    rise: perplexity over the reference's, minus one, with its paired standard error.
    """

    tokens: int
    windows: int
    window_tokens: int
    perplexity: float
    reference_perplexity: float | None = None
    rise: float | None = None
    rise_standard_error: float | None = None
    kl_mean: float | None = None
    kl_p50: float | None = None
    kl_p90: float | None = None
    kl_p99: float | None = None
    kl_max: float | None = None
    top1_agreement: float | None = None
    router_agreement: float | None = None
    layers: tuple[LayerComparison, ...] = ()
    kl_edges: tuple[float, ...] = ()
    kl_counts: tuple[int, ...] = ()
    lost_predictions: int = 0


def _ignore(_what: str, _done: int, _total: int) -> None:
    pass


@torch.inference_mode()
def evaluate(
    model: LayeredScorer,
    windows: Tensor,
    reference: LayeredScorer | None = None,
    progress: Progress = _ignore,
    watch: Watch | None = None,
) -> Comparison:
    """windows: [n, T] int64, each scored on its own from its second token on.

    watch: is shown the model's (not the reference's) predictions in the order of the windows.
    """
    if windows.dim() != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise ValueError(f"windows must be [n >= 1, T >= 2], found {list(windows.shape)}")
    models = [model] if reference is None else [model, reference]
    hidden = [m.embed(windows) for m in models]
    layers = []
    for index in range(model.num_layers):
        error = LayerError()
        for m in models:
            m.open_layer(index)
        for number, m in enumerate(models):
            hidden[number] = m.run_layer(hidden[number])
        if reference is not None:
            for theirs, ours in zip(hidden[1], hidden[0], strict=True):
                error.add(theirs, ours)
            layers.append(_layer_record(index, error, _router_agreement(reference, model)))
        progress("layers", index + 1, model.num_layers)
    return _score(models, hidden, windows, tuple(layers), progress, watch)


def _router_agreement(reference: LayeredScorer, model: LayeredScorer) -> float | None:
    """The mean overlap of the two sets of experts that a token visits in the open layer."""
    theirs, ours = reference.last_routing, model.last_routing
    if theirs is None or ours is None:
        return None
    same = (theirs.unsqueeze(2) == ours.unsqueeze(1)).any(dim=2)
    return float(same.double().mean())


def _layer_record(index: int, error: LayerError, router_agreement: float | None) -> LayerComparison:
    if not math.isfinite(error.noise):
        return LayerComparison(index, LOST_DB, 0.0, router_agreement)
    sqnr = 10 * math.log10(error.signal / error.noise) if error.noise > 0 and error.signal > 0 else math.inf
    return LayerComparison(index, sqnr, error.cosine / error.tokens, router_agreement)


def _score(
    models: list[LayeredScorer],
    hidden: list[Tensor],
    windows: Tensor,
    layers: tuple[LayerComparison, ...],
    progress: Progress,
    watch: Watch | None,
) -> Comparison:
    for m in models:
        m.open_head()
    targets = targets_of(windows)
    flat = [rows_to_score(states) for states in hidden]
    total = targets.shape[0]
    losses: list[list[Tensor]] = [[] for _ in models]
    divergences: list[Tensor] = []
    agreed = 0
    rows_per_batch = max(1, min(_ROWS_PER_HEAD_BATCH, HEAD_BATCH_BYTES // (4 * models[0].vocab_size)))
    for begin in range(0, total, rows_per_batch):
        part = slice(begin, begin + rows_per_batch)
        scores = [m.log_probabilities(rows[part]) for m, rows in zip(models, flat, strict=True)]
        if watch is not None:
            watch(scores[0], targets[part])
        for kept, score in zip(losses, scores, strict=True):
            kept.append(token_nll(score, targets[part]))
        if len(scores) == 2:
            divergences.append(token_kl(scores[1], scores[0]))
            agreed += int(agreement(scores[1], scores[0]).sum())
        progress("predictions", min(begin + rows_per_batch, total), total)
    nll = [concatenated(parts) for parts in losses]
    window_tokens = windows.shape[1] - 1
    lost = int(nll[0].isnan().sum())
    if len(models) == 1:
        return Comparison(total, windows.shape[0], window_tokens, perplexity(nll[0]), lost_predictions=lost)
    kl = concatenated(divergences)
    rise, error = paired_rise(nll[1], nll[0], window_tokens)
    p50, p90, p99 = quantiles(kl, (0.5, 0.9, 0.99))
    edges, counts = log_histogram(kl)
    routed = [layer.router_agreement for layer in layers if layer.router_agreement is not None]
    return Comparison(
        tokens=total,
        windows=windows.shape[0],
        window_tokens=window_tokens,
        perplexity=perplexity(nll[0]),
        reference_perplexity=perplexity(nll[1]),
        rise=rise,
        rise_standard_error=error,
        kl_mean=float(kl.mean()),
        kl_p50=p50,
        kl_p90=p90,
        kl_p99=p99,
        kl_max=float(kl.max()),
        top1_agreement=agreed / total,
        router_agreement=sum(routed) / len(routed) if routed else None,
        layers=layers,
        kl_edges=tuple(edges),
        kl_counts=tuple(counts),
        lost_predictions=lost,
    )
