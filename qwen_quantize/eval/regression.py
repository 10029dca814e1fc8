"""Whether a change hurt a model: paired tests on what two runs said of the same tokens.

With d_t the loss of token t after the change minus before, in nats, the mean of d is the change of ln perplexity.
Pairing removes what both runs share, which is nearly all of the spread. Tokens near each other are correlated, so
whole blocks are resampled: documents where there are many, else runs of tokens long enough to keep that
correlation inside (`block_sums`). The bootstrap is studentised (bootstrap-t): skewed differences, few tokens that
lose much, are what a broken cast makes, and plain percentiles are too short on their long side.

The decision is against a margin: a change is harmless when a loss above the margin is excluded at 5 %, because
not seeing a loss in too little text proves nothing. So a loss of the margin or more is missed at most 5 times in
100 whatever the number of tokens; false alarms fall as the text grows and are at most 5 % from `tokens_needed` on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.eval.divergence import quantiles
from qwen_quantize.eval.perplexity import perplexity
from qwen_quantize.eval.token_scores import TokenScores

RESAMPLES = 2000
_ENOUGH_DOCUMENTS = 30  # fewer say too little about how documents differ
_SHORTEST_BLOCK = 32  # tokens
_FEWEST_BLOCKS = 40
_BLOCKS_PER_CORRELATION = 8  # a block this many correlation times long has nearly all correlation inside
_RESAMPLES_AT_ONCE = 1 << 22  # numbers of blocks drawn together
_ROWS_AT_ONCE = 1 << 16  # tokens whose divergence is computed together
_Z95 = 1.6448536269514722  # the normal's 95 % point
_SMALLEST_REST = 1e-7  # float32 resolution of the probability that is left beside the tokens that are kept


@dataclass(frozen=True, slots=True)
class Limits:
    """When a change is no longer harmless.

    margin: relative rise of perplexity, also the share of tokens by which top-1 hits may fall; alpha: level of
    the test against the margin and of confidence bounds; alpha_flips: that of McNemar's test, smaller, so that
    all tests together stay at alpha; kl_p99: nats, as much as quantizing to four bits moves the answers.
    """

    margin: float = 0.005
    alpha: float = 0.05
    alpha_flips: float = 0.01
    kl_p99: float = 0.5


@dataclass(frozen=True, slots=True)
class Check:
    """One check. statistic, bound and threshold are in the same unit; p_value is against the threshold."""

    name: str
    statistic: float
    p_value: float | None
    bound: float | None
    threshold: float
    passed: bool
    text: str


@dataclass(frozen=True, slots=True)
class Judgement:
    """harmless: every check passed; conclusive: False where there is too little text to tell loss from noise.

    rise: of perplexity, relative; lower, upper: its one-sided 95 % bounds; tokens_needed: scored tokens at which
    neither an unharmed model nor a loss of the margin is taken for the other in more than 5 % of cases.
    """

    harmless: bool
    conclusive: bool
    checks: tuple[Check, ...]
    tokens: int
    perplexity_before: float
    perplexity_after: float
    rise: float
    lower: float
    upper: float
    kl_mean: float
    kl_p99: float
    tokens_needed: int


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """Of a mean over blocks: estimate, standard error, and t = (resampled - estimate) / its own error, ascending."""

    estimate: float
    error: float
    t: Tensor


@dataclass(frozen=True, slots=True)
class McNemar:
    """lost: right before and wrong after; gained: the reverse. p_harm is one-sided, p_change two-sided, exact."""

    lost: int
    gained: int
    p_harm: float
    p_change: float


def judge(before: TokenScores, after: TokenScores, limits: Limits | None = None, seed: int = 0) -> Judgement:
    """Both of the same tokens. Tokens that have no finite probability before the change are left out."""
    limits = limits or Limits()
    known = before.log_probability.isfinite()
    lost = known & ~after.log_probability.isfinite()
    nll = -before.log_probability.double()
    perplexity_before = perplexity(nll[known])
    if not bool(known.any()):
        raise ValueError(
            "no token has a finite probability before the change: there is nothing to compare with"
        )
    finite = _finite(int(lost.sum()), int(known.sum()))
    if not finite.passed:
        return Judgement(
            harmless=False,
            conclusive=True,
            checks=(finite,),
            tokens=before.tokens,
            perplexity_before=perplexity_before,
            perplexity_after=math.inf,
            rise=math.inf,
            lower=math.inf,
            upper=math.inf,
            kl_mean=math.inf,
            kl_p99=math.inf,
            tokens_needed=before.tokens,
        )
    difference = torch.where(known, -after.log_probability.double() - nll, 0.0)
    sums, counts = block_sums(difference, known, before)
    boot = bootstrap_mean(sums, counts, seed)
    lower, upper = (math.expm1(bound) for bound in bounds(boot, limits.alpha))
    kl = truncated_kl(before, after)[known]
    (p99,) = quantiles(kl, (0.99,))
    within = _non_inferiority(boot, upper, limits)
    harm = _harm(boot, lower, within.passed, limits)
    flips = _flips(before, after, known, limits)
    checks = (finite, within, harm, _divergence(p99, limits), flips)
    return Judgement(
        harmless=all(check.passed for check in checks),
        conclusive=within.passed or any(not check.passed for check in checks if check is not within),
        checks=checks,
        tokens=before.tokens,
        perplexity_before=perplexity_before,
        perplexity_after=perplexity(-after.log_probability.double()[known]),
        rise=math.expm1(boot.estimate),
        lower=lower,
        upper=upper,
        kl_mean=float(kl.mean()),
        kl_p99=p99,
        tokens_needed=tokens_needed(boot, int(known.sum()), limits.margin),
    )


def block_sums(difference: Tensor, known: Tensor, scores: TokenScores) -> tuple[Tensor, Tensor]:
    """(sum of differences, number of known tokens) of every block, float64 [blocks] each.

    A block is a document, that is all windows that begin in it, where there are 30 or more documents. Otherwise
    it is a run of consecutive tokens, `block_length` of them, the last one shorter.
    """
    documents = scores.window_documents
    if len(set(documents.tolist())) >= _ENOUGH_DOCUMENTS:
        block = documents.repeat_interleave(scores.window_tokens)
    else:
        block = torch.arange(difference.numel()) // block_length(difference)
    size = int(block.max()) + 1
    sums = torch.zeros(size, dtype=torch.float64).index_add_(0, block, difference.double())
    counts = torch.zeros(size, dtype=torch.float64).index_add_(0, block, known.double())
    filled = counts > 0
    return sums[filled], counts[filled]


def block_length(difference: Tensor) -> int:
    """Tokens in a block that keeps correlated tokens together: eight correlation times, in 32 .. n / 40.

    The integrated autocorrelation time is 1 + 2 (r_1 + r_2 + ... + r_w) with the smallest w that is five times
    the result (the self-consistent window of Sokal's lectures on Monte Carlo).
    """
    x = difference.double() - difference.double().mean()
    n = x.numel()
    longest = max(_SHORTEST_BLOCK, n // _FEWEST_BLOCKS)
    variance = float(x.square().mean())
    if variance == 0:
        return _SHORTEST_BLOCK
    time = 1.0
    for lag in range(1, min(n, longest // _BLOCKS_PER_CORRELATION + 1)):
        if lag > 5 * time:
            break
        time = max(1.0, time + 2 * float((x[:-lag] * x[lag:]).sum()) / (n * variance))
    return min(longest, max(_SHORTEST_BLOCK, math.ceil(_BLOCKS_PER_CORRELATION * time)))


def bootstrap_mean(sums: Tensor, counts: Tensor, seed: int = 0, resamples: int = RESAMPLES) -> Bootstrap:
    """Studentised bootstrap of sum(sums) / sum(counts) over blocks. One block has no error: NaN.

    The error of a ratio over blocks is that of its linearised residuals, sum - mean * count.
    """
    blocks = sums.numel()
    estimate = float(sums.sum() / counts.sum())
    residual = sums - estimate * counts
    if blocks < 2:
        return Bootstrap(estimate, math.nan, torch.zeros(resamples, dtype=torch.float64))
    correction = math.sqrt(blocks / (blocks - 1))
    error = float(residual.square().sum().sqrt() / counts.sum()) * correction
    generator = torch.Generator().manual_seed(seed)
    moments = torch.stack(
        [residual, counts, residual.square(), residual * counts, counts.square()], dim=1
    )  # [blocks, 5]
    at_once = max(1, _RESAMPLES_AT_ONCE // blocks)
    drawn = []
    for begin in range(0, resamples, at_once):
        rows = min(at_once, resamples - begin)
        index = torch.randint(blocks, (rows, blocks), generator=generator)
        times = torch.zeros(rows, blocks, dtype=torch.float64)
        times.scatter_add_(1, index, torch.ones(1, 1, dtype=torch.float64).expand(rows, blocks))
        drawn.append(times @ moments)
    first, total, square, cross, total_square = torch.cat(drawn).unbind(dim=1)
    shift = first / total
    spread = (square - 2 * shift * cross + shift.square() * total_square).clamp(min=0)
    own_error = spread.sqrt() / total * correction
    # Where all blocks drawn are one and the same there is no spread; such a sample says nothing.
    t = torch.where(own_error > 0, shift / own_error, 0.0)
    return Bootstrap(estimate, error, t.sort().values)


def bounds(boot: Bootstrap, alpha: float) -> tuple[float, float]:
    """One-sided lower and upper confidence bounds, each at 1 - alpha, in the unit of the estimate."""
    if math.isnan(boot.error):
        return -math.inf, math.inf
    last = boot.t.numel() - 1
    low, high = (float(boot.t[round(at * last)]) for at in (alpha, 1 - alpha))
    return boot.estimate - boot.error * high, boot.estimate - boot.error * low


def p_at_least(boot: Bootstrap, value: float) -> float:
    """p-value of the hypothesis that the true mean is `value` or more; small where it is surely less."""
    if math.isnan(boot.error):
        return 1.0
    if boot.error == 0:
        return 0.0 if boot.estimate < value else 1.0
    below = int((boot.t <= (boot.estimate - value) / boot.error).sum())
    return (1 + below) / (1 + boot.t.numel())


def p_at_most(boot: Bootstrap, value: float) -> float:
    """p-value of the hypothesis that the true mean is `value` or less; small where it is surely more."""
    if math.isnan(boot.error):
        return 1.0
    if boot.error == 0:
        return 0.0 if boot.estimate > value else 1.0
    above = int((boot.t >= (boot.estimate - value) / boot.error).sum())
    return (1 + above) / (1 + boot.t.numel())


def tokens_needed(boot: Bootstrap, tokens: int, margin: float) -> int:
    """Tokens at which the error is small enough for 5 % false alarms and 95 % detection of a loss of `margin`.

    From the error at `tokens`, which falls with their square root: both conditions hold from an error of
    ln(1 + margin) / (2 * 1.645) on. 0 where the differences have no spread.
    """
    if math.isnan(boot.error):
        return 2 * tokens  # one block: nothing is known of the spread
    return math.ceil(tokens * (boot.error * 2 * _Z95 / math.log1p(margin)) ** 2)


def truncated_kl(before: TokenScores, after: TokenScores) -> Tensor:
    """float64 [n]: KL(before || after) in nats over the tokens that both runs kept, all others as one.

    Kept by both are the tokens in both top-k lists and the one that came. Merging outcomes never raises a
    divergence (log-sum inequality), so this is a lower bound of the KL over the vocabulary.
    """
    parts = []
    for begin in range(0, before.tokens, _ROWS_AT_ONCE):
        rows = slice(begin, begin + _ROWS_AT_ONCE)
        p, q = (
            (run.top_ids[rows], run.top_log_probabilities[rows].double(), run.log_probability[rows].double())
            for run in (before, after)
        )
        parts.append(_truncated_kl(before.targets[rows], *p, *q))
    return torch.cat(parts)


def _truncated_kl(
    came: Tensor,
    ids: Tensor,
    top: Tensor,
    own: Tensor,
    other_ids: Tensor,
    other_top: Tensor,
    other_own: Tensor,
) -> Tensor:
    shared = torch.zeros_like(ids, dtype=torch.bool)
    other = torch.zeros_like(top)
    for column in range(other_ids.shape[1]):
        match = ids == other_ids[:, column : column + 1]
        shared |= match
        other = torch.where(match, other_top[:, column : column + 1], other)
    apart = ~((ids == came.unsqueeze(1)) & shared).any(dim=1, keepdim=True)  # else it is among the shared
    used = torch.cat([shared, apart], dim=1)
    log_p = torch.cat([top, own.unsqueeze(1)], dim=1)
    log_q = torch.cat([other, other_own.unsqueeze(1)], dim=1)
    p, q = (torch.where(used, part.exp(), 0.0) for part in (log_p, log_q))
    terms = torch.where(used & (p > 0), p * (log_p - log_q), 0.0).sum(dim=1)
    rest_p, rest_q = ((1 - part.sum(dim=1)).clamp(min=_SMALLEST_REST) for part in (p, q))
    return (terms + rest_p * (rest_p / rest_q).log()).clamp(min=0)


def mcnemar(lost: int, gained: int) -> McNemar:
    """Exact McNemar's test: of lost + gained flips each is a loss with probability 1/2 where nothing changed."""
    total = lost + gained
    at_least = _binomial_tail(total, lost)
    larger = at_least if lost >= gained else _binomial_tail(total, gained)
    return McNemar(lost, gained, at_least, min(1.0, 2 * larger))


def _binomial_tail(total: int, at_least: int) -> float:
    """P(X >= at_least) for X ~ Binomial(total, 1/2), summed in logarithms."""
    if at_least <= 0:
        return 1.0
    k = torch.arange(at_least, total + 1, dtype=torch.float64)
    whole = torch.tensor(total + 1, dtype=torch.float64)
    log_terms = torch.lgamma(whole) - torch.lgamma(k + 1) - torch.lgamma(total - k + 1)
    return min(1.0, float((log_terms - total * math.log(2)).logsumexp(0).exp()))


def _p(value: float) -> str:
    return f"p = {value:.4f}" if value >= 1e-4 else "p < 0.0001"


def _finite(broken: int, tokens: int) -> Check:
    text = (
        "every prediction is a number" if broken == 0 else f"{broken} of {tokens} predictions are no numbers"
    )
    return Check("finite", broken, None, None, 0, broken == 0, text)


def _non_inferiority(boot: Bootstrap, upper: float, limits: Limits) -> Check:
    p = p_at_least(boot, math.log1p(limits.margin))
    passed = p <= limits.alpha
    said = "excluded" if passed else "not excluded"
    text = (
        f"perplexity {math.expm1(boot.estimate):+.3%}, at most {upper:+.3%} (95 % bound): a loss of "
        f"{limits.margin:.2%} or more is {said} ({_p(p)})"
    )
    return Check("non-inferiority", math.expm1(boot.estimate), p, upper, limits.margin, passed, text)


def _harm(boot: Bootstrap, lower: float, within: bool, limits: Limits) -> Check:
    p = p_at_most(boot, 0.0)
    shown = p <= limits.alpha
    if not shown:
        text = f"no loss is shown ({_p(p)})"
    elif within:
        text = f"a loss is shown ({_p(p)}), but it is smaller than the margin"
    else:
        text = f"a loss of at least {lower:+.3%} is shown ({_p(p)})"
    return Check("harm", math.expm1(boot.estimate), p, lower, 0.0, not shown or within, text)


def _divergence(p99: float, limits: Limits) -> Check:
    passed = p99 <= limits.kl_p99
    text = f"99 of 100 tokens have a KL of at most {p99:.4g} nats (from the top tokens: a lower bound)"
    return Check("kl_p99", p99, None, None, limits.kl_p99, passed, text)


def _flips(before: TokenScores, after: TokenScores, known: Tensor, limits: Limits) -> Check:
    first, second = before.top_ids[:, 0], after.top_ids[:, 0]
    right, still = (top == before.targets for top in (first, second))
    result = mcnemar(int((right & ~still & known).sum()), int((~right & still & known).sum()))
    flipped = int(((first != second) & known).sum())
    tokens = int(known.sum())
    net = (result.lost - result.gained) / tokens
    passed = result.p_harm > limits.alpha_flips or net <= limits.margin
    text = (
        f"the most likely token changed {flipped} times in {tokens}: {result.lost} from right to wrong, "
        f"{result.gained} from wrong to right (McNemar, exact: {_p(result.p_harm)})"
    )
    return Check("top1_flips", net, result.p_harm, None, limits.margin, passed, text)
