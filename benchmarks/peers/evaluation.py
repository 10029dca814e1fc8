"""One evaluator for all results: this repository's engine, the same windows, the same casts of activations."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.linear import ChipCompute
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.compare import evaluate
from qwen_quantize.eval.perplexity import token_nll
from qwen_quantize.formats.activation_cast import ActivationCast, GroupCast, TokenCast
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.scales import ScaleRule
from qwen_quantize.formats.tables import E2M1, E4M3FN, INT8

LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(\w+_proj)\.")
# What enters a linear, whoever made its weights.
CASTS: Mapping[str, ActivationCast | None] = {
    "none": None,
    "int8-token": TokenCast(INT8, RNE_SATURATE),
    "e4m3-token": TokenCast(E4M3FN, RNE_SATURATE),
    "mxfp4": GroupCast(E2M1, RNE_SATURATE, ScaleRule.EVEN, 32),
    "mxfp8": GroupCast(E4M3FN, RNE_SATURATE, ScaleRule.RCEIL, 32),
}


class EveryLinear(ModelReader):
    """A reader to which each linear of the layers counts as quantized: a peer's folder holds plain float32."""

    def is_quantized(self, module: str) -> bool:  # noqa: ARG002
        return True


class LastHidden:
    """The unquantized model on one text, run once: what remains of it is the last hidden states and the head."""

    last_routing: Tensor | None = None

    def __init__(self, model: StreamedModel, windows: Tensor) -> None:
        self.model, self.windows = model, windows
        hidden = model.embed(windows)
        for index in range(model.num_layers):
            model.open_layer(index)
            hidden = model.run_layer(hidden)
        self._hidden = hidden

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def embed(self, tokens: Tensor) -> Tensor:
        if not torch.equal(tokens, self.windows):
            raise ValueError("these hidden states belong to another text")
        return self._hidden

    def open_layer(self, index: int) -> None:
        pass

    def run_layer(self, hidden: Tensor) -> Tensor:
        return hidden

    def open_head(self) -> None:
        self.model.open_head()

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        return self.model.log_probabilities(hidden)


@dataclass(frozen=True, slots=True)
class Evaluator:
    """The unquantized model's states on each text."""

    references: Mapping[str, LastHidden]

    def score(self, folder: Path, cast: str) -> dict[str, dict[str, Any]]:
        """Per text: perplexity, its rise with the paired standard error, KL, and each window's mean loss."""
        chip = None if CASTS[cast] is None else ChipCompute(CASTS[cast])
        reader = EveryLinear(open_source(folder))
        found = {}
        for name, reference in self.references.items():
            losses: list[Tensor] = []

            def keep(scores: Tensor, targets: Tensor, losses: list[Tensor] = losses) -> None:
                losses.append(token_nll(scores, targets))

            result = evaluate(StreamedModel(reader, chip), reference.windows, reference, watch=keep)
            found[name] = {
                "tokens": result.tokens,
                "perplexity": result.perplexity,
                "reference_perplexity": result.reference_perplexity,
                "rise": result.rise,
                "rise_standard_error": result.rise_standard_error,
                "kl_mean": result.kl_mean,
                "kl_p99": result.kl_p99,
                "top1_agreement": result.top1_agreement,
                "window_losses": torch.cat(losses).view(result.windows, -1).mean(dim=1).tolist(),
            }
        return found


@torch.inference_mode()
def evaluator(model: Path, windows: Mapping[str, Tensor]) -> Evaluator:
    """Run the unquantized model on each text once."""
    reader = ModelReader(open_source(model))
    return Evaluator({name: LastHidden(StreamedModel(reader), ids) for name, ids in windows.items()})


def read_back(quantized: Path, weights: Path) -> dict[str, Any]:
    """How this package decodes a checkpoint that a peer wrote, held against the peer's own decoding.

    largest_difference: of two weights, over the largest magnitude in its linear. equal_in_fp16: linears that are
    equal when ours are rounded to FP16, in which some peers multiply codes and scales.
    """
    ours, theirs = ModelReader(open_source(quantized)), ModelReader(open_source(weights))
    linears, equal, equal_in_fp16, largest = 0, 0, 0, 0.0
    for stored in ours.quantized_linears():
        expected, found = theirs.read_linear(stored.module), ours.read_linear(stored.module)
        difference = (found - expected).abs().max() / expected.abs().max()
        linears += 1
        equal += int(difference == 0)
        equal_in_fp16 += int(torch.equal(found.to(torch.float16).to(expected.dtype), expected))
        largest = max(largest, float(difference))
    return {
        "linears": linears,
        "equal": equal,
        "equal_in_fp16": equal_in_fp16,
        "largest_difference": largest,
    }


def linear_bytes(folder: Path) -> int:
    """Bytes of everything that the folder's safetensors store for the linears of the layers: codes and scales."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            total += sum(tensors.get_tensor(name).nbytes for name in tensors.keys() if LINEAR.match(name))  # noqa: SIM118
    return total


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """(mean of ours - theirs in nats a token, its standard error) from the losses of the same windows."""
    difference = torch.tensor(ours, dtype=torch.float64) - torch.tensor(theirs, dtype=torch.float64)
    return float(difference.mean()), float(difference.std(unbiased=True)) / math.sqrt(difference.numel())
