"""A virtual environment for each peer, made from its pinned requirements; the peers need what excludes each other."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent / "requirements"


class EnvironmentRefusal(RuntimeError):
    """A peer cannot be installed here; says what pip said."""


def python_of(tool: str, folder: Path) -> Path:
    """The interpreter of the tool's environment, which is made where it is missing or pinned to other versions."""
    requirements = REQUIREMENTS / f"{tool}.txt"
    place = folder.resolve() / tool
    python, stamp = place / "bin" / "python", place / "installed.txt"
    if stamp.is_file() and stamp.read_text() == requirements.read_text():
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, stdout=sys.stderr)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*install, "-r", str(requirements)], stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [
            "no reason given"
        ]
        raise EnvironmentRefusal(f"pip could not install {tool}: {errors[0]}")
    shutil.copyfile(requirements, stamp)
    return python
