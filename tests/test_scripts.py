"""Scripts in benchmarks and tools that have a command line say what it is: a stale import is seen before a long run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# benchmarks/peers/quantizers is left out: its scripts import what only a peer's own environment has.
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "benchmarks/peers", "tools")
    for path in (ROOT / folder).glob("*.py")
    if '\nif __name__ == "__main__":' in path.read_text(encoding="utf-8")
)


def test_scripts_are_found() -> None:
    assert {"benchmarks/casts.py", "benchmarks/peers/run.py", "tools/readme_tables.py"} <= set(SCRIPTS)


@pytest.mark.slow  # a minute or more in all: most of them import torch, each in a process of its own
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_answers_help(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / script), "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout
    assert not list(tmp_path.iterdir())
