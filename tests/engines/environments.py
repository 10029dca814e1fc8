"""A virtual environment for each engine that is asked to load our folders, made once in build/engines.

Engines need what excludes each other and this program, so none of them is a dependency of the tests. An environment
is made anew when what is pinned changes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"


def engine_python(engine: str, without_dependencies: tuple[str, ...] = ()) -> Path:
    """The interpreter of an engine's environment; the test is skipped where pip cannot install the engine.

    without_dependencies: installed last and alone, since they ask for more than they need.
    """
    requirements = REQUIREMENTS / f"{engine}.txt"
    wanted = requirements.read_text() + "\n".join(without_dependencies)
    place = ROOT / "build" / "engines" / engine
    python, stamp = place / "bin" / "python", place / "installed.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True)
    _install(python, engine, "-r", str(requirements))
    if without_dependencies:
        _install(python, engine, "--no-deps", *without_dependencies)
    stamp.write_text(wanted)
    return python


def _install(python: Path, engine: str, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(f"pip cannot install {engine} here: {errors[0] if errors else 'no reason given'}")
