"""Ctrl-C while the program starts: a stand-in for a package that is imported says when, and waits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["qwen_quantize"]
STAND_IN = """
import signal, time
how = signal.getsignal(signal.SIGINT)
names = {signal.default_int_handler: "raises", signal.SIG_IGN: "ignores"}
print(names.get(how, "ends"), flush=True)
time.sleep(20 if how is not signal.SIG_IGN else 0)
raise SystemExit("waited for nothing")
"""
# Who runs the tests in the background may have them ignore Ctrl-C, and programs pass that on.
HEEDING = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def started(package: str, folder: Path, command: list[str]) -> subprocess.Popen[str]:
    (folder / f"{package}.py").write_text(STAND_IN)
    path = os.pathsep.join((str(folder), str(ROOT)))
    command += ["--device", "cpu", "--output-path", str(folder / "out")]
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def as_installed() -> list[str]:
    """What the script that pip writes does."""
    module, function = SCRIPT.split(":")
    return [sys.executable, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


@pytest.mark.parametrize(
    ("package", "handling", "words"),
    [
        ("typer", "ends", "interrupted\n"),  # before there is a command line
        ("torch", "raises", "interrupted; run the same command with --resume to go on\n"),  # inside a command
    ],
)
@pytest.mark.parametrize(
    "command", [[sys.executable, "-m", "qwen_quantize"], as_installed()], ids=["module", "script"]
)
def test_an_interrupted_start_is_one_line(
    command: list[str], package: str, handling: str, words: str, tmp_path: Path
) -> None:
    with started(package, tmp_path, [sys.executable, "-c", HEEDING, *command[1:]]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{handling}\n"
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    assert (process.returncode, output, errors) == (130, "", words)
    assert not (tmp_path / "out").exists()


def test_where_ctrl_c_is_ignored_it_stays_so(tmp_path: Path) -> None:
    command = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-m", "qwen_quantize"]
    with started("typer", tmp_path, command) as process:
        output, errors = process.communicate()
    assert (output, errors) == ("ignores\n", "waited for nothing\n")
