"""A checkpoint read rotated computes what it computed before, in float64, in this engine and in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from qwen_quantize.calibrators.pair_scaling import LayerTensors
from qwen_quantize.checkpoint.source import CheckpointSource, open_source
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import run_layer
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint, Half
from qwen_quantize.models.lookup import require_blueprint
from qwen_quantize.pipeline.rotated_source import Rotate, RotatedSource, Rotating
from tests.models.test_scale_pairs import put_together
from tests.tiny_models import FAMILIES, make_tiny

R2, R1R2 = Rotating(Rotate.R2), Rotating(Rotate.R1R2)
REFUSED = {
    **{(Rotate.R1R2, family): "norms what each half adds" for family in ("gemma2", "gemma3", "glm4")},
    **{
        (Rotate.R2, family): "a gate or a norm stands behind"
        for family in ("qwen3-next", "qwen3.5", "qwen3.5-moe")
    },
}


def in_float64(folder: Path) -> CheckpointSource:
    """The folder's model, its tensors stored in float64."""
    state = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return open_source(folder)


def layer_of(source: CheckpointSource, blueprint: Blueprint, index: int) -> LayerTensors:
    """A layer as the source has it, in its own dtype."""
    weights: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    paths = [site.path for half in Half for site in blueprint.sites(index, half)]
    paths += [
        site.path.replace("{expert}", str(expert))
        for expert in range(blueprint.num_experts(index))
        for site in blueprint.expert_sites(index)
    ]
    names = frozenset(source.names())
    for path in paths:
        name = blueprint.layer_name(index, path)
        weights[path] = source.read(f"{name}.weight")
        if f"{name}.bias" in names:
            biases[path] = source.read(f"{name}.bias")
    tensors = {
        suffix: source.read(blueprint.layer_name(index, suffix)) + blueprint.norm_offset(suffix)
        for suffix in blueprint.layer_tensors(index)
    }
    return LayerTensors(weights, biases, tensors)


def logits(source: CheckpointSource, tokens: Tensor) -> Tensor:
    """float64 [n, T, vocabulary], before any soft cap."""
    blueprint = require_blueprint(source.config)
    family, config = blueprint.family, blueprint.config
    rotary = ModelReader(source).rotary
    hidden = source.read(family.embedding)[tokens] * blueprint.embedding_scale
    for index in range(blueprint.num_layers):
        layer = put_together(layer_of(source, blueprint, index), index, blueprint)
        hidden = run_layer(hidden, layer, index, blueprint, rotary)
    norm = source.read(family.final_norm) + blueprint.norm_offset(family.final_norm)
    head = source.read(family.embedding if config.tie_word_embeddings else family.head)
    return functional.rms_norm(hidden, hidden.shape[-1:], norm, config.rms_norm_eps) @ head.T


@pytest.mark.parametrize("block", [0, 4])
@pytest.mark.parametrize("family", sorted(FAMILIES))
@torch.inference_mode()
def test_the_function_stays(family: str, block: int, tmp_path: Path) -> None:
    make_tiny(tmp_path, family)
    source = in_float64(tmp_path)
    tokens = torch.randint(3, 160, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = logits(source, tokens)
    assert expected.dtype == torch.float64
    for kind in (Rotate.R2, Rotate.R1R2):
        asked = Rotating(kind, block)
        refusal = REFUSED.get((kind, family))
        if refusal is not None:
            with pytest.raises(UserError, match=refusal):
                RotatedSource(source, asked)
            continue
        rotated = RotatedSource(source, asked, seed=3)
        found = logits(rotated, tokens)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10 * float(expected.abs().max()))
        changed = [
            name
            for name in source.names()
            if name in rotated.names() and not torch.equal(source.read(name), rotated.read(name))
        ]
        assert len(changed) >= (2 if kind is Rotate.R2 else 7)


@pytest.mark.parametrize("family", ["qwen3-tied", "mixtral", "deepseek-v3", "llama-biased"])
@torch.inference_mode()
def test_other_engines_read_it(family: str, tmp_path: Path) -> None:
    """What was read rotated is written as an ordinary checkpoint; the one engine knows nothing of rotations."""
    model = make_tiny(tmp_path / "plain", family)
    rotated = RotatedSource(open_source(tmp_path / "plain"), R1R2)
    folder = tmp_path / "rotated"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(rotated.config))
    save_file(
        {name: rotated.read(name) for name in rotated.names()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    tokens = torch.randint(3, 160, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    torch.testing.assert_close(other.eval()(tokens).logits, expected, rtol=0, atol=1e-3)
    ours = load_model(ModelReader(open_source(folder))).forward(tokens)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-3)


def test_some_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3-tied")
    rotated = RotatedSource(open_source(tmp_path), R1R2)
    for name in rotated.names():
        whole = rotated.read(name)
        assert tuple(whole.shape) == rotated.info(name).shape
        assert torch.equal(rotated.read_rows(name, 3, 9), whole[3:9])


def test_a_tied_head_stands_by_itself_under_r1(tmp_path: Path) -> None:
    make_tiny(tmp_path, "qwen3-tied")
    source = open_source(tmp_path)
    assert "lm_head.weight" not in source.names()
    assert "lm_head.weight" not in RotatedSource(source, R2).names()
    rotated = RotatedSource(source, R1R2)
    assert "lm_head.weight" in rotated.names()
    assert rotated.info("lm_head.weight").nbytes == source.info("model.embed_tokens.weight").nbytes
    assert rotated.config["tie_word_embeddings"] is False
    assert source.config["tie_word_embeddings"] is True
    assert not torch.equal(rotated.read("lm_head.weight"), rotated.read("model.embed_tokens.weight"))


def test_another_rotation_is_another_model(tmp_path: Path) -> None:
    make_tiny(tmp_path, "llama")
    source = open_source(tmp_path)
    marks = [
        source.fingerprint(),
        RotatedSource(source, R2).fingerprint(),
        RotatedSource(source, R1R2).fingerprint(),
        RotatedSource(source, R1R2, seed=1).fingerprint(),
        RotatedSource(source, Rotating(Rotate.R1R2, 32)).fingerprint(),
    ]
    assert len(set(marks)) == len(marks)
    assert RotatedSource(source, R2).fingerprint() == marks[1]


def test_what_cannot_be_rotated_is_refused(tmp_path: Path) -> None:
    make_tiny(tmp_path / "llama", "llama")
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    config["architectures"] = ["NobodysForCausalLM"]
    (tmp_path / "llama" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="has no forward pass here"):
        RotatedSource(open_source(tmp_path / "llama"), R2)
    with pytest.raises(UserError, match=r"'model\.layers\.4\..*' does with the residual stream is not known"):
        RotatedSource(open_source("embedded:moe"), R1R2)


@pytest.mark.parametrize(
    ("text", "found"),
    [("none", Rotating()), ("r2", R2), ("r1r2", R1R2), ("r1r2:32", Rotating(Rotate.R1R2, 32))],
)
def test_what_is_asked_for(text: str, found: Rotating) -> None:
    assert Rotating.parse(text) == found


@pytest.mark.parametrize(
    "text", ["", "r1", "none:32", "r2:", "r2:6", "r1r2:-4", "r1r2:92", "r1r2:999999", "R2"]
)
def test_what_cannot_be_asked_for(text: str) -> None:
    with pytest.raises(UserError, match=r"none of none, r2 and r1r2"):
        Rotating.parse(text)
