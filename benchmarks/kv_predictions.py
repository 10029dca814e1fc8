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


@torch.inference_mode()
def last_states(reader: ModelReader, plan: KvPlan | None, windows: Tensor) -> Tensor:
    """What the head reads for each prediction, one window at a time inside each layer."""
    model = StreamedModel(reader, None, plan)
    hidden = model.embed(windows)
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
    return rows_to_score(hidden)


@torch.inference_mode()
def predictions(reader: ModelReader, plan: KvPlan | None, windows: Tensor, exact: Tensor) -> Predictions:
    """exact: `last_states` of the unquantized cache."""
    rows, targets = exact if plan is None else last_states(reader, plan, windows), targets_of(windows)
    model = StreamedModel(reader)
    model.open_head()
    loss, divergence = [], []
    for at in range(0, rows.shape[0], _ROWS):
        part = slice(at, at + _ROWS)
        ours, theirs = (model.log_probabilities(one[part]) for one in (rows, exact))
        loss.append(token_nll(ours, targets[part]))
        divergence.append(token_kl(theirs, ours))
    return Predictions(torch.cat(loss), torch.cat(divergence))


def mean_and_error(values: Tensor, tokens: int) -> tuple[float, float]:
    """Mean of values that come in windows of `tokens`, and its standard error over windows."""
    means = values.view(-1, tokens).mean(dim=1)
    return float(means.mean()), float(means.std(unbiased=True)) / math.sqrt(means.numel())
