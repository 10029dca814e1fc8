"""`qwen_quantize check`: exit codes, the JSON document, the table, and the check after every write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import Result

from qwen_quantize.cli import check as command
from qwen_quantize.cli.console import Speaker

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def written(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A folder that this program wrote, and what it printed about it."""
    from typer.testing import CliRunner

    from qwen_quantize.cli.main import app

    out = tmp_path_factory.mktemp("written") / "out"
    arguments = ["--model-path", str(tiny_source), "--output-path", str(out), "--device", "ascend"]
    result = CliRunner().invoke(app, [*arguments, "--quant-method", "ue8m0", "--no-validate", "--json"])
    assert result.exit_code == 0, result.output
    return out, json.loads(result.stdout)


def spoil(folder: Path, out: Path) -> str:
    """A copy in which one scale is 0, and that scale's name."""
    out.mkdir()
    for file in folder.iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(out / "model.safetensors")
    name: str = next(name for name in tensors if name.endswith("_scale_inv"))
    tensors[name][0, 0] = 0
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return name


def test_a_sound_folder(written: tuple[Path, dict[str, object]], run: Run) -> None:
    result = run("check", written[0])
    assert result.exit_code == 0
    assert "nothing to object to" in result.output
    assert "vllm" in result.output


def test_the_write_was_checked(written: tuple[Path, dict[str, object]]) -> None:
    folder, printed = written
    manifest = json.loads((folder / "qwen_quantize.json").read_text())
    assert printed["check"] == manifest["check"]
    assert manifest["check"]["findings"] == []
    assert [engine["name"] for engine in manifest["check"]["engines"]] == ["vllm", "sglang", "transformers"]


def test_findings_are_exit_code_1_and_json(
    written: tuple[Path, dict[str, object]], tmp_path: Path, run: Run
) -> None:
    name = spoil(written[0], tmp_path / "spoiled")
    result = run("check", tmp_path / "spoiled", "--engine", "vllm", "--json")
    assert result.exit_code == 1
    record = json.loads(result.stdout)
    (finding,) = record["findings"]
    assert (finding["tensor"], finding["rule"], finding["severity"]) == (name, "scale-value", "error")
    assert finding["message"]
    assert finding["remedy"]
    assert record["engines"] == [{"name": "vllm", "tested": "0.33.0", "asked": True}]
    assert (record["layout"], record["errors"]) == ("deepseek-fp8", 1)
    assert record["tensors"] > 0
    assert "scale-value" in result.stderr


def test_words_for_a_pipe_and_a_table_for_a_terminal(
    written: tuple[Path, dict[str, object]], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = spoil(written[0], tmp_path / "spoiled")
    line = run("check", tmp_path / "spoiled").stdout.splitlines()[0]
    assert line.startswith(f"error scale-value: {name}: ")
    assert "to mend it" in line
    monkeypatch.setattr(Speaker, "terminal", True)
    assert "how to mend it" in run("check", tmp_path / "spoiled").stdout
    assert run("check", tmp_path / "spoiled", "--quiet").stdout == ""


def test_devices_that_share_the_model(written: tuple[Path, dict[str, object]], run: Run) -> None:
    record = json.loads(run("check", written[0], "--tp", "3", "--json").stdout)
    assert "tp-heads" in {finding["rule"] for finding in record["findings"]}


def test_a_chip_that_the_engine_does_not_serve(written: tuple[Path, dict[str, object]], run: Run) -> None:
    result = run("check", written[0], "--engine", "vllm", "--device", "ascend-910b", "--json")
    assert result.exit_code == 1
    assert "engine-device" in {finding["rule"] for finding in json.loads(result.stdout)["findings"]}


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["nowhere"], "no folder"),
        (["."], "config.json"),
        ([".", "--engine", "vllm2"], "--engine"),
        ([".", "--device", "abacus"], "abacus"),
    ],
)
def test_bad_input_is_exit_code_2(
    arguments: list[str], fragment: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("check", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert fragment in result.stderr


def test_a_config_that_is_no_json(tmp_path: Path, run: Run) -> None:
    (tmp_path / "config.json").write_text("{")
    assert run("check", tmp_path).exit_code == 2


def test_a_long_list_is_cut_in_words_and_whole_in_json(
    written: tuple[Path, dict[str, object]], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "spoiled"
    spoil(written[0], out)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    (out / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(command, "_SHOWN", 2)
    words = run("check", out).stdout
    assert "more; --json prints them all" in words
    assert len(json.loads(run("check", out, "--json").stdout)["findings"]) > 2
