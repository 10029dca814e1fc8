"""The lockstep comparison against transformers' logits, and of a model with itself."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.eval.compare import LOST_DB, evaluate
from tests.tiny_models import make_tiny


def streamed(folder: Path) -> StreamedModel:
    return StreamedModel(ModelReader(open_source(folder)))


@pytest.fixture
def windows() -> torch.Tensor:
    return torch.randint(160, (6, 33), generator=torch.Generator().manual_seed(8))


def test_perplexity_and_kl_equal_the_oracles(tmp_path: Path, windows: torch.Tensor) -> None:
    first = make_tiny(tmp_path / "a", "llama", seed=1)
    second = make_tiny(tmp_path / "b", "llama", seed=2)
    found = evaluate(streamed(tmp_path / "a"), windows, streamed(tmp_path / "b"))
    with torch.inference_mode():
        scores = [m(windows).logits[:, :-1].double().log_softmax(-1) for m in (first, second)]
    losses = [-s.gather(-1, windows[:, 1:, None]).mean() for s in scores]
    kl = (scores[1].exp() * (scores[1] - scores[0])).sum(-1)
    assert found.tokens == 6 * 32
    assert found.perplexity == pytest.approx(math.exp(losses[0]), rel=1e-4)
    assert found.reference_perplexity == pytest.approx(math.exp(losses[1]), rel=1e-4)
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.kl_max == pytest.approx(float(kl.max()), rel=1e-3)
    assert found.top1_agreement == pytest.approx(
        float((scores[0].argmax(-1) == scores[1].argmax(-1)).double().mean())
    )
    assert len(found.layers) == 2
    assert sum(found.kl_counts) == found.tokens


def test_a_model_agrees_with_itself(tmp_path: Path, windows: torch.Tensor) -> None:
    make_tiny(tmp_path, "qwen3-tied")
    found = evaluate(streamed(tmp_path), windows, streamed(tmp_path))
    assert found.rise == 0
    assert found.kl_max == 0
    assert found.top1_agreement == 1
    assert all(layer.sqnr_db == math.inf for layer in found.layers)


def test_alone_there_is_only_perplexity(tmp_path: Path, windows: torch.Tensor) -> None:
    make_tiny(tmp_path, "llama")
    found = evaluate(streamed(tmp_path), windows)
    assert found.reference_perplexity is None
    assert found.layers == ()


@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (7,)])
def test_windows_must_have_something_to_score(tmp_path: Path, shape: tuple[int, ...]) -> None:
    make_tiny(tmp_path, "llama")
    with pytest.raises(ValueError, match="windows must be"):
        evaluate(streamed(tmp_path), torch.zeros(shape, dtype=torch.int64))


class Broken(StreamedModel):
    """A model whose last layer overflows to NaN from a token on."""

    def run_layer(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().run_layer(hidden)
        if self._index == self.num_layers - 1:
            found[0, 3] = math.nan
        return found


def test_an_overflow_counts_as_an_infinite_loss(tmp_path: Path, windows: torch.Tensor) -> None:
    make_tiny(tmp_path, "llama")
    broken = Broken(ModelReader(open_source(tmp_path)))
    found = evaluate(broken, windows, streamed(tmp_path))
    assert found.lost_predictions == 1
    assert found.perplexity == math.inf
    assert found.kl_mean == found.kl_max == math.inf
    assert found.kl_p50 == 0
    assert sum(found.kl_counts) == found.tokens
    assert all(math.isfinite(edge) for edge in found.kl_edges)
    assert [layer.sqnr_db for layer in found.layers] == [math.inf, LOST_DB]
    assert evaluate(broken, windows).lost_predictions == 1
