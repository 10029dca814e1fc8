"""Schemes chosen by linear: exact bits, better than one scheme at as many, the same bytes when run again."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.embedded import calibration_text_path
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.pipeline.choices import LinearChoice
from qwen_quantize.pipeline.choosable import MixedRequest, weigh_request
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.sensitivity import StreamSolver, places
from qwen_quantize.pipeline.solving import solve_group
from qwen_quantize.pipeline.statistics_folder import read_statistics
from tests.cli.test_resume import hashes
from tests.pipeline.test_methods import invoke, make, run
from tests.tiny_models import words


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("text") / "calib.jsonl"
    file.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(6)))
    return ["--calibration-dataset", str(file), "--calibration-length", "32", "--calibration-samples", "8"]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("dense") / "model", "qwen3")


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sparse") / "model", "deepseek-v3")


def quantized(model: Path, out: Path, *arguments: object) -> dict[str, Any]:
    """The manifest of a result."""
    run("--model-path", model, "--output-path", out, "--device", "nvidia-h100", "--no-validate", *arguments)
    found: dict[str, Any] = json.loads((out / "qwen_quantize.json").read_text())
    return found


def bits_on_disk(out: Path, names: list[str]) -> int:
    tensors = load_file(out / "model.safetensors")
    return sum(8 * t.nbytes for name, t in tensors.items() if name.rpartition(".")[0] in names)


def test_bits_are_exact_and_the_choice_can_be_run_again(dense: Path, text: list[str], tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    manifest = quantized(dense, out, "--quant-method", "gptq", "--target-bits", "5.5", *text)
    mixed = manifest["mixed_precision"]
    names = [linear["name"] for linear in mixed["linears"]]
    assert mixed["bits"] == bits_on_disk(out, names)
    assert mixed["bits_per_weight"] == mixed["bits"] / mixed["weights"] <= 5.5
    assert mixed["bits_per_weight"] > 5.3
    assert len({linear["candidate"] for linear in mixed["linears"]}) > 1
    by_name = {linear["name"]: linear["candidate"] for linear in mixed["linears"]}
    for layer in (0, 1):
        assert len({by_name[f"model.layers.{layer}.self_attn.{part}_proj"] for part in "qkv"}) == 1
        assert len({by_name[f"model.layers.{layer}.mlp.{part}_proj"] for part in ("gate", "up")}) == 1
    run("--recipe", out / "qwen_quantize.json", "--output-path", again, "--no-validate")
    mine, theirs = hashes(out), hashes(again)
    for name in ("model.safetensors", "config.json"):
        assert mine[name] == theirs[name]


def test_mixed_loses_less_than_one_scheme_at_as_many_bits(
    dense: Path, text: list[str], tmp_path: Path
) -> None:
    candidates = ["--candidates", "w4a16:32,w4a16:64,w8a16:64,16"]
    first = quantized(
        dense, tmp_path / "a", "--quant-method", "rtn", "--target-bits", "8.5", *candidates, *text
    )
    uniform = {one["candidate"]: one for one in first["mixed_precision"]["uniform"]}
    for number, name in enumerate(("w4a16:32", "w8a16:64")):
        target = uniform[name]["bits_per_weight"]
        mixed = quantized(
            dense, tmp_path / str(number), "--quant-method", "rtn", "--target-bits", str(target), *candidates, *text
        )["mixed_precision"]  # fmt: skip
        assert mixed["bits_per_weight"] <= target
        assert mixed["sum_of_losses"] <= uniform[name]["predicted_kl"]
        if name == "w4a16:32":  # at 8 bits nothing may be better than the same for all
            assert mixed["sum_of_losses"] < 0.95 * uniform[name]["predicted_kl"]


def test_experts_of_a_layer_become_one_scheme(sparse: Path, text: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["--quant-method", "awq", "--target-bits", "6", "--candidates", "w4a16:32,w8a16:32"]
    manifest = quantized(sparse, out, *asked, *text)
    mixed = manifest["mixed_precision"]
    names = [linear["name"] for linear in mixed["linears"]]
    assert mixed["bits"] == bits_on_disk(out, names)
    experts = {linear["candidate"] for linear in mixed["linears"] if ".experts." in linear["name"]}
    assert len(experts) == 1
    methods = {linear["scheme"]: linear["method"] for one in manifest["layers"] for linear in one["linears"]}
    assert methods == {"w4a16": "awq", "w8a16": "gptq"}


def test_from_statistics_nothing_runs_forward(dense: Path, text: list[str], tmp_path: Path) -> None:
    run("--model-path", dense, "--collect", tmp_path / "statistics", *text)
    asked = ["--quant-method", "gptq", "--from-statistics", tmp_path / "statistics"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qwen_quantize.engine.model.run_layer", None)
        patch.setattr("qwen_quantize.engine.streamed.run_layer", None)
        patch.setattr("qwen_quantize.pipeline.stream.run_half", None)
        mixed = quantized(dense, tmp_path / "out", *asked, "--target-bits", "6")["mixed_precision"]
    assert mixed["predicted_rise"] is None
    assert mixed["bits"] == bits_on_disk(tmp_path / "out", [linear["name"] for linear in mixed["linears"]])
    refused = invoke("--model-path", dense, "--output-path", tmp_path / "no", "--device", "cpu", *asked,
                     "--max-loss", "1%")  # fmt: skip
    assert refused.exit_code == 2
    assert "measures the loss on text" in refused.output


def test_fewest_bits_under_a_loss(dense: Path, text: list[str], tmp_path: Path) -> None:
    asked = ["--quant-method", "rtn", "--candidates", "w4a16:32,w8a16:64,16", *text]
    chosen = [
        quantized(dense, tmp_path / loss, *asked, "--max-loss", loss)["mixed_precision"]
        for loss in ("3%", "0.2%")
    ]
    for mixed, most in zip(chosen, (0.03, 0.002), strict=True):
        assert mixed["predicted_rise"] <= most
    assert chosen[0]["bits_per_weight"] < chosen[1]["bits_per_weight"]


def test_each_linear_is_solved_once_for_each_candidate(
    dense: Path, text: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[tuple[str, str]] = []

    def counting(choice: LinearChoice, modules: Sequence[str], *rest: Any) -> Any:
        solved.append((choice.scheme.name, modules[0]))
        return solve_group(choice, modules, *rest)

    monkeypatch.setattr("qwen_quantize.pipeline.sensitivity.solve_group", counting)
    asked = ["--quant-method", "rtn", "--candidates", "w4a16:32,w8a16:64,16", *text]
    quantized(dense, tmp_path / "out", *asked, "--max-loss", "1%")
    assert len(solved) == len(set(solved)) == 2 * 2 * 4  # candidates, layers, streams


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target-bits", "4.0"], "the smallest choice (w4a16:128, w4a16:64) takes 4.3073 bits"),
        (["--target-bits", "5", "--candidates", "w4a16:7"], "no candidate fits"),
        (["--target-bits", "5", "--candidates", "w3"], "'w3' is none"),
        (["--target-bits", "5", "--candidates", "mxfp4,16"], "cannot run mxfp4"),
        (["--target-bits", "5", "--quant-method", "ue8m0"], "name what to choose from"),
        (["--target-bits", "3", "--layout", "awq"], "the smallest choice (w4a16:64"),
        (["--target-bits", "6", "--layout", "awq", "--candidates", "w4a16:32,w8a16"], "layout awq"),
        (["--target-bits", "6", "--layout", "hif8-plain"], "layout hif8-plain"),
        (["--max-loss", "0.00001%", "--candidates", "w4a16:32,w4a16:64"], "allow that much"),
    ],
)  # fmt: skip
def test_what_cannot_be_reached_is_refused(
    dense: Path, text: list[str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = invoke("--model-path", dense, "--output-path", tmp_path / "out", "--device", "nvidia-h100",
                    "--quant-method", "rtn", *arguments, *text)  # fmt: skip
    assert result.exit_code == 2, result.output
    assert message in result.output.replace("\n", " ")
    assert not list(tmp_path.iterdir())


def test_experts_are_solved_alike_every_time(sparse: Path, text: list[str], tmp_path: Path) -> None:
    """What is made up for an expert's missing tokens must not stay in the statistics that others read."""
    run("--model-path", sparse, "--collect", tmp_path / "statistics", *text)
    source = open_source(sparse)
    recipe = Recipe(str(sparse), "cpu", "gptq", statistics=str(tmp_path / "statistics"), group_size=32)
    plans = {"w4a16:32": make_plan(recipe, source)}
    solver = StreamSolver(ModelReader(source), read_statistics(recipe.statistics or ""), plans)
    routed = [place for place in places(solver.reader, 1) if place.expert is not None]
    for place in routed[:4]:
        plain = solver.plain(place)
        before = [moment.clone() for moment in solver.raw(place).statistics.second_moments]
        first, second = (solver.solve("w4a16:32", place, plain).weights for _ in range(2))
        assert all(torch.equal(first[name].codes, second[name].codes) for name in first)
        after = solver.raw(place).statistics.second_moments
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["embedded:dense", "embedded:moe"])
def test_an_embedded_model_is_no_farther_from_its_source(model: str, tmp_path: Path) -> None:
    """At the bits of groups of 32 in 4 bits everywhere, on text that calibration has not seen."""
    common = ["--model-path", model, "--device", "nvidia-h100", "--quant-method", "gptq", "--calibration-dataset",
              calibration_text_path(), "--calibration-samples", 8, "--calibration-length", 256,
              "--validation-tokens", 8192]  # fmt: skip
    uniform = run(*common, "--group-size", 32, "--output-path", tmp_path / "uniform")
    mixed = run(*common, "--target-bits", 4.51, "--output-path", tmp_path / "mixed")
    assert mixed["mixed_precision"]["bits_per_weight"] <= 4.51
    assert mixed["validation"]["kl_mean"] <= uniform["validation"]["kl_mean"]
    predicted, measured = mixed["mixed_precision"]["predicted_kl"], mixed["validation"]["kl_mean"]
    assert abs(math.log(measured / predicted)) < math.log(3)


@pytest.mark.parametrize(
    ("method", "layout", "left", "kept"),
    [
        ("rtn", "gguf", {"w4a16:64", "w4a16:128"}, {"w4a16:32", "w8a16", "16"}),
        ("rtn", "awq", {"w4a16:32", "w4a16:128", "w8a16"}, {"w4a16:64", "16"}),
        ("rtn", "ascend", {"w4a16:32", "w4a16:128", "w8a16"}, {"w4a16:64", "16"}),
        ("w8a8", "ascend", {"w4a8:32", "w4a8:64", "w4a8:128"}, {"w8a8", "16"}),
        ("rtn", "compressed-tensors", set(), {"w4a16:32", "w4a16:64", "w4a16:128", "w8a16", "16"}),
    ],
)
def test_candidates_that_the_layout_cannot_hold_are_left_out(
    dense: Path, text: list[str], method: str, layout: str, left: set[str], kept: set[str]
) -> None:
    recipe = Recipe(str(dense), "nvidia-h100", method, dataset=text[1], length=32, layout=layout)
    found = weigh_request(recipe, MixedRequest(8.5, None), open_source(dense))
    assert found.left_out.keys() == left
    assert found.named.keys() == kept
    assert all("layout" in why for why in found.left_out.values())


def test_what_is_left_out_is_said(dense: Path, text: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke("--model-path", dense, "--output-path", out, "--device", "nvidia-h100", "--quant-method", "rtn",
                    "--layout", "awq", "--target-bits", "8", "--no-validate", *text)  # fmt: skip
    assert result.exit_code == 0, result.output
    mixed = json.loads((out / "qwen_quantize.json").read_text())["mixed_precision"]
    assert mixed["bits_per_weight"] <= 8
    assert len({linear["candidate"] for linear in mixed["linears"]}) == 2
    assert mixed["left_out"].keys() == {"w4a16:32", "w4a16:128", "w8a16"}
    assert all(f"{name} is not chosen from: " in result.output for name in mixed["left_out"])
