"""Rotary position embedding: inverse frequencies of each variant, and their application."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qwen_quantize.models.config import ModelConfig
from qwen_quantize.models.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, tokens: int = 0) -> Tensor:
    """[rotary_dim / 2] float32 angular steps per position, after the variant's scaling.

    tokens: the length of the text, which decides between the two sets of factors of `longrope`.
    """
    dim = rope.rotary_dim(head_dim)
    steps = torch.arange(0, dim, 2, dtype=torch.int64).float()
    inverse = 1.0 / (rope.theta ** (steps / dim))
    match rope.kind:
        case "linear":
            return inverse / rope.factor
        case "llama3":
            return _llama3(inverse, rope)
        case "yarn":
            return _yarn(inverse, rope, dim)
        case "longrope":
            long = tokens > rope.original_max_position
            factors = torch.tensor(rope.long_factors if long else rope.short_factors)
            return 1.0 / (factors * rope.theta ** (steps / dim))
    return inverse


def _llama3(inverse: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1 release)."""
    wavelength = 2 * math.pi / inverse
    low = rope.original_max_position / rope.low_freq_factor
    high = rope.original_max_position / rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * inverse / rope.factor + smooth * inverse
    stretched = torch.where(wavelength > low, inverse / rope.factor, inverse)
    between = (wavelength <= low) & (wavelength >= high)
    return torch.where(between, blended, stretched)


def _yarn(inverse: Tensor, rope: RopeConfig, dim: int) -> Tensor:
    """Interpolate slow dimensions, keep fast ones, with a linear ramp between (arXiv 2309.00071)."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return inverse / rope.factor * (1 - keep) + inverse * keep


class RotaryTable:
    """cos and sin for positions, computed once and grown when a longer context comes.

    With `longrope` a call that reaches past `original_max_position` takes the long factors for all its
    positions, as transformers does; keys that a cache holds from before keep the short ones.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, tokens: int = 0) -> None:
        self.rope = rope
        self.inverse = inverse_frequencies(rope, head_dim, tokens)
        self.cos = torch.empty(0)
        self.sin = torch.empty(0)
        self._longer: RotaryTable | None = None
        if rope.kind == "longrope" and tokens <= rope.original_max_position:
            self._longer = RotaryTable(rope, head_dim, rope.original_max_position + 1)

    def slice(self, start: int, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [length, rotary_dim], for positions start .. start + length - 1."""
        end = start + length
        if self._longer is not None and end > self.rope.original_max_position:
            return self._longer.slice(start, length)
        if self.cos.shape[0] < end:
            size = max(end, 2 * self.cos.shape[0])
            angles = torch.outer(torch.arange(size, dtype=torch.float32), self.inverse)
            doubled = torch.cat((angles, angles), dim=-1)
            self.cos = doubled.cos() * self.rope.attention_factor
            self.sin = doubled.sin() * self.rope.attention_factor
        return self.cos[start:end], self.sin[start:end]


class LayerRotary:
    """The rotary table of each layer; layers with a sliding window may have one of their own."""

    def __init__(self, config: ModelConfig) -> None:
        self._table = RotaryTable(config.rope, config.rotary_head_dim)
        self._local = self._table
        if config.local_rope is not None:
            self._local = RotaryTable(config.local_rope, config.rotary_head_dim)
        self._sliding = config.sliding_layers

    def slice(self, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """(cos, sin), each [length, rotary_dim], for a layer's positions start .. start + length - 1."""
        local = bool(self._sliding) and self._sliding[layer]
        return (self._local if local else self._table).slice(start, length)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x: [B, heads, T, head_dim] -> the same shape; cos, sin: [T, rotary_dim].

    The two halves of the rotated part form the pairs, or neighbours if `interleaved`; those leave as halves,
    which is the same to a product of queries and keys that both come from here.
    """
    dim = cos.shape[-1]
    half = dim // 2
    # Both halves of cos (and of sin) are equal; writing into halves saves two copies of x.
    cosine, sine = cos[..., :half], sin[..., :half]
    if interleaved:
        first, second = x[..., 0:dim:2], x[..., 1:dim:2]
    else:
        first, second = x[..., :half], x[..., half:dim]
    if x.requires_grad and torch.is_grad_enabled():
        parts = (first * cosine - second * sine, second * cosine + first * sine, x[..., dim:])
        return torch.cat(parts, dim=-1)
    turned = torch.empty_like(x)
    torch.mul(first, cosine, out=turned[..., :half]).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=turned[..., half:dim]).addcmul_(first, sine)
    turned[..., dim:] = x[..., dim:]
    return turned


def rotate_back(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The transpose of `rotate`: what a derivative by rotated numbers is by those before."""
    back = rotate(x, cos, -sin)
    if not interleaved:
        return back
    half = cos.shape[-1] // 2
    pairs = torch.stack((back[..., :half], back[..., half : 2 * half]), dim=-1).flatten(-2)
    return torch.cat((pairs, back[..., 2 * half :]), dim=-1)
