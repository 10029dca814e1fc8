"""`eval` and `generate` of folders in other schemes than block FP8: their activations are those of the chip."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.engine.stored_schemes import small, store
from tests.tiny_models import make_tiny, make_tokenizer, words

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tiny model as it was, and under each of some schemes; a text."""
    root = tmp_path_factory.mktemp("schemes")
    found = {"text": root / "text.txt"}
    found["text"].write_text(words(300, 3))
    for name in ("plain", "w8a8", "fp8", "w4a16"):
        found[name] = root / name
        make_tiny(found[name], "qwen3", num_hidden_layers=1)
        make_tokenizer(found[name])
        if name != "plain":
            store(found[name], small(name))
    return found


@pytest.fixture
def evaluate(folders: dict[str, Path], run: Run) -> Callable[..., dict[str, Any]]:
    def call(name: str, *more: str) -> dict[str, Any]:
        rest = ("--text", folders["text"], "--length", 32, "--max-tokens", 128, "--json", "--quiet")
        result = run("eval", folders[name], "--against", folders["plain"], *rest, *more)
        assert result.exit_code == 0, result.output
        record: dict[str, Any] = json.loads(result.stdout)
        return record

    return call


@pytest.mark.parametrize("name", ["w8a8", "fp8"])
def test_activations_are_cast(name: str, evaluate: Callable[..., dict[str, Any]]) -> None:
    weights, chip = evaluate(name, "--weights-only"), evaluate(name, "--device", "cpu")
    assert weights["chip"] is None
    assert chip["chip"].startswith("cpu")
    assert chip["kl_mean"] != weights["kl_mean"]
    truncated = evaluate(name, "--assume", "cast.rounding=rtz")
    assert truncated["activation_rounding"] == "rtz"
    assert truncated["kl_mean"] != chip["kl_mean"]


def test_a_narrow_register_and_its_share(evaluate: Callable[..., dict[str, Any]]) -> None:
    exact = evaluate("fp8", "--device", "cpu")
    narrow = evaluate("fp8", "--device", "cpu", "--assume", "accumulator.fraction_bits=6", "--attribute")
    assert narrow["kl_mean"] != exact["kl_mean"]
    attribution = narrow["attribution"]
    assert [share["part"] for share in attribution["parts"]] == ["weights", "activations", "accumulator"]
    assert attribution["everything_off_is_the_reference"]


def test_float32_scales_round_nothing(evaluate: Callable[..., dict[str, Any]]) -> None:
    attribution = evaluate("w8a8", "--attribute")["attribution"]
    assert [share["part"] for share in attribution["parts"]] == ["weights", "activations"]
    assert attribution["everything_off_is_the_reference"]


def test_weight_only_schemes_emulate_nothing_and_say_so(folders: dict[str, Path], run: Run) -> None:
    rest = ("--text", folders["text"], "--length", 32, "--max-tokens", 64)
    result = run("eval", folders["w4a16"], "--device", "nvidia-h100", *rest)
    assert result.exit_code == 0, result.output
    assert "activations stay in 16 bits" in result.stderr + result.stdout


def test_generate_takes_any_scheme(folders: dict[str, Path], run: Run) -> None:
    result = run("generate", folders["w8a8"], "w1 w2", "--max-new-tokens", 3)
    assert result.exit_code == 0, result.output
