"""The indexer's scores and choice, and soft-capped attention, each against the formula written out."""

from __future__ import annotations

import math

import torch

from qwen_quantize.engine.soft_cap import attend_capped, soft_cap
from qwen_quantize.engine.sparse_index import index_scores, select_tokens


def test_scores_equal_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = torch.randn(2, 5, 6, 8, generator=generator), torch.randn(2, 9, 8, generator=generator)
    weights = torch.randn(2, 5, 6, generator=generator)
    found = index_scores(query, keys, weights)
    for b, t, s in ((0, 0, 0), (1, 4, 8), (0, 3, 5)):
        expected = sum(
            float(weights[b, t, h]) / math.sqrt(6) * max(float(query[b, t, h] @ keys[b, s]) / math.sqrt(8), 0)
            for h in range(6)
        )
        assert math.isclose(float(found[b, t, s]), expected, rel_tol=1e-4, abs_tol=1e-5)


def test_the_best_visible_tokens_are_chosen() -> None:
    scores = torch.tensor([[[5.0, 1.0, 9.0, 9.0], [2.0, 3.0, 1.0, 9.0], [-1.0, -3.0, -2.0, -4.0]]])
    visible = torch.tensor([[True, False, False, False], [True, True, True, False], [True] * 4])
    chosen = select_tokens(scores, visible, 2)
    assert chosen.tolist() == [
        [[True, False, False, False], [True, True, False, False], [True, False, True, False]]
    ]
    assert torch.equal(select_tokens(scores, visible, 10)[0], visible)


def test_capped_attention() -> None:
    generator = torch.Generator().manual_seed(1)
    query = 9 * torch.randn(2, 4, 5, 8, generator=generator)
    keys, values = torch.randn(2, 2, 7, 8, generator=generator), torch.randn(2, 2, 7, 8, generator=generator)
    visible = torch.ones(5, 7, dtype=torch.bool).tril(2)
    found = attend_capped(query, keys, values, visible, 0.5, 3.0)
    for head in range(4):
        logits = soft_cap(query[:, head] @ keys[:, head // 2].transpose(1, 2) * 0.5, 3.0)
        assert logits.abs().max() <= 3
        shares = logits.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        torch.testing.assert_close(found[:, head], shares @ values[:, head // 2])
