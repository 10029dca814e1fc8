"""Turns what a user can cause into one sentence and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from qwen_quantize.cli.interrupt import command_begins
from qwen_quantize.errors import UserError


@contextmanager
def guard(as_json: bool, resumable: bool = False) -> Iterator[None]:
    """UserError: its sentence on stderr, exit code 2. Ctrl-C: exit code 130, and how to resume where one can."""
    try:
        command_begins()
        yield
    except UserError as error:
        _say(str(error), as_json)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        hint = "; run the same command with --resume to go on" if resumable else ""
        sys.stderr.write(f"interrupted{hint}\n")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(0) from None
    except OSError as error:
        # A file that cannot be read or written (too long a name, no permission): the system's own words.
        _say(f"{error.filename or 'input or output'}: {error.strerror or error}", as_json)
        raise typer.Exit(2) from None


def _say(message: str, as_json: bool) -> None:
    sys.stderr.write(f"error: {message}\n")
    if as_json:
        sys.stdout.write(json.dumps({"error": message}) + "\n")
