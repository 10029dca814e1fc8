"""`eval --tasks`: local tasks from end to end, against a recorded run, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from qwen_quantize.cli import tasks as cli_tasks
from qwen_quantize.eval.local_tasks import LOCAL_TASKS
from tools import local_tasks

Run = Callable[..., Result]
NEEDS_HARNESS = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-evaluation-harness is not installed"
)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without lm-evaluation-harness, whether it is installed here or not."""
    monkeypatch.setattr(cli_tasks, "has_harness", lambda: False)


@pytest.fixture
def ask(run: Run, alone: None) -> Callable[..., dict[str, Any]]:  # noqa: ARG001
    def call(*arguments: object) -> dict[str, Any]:
        result = run("eval", *arguments, "--threads", 1, "--json", "--quiet")
        assert result.exit_code == 0, result.output
        record: dict[str, Any] = json.loads(result.stdout)
        return record

    return call


def test_local_items_are_fresh() -> None:
    assert local_tasks.main(["--check"]) == 0, "run `python tools/local_tasks.py`"


def test_the_embedded_model_knows_its_language(ask: Callable[..., dict[str, Any]]) -> None:
    record = ask("embedded:dense", "--tasks", "heldout_word", "--limit", 40)
    (task,) = record["tasks"]
    assert (task["name"], task["items"], task["metric"], task["flips"]) == ("heldout_word", 40, "acc", None)
    assert task["lower"] > 0.25  # which guessing would have
    assert task["lower"] < task["accuracy"] < task["upper"]
    assert 0 < task["standard_error"] < 0.2
    assert record["harness"] == "qwen_quantize"


def test_flips_against_a_recorded_run(ask: Callable[..., dict[str, Any]], run: Run, tmp_path: Path) -> None:
    path = tmp_path / "before.json"
    ask("embedded:dense", "--tasks", "heldout", "--limit", 12, "--record", path)
    kept = json.loads(path.read_text())
    assert [task["name"] for task in kept["tasks"]] == list(LOCAL_TASKS)
    word = kept["tasks"][1]
    right = [place for place, correct in enumerate(word["correct"]) if correct]
    wrong = [place for place, correct in enumerate(word["correct"]) if not correct]
    assert len(right) >= 2
    assert wrong
    for place in (*right[:2], wrong[0]):
        word["correct"][place] = not word["correct"][place]
    path.write_text(json.dumps(kept))
    record = ask("embedded:dense", "--tasks", "heldout_word,heldout_cloze", "--limit", 12, "--against", path)
    changed, same = record["tasks"]
    assert changed["flips"] == {"right_to_wrong": 1, "wrong_to_right": 2}
    assert changed["difference"] == pytest.approx(1 / 12)
    assert changed["p_change"] == 1.0
    assert same["flips"] == {"right_to_wrong": 0, "wrong_to_right": 0}
    asked = ("eval", "embedded:dense", "--tasks", "heldout_word", "--against", path)
    shown = run(*asked, "--limit", 12)
    assert "1 right -> wrong, 2 wrong -> right, McNemar p = 1" in shown.output
    other = run(*asked, "--limit", 11)
    assert other.exit_code == 2
    assert "only one of them has item" in other.output


def test_another_folder_is_asked_the_same(
    ask: Callable[..., dict[str, Any]], tiny_source: Path, model: Path
) -> None:
    record = ask(model, "--tasks", "heldout_cloze", "--limit", 3, "--against", tiny_source)
    (task,) = record["tasks"]
    assert record["against"] == str(tiny_source)
    assert task["accuracy"] == task["reference_accuracy"]
    assert task["flips"] == {"right_to_wrong": 0, "wrong_to_right": 0}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--limit", 5), "--limit says nothing beside a text"),
        (("--tasks", "heldout", "--length", 64), "--length says nothing beside --tasks"),
        (("--tasks", "heldout_word,heldout"), "names heldout_word twice"),
        (("--tasks", " , "), "names no task"),
        (("--tasks", "gsm8k"), "pip install 'qwen-quantize[eval]'"),
        (("--tasks", "heldout", "--chat"), "needs lm-evaluation-harness"),
        (("--tasks", "heldout", "--record", "run.safetensors"), "ends in .json"),
        (("--tasks", "heldout", "--against", "nothing.json"), "nothing.json cannot be read"),
    ],
)
@pytest.mark.usefixtures("alone")
def test_what_is_refused(arguments: tuple[object, ...], words: str, run: Run) -> None:
    result = run("eval", "embedded:dense", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


# --- through lm-evaluation-harness, which takes many seconds to import ---


def harness(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qwen_quantize", "eval", *map(str, arguments), "--threads", "1"]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.slow
@NEEDS_HARNESS
def test_the_harness_finds_the_same_answers(ask: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "alone.json"
    expected = ask("embedded:dense", "--tasks", "heldout", "--limit", 20, "--record", path)
    asked = ("embedded:dense", "--tasks", "heldout", "--limit", 20, "--against", path, "--json", "--quiet")
    done = harness(*asked, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["harness"].startswith("lm-eval ")
    for found, ours in zip(record["tasks"], expected["tasks"], strict=True):
        assert {key: found[key] for key in ours if key != "flips"} == {
            key: value for key, value in ours.items() if key != "flips"
        }
        assert found["flips"] == {"right_to_wrong": 0, "wrong_to_right": 0}


@pytest.mark.slow
@NEEDS_HARNESS
def test_own_tasks_and_groups(tmp_path: Path) -> None:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "data.jsonl").write_text('{"q": "It was a", "a": "no such answer"}\n' * 3)
    (folder / "written.yaml").write_text(
        "task: written\ndataset_path: json\noutput_type: generate_until\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'data.jsonl'}}}}}\n"
        'doc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 4, do_sample: false}\n'
        "metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]\n"
    )
    for name in ("first", "second"):
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\noutput_type: multiple_choice\ntest_split: test\n"
            f"dataset_kwargs: {{data_files: {{test: {local_tasks.FOLDER / 'heldout_word.jsonl'}}}}}\n"
            'doc_to_text: "{{context}}"\ndoc_to_choice: choices\ndoc_to_target: answer\ntarget_delimiter: ""\n'
            "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n"
        )
    (folder / "pair.yaml").write_text("group: pair\ntask: [first, second]\n")
    asked = ("--tasks", "written,pair", "--limit", 3, "--tasks-folder", folder, "--json")
    done = harness("embedded:dense", *asked, HF_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    written, pair = json.loads(done.stdout)["tasks"]
    assert (written["items"], written["accuracy"], written["metric"]) == (3, 0.0, "exact_match")
    assert (pair["items"], pair["metric"]) == (6, "acc")
    first, second = pair["parts"]
    assert (first["name"], second["name"]) == ("first", "second")
    assert first["items"] == second["items"] == 3
    assert first["accuracy"] == second["accuracy"] == pair["accuracy"]


@pytest.mark.slow
@NEEDS_HARNESS
def test_data_that_cannot_be_had_are_named(tmp_path: Path) -> None:
    done = harness(
        "embedded:dense", "--tasks", "gsm8k", "--limit", 2, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 2
    assert "the data of task gsm8k (data set openai/gsm8k) cannot be had here" in done.stderr
    unknown = harness("embedded:dense", "--tasks", "gsm8kk", HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1")
    assert unknown.returncode == 2
    assert "did you mean gsm8k" in unknown.stderr
