"""`qwen_quantize compare` on folders and results that the program itself wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open
from typer.testing import CliRunner, Result

from qwen_quantize.cli.main import app
from tests.tiny_models import words

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def results(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two folders of one model, and what `eval`, `bench`, `eval --record` and quantizing say of the first."""
    place = tmp_path_factory.mktemp("results")
    text = place / "text.txt"
    text.write_text(words(300))
    measured = ["--validation-text", text, "--validation-tokens", 128, "--json"]
    evaluated = ["eval", place / "fp8", "--text", text, "--max-tokens", 64, "--length", 32, "--json"]
    runs: list[tuple[str, list[object]]] = [
        ("made.json", ["--model-path", tiny_source, "--output-path", place / "fp8", "--device", "example@1.2",
                       *measured]),
        ("other.json", ["--model-path", tiny_source, "--output-path", place / "int4", "--device", "nvidia-h100",
                        "--quant-method", "rtn", "--group-size", 32, *measured]),
        ("eval.json", [*evaluated, "--record", place / "run.safetensors"]),
        ("bench.json", ["bench", place / "fp8", "--prompt-tokens", 4, "--new-tokens", 2, "--json"]),
    ]  # fmt: skip
    for name, arguments in runs:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
        (place / name).write_text(result.stdout)
    return place


def test_two_folders(results: Path, run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run("compare", results / "fp8", results / "int4", "--by", "size", "--html", page, "--json")
    assert result.exit_code == 0
    record = json.loads(result.stdout)
    assert [row["name"] for row in record["rows"]] == ["int4", "fp8"]
    assert record["comparable"] is True
    assert record["html"] == str(page)
    assert "fp8" in page.read_text()
    for row in record["rows"]:
        folder = results / row["name"]
        manifest = json.loads((folder / "qwen_quantize.json").read_text())
        assert row["kl_mean"] == manifest["validation"]["kl_mean"]
        assert row["output_bytes"] == manifest["output_bytes"]
        linears = {linear["name"] for layer in manifest["layers"] for linear in layer["linears"]}
        stored = 0
        with safe_open(folder / "model.safetensors", "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (this mapping cannot be iterated)
                tensor = tensors.get_tensor(name)
                stored += tensor.numel() * tensor.element_size() if name.rpartition(".")[0] in linears else 0
        assert row["linear_bytes"] == stored
    bits = {row["name"]: row["bits_per_weight"] for row in record["rows"]}
    assert 4 < bits["int4"] < 5.5
    assert 8 < bits["fp8"] < 8.5


def test_results_beside_folders(results: Path, run: Run) -> None:
    names = ("int4", "fp8", "bench.json", "made.json")
    result = run("compare", *(results / name for name in names), "--by", "speed", "--json")
    assert result.exit_code == 0
    first = json.loads(result.stdout)["rows"][0]
    assert first["name"] == "fp8"
    bench, made = (json.loads((results / name).read_text()) for name in names[2:])
    assert first["decode_tokens_per_second"] == bench["decode_tokens_per_second"]
    assert first["quantize_memory_bytes"] == made["peak_memory_bytes"]


def test_other_text_is_marked_and_ends_in_one(results: Path, run: Run) -> None:
    files = [results / name for name in ("eval.json", "int4")]
    result = run("compare", *files)
    assert result.exit_code == 1
    assert "†" in result.stdout
    assert "cannot be compared in accuracy" in result.stdout
    assert run("compare", *files, "--by", "size").exit_code == 0


def test_a_result_brings_its_folder_and_a_recorded_run_has_the_same_perplexity(
    results: Path, run: Run
) -> None:
    result = run(
        "compare", results / "eval.json", results / "run.safetensors", "--by", "perplexity", "--json"
    )
    assert result.exit_code == 0
    rows = json.loads(result.stdout)["rows"]
    assert {row["name"] for row in rows} == {"fp8 (eval)", "fp8 (run)"}
    assert rows[0]["perplexity"] == pytest.approx(rows[1]["perplexity"], rel=1e-6)
    assert {row["method"] for row in rows} == {"ue8m0"}
    assert {row["versions"] for row in rows} == {"firmware 1.2"}


def test_words_for_a_pipe(results: Path, run: Run) -> None:
    result = run("compare", results / "fp8", results / "int4")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("result\tchip\t")
    assert {line.split("\t")[0] for line in lines[1:3]} == {"fp8", "int4"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["fp8", "--by", "beauty"], "--by 'beauty'"),
        (["fp8", "--html", "page.txt"], "ends in .html"),
        (["fp8", "--html", "none/page.html"], "there is no folder"),
        (["absent"], "is not there"),
        (["text.txt"], "not valid JSON"),
        (["odd.json"], "none of what can be compared"),
        (["empty"], "holds no qwen_quantize.json"),
        (["broken"], "no manifest of this program"),
        (["cut"], "truncated"),
    ],
)
def test_bad_requests(
    results: Path,
    run: Run,
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fp8", "text.txt"):
        (tmp_path / name).symlink_to(results / name)
    (tmp_path / "odd.json").write_text('{"verdict": "harmless"}')
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "qwen_quantize.json").write_text("{}")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "qwen_quantize.json").write_bytes((results / "fp8/qwen_quantize.json").read_bytes())
    (tmp_path / "cut" / "model.safetensors").write_bytes(
        (results / "fp8/model.safetensors").read_bytes()[:99]
    )
    before = sorted(tmp_path.iterdir())
    result = run("compare", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr
    assert sorted(tmp_path.iterdir()) == before
