"""Write docs/reference/commands.md from the program's own option tables; with --check only say whether it is fresh."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import typer

from qwen_quantize.cli.main import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "commands.md"
_HEAD = """# Commands

Written by `tools/command_reference.py` from the program itself; `qwen_quantize COMMAND --help` says the same.
Exit codes and the keys that `--json` prints stand in the README.
"""


def reference() -> str:
    """The whole page."""
    return "\n".join([_HEAD, *_sections(typer.main.get_command(app), ("qwen_quantize",))])


def _sections(command: Any, path: tuple[str, ...]) -> list[str]:
    lines = [f"## `{' '.join(path)}`", ""]
    said = (command.help or "").strip()
    if said:
        lines += [_escaped(re.sub(r"[ \t]*\n[ \t]*", "\n", said)), ""]
    rows = [_row(parameter) for parameter in command.params if not _is_completion(parameter)]
    if rows:
        lines += ["| argument or option | what | default |", "| --- | --- | --- |", *rows, ""]
    for name, inner in getattr(command, "commands", {}).items():
        lines += _sections(inner, (*path, name))
    return lines


def _is_completion(parameter: Any) -> bool:
    return parameter.name in ("install_completion", "show_completion", "help")


def _row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        name = f"`{(parameter.name or '').upper()}`" + ("" if parameter.required else " (optional)")
    else:
        value = "" if parameter.is_flag else f" {(parameter.metavar or parameter.name or '').upper()}"
        names = [*parameter.opts, *parameter.secondary_opts]
        name = ", ".join(f"`{option}{value}`" for option in names)
        name += " (required)" if parameter.required else ""
        name += ", repeatable" if parameter.multiple else ""
    default = parameter.default
    shown = "" if default is None or callable(default) or not _is_plain(default) else f"`{default}`"
    return f"| {name} | {_escaped(getattr(parameter, 'help', None) or '')} | {shown} |"


def _is_plain(default: object) -> bool:
    return isinstance(default, str | int | float) and default is not False and default != ""


def _escaped(text: str) -> str:
    """What would be taken for a table's edge or for HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 with --check where the page is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    made = reference()
    if check:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == made else 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
