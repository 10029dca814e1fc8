"""Turns what a user can cause into one sentence and an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from qwen_quantize.errors import UserError


@contextmanager
def guard(as_json: bool) -> Iterator[None]:
    """UserError: its sentence on stderr, exit code 2. Ctrl-C: how to resume, exit code 130."""
    try:
        yield
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        if as_json:
            sys.stdout.write(json.dumps({"error": str(error)}, ensure_ascii=False) + "\n")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; run the same command with --resume to go on\n")
        raise typer.Exit(130) from None
    except BrokenPipeError:
        raise typer.Exit(0) from None
