"""The gated delta rule: chunks against single steps, steps against a float64 loop that is written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.engine.delta_net import (
    causal_convolution,
    chunked,
    gated_rms_norm,
    recurrent,
    unit_vectors,
)


def problem(tokens: int, seed: int = 0) -> tuple[Tensor, ...]:
    """(query, key, value, decay, rate, state) of 2 sequences, 3 heads, keys of 8 and values of 12."""
    generator = torch.Generator().manual_seed(seed)
    query = unit_vectors(torch.randn(2, 3, tokens, 8, generator=generator))
    key = unit_vectors(torch.randn(2, 3, tokens, 8, generator=generator))
    value = torch.randn(2, 3, tokens, 12, generator=generator)
    decay = -3 * torch.rand(2, 3, tokens, generator=generator) ** 3
    rate = torch.rand(2, 3, tokens, generator=generator)
    state = torch.randn(2, 3, 8, 12, generator=generator)
    return query, key, value, decay, rate, state


def written_out(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, rate: Tensor, state: Tensor
) -> Tensor:
    """One head of one sequence in float64: S <- e^g (S - b k (k^T S)) + b k v^T, in the paper's own form."""
    memory = state.double()
    outputs = []
    for q, k, v, g, b in zip(query.double(), key.double(), value.double(), decay, rate, strict=True):
        forget = torch.eye(len(k), dtype=torch.float64) - b.double() * torch.outer(k, k)
        memory = g.double().exp() * (forget @ memory) + b.double() * torch.outer(k, v)
        outputs.append(q @ memory)
    return torch.stack(outputs).float()


def test_steps_equal_the_formula() -> None:
    query, key, value, decay, rate, state = problem(20)
    outputs, _ = recurrent(query, key, value, decay, rate, state)
    for sequence in range(2):
        for head in range(3):
            at = (sequence, head)
            expected = written_out(query[at], key[at], value[at], decay[at], rate[at], state[at])
            torch.testing.assert_close(outputs[at], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 16, 33, 150])
@pytest.mark.parametrize("size", [1, 16, 64])
def test_chunks_equal_steps(tokens: int, size: int) -> None:
    inputs = problem(tokens)
    before = inputs[5].clone()
    outputs, state = chunked(*inputs, size=size)
    expected, expected_state = recurrent(*inputs)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)
    assert torch.equal(inputs[5], before)


def test_a_state_that_forgets_everything_at_once() -> None:
    """exp(-300) is zero in float32; no quotient of such numbers may appear."""
    query, key, value, _, rate, state = problem(40)
    decay = torch.full((2, 3, 40), -300.0)
    outputs, after = chunked(query, key, value, decay, rate, state)
    expected, expected_state = recurrent(query, key, value, decay, rate, state)
    assert torch.isfinite(outputs).all()
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(after, expected_state)


def test_convolution_equals_torch_and_continues() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = torch.randn(2, 11, 6, generator=generator), torch.randn(6, 1, 4, generator=generator)
    expected = functional.conv1d(x.transpose(1, 2), weight, padding=3, groups=6)[:, :, :11].transpose(1, 2)
    before = torch.zeros(2, 3, 6)
    outputs, _ = causal_convolution(x, weight, before)
    torch.testing.assert_close(outputs, expected)
    parts = []
    for start, end in ((0, 2), (2, 3), (3, 11)):  # shorter than the taps, one token, the rest
        part, before = causal_convolution(x[:, start:end], weight, before)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_the_norm_comes_before_the_gate() -> None:
    x, gate = torch.tensor([3.0, 4.0]), torch.tensor([1.0, -2.0])
    rms = 12.5**0.5
    silu = gate / (1 + (-gate).exp())
    expected = torch.tensor([3 / rms * 2, 4 / rms * 5]) * silu
    torch.testing.assert_close(gated_rms_norm(x, gate, torch.tensor([2.0, 5.0]), 0.0), expected)
