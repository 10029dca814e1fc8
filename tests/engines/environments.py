"""A virtual environment for each engine that is asked to load our folders: they exclude each other's requirements."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).resolve().parent / "requirements"


def engine_python(engine: str, without_dependencies: tuple[str, ...] = ()) -> Path:
    """The interpreter of the engine's environment in build/engines, made where it is missing or pinned otherwise.

    without_dependencies: installed last and alone, since they ask for more than they need.
    """
    wanted = (REQUIREMENTS / f"{engine}.txt").read_text() + "\n".join(without_dependencies)
    place = ROOT / "build" / "engines" / engine
    python, stamp = place / "bin" / "python", place / "installed.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-r", str(REQUIREMENTS / f"{engine}.txt")], check=True)
    if without_dependencies:
        subprocess.run([*install, "--no-deps", *without_dependencies], check=True)
    stamp.write_text(wanted)
    return python
