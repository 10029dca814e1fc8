"""What the notebooks share: running commands, and figures that can be read in black and white, with Chinese labels."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from IPython.display import display
from matplotlib import font_manager
from matplotlib.figure import Figure
from typer.testing import CliRunner

from qwen_quantize.cli.main import app

BUILD = Path(__file__).resolve().parent.parent / "build" / "notebooks"
CHINESE_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "SimHei",
    "PingFang SC",
    "Droid Sans Fallback",
)
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "p", "h", "d", "8")
HATCHES = ("", "////", "xxxx", "....", "\\\\\\\\")
GRAYS = ("0.15", "0.85", "0.6", "1.0", "0.4")


def workplace(name: str) -> None:
    """Make an empty folder build/notebooks/NAME and work there, so that a notebook can be run again."""
    folder = BUILD / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)


def qwen_quantize(command: str, expect: tuple[int, ...] = (0,)) -> dict[str, Any]:
    """Run `qwen_quantize COMMAND --json` in this process, print the command, and return its document.

    RuntimeError with what the program said when the exit code is none of `expect`.
    """
    print(f"$ qwen_quantize {command}")
    result = CliRunner().invoke(app, [*shlex.split(command), "--json"])
    if result.exit_code not in expect:
        raise RuntimeError(f"exit code {result.exit_code}: {result.stderr}") from result.exception
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def labels(language: str = "en") -> Callable[[str, str], str]:
    """Set the style of all figures; what returns picks the English or the Chinese of two words.

    "zh" needs a font that has Chinese characters; where none is installed, labels stay English. The environment's
    QWEN_QUANTIZE_LABELS overrides `language`.
    """
    language = os.environ.get("QWEN_QUANTIZE_LABELS", language)
    matplotlib.rcParams.update(
        {
            "figure.dpi": 90,
            "axes.grid": True,
            "grid.color": "0.9",
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": 10,
            "hatch.linewidth": 0.6,
            "legend.frameon": False,
            "image.cmap": "Greys",
        }
    )
    known = {font.name for font in font_manager.fontManager.ttflist}
    found = [name for name in CHINESE_FONTS if name in known]
    if language == "zh" and not found:
        print("no font with Chinese characters is installed (fonts-noto-cjk has one): labels stay English")
    chinese = language == "zh" and bool(found)
    if chinese:
        matplotlib.rcParams.update({"font.sans-serif": [*found, "DejaVu Sans"], "axes.unicode_minus": False})
    return lambda english, other: other if chinese else english


def show(figure: Figure, words: str) -> None:
    """Put the figure into the notebook, with `words` for those who cannot see it."""
    display(figure, metadata={"image/png": {"alt": words}})
    plt.close(figure)


def bar_look(number: int) -> dict[str, Any]:
    """Fill and hatch of the number-th kind of bar: told apart without colour."""
    return {
        "facecolor": GRAYS[number % len(GRAYS)],
        "hatch": HATCHES[number % len(HATCHES)],
        "edgecolor": "black",
        "linewidth": 0.8,
    }
