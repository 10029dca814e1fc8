"""Gated delta rule: linear attention whose state forgets by a gate and is corrected, not only added to.

Per head a matrix S [key_dim, value_dim] is the memory. A token with key k, value v, decay g <= 0 (a
logarithm) and rate b first lets the memory fade, then moves what k reads from it towards v:

    S <- exp(g) S;   S <- S + k (b (v - S^T k))^T;   output = S^T q

(Gated Delta Networks, arXiv 2412.06464.) Step by step this is a loop over tokens, which generation needs.
`chunked` gives the same numbers with matrix products over 64 tokens at a time: inside a chunk the
corrections solve a unit lower triangular system (the WY form of section 3.3 there).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
_UNIT_EPSILON = 1e-6  # inside the square root, as the released kernels have it


def unit_vectors(x: Tensor) -> Tensor:
    """x / sqrt(sum of squares + 1e-6) over the last dimension."""
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _UNIT_EPSILON)


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Token by token: (outputs [B, H, T, V], state after the last token), all float32.

    query, key: [B, H, T, K]; value: [B, H, T, V]; decay (logarithm, <= 0), rate: [B, H, T];
    state: [B, H, K, V], which is not changed.
    """
    outputs = torch.empty_like(value)
    for step in range(value.shape[2]):
        state = state * decay[:, :, step, None, None].exp()
        k = key[:, :, step].unsqueeze(-1)  # [B, H, K, 1]
        known = (state * k).sum(dim=-2)
        correction = (value[:, :, step] - known) * rate[:, :, step, None]
        state = state + k * correction.unsqueeze(-2)
        outputs[:, :, step] = (state * query[:, :, step].unsqueeze(-1)).sum(dim=-2)
    return outputs, state


def chunked(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor, size: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """The same function as `recurrent`, `size` tokens at a time; a last chunk may be shorter."""
    outputs = torch.empty_like(value)
    for start in range(0, value.shape[2], size):
        part = slice(start, start + size)
        outputs[:, :, part], state = _chunk(
            query[:, :, part], key[:, :, part], value[:, :, part], decay[:, :, part], rate[:, :, part], state
        )
    return outputs, state


def _chunk(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    length = value.shape[2]
    faded = decay.cumsum(dim=-1)  # log of what is left, at each token, of the state before the chunk
    # between[i, j]: what is left at token i of what token j wrote; nothing of the future.
    later = torch.ones(length, length, dtype=torch.bool, device=value.device).triu(1)
    between = (faded.unsqueeze(-1) - faded.unsqueeze(-2)).masked_fill(later, float("-inf")).exp()
    keys = key.transpose(-1, -2)
    overlaps = (key @ keys) * between * rate.unsqueeze(-1)
    # What the state before the chunk already says about each key; the rest is to be corrected.
    known = (key @ state) * faded.exp().unsqueeze(-1)
    wanted = (value - known) * rate.unsqueeze(-1)
    # correction_i + sum over j < i of overlaps_ij correction_j = wanted_i; the diagonal is taken as ones.
    corrections = torch.linalg.solve_triangular(overlaps, wanted, upper=False, unitriangular=True)
    outputs = (query @ state) * faded.exp().unsqueeze(-1) + ((query @ keys) * between) @ corrections
    left = (faded[..., -1:] - faded).exp().unsqueeze(-1)
    state = state * faded[..., -1].exp()[..., None, None] + (key * left).transpose(-1, -2) @ corrections
    return outputs, state


def causal_convolution(x: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """Depthwise convolution over past tokens: (outputs [B, T, C], the last K - 1 inputs [B, K - 1, C]).

    x: [B, T, C]; weight: [C, 1, K], the last tap on the token itself; before: [B, K - 1, C], the inputs in
    front of x: zeros, or what an earlier call returned.
    """
    taps = weight.shape[-1]
    padded = torch.cat((before, x), dim=1)
    length = x.shape[1]
    # Few taps: as many scaled copies are faster than a grouped convolution and need no transposes.
    outputs = padded[:, :length] * weight[:, 0, 0]
    for tap in range(1, taps):
        outputs.addcmul_(padded[:, tap : tap + length], weight[:, 0, tap])
    return outputs, padded[:, length:]


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight * silu(gate) over the last dimension; the norm comes before the gate."""
    return functional.rms_norm(x, (x.shape[-1],), weight, eps) * functional.silu(gate)
