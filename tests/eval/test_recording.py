"""A recorded run: the same again after reading, and refused when anything about the file is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.errors import UserError
from qwen_quantize.eval.recording import (
    METADATA_KEY,
    RecordedRun,
    RunAbout,
    check_comparable,
    check_record_path,
    is_recording,
    read_run,
    write_run,
)
from qwen_quantize.eval.token_scores import ScoreRecorder

ABOUT = RunAbout(
    tool_version="0.1.0",
    model="models/a",
    model_fingerprint="ab" * 32,
    manifest_sha256="",
    chip="example",
    versions={"firmware": "1.2"},
    with_claims=False,
    arithmetic={"cast.rounding": "rne"},
    arithmetic_fingerprint="cd" * 32,
    text="novel.txt",
    text_sha256="ef" * 32,
    max_tokens=64,
)


@pytest.fixture
def run() -> RecordedRun:
    """Three windows of 8 predictions, added in two batches."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(24, 30, generator=generator).log_softmax(-1)
    targets = torch.randint(30, (24,), generator=generator)
    recorder = ScoreRecorder()
    recorder.add(scores[:10], targets[:10])
    recorder.add(scores[10:], targets[10:])
    return RecordedRun(ABOUT, recorder.scores(["one", "one", "two"]))


@pytest.fixture
def file(run: RecordedRun, tmp_path: Path) -> Path:
    path = tmp_path / "run.safetensors"
    write_run(path, run)
    return path


def metadata(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"][METADATA_KEY])


def edit(path: Path, tensors: dict[str, torch.Tensor] | None = None, **changes: Any) -> None:
    """Write the file again with other tensors or metadata; a value of None removes an entry."""
    about = {key: value for key, value in {**metadata(path), **changes}.items() if value is not None}
    stored = {**load_file(path), **(tensors or {})}
    save_file(stored, path, metadata={METADATA_KEY: json.dumps(about)})


def test_the_recorder_keeps_what_the_model_said(run: RecordedRun) -> None:
    scores = run.scores
    assert (scores.tokens, scores.windows, scores.window_tokens) == (24, 3, 8)
    assert scores.documents == ("one", "two")
    assert scores.window_documents.tolist() == [0, 0, 1]
    generator = torch.Generator().manual_seed(0)
    full = torch.randn(24, 30, generator=generator).log_softmax(-1)
    assert torch.equal(scores.log_probability, full[torch.arange(24), scores.targets])
    assert torch.equal(scores.top_log_probabilities, full.sort(dim=1, descending=True).values[:, :8])
    assert torch.equal(full.gather(1, scores.top_ids), scores.top_log_probabilities)


def test_round_trip(run: RecordedRun, file: Path) -> None:
    again = read_run(file)
    assert again.about == run.about
    for name in ("log_probability", "targets", "top_ids", "top_log_probabilities", "window_documents"):
        assert torch.equal(getattr(again.scores, name), getattr(run.scores, name))
    assert again.scores.documents == run.scores.documents
    assert is_recording(file)
    assert metadata(file)["format"] == 1


def test_the_same_run_is_the_same_bytes(run: RecordedRun, file: Path) -> None:
    first = file.read_bytes()
    write_run(file, run)
    assert file.read_bytes() == first


def test_predictions_that_are_no_numbers_survive(run: RecordedRun, tmp_path: Path) -> None:
    broken = run.scores.log_probability.clone()
    broken[2], broken[3] = torch.nan, -torch.inf
    write_run(tmp_path / "x.safetensors", RecordedRun(ABOUT, replace(run.scores, log_probability=broken)))
    found = read_run(tmp_path / "x.safetensors").scores.log_probability
    assert found[2].isnan()
    assert found[3] == -torch.inf


def test_odd_paths_become_one_line(run: RecordedRun, tmp_path: Path) -> None:
    odd = replace(ABOUT, model="a\nb\udc80", text="x" * 9000)
    path = tmp_path / "x.safetensors"
    write_run(path, RecordedRun(odd, replace(run.scores, documents=("a\tb", "two"))))
    again = read_run(path)
    assert again.about.model == "a\\nb\\udc80"
    assert len(again.about.text) == 4096
    assert again.scores.documents == ("a\\tb", "two")


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def huge_header(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")


def no_metadata(path: Path) -> None:
    save_file(load_file(path), path, metadata={"format": "pt"})


def metadata_is_no_json(path: Path) -> None:
    save_file(load_file(path), path, metadata={METADATA_KEY: "{"})


def deep_metadata(path: Path) -> None:
    save_file(load_file(path), path, metadata={METADATA_KEY: "[" * 100_000})


def missing_tensor(path: Path) -> None:
    about = json.dumps(metadata(path))
    tensors = load_file(path)
    del tensors["targets"]
    save_file(tensors, path, metadata={METADATA_KEY: about})


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda path: edit(path, {name: change(load_file(path)[name]).contiguous()})


def put(name: str, place: tuple[int, ...], value: float) -> Callable[[Path], None]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return changed(name, change)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "truncated"),
        (huge_header, "declares a header"),
        (no_metadata, "no recorded run"),
        (metadata_is_no_json, "not valid JSON"),
        (deep_metadata, "nested too deeply|not valid JSON"),
        (missing_tensor, "must hold the tensors"),
        (lambda path: edit(path, {"more": torch.zeros(1)}), "must hold the tensors"),
        (lambda path: edit(path, format=2), "has the format 2"),
        (lambda path: edit(path, documents="one"), "list of names"),
        (lambda path: edit(path, documents=["one"]), "outside the 1 documents"),
        (lambda path: edit(path, arithmetic=["rne"]), "'arithmetic' must map"),
        (lambda path: edit(path, arithmetic={"cast.rounding": 3}), "'arithmetic' must map"),
        (lambda path: edit(path, chip="a\nb"), "'chip' must be a line"),
        (lambda path: edit(path, with_claims="no"), "'with_claims' must be true or false"),
        (lambda path: edit(path, max_tokens=True), "'max_tokens' must be a whole number"),
        (lambda path: edit(path, text_sha256=None), "'text_sha256' must be a line"),
        (changed("log_probability", torch.Tensor.double), "must be F32 with 1 dimensions"),
        (changed("log_probability", lambda x: x.view(3, 8)), "must be F32 with 1 dimensions"),
        (changed("targets", lambda x: x[:20]), "not of the same 24 predictions"),
        (changed("top_ids", lambda x: x[:, :3]), "not of the same 24 predictions"),
        (changed("window_documents", lambda x: x[:0]), "do not fill 0 windows"),
        (changed("window_documents", lambda x: x.new_zeros(5)), "do not fill 5 windows"),
        (put("log_probability", (4,), 0.5), "above 0"),
        (put("top_log_probabilities", (4, 0), 0.5), "above 0"),
        (put("top_log_probabilities", (4, 7), -0.001), "must fall along each row"),
        (changed("top_log_probabilities", torch.zeros_like), "sum to more than 1"),
        (put("targets", (1,), -1), "negative token ids"),
        (put("top_ids", (1, 1), -1), "negative token ids"),
        (changed("top_ids", torch.zeros_like), "names a token twice"),
        (put("window_documents", (1,), 7), "outside the 2 documents"),
    ],
)
def test_hostile_files_are_refused(file: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(file)
    with pytest.raises(UserError, match=message) as error:
        read_run(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda run: replace(run, about=replace(run.about, text_sha256="0")), "SHA-256 of the text"),
        (
            lambda run: replace(
                run, scores=replace(run.scores, window_documents=torch.zeros(4, dtype=torch.int64))
            ),
            "number of windows",
        ),
        (
            lambda run: replace(
                run, scores=replace(run.scores, log_probability=run.scores.log_probability[:12])
            ),
            "number of tokens",
        ),
        (lambda run: replace(run, scores=replace(run.scores, targets=run.scores.targets + 1)), "tokenizers"),
    ],
)
def test_only_runs_of_the_same_tokens_compare(
    run: RecordedRun, other: Callable[[RecordedRun], RecordedRun], message: str
) -> None:
    check_comparable(run, run, ("a", "b"))
    with pytest.raises(UserError, match=f"a and b cannot be compared.*{message}"):
        check_comparable(run, other(run), ("a", "b"))


def test_where_a_run_may_be_written(file: Path, tmp_path: Path) -> None:
    check_record_path(file)  # its own kind may be replaced
    check_record_path(tmp_path / "new.safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, message in (
        ("model.safetensors", "is no recorded run"),
        ("folder.safetensors", "is a folder"),
        ("absent/run.safetensors", "there is no folder"),
        ("run.json", "ends in .safetensors"),
    ):
        with pytest.raises(UserError, match=message):
            check_record_path(tmp_path / name)
