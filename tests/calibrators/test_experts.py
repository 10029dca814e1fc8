"""Shrinkage of starved experts' statistics against its formula."""

from __future__ import annotations

import pytest
import torch

from qwen_quantize.calibrators.experts import evenly_spread, needed_tokens, shrunk
from qwen_quantize.calibrators.observers import InputObserver, InputStatistics


def statistics(tokens: int, seed: int, weight: float = 1.0) -> InputStatistics:
    observer = InputObserver(8, None, (8,))
    x = torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed))
    observer.observe(x, torch.full((tokens,), weight))
    return observer.statistics()


def test_missing_tokens_are_average_tokens_of_everyone() -> None:
    own, everyone = statistics(10, 1, 0.25), statistics(400, 2)
    before = own.second_moments[0].clone()
    found = shrunk(own, everyone, 32)
    expected = before + 22 * 0.25 * everyone.second_moments[0] / 400
    torch.testing.assert_close(found.second_moments[0], expected)
    assert found.weight_total == pytest.approx(32 * 0.25)
    assert found.tokens == 10  # pseudo-tokens were not seen
    torch.testing.assert_close(found.squares, own.squares + 22 / 400 * everyone.squares)


def test_an_expert_without_tokens_gets_the_hessian_of_everyone() -> None:
    own, everyone = statistics(0, 1), statistics(50, 2)
    found = shrunk(own, everyone, 32)
    torch.testing.assert_close(
        found.second_moments[0] / found.weight_total, everyone.second_moments[0] / everyone.weight_total
    )
    assert torch.equal(found.amax, everyone.amax)


def test_a_fed_expert_keeps_its_own() -> None:
    own = statistics(32, 1)
    assert shrunk(own, statistics(50, 2), 32) is own


def test_needed_tokens() -> None:
    assert needed_tokens(64) == 256
    assert needed_tokens(7168) == 8192


def test_spread_positions_are_distinct_and_ordered() -> None:
    assert evenly_spread(10, 4).tolist() == [0, 2, 5, 7]
    assert evenly_spread(3, 9).tolist() == [0, 1, 2]
    assert evenly_spread(5, 0).tolist() == []
