"""One thing spoilt in a good checkpoint is found before any weight is used, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint.completeness import check_tensors
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.errors import UserError
from qwen_quantize.models.lookup import require_blueprint
from tests.checkpoint.tiny_deepseek import CONFIG, SHARDS, Tensors, make_tensors, write_folder, write_mutation

EXPERT = "model.layers.2.mlp.experts.3.up_proj"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Change = Callable[[Tensors, dict[str, Any]], object]


def check(folder: Path) -> tuple[str, ...]:
    source = open_source(folder)
    return check_tensors(source, LinearReader(source), require_blueprint(source.config))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        check(folder)
    for word in (str(folder), *words):
        assert word in str(caught.value)


def test_a_good_checkpoint_passes_without_a_note(tmp_path: Path) -> None:
    assert check(write_folder(tmp_path, make_tensors())) == ()


def drop(name: str) -> Change:
    return lambda tensors, _: tensors.pop(name)


def replace(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, _: tensors.update({name: make(tensors[name])})


def setting(**changes: object) -> Change:
    return lambda _, config: config.update(changes)


MUTATIONS: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a missing scale": (drop(f"{EXPERT}.weight_scale_inv"), (f"{EXPERT}.weight_scale_inv", "missing")),
    "a scale with a row less": (
        replace(f"{EXPERT}.weight_scale_inv", lambda scale: scale[:-1]),
        (f"{EXPERT}.weight_scale_inv", "[1, 3]", "[2, 3]", "[16, 16]"),
    ),
    "a transposed scale": (
        replace(f"{EXPERT}.weight_scale_inv", lambda scale: scale.t()),
        (f"{EXPERT}.weight_scale_inv", "[3, 2]", "[2, 3]"),
    ),
    "a scale of whole numbers": (
        replace(f"{EXPERT}.weight_scale_inv", lambda scale: scale.to(torch.int32)),
        (f"{EXPERT}.weight_scale_inv", "I32"),
    ),
    "a second scale": (
        lambda tensors, _: tensors.update({f"{EXPERT}.scale": tensors[f"{EXPERT}.weight_scale_inv"].clone()}),
        (f"{EXPERT}.weight_scale_inv", f"{EXPERT}.scale"),
    ),
    "a scale beside a plain weight": (
        replace(f"{EXPERT}.weight", lambda weight: weight.float()),
        (f"{EXPERT}.weight", "F32", f"{EXPERT}.weight_scale_inv"),
    ),
    "a transposed expert": (
        replace(f"{EXPERT}.weight", lambda weight: weight.view(torch.uint8).t().contiguous().view(weight.dtype)),
        (f"{EXPERT}.weight", "[40, 24]", "[24, 40]", "transposed"),
    ),
    "a missing expert": (
        lambda tensors, _: [tensors.pop(name) for name in list(tensors) if ".2.mlp.experts.3." in name],
        ("model.layers.2.mlp.experts.3.", "missing"),
    ),
    "a missing weight": (drop(f"{EXPERT}.weight"), (f"{EXPERT}.weight", "missing")),
    "a weight of whole numbers": (
        replace(f"{EXPERT}.weight", lambda weight: weight.view(torch.int8)), (f"{EXPERT}.weight", "I8"),
    ),
    "an embedding in FP8": (
        replace(EMBEDDING, lambda weight: weight.to(torch.float8_e4m3fn)), (EMBEDDING, "F8_E4M3"),
    ),
    "a missing norm": (drop("model.layers.1.input_layernorm.weight"), ("model.layers.1.input_layernorm.weight",)),
    "a norm of another size": (
        replace("model.norm.weight", lambda norm: norm[:-1]), ("model.norm.weight", "[39]", "[40]"),
    ),
    "a missing router bias": (
        drop("model.layers.1.mlp.gate.e_score_correction_bias"), ("model.layers.1.mlp.gate.e_score_correction_bias",),
    ),
    "a missing head": (drop(HEAD), (HEAD, "missing")),
    # Layers 0, 1, 2 and, for prediction, 3.
    "two layers too few": (setting(num_hidden_layers=1), ("model.layers.2.", "num_hidden_layers 1", "layer 2")),
    "a layer too few": (setting(num_hidden_layers=2), ("model.layers.3.", "num_hidden_layers 2")),
    "a layer too few and none for prediction": (
        setting(num_hidden_layers=2, num_nextn_predict_layers=0), ("'model.layers.2.", "num_hidden_layers 2"),
    ),
    "prediction not declared": (setting(num_nextn_predict_layers=0), ("'model.layers.3.", "layer 3")),
    "a layer too many": (setting(num_hidden_layers=4), ("model.layers.3.eh_proj.weight", "num_hidden_layers 4")),
    "two layers too many": (setting(num_hidden_layers=5), ("model.layers.4.", "num_hidden_layers 5")),
    "a layer cut out": (
        lambda tensors, _: [tensors.pop(name) for name in list(tensors) if ".layers.1." in name],
        ("layer 1", "model.layers.1."),
    ),
    "an expert too few in config.json": (
        setting(n_routed_experts=2, n_group=1),
        ("model.layers.1.mlp.gate.weight", "[4, 40]"),
    ),
    "prediction without its joining linear": (
        drop("model.layers.3.eh_proj.weight"), ("model.layers.3.eh_proj.weight", "in part"),
    ),
    "prediction without an expert": (
        drop("model.layers.3.mlp.experts.0.down_proj.weight"),
        ("model.layers.3.mlp.experts.0.down_proj.weight", "in part"),
    ),
    "prediction without a norm": (drop("model.layers.3.hnorm.weight"), ("model.layers.3.hnorm.weight", "in part")),
    "prediction without a scale": (
        drop("model.layers.3.self_attn.o_proj.weight_scale_inv"),
        ("model.layers.3.self_attn.o_proj.weight_scale_inv", "missing"),
    ),
    "a tied head that differs": (
        setting(tie_word_embeddings=True), (HEAD, EMBEDDING, "tie_word_embeddings"),
    ),
    "no word of FP8 in config.json": (
        lambda _, config: config.pop("quantization_config"), ("F8_E4M3", "quantization_config"),
    ),
    "another block size in config.json": (
        setting(quantization_config=CONFIG["quantization_config"] | {"weight_block_size": [32, 32]}),
        ("weight_scale_inv", "[32, 32]"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations(tmp_path: Path, mutation: str) -> None:
    change, words = MUTATIONS[mutation]
    refused(write_mutation(tmp_path, change), *words)


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    tensors = make_tensors()
    write_folder(tmp_path, tensors)
    name = f"{EXPERT}.weight"
    second = {key: value for key, value in tensors.items() if key.endswith("_inv") or "norm" in key}
    save_file(second | {name: tensors[name]}, tmp_path / SHARDS[1])
    refused(tmp_path, name, *SHARDS)


def test_a_prediction_layer_that_is_absent_is_a_note(tmp_path: Path) -> None:
    def change(tensors: Tensors, _: object) -> None:
        for name in [name for name in tensors if ".layers.3." in name]:
            del tensors[name]

    (note,) = check(write_mutation(tmp_path, change))
    assert "layer 3" in note
    assert "multi-token prediction" in note


def test_copies_of_embedding_and_head_may_be_left_out(tmp_path: Path) -> None:
    def change(tensors: Tensors, _: object) -> None:
        del tensors["model.layers.3.embed_tokens.weight"], tensors["model.layers.3.shared_head.head.weight"]

    assert check(write_mutation(tmp_path, change)) == ()


def test_a_tied_head_that_repeats_the_embedding_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True
        tensors[HEAD] = tensors[EMBEDDING].clone()

    monkeypatch.setattr("qwen_quantize.checkpoint.completeness._COMPARED_BYTES", 500)
    (note,) = check(write_mutation(tmp_path / "same", change))
    assert HEAD in note
    assert EMBEDDING in note

    def change_last(tensors: Tensors, config: dict[str, Any]) -> None:
        change(tensors, config)
        tensors[HEAD][-1, -1] += 1

    refused(write_mutation(tmp_path / "differs", change_last), HEAD, EMBEDDING)


def test_a_head_in_fp8_may_be(tmp_path: Path) -> None:
    def change(tensors: Tensors, _: object) -> None:
        tensors[HEAD] = tensors[HEAD].to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale_inv"] = torch.ones(4, 3)

    assert check(write_mutation(tmp_path, change)) == ()


def test_tensors_without_a_use_are_a_note(tmp_path: Path) -> None:
    def change(tensors: Tensors, _: object) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        tensors["visual.patch.weight"] = torch.ones(2, 2)

    (note,) = check(write_mutation(tmp_path, change))
    assert "2 tensors" in note
    assert "inv_freq" in note or "visual.patch.weight" in note
