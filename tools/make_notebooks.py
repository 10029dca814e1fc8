"""Run the sources in notebooks/src and keep them with their outputs as notebooks/NAME.ipynb.

    python tools/make_notebooks.py [--check] [--output FOLDER] [NAME...]

A source is Python in which `# %%` begins a cell of code and `# %% [markdown]` one of commented text. A notebook
differs from run to run only where its outputs do. With --check nothing is run or written; the exit code is 1 when
the cells of a kept notebook are not those of its source. Needs the extra `notebooks`, but for --check.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
SECONDS = 900  # of a cell: minutes on two free cores, and a loaded machine is no fault of a notebook
Notebook = dict[str, Any]


def sources() -> list[Path]:
    return sorted((FOLDER / "src").glob("*.py"))


def notebook_of(text: str) -> Notebook:
    """The notebook of a source, without outputs; ValueError for text before the first cell."""
    cells: list[Notebook] = []
    before, *parts = ("\n" + text).split("\n# %%")
    if before.strip():
        raise ValueError("a source begins with `# %%`")
    for number, part in enumerate(parts):
        head, _, body = part.partition("\n")
        kind = "markdown" if head.strip() == "[markdown]" else "code"
        body = body.strip("\n")
        if kind == "markdown":
            body = "\n".join(line.removeprefix("#").removeprefix(" ") for line in body.splitlines())
        cell: Notebook = {
            "cell_type": kind,
            "id": f"cell-{number:02}",
            "metadata": {},
            "source": body.splitlines(keepends=True),
        }
        cells.append(cell if kind == "markdown" else cell | {"execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 5}


def cells_of(notebook: Notebook) -> list[tuple[str, str]]:
    return [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]


def executed(notebook: Notebook) -> Notebook:
    """The same with outputs, run in notebooks/; nbclient's CellExecutionError when a cell fails."""
    import nbformat
    from nbclient import NotebookClient

    ready = nbformat.reads(json.dumps(notebook), as_version=4)
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(ready, timeout=SECONDS, kernel_name="python3", resources=where).execute()
    done: Notebook = json.loads(nbformat.writes(ready))
    done["metadata"] = notebook["metadata"]
    for cell in done["cells"]:
        cell["metadata"] = {}  # the times of the run
    return done


def write(path: Path, notebook: Notebook) -> None:
    path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def stale() -> list[str]:
    """Names of sources whose kept notebook is missing or has other cells, and of notebooks without a source."""
    known = {path.stem: path for path in sources()}
    kept = {path.stem: path for path in FOLDER.glob("*.ipynb")}
    other = [
        name
        for name in known.keys() & kept.keys()
        if cells_of(notebook_of(known[name].read_text())) != cells_of(json.loads(kept[name].read_text()))
    ]
    return sorted({*other, *(known.keys() ^ kept.keys())})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="e.g. 01_quickstart (default: all)")
    parser.add_argument("--check", action="store_true", help="only compare cells; exit code 1: stale")
    parser.add_argument("--output", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    if options.check:
        for name in stale():
            print(f"notebooks/{name}.ipynb is stale: run `make notebooks`", file=sys.stderr)
        return int(bool(stale()))
    unknown = set(options.names) - {path.stem for path in sources()}
    if unknown:
        parser.error(f"no such source: {', '.join(sorted(unknown))}")
    options.output.mkdir(parents=True, exist_ok=True)
    for path in sources():
        if options.names and path.stem not in options.names:
            continue
        begin = time.perf_counter()
        write(options.output / f"{path.stem}.ipynb", executed(notebook_of(path.read_text())))
        print(f"{path.stem}: {time.perf_counter() - begin:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
