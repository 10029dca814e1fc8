"""What calibration reached of the routed experts, and what its policy for starved ones cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qwen_quantize.report.linears import Linear
from qwen_quantize.report.record import Expert, LayerFidelity, Manifest

_POLICIES = {
    "own": "the expert's own tokens, which are enough",
    "shrink": "its own tokens; those that are missing are made up by the average of all tokens",
    "forced": "tokens spread evenly over the text, wherever the router sent them",
    "round": "no data: rounded to nearest, and the error is that of the weights alone",
}


@dataclass(frozen=True, slots=True)
class ExpertResult:
    """One expert and the linear of it with the largest error; None where none was quantized."""

    coverage: Expert
    worst: Linear | None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """All experts of one policy; the mean errors are of each one's worst linear."""

    policy: str
    meaning: str
    count: int
    fewest_tokens: int
    mean_error: float | None
    mean_baseline_error: float | None
    mean_saving: float | None


@dataclass(frozen=True, slots=True)
class ExpertSummary:
    """The routed experts of a model: `policies` in the order of `_POLICIES`, `starved` by error, worst first."""

    policies: tuple[PolicyResult, ...]
    starved: tuple[ExpertResult, ...]
    words: str


def summarize_experts(record: Manifest) -> ExpertSummary | None:
    """None where calibration saw no routed expert: dense models, runs without data, older manifests."""
    experts = record.experts
    if not experts:
        return None
    worst = _worst_linears(record.linears)
    results = [ExpertResult(it, worst.get((it.layer, it.expert))) for it in experts]
    known = list(_POLICIES)
    names = {it.policy for it in experts}
    ordered = sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))
    return ExpertSummary(
        policies=tuple(_policy_result(name, results) for name in ordered),
        starved=tuple(sorted((it for it in results if it.coverage.starved), key=_worst_first)),
        words=coverage_words(experts),
    )


def coverage_words(experts: Sequence[Expert]) -> str:
    """'48 routed in 3 layers; 5 starved (fewest 12 tokens, 1,024 needed; policy shrink)'; of at least one."""
    layers = len({it.layer for it in experts})
    starved = [it for it in experts if it.starved]
    without = sum(it.tokens == 0 for it in experts)
    fewest = min(starved or experts, key=lambda it: (it.tokens, -it.needed))
    policies = sorted({it.policy for it in experts if it.policy not in ("", "own")})
    inside = f"{fewest.needed:,} needed"
    if not without:
        inside = f"fewest {_counted(fewest.tokens, 'token')}, {inside}"
    if policies:
        inside += f"; policy {' and '.join(policies)}"
    found = f"{len(starved):,}" if starved else "none"
    reached = f", {without:,} of them without a token" if without else ""
    return f"{len(experts):,} routed in {_counted(layers, 'layer')}; {found} starved{reached} ({inside})"


def routed_layers(layers: Sequence[LayerFidelity]) -> list[tuple[int, float]]:
    """(layer, router agreement as a share of one) of the layers that have a router."""
    return [(it.layer, it.router_agreement) for it in layers if it.router_agreement is not None]


def _worst_linears(linears: Sequence[Linear]) -> dict[tuple[int, int], Linear]:
    """(layer, expert) -> its linear with the largest error."""
    worst: dict[tuple[int, int], Linear] = {}
    for linear in linears:
        expert = linear.expert
        if linear.layer is None or expert is None or linear.error is None:
            continue
        other = worst.get((linear.layer, expert))
        if other is None or other.error is None or linear.error > other.error:
            worst[linear.layer, expert] = linear
    return worst


def _worst_first(result: ExpertResult) -> tuple[float, int, int, int]:
    """By error, then by tokens; experts without an error come last."""
    worst, coverage = result.worst, result.coverage
    error = worst.error if worst is not None and worst.error is not None else -1.0
    return (-error, coverage.tokens, coverage.layer, coverage.expert)


def _policy_result(policy: str, results: Sequence[ExpertResult]) -> PolicyResult:
    members = [it for it in results if it.coverage.policy == policy]
    linears = [it.worst for it in members if it.worst is not None]
    return PolicyResult(
        policy,
        _POLICIES.get(policy, ""),
        len(members),
        min(it.coverage.tokens for it in members),
        _mean([it.error for it in linears]),
        _mean([it.baseline_error for it in linears]),
        _mean([it.saving for it in linears]),
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
