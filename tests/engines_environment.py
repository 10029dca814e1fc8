"""A virtual environment for each engine that tests load folders with, made once under build/engines/.

Engines need what excludes each other and the program itself, so none of them is a dependency of the tests. An
environment is made anew when its pinned requirements change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parent / "engines"
_BUILD = Path(__file__).resolve().parent.parent / "build" / "engines"


def python_of(engine: str) -> Path:
    """The interpreter of an engine's environment; the test is skipped where pip cannot install the engine."""
    requirements = _FOLDER / "requirements" / f"{engine}.txt"
    place = _BUILD / engine
    python, stamp = place / "bin" / "python", place / "installed.txt"
    if stamp.is_file() and stamp.read_text() == requirements.read_text():
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True)
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    ]
    done = subprocess.run([*install, "-r", str(requirements)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = next(
            (line for line in done.stderr.splitlines() if line.startswith("ERROR")), "no reason given"
        )
        pytest.skip(f"pip cannot install {engine} here: {reason}")
    shutil.copyfile(requirements, stamp)
    return python
