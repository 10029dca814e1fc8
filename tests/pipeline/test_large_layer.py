"""A DeepSeek-R1 layer at real width, with fewer experts: killed and resumed, and on a disk that fills up."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.r1_layer import make_checkpoint
from qwen_quantize.cli.main import app
from tests.cli.test_resume import hashes

EXPERTS = 16


def command(model: Path, out: Path) -> list[str]:
    return [
        "--model-path", str(model), "--output-path", str(out), "--device", "ascend", "--no-validate", "--quiet",
        "--max-memory", "4GiB",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])
def test_killed_inside_the_layer_and_resumed(fp8: bool, tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_checkpoint(model, EXPERTS, fp8)

    def process(out: Path) -> list[str]:
        return [sys.executable, "-m", "qwen_quantize", *command(model, out)]

    begin = time.monotonic()
    subprocess.run(process(tmp_path / "whole"), check=True, capture_output=True)
    whole_seconds = time.monotonic() - begin
    expected = hashes(tmp_path / "whole")
    moments, kills = random.Random(3), 0
    for attempt in range(4):
        out = tmp_path / f"out-{attempt}"
        running = subprocess.Popen(process(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            running.wait(timeout=moments.uniform(0.5, 0.95) * whole_seconds)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGKILL)
            running.wait()
            kills += 1
            if not out.exists():
                subprocess.run([*process(out), "--resume"], check=True, capture_output=True)
        assert hashes(out) == expected
        shutil.rmtree(out)  # nearly a gigabyte each
    assert kills >= 2, "the runs ended before they could be killed"


@pytest.mark.slow
def test_a_disk_that_fills_up_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_checkpoint(model, EXPERTS, True)
    assert CliRunner().invoke(app, command(model, tmp_path / "whole")).exit_code == 0
    write, written = os.pwrite, 0

    def filling(descriptor: int, data: bytes, offset: int) -> int:
        nonlocal written
        written += len(data)
        if written > 200 << 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", filling)
        stopped = CliRunner().invoke(app, command(model, out))
    assert stopped.exit_code == 2
    assert "disk is full" in stopped.stderr
    assert "--resume" in stopped.stderr
    assert not out.exists()
    assert CliRunner().invoke(app, [*command(model, out), "--resume"]).exit_code == 0
    assert hashes(out) == hashes(tmp_path / "whole")
