"""How the commands speak: progress in each mode, colours, narrow terminals, Ctrl-C, completion."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import Result

from qwen_quantize.cli.console import Speaker
from qwen_quantize.cli.guard import guard

Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parent.parent.parent
COMMAND = [sys.executable, "-m", "qwen_quantize"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


def steps(speaker: Speaker, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with speaker.progress("quantize") as progress:
        for done in range(1, 5):
            progress("layers", done, 4)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_a_pipe_gets_the_last_step_at_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(Speaker(as_json=False, quiet=False), capsys) == ["quantize: layers 4/4"]


def test_verbose_says_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = steps(Speaker(as_json=False, quiet=False, verbose=True), capsys)
    assert [line.partition(",")[0] for line in lines] == [
        f"quantize: layers {done}/4" for done in range(1, 5)
    ]
    assert all("s left" in line for line in lines[:-1])


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert steps(Speaker(as_json=False, quiet=True), capsys) == []


def test_json_progress_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    events = [json.loads(line) for line in steps(Speaker(as_json=True, quiet=False, verbose=True), capsys)]
    assert [event["done"] for event in events] == [1, 2, 3, 4]
    assert events[-1] == {
        "event": "progress", "stage": "quantize", "what": "layers", "done": 4, "total": 4, "seconds_left": None,
    }  # fmt: skip
    assert all(event["seconds_left"] >= 0 for event in events[:-1])


def test_a_run_with_json_has_one_document_and_events(run: Run, tiny_source: Path, tmp_path: Path) -> None:
    result = run(
        "--model-path", tiny_source, "--output-path", tmp_path / "out", "--device", "ascend", "--no-validate",
        "--json", "--verbose",
    )  # fmt: skip
    assert result.exit_code == 0
    assert json.loads(result.stdout)["method"] == "ue8m0"
    events = [json.loads(line) for line in result.stderr.splitlines() if line.startswith("{")]
    assert events
    assert {event["stage"] for event in events} == {"quantize"}
    assert events[-1]["done"] == events[-1]["total"]


def test_ctrl_c_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    for resumable, said in ((True, "--resume"), (False, "interrupted\n")):
        with pytest.raises(typer.Exit) as stopped, guard(False, resumable=resumable):
            raise KeyboardInterrupt
        assert stopped.value.exit_code == 130
        assert said in capsys.readouterr().err


def in_terminal(arguments: list[str], columns: int, **environment: str) -> str:
    """What a command writes to a terminal of that width."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**ENVIRONMENT, "COLUMNS": str(columns), **environment},
    )
    os.close(theirs)
    found = b""
    try:
        while select.select([ours], [], [], 120)[0]:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed
                break
            if not part:
                break
            found += part
    finally:
        os.close(ours)
        process.kill()
        process.wait()
    return found.decode().replace("\r\n", "\n")


def test_narrow_terminals_and_colours() -> None:
    text = in_terminal(["chips", "show", "example"], 40)
    assert "\x1b[" in text
    plain = in_terminal(["chips", "show", "example"], 40, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain), "a colour in spite of NO_COLOR"
    bare = re.sub(r"\x1b\[[0-9;]*m", "", plain)
    assert "example" in bare
    assert max(map(len, bare.splitlines())) <= 40


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str) -> None:
    done = subprocess.run(
        COMMAND,
        env={**ENVIRONMENT, "_QWEN_QUANTIZE_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
    )
    assert "_QWEN_QUANTIZE_COMPLETE" in done.stdout
    words = {"COMP_WORDS": "qwen_quantize co", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "qwen_quantize co"}
    action = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"} if shell == "fish" else {}
    done = subprocess.run(
        COMMAND,
        env={**ENVIRONMENT, **words, **action, "_QWEN_QUANTIZE_COMPLETE": f"complete_{shell}"},
        capture_output=True,
        text=True,
    )
    assert "compare" in done.stdout
    assert "regress" not in done.stdout
