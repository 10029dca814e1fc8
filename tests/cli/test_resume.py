"""A run that is killed and resumed writes the same bytes as one that is not."""

from __future__ import annotations

import hashlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from qwen_quantize.cli.main import app
from qwen_quantize.pipeline.journal import Journal
from tests.tiny_models import make_tiny, make_tokenizer, words


def hashes(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def command(model: Path, out: Path, dataset: Path, text: Path) -> list[str]:
    return [
        "--model-path", str(model), "--output-path", str(out), "--device", "example@1.2",
        "--calibration-dataset", str(dataset), "--calibration-length", "32", "--calibration-samples", "8",
        "--validation-text", str(text), "--validation-tokens", "1024",
    ]  # fmt: skip


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    path = tmp_path / "held-out.txt"
    path.write_text(words(1500, seed=99))
    return path


@dataclass(frozen=True)
class Whole:
    """A run that nobody stopped: what it read, and the hashes of what it wrote."""

    model: Path
    dataset: Path
    text: Path
    hashes: dict[str, str]


@pytest.fixture(scope="module")
def whole(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    dataset, text = folder / "calib.jsonl", folder / "held-out.txt"
    dataset.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(12)))
    text.write_text(words(1500, seed=99))
    done = CliRunner().invoke(app, command(tiny_source, folder / "out", dataset, text))
    assert done.exit_code == 0, done.output
    return Whole(tiny_source, dataset, text, hashes(folder / "out"))


@pytest.mark.parametrize("stop_at", ["after 1", "after 3", "before 0", "before 2", "after 6"])
def test_interrupted_run_resumes_to_the_same_bytes(
    stop_at: str,
    whole: Whole,
    tmp_path: Path,
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    when, count = stop_at.split()
    finish, seen = Journal.finish, []

    def stopping(self: Journal, unit: str, record: dict[str, object]) -> None:
        if when == "before" and len(seen) == int(count):
            raise KeyboardInterrupt
        finish(self, unit, record)
        seen.append(unit)
        if when == "after" and len(seen) == int(count):
            raise KeyboardInterrupt

    monkeypatch.setattr(Journal, "finish", stopping)
    arguments = command(whole.model, tmp_path / "out", whole.dataset, whole.text)
    stopped = CliRunner().invoke(app, arguments)
    assert stopped.exit_code == 130
    assert "--resume" in stopped.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(Journal, "finish", finish)
    refused = run(*arguments)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    assert run(*arguments, "--resume").exit_code == 0
    assert hashes(tmp_path / "out") == whole.hashes
    assert not list(tmp_path.glob(".out*"))


def test_resume_with_another_request_is_refused(
    model: Path,
    dataset: Path,
    held_out: Path,
    tmp_path: Path,
    run: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stopping(_self: Journal, _unit: str, _record: dict[str, object]) -> None:
        raise KeyboardInterrupt

    arguments = command(model, tmp_path / "out", dataset, held_out)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", stopping)
        CliRunner().invoke(app, arguments)
    result = run(*arguments, "--resume", "--seed", "7")
    assert result.exit_code == 2
    assert "another request" in result.stderr
    assert run(*arguments, "--resume").exit_code == 0


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path: Path) -> None:
    """kill -9 at five random moments of real processes, then --resume: every file as in the whole run."""
    model = tmp_path / "model"
    make_tiny(model, "qwen3", hidden_size=256, intermediate_size=512, num_hidden_layers=10, seed=6)
    make_tokenizer(model)
    dataset, text = tmp_path / "calib.jsonl", tmp_path / "text.txt"
    dataset.write_text("".join(f'{{"text": "{words(600, seed)}"}}\n' for seed in range(24)))
    text.write_text(words(1500, seed=98))

    def arguments(out: Path) -> list[str]:
        return [sys.executable, "-m", "qwen_quantize", *command(model, out, dataset, text)]

    begin = time.monotonic()
    subprocess.run(arguments(tmp_path / "whole"), check=True, capture_output=True)
    whole_seconds = time.monotonic() - begin
    expected = hashes(tmp_path / "whole")
    moments = random.Random(20)
    kills = 0
    for attempt in range(15):  # where the first run was slowed down by others, some end before their moment
        if kills == 5:
            break
        out = tmp_path / f"out-{attempt}"
        process = subprocess.Popen(arguments(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=moments.uniform(0.2, 0.98) * whole_seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            if not out.exists():  # else it was killed between its last rename and its end
                subprocess.run([*arguments(out), "--resume"], check=True, capture_output=True)
        assert hashes(out) == expected
    assert kills >= 3, "the runs ended before they could be killed"
