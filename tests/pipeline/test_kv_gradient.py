"""The way back through a model, layer by layer: autograd's own gradient, and divergences that it foretells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen_quantize.calibrators.kv_plans import uniform_plan
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path, embedded_model_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.engine.model import run_layer
from qwen_quantize.engine.streamed import StreamedModel
from qwen_quantize.errors import UserError
from qwen_quantize.eval.divergence import token_kl
from qwen_quantize.formats.kv_plan import KvPlan
from qwen_quantize.formats.kv_scheme import parse_kv_scheme
from qwen_quantize.pipeline.kv_gradient import observe_gradient, through_layer
from qwen_quantize.pipeline.kv_observe import LayerLook, Room
from qwen_quantize.pipeline.run import source_tokenizer
from qwen_quantize.pipeline.texts import calibration_batches, load_documents
from tests.tiny_models import make_tiny

SCHEME = parse_kv_scheme("mixed:6:32,importance=gradient,window=0,sinks=0")


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "glm4", "qwen2-moe", "deepseek-v3"])
def test_the_gradient_is_that_of_the_whole_layer(family: str, tmp_path: Path) -> None:
    make_tiny(tmp_path, family, seed=3)
    reader = ModelReader(open_source(tmp_path))
    index = reader.blueprint.num_layers - 1  # a sparse one where there are experts
    generator = torch.Generator().manual_seed(1)
    before, after = (torch.randn(3, 40, 64, generator=generator) for _ in range(2))
    layer = reader.read_layer(index, resident=True)
    leaf = before.clone().requires_grad_()
    (expected,) = torch.autograd.grad(
        run_layer(leaf, layer, index, reader.blueprint, reader.rotary), leaf, after
    )
    with torch.no_grad():
        look = LayerLook(reader, index, 40, SCHEME, None)
        found = through_layer(reader, reader.read_layer(index), reader.rotary, index, before, after, look)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def log_probabilities(reader: ModelReader, plan: KvPlan | None, windows: torch.Tensor) -> torch.Tensor:
    model = StreamedModel(reader, None, plan)
    hidden = model.embed(windows)
    for index in range(model.num_layers):
        model.open_layer(index)
        hidden = model.run_layer(hidden)
    model.open_head()
    return model.log_probabilities(hidden).flatten(0, 1)


def test_squared_gradients_foretell_the_divergence(tmp_path: Path) -> None:
    source = open_source(embedded_model_path())
    reader = ModelReader(source)
    documents = load_documents(str(calibration_text_path()))
    windows = calibration_batches(documents, source_tokenizer(source), 4, 192, 0).tokens
    room = Room(2, tmp_path / "states")
    exact = log_probabilities(
        reader, None, windows
    )  # first: what inference mode leaves in the reader does no harm
    seen = observe_gradient(reader, windows, SCHEME, room=room)
    assert not list((tmp_path / "states").iterdir())
    # Keys of 32 tokens share a scale, and values of 32 channels, the second of the choices among values.
    foretold = 0.0
    for layer in seen.values():
        assert layer.values is not None
        foretold += float(layer.keys.damages[0].sum() + layer.values.damages[1].sum()) / 2
    plan = uniform_plan(parse_kv_scheme("int4:32,window=0,sinks=0"), reader.blueprint.config)
    measured = float(token_kl(exact, log_probabilities(reader, plan, windows)).mean())
    assert 0.5 < foretold / measured < 2


def test_delta_nets_are_refused_before_any_text_is_read(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3-next")
    with pytest.raises(UserError, match="--importance gradient"):
        observe_gradient(ModelReader(open_source(tmp_path)), torch.zeros(1, 8, dtype=torch.int64), SCHEME)
