"""The notebooks: kept with outputs, made from their sources, and, in the slow suite, run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tools import make_notebooks

ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "01_quickstart",
    "02_chips_and_methods",
    "03_firmware_upgrade",
    "04_kv_cache",
    "05_bring_your_own_chip",
)


def kept(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.ipynb").read_text(encoding="utf-8"))
    return found


def outputs(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [output for cell in notebook["cells"] for output in cell.get("outputs", ())]


def pictures(notebook: dict[str, Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs(notebook))


def without_words(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    drawn = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    return [output for output in drawn if not output["metadata"].get("image/png", {}).get("alt")]


def words(notebook: dict[str, Any]) -> str:
    return "".join("".join(output.get("text", ())) for output in outputs(notebook))


def test_all_have_a_source() -> None:
    assert [path.stem for path in make_notebooks.sources()] == list(NAMES)


def test_kept_notebooks_are_fresh() -> None:
    assert make_notebooks.stale() == [], "run `make notebooks`"


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept(name: str) -> None:
    notebook = kept(make_notebooks.FOLDER, name)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    shows = sum("show(\n" in "".join(cell["source"]) for cell in code)
    assert pictures(notebook) == shows > 0
    assert not without_words(notebook)
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr"]
    assert not re.search(r"/(?:home|root|tmp|Users|work)/", words(notebook))


@pytest.mark.parametrize("name", NAMES)
def test_every_plot_has_labels_in_two_languages(name: str) -> None:
    text = (make_notebooks.FOLDER / "src" / f"{name}.py").read_text(encoding="utf-8")
    titles = re.findall(r"\b(?:set_xlabel|set_ylabel|xlabel|ylabel|title|suptitle)[=(]\s*(\S+)", text)
    assert titles
    assert not [title for title in titles if title.startswith(('"', 'f"'))]
    for line in re.findall(r'word\(\s*f?"[^"]*",\s*f?"([^"]*)"', text):
        assert re.search(r"[\u4e00-\u9fff]", line), line


def test_cells_of_a_source() -> None:
    notebook = make_notebooks.notebook_of("# %% [markdown]\n# # Title\n#\n# Text\n\n# %%\na = 1\n\n\nb = 2\n")
    assert make_notebooks.cells_of(notebook) == [
        ("markdown", "# Title\n\nText"),
        ("code", "a = 1\n\n\nb = 2"),
    ]
    with pytest.raises(ValueError, match="begins with"):
        make_notebooks.notebook_of("a = 1\n# %%\n")


def test_a_stale_notebook_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_notebooks, "FOLDER", tmp_path)
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "one.py").write_text("# %%\na = 1\n")
    assert make_notebooks.main(["--check"]) == 1
    make_notebooks.write(tmp_path / "one.ipynb", make_notebooks.notebook_of("# %%\na = 1\n"))
    assert make_notebooks.main(["--check"]) == 0
    (tmp_path / "src" / "one.py").write_text("# %%\na = 2\n")
    assert make_notebooks.main(["--check"]) == 1
    (tmp_path / "src" / "one.py").unlink()
    assert make_notebooks.stale() == ["one"]


@pytest.fixture
def support() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("notebook_support", ROOT / "notebooks" / "support.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_chinese_labels_need_a_font(
    support: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib

    with matplotlib.rc_context():
        monkeypatch.delenv("QWEN_QUANTIZE_LABELS", raising=False)
        assert support.labels()("layer", "层") == "layer"
        monkeypatch.setattr(support, "CHINESE_FONTS", ())
        assert support.labels("zh")("layer", "层") == "layer"
        assert "labels stay English" in capsys.readouterr().out
        monkeypatch.setattr(
            support, "CHINESE_FONTS", ("DejaVu Sans",)
        )  # stands for one that has the characters
        assert support.labels("zh")("layer", "层") == "层"
        monkeypatch.setenv("QWEN_QUANTIZE_LABELS", "en")
        assert support.labels("zh")("layer", "层") == "layer"


def test_a_command_that_fails_says_why(support: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match=r"exit code 2: .*nochip"):
        support.qwen_quantize("chips show nochip")
    assert support.qwen_quantize("chips show example")["name"] == "example"
    assert capsys.readouterr().out.splitlines()[-1] == "$ qwen_quantize chips show example"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    """In a process of its own, as `make notebooks` does; a cell that fails makes the exit code 1."""
    for needed in ("nbclient", "nbformat", "ipykernel", "matplotlib"):
        pytest.importorskip(needed)
    done = subprocess.run(
        [sys.executable, "tools/make_notebooks.py", name, "--output", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    again, before = kept(tmp_path, name), kept(make_notebooks.FOLDER, name)
    assert make_notebooks.cells_of(again) == make_notebooks.cells_of(before)
    assert pictures(again) == pictures(before)
