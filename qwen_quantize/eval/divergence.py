"""How far a quantized model's predictions are from the reference's, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

KL_FLOOR = 1e-9  # where the histogram's logarithmic axis begins


def token_kl(reference: Tensor, candidate: Tensor) -> Tensor:
    """KL(p_reference || p_candidate) per row, in nats, from log-probabilities [rows, vocab] -> float64 [rows].

    The sum runs in float32 over the vocabulary; tiny negative results of rounding count as zero. A candidate
    whose probabilities are no numbers is infinitely far.
    """
    kl = (reference.exp() * (reference - candidate)).sum(dim=-1).double().clamp(min=0)
    return torch.where(candidate.isnan().any(dim=-1) & kl.isnan(), torch.inf, kl)


def agreement(reference: Tensor, candidate: Tensor) -> Tensor:
    """[rows] bool: whether both find the same token most likely."""
    return reference.argmax(dim=-1) == candidate.argmax(dim=-1)


def quantiles(values: Tensor, at: tuple[float, ...]) -> tuple[float, ...]:
    """Exact quantiles (nearest rank) of a 1-D tensor, by sorting."""
    ordered = values.sort().values
    last = ordered.numel() - 1
    return tuple(float(ordered[min(last, round(q * last))]) for q in at)


def log_histogram(values: Tensor, bins: int = 48) -> tuple[list[float], list[int]]:
    """(bin edges, counts) on a logarithmic axis; below the floor is the first bin, infinite the last."""
    finite = values[values.isfinite()]
    top = max(float(finite.max()) if finite.numel() else 0.0, KL_FLOOR * 10)
    edges = torch.logspace(
        torch.log10(torch.tensor(KL_FLOOR)).item(),
        torch.log10(torch.tensor(top)).item(),
        bins + 1,
        dtype=torch.float64,
    )
    index = torch.bucketize(values.clamp(min=KL_FLOOR), edges[1:-1])
    counts = torch.bincount(index, minlength=bins)
    return [float(edge) for edge in edges], [int(count) for count in counts]


class LayerError:
    """Streaming signal-to-noise ratio and cosine between two models' hidden states after one layer."""

    def __init__(self) -> None:
        self.signal = 0.0
        self.noise = 0.0
        self.cosine = 0.0
        self.tokens = 0

    def add(self, reference: Tensor, candidate: Tensor) -> None:
        """[n, T, hidden] float32 each, after the same layer."""
        a, b = reference.reshape(-1, reference.shape[-1]), candidate.reshape(-1, candidate.shape[-1])
        self.signal += float(a.square().sum(dtype=torch.float64))
        self.noise += float((a - b).square().sum(dtype=torch.float64))
        self.cosine += float(torch.nn.functional.cosine_similarity(a, b, dim=-1).sum(dtype=torch.float64))
        self.tokens += a.shape[0]
