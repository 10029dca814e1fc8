"""A tiny model with a tokenizer and calibration text, and a way to run the program in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from qwen_quantize.cli.main import app
from tests.tiny_models import make_tiny, make_tokenizer, words


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-style model of three layers, in two shards; never written to by a test."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model = make_tiny(
        folder, "qwen3-tied", hidden_size=128, intermediate_size=192, num_hidden_layers=3, seed=4
    )
    model.save_pretrained(folder, max_shard_size="400KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def model(tiny_source: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may break."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "calib.jsonl"
    path.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(12)))
    return path


@pytest.fixture
def run() -> Callable[..., Result]:
    """Run `qwen_quantize ARGS` and return its result; exceptions that reach the top fail the test."""

    def call(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call
