"""What one key-value cache does to a model's predictions, token by token, against those with an unquantized one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.divergence import token_kl
from qwen_quantize.eval.perplexity import rows_to_score, targets_of, token_nll
from qwen_quantize.formats.kv_plan import KvPlan

_ROWS = 256  # predictions whose probabilities are held together


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of one cache, token by token, float64: losses, and divergences from the unquantized cache's predictions."""

    loss: Tensor
    divergence: Tensor


@dataclass(frozen=True, slots=True)
class LastStates:
    """What the head reads for each prediction, and by sparse layer the experts that each token visited."""

    rows: Tensor
    experts: dict[int, Tensor]


@torch.inference_mode()
def last_states(
    reader: ModelReader, plan: KvPlan | None, windows: Tensor, experts: dict[int, Tensor] | None = None
) -> LastStates:
    """experts: those that every token shall visit; without, the routers choose."""
    model = StreamedModel(reader, None, plan, experts)
    hidden, visited = model.embed(windows), {}
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
        if model.last_routing is not None:
            visited[index] = model.last_routing
    return LastStates(rows_to_score(hidden), visited)


@torch.inference_mode()
def predictions(
    reader: ModelReader,
    plan: KvPlan | None,
    windows: Tensor,
    exact: LastStates,
    experts: dict[int, Tensor] | None = None,
) -> Predictions:
    """exact: `last_states` of the unquantized cache. experts: as `last_states` takes them."""
    states, targets = (
        exact if plan is None else last_states(reader, plan, windows, experts),
        targets_of(windows),
    )
    model = StreamedModel(reader)
    model.open_head()
    loss, divergence = [], []
    for at in range(0, states.rows.shape[0], _ROWS):
        part = slice(at, at + _ROWS)
        ours, theirs = (model.log_probabilities(one.rows[part]) for one in (states, exact))
        loss.append(token_nll(ours, targets[part]))
        divergence.append(token_kl(theirs, ours))
    return Predictions(torch.cat(loss), torch.cat(divergence))


def mean_and_error(values: Tensor, tokens: int) -> tuple[float, float]:
    """Mean of values that come in windows of `tokens`, and its standard error over windows."""
    means = values.view(-1, tokens).mean(dim=1)
    return float(means.mean()), float(means.std(unbiased=True)) / math.sqrt(means.numel())


def over_mixed(other: Predictions, mixed: Predictions, tokens: int) -> dict[str, float]:
    """By how much a cache is worse than the mixed one, and how often; windows of `tokens` predictions."""
    found: dict[str, float] = {}
    for name, values in (
        ("kl_over_mixed", other.divergence - mixed.divergence),
        ("mixed_closer", (mixed.divergence < other.divergence).double()),
        ("loss_over_mixed", other.loss - mixed.loss),
    ):
        found[name], found[f"{name}_standard_error"] = mean_and_error(values, tokens)
    return found
