"""What memory and arithmetic alone would allow: bounds of speed, not predictions of it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from qwen_quantize.engine.generate import Speed
from qwen_quantize.models.blueprint import Blueprint, Half, LinearSite


def measured_read_bandwidth() -> float:
    """Bytes per second that this machine reads from memory in one pass of a sum, threads as set."""
    data = torch.ones(64 * 2**20)
    data.sum()
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - begin))
    return best


def measured_flops() -> float:
    """Float32 operations per second of a matrix product of 1024 x 1024 x 1024, threads as set."""
    a = torch.ones(1024, 1024)
    a @ a
    best = 0.0
    for _ in range(3):
        begin = time.perf_counter()
        a @ a
        best = max(best, 2 * 1024**3 / (time.perf_counter() - begin))
    return best


def token_operations(blueprint: Blueprint) -> int:
    """Operations of the linears of all layers for one token: two for each weight that it meets."""

    def elements(sites: tuple[LinearSite, ...], layer: int) -> int:
        return sum(math.prod(blueprint.linear_shape(site, layer)) for site in sites)

    total = 0
    for layer in range(blueprint.num_layers):
        total += sum(elements(blueprint.sites(layer, half), layer) for half in Half)
        moe = blueprint.sparse(layer)
        if moe is not None:
            total += moe.experts_per_token * elements(blueprint.expert_sites(layer), layer)
    return 2 * total


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bytes and operations per second; None for what is not known."""

    bandwidth: float | None
    flops: float | None

    def decode_bound(self, speed: Speed) -> float | None:
        """Tokens per second if each step only read all weights and half of the cache that will be full."""
        if self.bandwidth is None:
            return None
        return speed.batch * self.bandwidth / (speed.step_bytes + speed.cache_bytes / 2)

    def prefill_bound(self, operations: int) -> float | None:
        """Tokens per second if only the linears' arithmetic took time. operations: of a token."""
        return None if self.flops is None else self.flops / operations
