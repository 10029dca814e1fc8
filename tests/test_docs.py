"""The site: generated parts are fresh, commands parse, links lead somewhere; and the README's blocks run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.test_documents import CODE, LINK, blocks, commands, complaint, prose, text_of
from tools import arithmetic_figures, command_reference, rotation_table

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))
SETTINGS = yaml.safe_load(text_of("mkdocs.yml"))
# What stands before a block, perhaps with an empty line between, and says why the block is not run.
MARK = re.compile(r"<!-- not run: (\S[^>]*?) -->\n\n?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_reference_of_commands_is_fresh() -> None:
    assert command_reference.main(["--check"]) == 0, "run `python tools/command_reference.py`"


def test_the_tables_of_rotations_are_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rotation_table.main(["--check"]) == 0, "run `python tools/rotation_table.py`"
    page = tmp_path / "rotate.md"
    page.write_text(rotation_table.PAGE.read_text(encoding="utf-8").replace("| w4a8 |", "| w4a9 |", 1))
    monkeypatch.setattr(rotation_table, "PAGE", page)
    assert rotation_table.main(["--check"]) == 1


def test_the_figures_are_fresh() -> None:
    assert arithmetic_figures.main(["--check"]) == 0, "run `python tools/arithmetic_figures.py`"


def test_stale_parts_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_reference, "PAGE", tmp_path / "commands.md")
    assert command_reference.main(["--check"]) == 1
    assert command_reference.main([]) == 0
    assert command_reference.main(["--check"]) == 0
    monkeypatch.setattr(arithmetic_figures, "FOLDER", tmp_path)
    monkeypatch.setattr(arithmetic_figures, "FIGURES", {"rounding": arithmetic_figures.rounding})
    assert arithmetic_figures.main(["--check"]) == 1
    assert arithmetic_figures.main([]) == 0
    assert arithmetic_figures.main(["--check"]) == 0


def test_every_page_is_in_the_navigation() -> None:
    listed: list[str] = []
    waiting = list(SETTINGS["nav"])
    while waiting:
        entry = waiting.pop()
        if isinstance(entry, str):
            listed.append(f"docs/{entry}")
        else:
            waiting += [inner for part in entry.values() for inner in part]
    assert sorted(listed) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_commands_of_the_site_parse(page: str) -> None:
    for arguments in commands(page, "qwen_quantize"):
        said = arguments[: arguments.index(">")] if ">" in arguments else arguments
        assert complaint(said) is None, f"{page}: {said}"


@pytest.mark.parametrize("page", PAGES)
def test_links_and_words_of_the_site(page: str) -> None:
    text = prose(text_of(page))
    for target in LINK.findall(text):
        assert "://" not in target
        assert ((ROOT / page).parent / target).is_file(), f"{page}: {target}"
    for span in CODE.findall(text):
        if re.fullmatch(r"(?:tools|qwen_quantize|docs)/[\w./-]+", span):
            assert (ROOT / span).exists(), f"{page}: {span}"
    assert not re.search(r"(?i)\bissue \d|\bsessions?\b|\bhelpers?\b|\bTODO\b", text)


def test_modules_of_the_api_page_exist() -> None:
    named = re.findall(r"^::: ([\w.]+)$", text_of("docs/reference/api.md"), re.MULTILINE)
    assert named
    for name in named:
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file()


# The README's blocks.


@dataclass(frozen=True, slots=True)
class Block:
    """why_not: what stands in a mark before it, None where it is to be run."""

    language: str
    content: str
    why_not: str | None


def readme_blocks(text: str) -> list[Block]:
    """In order; a mark belongs to the block right after it."""
    marked = {found.end(): found[1] for found in MARK.finditer(text)}
    return [Block(found[1], found[2], marked.get(found.end())) for found in BLOCK.finditer(text)]


def test_marks_belong_to_the_block_after_them() -> None:
    text = "<!-- not run: needs a chip -->\n```sh\na\n```\n\n```sh\nb\n```\n\n<!-- not run: big -->\n\n```sh\nc\n```\n"
    assert [(it.content, it.why_not) for it in readme_blocks(text)] == [
        ("a\n", "needs a chip"),
        ("b\n", None),
        ("c\n", "big"),
    ]


def test_both_editions_mark_the_same_blocks() -> None:
    english, chinese = (readme_blocks(text_of(name)) for name in ("README.md", "README.zh-CN.md"))
    assert [(it.content, it.why_not is None) for it in english] == [
        (it.content, it.why_not is None) for it in chinese
    ]
    assert len(english) == len(blocks(text_of("README.md")))


@pytest.mark.slow
def test_every_block_of_the_readme_runs(tmp_path: Path) -> None:
    """In one folder, top to bottom, as a reader would; MODEL is the embedded model, and few tokens are scored."""
    from qwen_quantize.embedded import calibration_text_path, embedded_model_path, heldout_text_path

    program = tmp_path / "bin" / "qwen_quantize"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" -m qwen_quantize "$@"\n')
    program.chmod(0o755)
    folder = tmp_path / "reader"
    folder.mkdir()
    places = (
        ("MODEL", embedded_model_path()),
        ("calib.jsonl", calibration_text_path()),
        ("heldout.txt", heldout_text_path()),
        ("qwen_quantize", ROOT / "qwen_quantize"),
        ("mine.toml", ROOT / "qwen_quantize" / "chip_profiles" / "example.toml"),
    )
    for name, place in places:
        (folder / name).symlink_to(place)
    environment = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    ran = 0
    for block in readme_blocks(text_of("README.md")):
        named = re.match(r"# ([\w.]+)\n", block.content)
        if block.language == "toml" and named is not None:
            (folder / named[1]).write_text(block.content)
        if block.why_not is not None or block.language != "sh":
            continue
        for line in block.content.replace("\\\n", " ").splitlines():
            command = for_a_test(line)
            if " OTHER " in command:  # statistics of another text, which no line makes
                made = for_a_test(
                    "qwen_quantize --collect OTHER --model-path MODEL --calibration-dataset heldout.txt"
                )
                command = f"{made} && {command}"
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
            )
            allowed = (0, 1) if re.search(" (regress|check|compare|doctor)( |$)", command) else (0,)
            assert done.returncode in allowed, f"{command}\n{done.stderr}"
            ran += 1
    assert ran >= 10


def for_a_test(line: str) -> str:
    """The same command on few tokens, and over a folder that an earlier line has made."""
    if not line.startswith("qwen_quantize "):
        return line
    line = re.sub(r"--max-tokens \d+", "--max-tokens 512", line)
    inner = line.split()[1]
    if inner == "eval" or (inner == "regress" and ".safetensors" not in line):
        few = "--limit 4" if "--tasks" in line else "--max-tokens 512"
        line += "" if few.split()[0] in line else f" {few}"
    elif "--from " in line:
        line += " --overwrite"
    elif "--output-path" in line or "--collect" in line:
        line = re.sub(r"--calibration-samples \d+ --calibration-length \d+", "", line)
        line += " --calibration-samples 2" if "--calibration-dataset" in line else ""
        line += "" if "--collect" in line else " --validation-tokens 256"
        line += "" if "--resume" in line else " --overwrite"
    return line
