"""The paired tests against enumeration, simulation and what must hold exactly."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from qwen_quantize.eval.divergence import token_kl
from qwen_quantize.eval.regression import (
    Judgement,
    Limits,
    block_length,
    block_sums,
    bootstrap_mean,
    bounds,
    judge,
    mcnemar,
    p_at_least,
    p_at_most,
    tokens_needed,
    truncated_kl,
)
from qwen_quantize.eval.token_scores import ScoreRecorder, TokenScores

VOCABULARY = 24


def recorded(
    logits: torch.Tensor, targets: torch.Tensor, top_k: int = 4, documents: Sequence[str] = ("novel",)
) -> TokenScores:
    recorder = ScoreRecorder(top_k)
    recorder.add(logits.log_softmax(-1), targets)
    return recorder.scores(documents)


def run_of(tokens: int, seed: int = 0, documents: Sequence[str] = ("novel",)) -> TokenScores:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(tokens, VOCABULARY, generator=generator)
    return recorded(logits, torch.randint(VOCABULARY, (tokens,), generator=generator), documents=documents)


def shifted(run: TokenScores, nats: float, noise: float, seed: int = 1) -> TokenScores:
    """Every token loses `nats`, give or take normal noise."""
    generator = torch.Generator().manual_seed(seed)
    change = nats + noise * torch.randn(run.tokens, generator=generator)
    return replace(run, log_probability=run.log_probability - change)


def correlated(rows: int, length: int, generator: torch.Generator, keep: float = 0.6) -> torch.Tensor:
    """[rows, length] of an autoregressive process of variance 1 and mean 0."""
    noise = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    values = torch.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for t in range(1, length):
        values[:, t] = keep * values[:, t - 1] + math.sqrt(1 - keep**2) * noise[:, t]
    return values


def check(judgement: Judgement, name: str):  # type: ignore[no-untyped-def]
    return next(it for it in judgement.checks if it.name == name)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 3), (5, 2), (2, 5), (8, 8), (13, 4)])
def test_mcnemar_by_enumeration(lost: int, gained: int) -> None:
    total = lost + gained
    ways = [sum(flips) for flips in itertools.product((0, 1), repeat=total)]
    one_sided = sum(way >= lost for way in ways) / len(ways)
    two_sided = sum(abs(way - total / 2) >= abs(lost - total / 2) for way in ways) / len(ways)
    found = mcnemar(lost, gained)
    assert found.p_harm == pytest.approx(one_sided)
    assert found.p_change == pytest.approx(two_sided if lost != gained else 1)


def test_mcnemar_of_many_flips_is_the_normal_tail() -> None:
    found = mcnemar(50_500, 49_500)
    z = (50_500 - 0.5 - 50_000) / math.sqrt(100_000 / 4)
    assert found.p_harm == pytest.approx(0.5 * math.erfc(z / math.sqrt(2)), rel=1e-3)
    assert mcnemar(100_000, 0).p_harm == 0


def test_bootstrap_is_the_enumeration_of_all_resamples() -> None:
    """Four blocks have 256 resamples; the drawn t must have their distribution."""
    sums = torch.tensor([3.0, -1.0, 4.0, 0.5], dtype=torch.float64)
    counts = torch.tensor([10.0, 7.0, 9.0, 12.0], dtype=torch.float64)
    estimate = float(sums.sum() / counts.sum())
    residual = sums - estimate * counts
    every = []
    for chosen in itertools.product(range(4), repeat=4):
        index = torch.tensor(chosen)
        r, n = residual[index], counts[index]
        shift = float(r.sum() / n.sum())
        error = float((r - shift * n).square().sum().sqrt() / n.sum()) * math.sqrt(4 / 3)
        every.append(shift / error if error > 1e-12 else 0.0)
    found = bootstrap_mean(sums, counts, seed=3, resamples=40_000)
    assert found.estimate == pytest.approx(estimate)
    assert found.error == pytest.approx(
        float(residual.square().sum().sqrt() / counts.sum()) * math.sqrt(4 / 3)
    )
    for t in (-2.1, -0.7, -0.1, 0.4, 1.3, 3.3):
        exact = sum(value <= t for value in every) / len(every)
        assert float((found.t <= t).double().mean()) == pytest.approx(exact, abs=0.01)


def test_bounds_and_p_values_say_the_same() -> None:
    generator = torch.Generator().manual_seed(5)
    sums = 10 * torch.randn(60, generator=generator, dtype=torch.float64).exp()
    boot = bootstrap_mean(sums, torch.full((60,), 100.0, dtype=torch.float64))
    lower, upper = bounds(boot, 0.05)
    assert lower < boot.estimate < upper
    assert upper - boot.estimate > boot.estimate - lower  # skewed to the right: the long side is above
    step = 1e-3 * boot.error
    for value, below in ((upper + 20 * step, True), (upper - 20 * step, False)):
        assert (p_at_least(boot, value) <= 0.05) is below
    for value, above in ((lower - 20 * step, True), (lower + 20 * step, False)):
        assert (p_at_most(boot, value) <= 0.05) is above


def test_degenerate_differences() -> None:
    counts = torch.full((50,), 10.0, dtype=torch.float64)
    nothing = bootstrap_mean(torch.zeros(50, dtype=torch.float64), counts)
    assert bounds(nothing, 0.05) == (0, 0)
    assert p_at_least(nothing, 0.005) == 0
    assert p_at_most(nothing, 0.0) == 1
    single = bootstrap_mean(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64))
    assert bounds(single, 0.05) == (-math.inf, math.inf)
    assert p_at_least(single, 9.0) == p_at_most(single, -9.0) == 1
    assert tokens_needed(single, 100, 0.005) > 100


def coverage(documents: int, length: int) -> tuple[float, float]:
    """How often the true mean, 0, is below the upper and above the lower 95 % bound."""
    generator = torch.Generator().manual_seed(documents)
    names = tuple(str(number) for number in range(documents))
    base = run_of(documents * length, documents=names)
    known = torch.ones(base.tokens, dtype=torch.bool)
    repetitions, below, above = 300, 0, 0
    values = correlated(repetitions * documents, length, generator).view(repetitions, documents, length)
    if documents > 1:  # documents differ by more than their tokens do
        values += 0.3 * torch.randn(repetitions, documents, 1, generator=generator, dtype=torch.float64)
    for repetition in range(repetitions):
        sums, counts = block_sums(values[repetition].flatten(), known, base)
        lower, upper = bounds(bootstrap_mean(sums, counts, repetition, 400), 0.05)
        below += upper > 0
        above += lower < 0
    return below / repetitions, above / repetitions


@pytest.mark.parametrize(("documents", "length"), [(60, 40), (1, 4000)])
def test_bounds_cover_on_correlated_tokens(documents: int, length: int) -> None:
    for found in coverage(documents, length):
        assert 0.90 <= found <= 0.985  # 0.95 within four standard errors


def test_blocks_are_longer_where_tokens_are_correlated() -> None:
    generator = torch.Generator().manual_seed(2)
    independent = torch.randn(20_000, generator=generator, dtype=torch.float64)
    assert block_length(independent) <= 40
    for keep, least in ((0.8, 8 * 7), (0.95, 8 * 25)):  # correlation times of 9 and 39 tokens
        assert least <= block_length(correlated(1, 20_000, generator, keep)[0]) <= 500
    assert block_length(torch.zeros(100)) == 32


def test_blocks_are_documents_where_there_are_many() -> None:
    names = [f"d{number // 2}" for number in range(80)]  # two windows each
    run = run_of(80 * 5, documents=names)
    difference = torch.arange(400, dtype=torch.float64)
    known = torch.ones(400, dtype=torch.bool)
    known[:10] = False
    sums, counts = block_sums(torch.where(known, difference, 0.0), known, run)
    assert counts.tolist() == [10.0] * 39  # the document without a known token is no block
    assert sums[0] == sum(range(10, 20))


def test_nothing_changed_is_harmless_and_exactly_zero() -> None:
    run = run_of(4000)
    found = judge(run, run)
    assert (found.harmless, found.conclusive, found.rise, found.kl_p99) == (True, True, 0, 0)
    assert found.perplexity_before == found.perplexity_after


def test_a_loss_of_one_percent_is_found_and_a_small_one_is_harmless() -> None:
    run = run_of(20_000)
    hurt = judge(run, shifted(run, math.log(1.01), 0.2))
    assert (hurt.harmless, hurt.conclusive) == (False, True)
    assert hurt.rise == pytest.approx(0.01, abs=0.005)
    assert hurt.lower < 0.01 < hurt.upper
    assert not check(hurt, "non-inferiority").passed
    assert not check(hurt, "harm").passed
    small = judge(run, shifted(run, math.log(1.002), 0.05))
    assert small.harmless
    assert check(small, "harm").p_value < 0.01  # real, but below the margin
    assert judge(run, shifted(run, -0.02, 0.1)).harmless


def test_too_few_tokens_are_not_evidence_of_no_harm() -> None:
    run = run_of(500)
    after = shifted(run, 0.0, 0.3)
    found = judge(run, after)
    assert (found.harmless, found.conclusive) == (False, False)
    assert 3000 < found.tokens_needed < 40_000  # 500 * (0.3 / sqrt(500) * 3.29 / 0.005)^2 = 39,000, or less
    assert judge(run, after, Limits(margin=0.2)).harmless


def test_the_same_seed_gives_the_same_answer() -> None:
    run = run_of(3000)
    after = shifted(run, 0.001, 0.1)
    assert judge(run, after, seed=4) == judge(run, after, seed=4)


def test_predictions_that_are_no_numbers_are_harm() -> None:
    run = run_of(200)
    broken = run.log_probability.clone()
    broken[3] = math.nan
    found = judge(run, replace(run, log_probability=broken))
    assert (found.harmless, found.conclusive, found.perplexity_after) == (False, True, math.inf)
    assert check(found, "finite").statistic == 1
    # What was broken before is no fault of the change.
    assert judge(replace(run, log_probability=broken), run).harmless
    with pytest.raises(ValueError, match="nothing to compare"):
        judge(replace(run, log_probability=torch.full((200,), math.nan)), run)


def test_flips_fail_only_beyond_chance_and_margin() -> None:
    run = run_of(4000)
    right = run.top_ids[:, 0] == run.targets

    def flipped(to_wrong: int) -> TokenScores:
        ids = run.top_ids.clone()
        rows = right.nonzero().flatten()[:to_wrong]
        ids[rows] = ids[rows].roll(1, dims=1)
        return replace(run, top_ids=ids)

    assert int(right.sum()) > 60
    assert check(judge(run, flipped(19)), "top1_flips").passed  # p is small, but 19 of 4000 is within 0.5 %
    found = check(judge(run, flipped(60)), "top1_flips")
    assert not found.passed
    assert found.statistic == pytest.approx(60 / 4000)
    assert check(judge(flipped(60), run), "top1_flips").passed  # the reverse is a gain


def test_truncated_kl_is_a_lower_bound_and_exact_when_nothing_is_cut() -> None:
    generator = torch.Generator().manual_seed(9)
    logits = 2 * torch.randn(500, VOCABULARY, generator=generator)
    moved = logits + 0.3 * torch.randn(500, VOCABULARY, generator=generator)
    targets = torch.randint(VOCABULARY, (500,), generator=generator)
    full = token_kl(logits.double().log_softmax(-1), moved.double().log_softmax(-1))
    last = torch.zeros(500, dtype=torch.float64)
    for top_k in (1, 4, 12):
        found = truncated_kl(recorded(logits, targets, top_k), recorded(moved, targets, top_k))
        assert bool((found <= full + 1e-6).all())
        assert bool((found >= 0).all())
        assert found.mean() > last.mean()
        last = found
    exact = truncated_kl(recorded(logits, targets, VOCABULARY), recorded(moved, targets, VOCABULARY))
    torch.testing.assert_close(exact, full, rtol=1e-4, atol=2e-6)


def test_kl_beyond_its_limit_fails_alone() -> None:
    """Answers that move without a loss of perplexity: displacement is not harm, until it is this large."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2000, VOCABULARY, generator=generator)
    other = logits.clone()
    other[:40, 1:] += 4 * torch.randn(40, VOCABULARY - 1, generator=generator)
    targets = torch.zeros(2000, dtype=torch.int64)
    before = recorded(logits, targets, 8)
    after = replace(recorded(other, targets, 8), log_probability=before.log_probability)
    found = judge(before, after)
    assert [it.name for it in found.checks if not it.passed] == ["kl_p99"]
    assert found.conclusive


def test_two_thousand_resamples_take_less_than_a_second() -> None:
    sums = torch.randn(1500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    begin = time.process_time()
    bootstrap_mean(sums, torch.full((1500,), 32.0, dtype=torch.float64))
    assert time.process_time() - begin < 1
