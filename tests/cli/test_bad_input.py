"""Whatever is wrong with the input: one clear line, exit code 2, and nothing written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

Run = Callable[..., Result]


def first_shard(model: Path) -> Path:
    return sorted(model.glob("*.safetensors"))[0]


def edit_json(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def no_such_folder(model: Path, _data: Path) -> None:
    model.rename(model.with_name("elsewhere"))


def no_config(model: Path, _data: Path) -> None:
    (model / "config.json").unlink()


def unknown_architecture(model: Path, _data: Path) -> None:
    edit_json(model / "config.json", lambda c: c.update(architectures=["MambaForCausalLM"]))


def missing_shard(model: Path, _data: Path) -> None:
    first_shard(model).unlink()


def truncated_shard(model: Path, _data: Path) -> None:
    shard = first_shard(model)
    shard.write_bytes(shard.read_bytes()[:-1000])


def lying_header(model: Path, _data: Path) -> None:
    shard = first_shard(model)
    data = shard.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    name = next(key for key in header if key != "__metadata__")
    header[name]["data_offsets"][1] += 4_000_000
    encoded = json.dumps(header).encode()
    shard.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + size :])


def escaping_shard(model: Path, _data: Path) -> None:
    def change(index: dict) -> None:
        name = next(iter(index["weight_map"]))
        index["weight_map"][name] = "../model.safetensors"

    edit_json(model / "model.safetensors.index.json", change)


def only_pickle(model: Path, _data: Path) -> None:
    for shard in model.glob("*.safetensors*"):
        shard.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x02")


def nan_weight(model: Path, _data: Path) -> None:
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        name = "model.layers.1.mlp.up_proj.weight"
        if name in tensors:
            tensors[name][3, 5] = float("nan")
            save_file(tensors, shard, metadata={"format": "pt"})


def infinite_norm(model: Path, _data: Path) -> None:
    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        if "model.norm.weight" in tensors:
            tensors["model.norm.weight"][0] = float("inf")
            save_file(tensors, shard, metadata={"format": "pt"})


def missing_tensor(model: Path, _data: Path) -> None:
    def change(index: dict) -> None:
        del index["weight_map"]["model.layers.2.self_attn.o_proj.weight"]

    for shard in model.glob("*.safetensors"):
        tensors = load_file(shard)
        if tensors.pop("model.layers.2.self_attn.o_proj.weight", None) is not None:
            save_file(tensors, shard, metadata={"format": "pt"})
    edit_json(model / "model.safetensors.index.json", change)


def wrong_sizes(model: Path, _data: Path) -> None:
    edit_json(model / "config.json", lambda c: c.update(intermediate_size=256))


def no_dataset(_model: Path, data: Path) -> None:
    data.unlink()


def empty_dataset(_model: Path, data: Path) -> None:
    data.write_text("")


def no_usable_column(_model: Path, data: Path) -> None:
    data.write_text('{"question_id": 4, "label": "yes"}\n')


def broken_line(_model: Path, data: Path) -> None:
    lines = data.read_text().splitlines()
    lines[2] = '{"text": "w1 w2'
    data.write_text("\n".join(lines))


def tiny_dataset(_model: Path, data: Path) -> None:
    data.write_text('{"text": "w1 w2"}\n')


CASES = [
    (no_such_folder, ["model"]),
    (no_config, ["config.json"]),
    (unknown_architecture, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
    (missing_shard, ["model-00001-of-0000"]),
    (truncated_shard, ["model-00001-of-0000", "truncated"]),
    (lying_header, ["model-00001-of-0000"]),
    (escaping_shard, ["../model.safetensors"]),
    (only_pickle, ["pickle"]),
    (nan_weight, ["model.layers.1.mlp.up_proj.weight", "nan", "[3, 5]"]),
    (infinite_norm, ["model.norm.weight", "inf"]),
    (missing_tensor, ["model.layers.2.self_attn.o_proj.weight"]),
    (wrong_sizes, ["256"]),
    (no_dataset, ["calib.jsonl"]),
    (empty_dataset, ["calib.jsonl", "empty"]),
    (no_usable_column, ["question_id", "label", "text"]),
    (broken_line, ["calib.jsonl", "3"]),
    (tiny_dataset, ["calib.jsonl"]),
]


def assert_refused(result: Result, tmp_path: Path, fragments: list[str]) -> None:
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, result.stderr
    for fragment in fragments:
        assert fragment in lines[0]
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*")), "a staging folder was left behind"


@pytest.mark.parametrize(("spoil", "fragments"), CASES, ids=[case[0].__name__ for case in CASES])
def test_bad_input(
    spoil: Callable[[Path, Path], None],
    fragments: list[str],
    model: Path,
    dataset: Path,
    tmp_path: Path,
    run: Run,
) -> None:
    spoil(model, dataset)
    result = run(
        "--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2",
        "--calibration-dataset", dataset, "--calibration-length", 32, "--calibration-samples", 8,
    )  # fmt: skip
    assert_refused(result, tmp_path, fragments)


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--device", "ascent"], ["ascent", "ascend"]),
        (["--device", "ascend", "--quant-method", "ue8m1"], ["ue8m1", "ue8m0"]),
        (["--device", "ascend-910b"], ["ascend-910b", "w8a8", "--allow-unsupported"]),
        (["--device", "ascend", "--ignore", "attention"], ["--ignore", "attention"]),
        (["--device", "ascend", "--include", "nothing.*"], ["--include", "nothing.*"]),
        (["--device", "ascend", "--ignore", "q_proj"], ["q_proj", "k_proj"]),
        (["--device", "ascend", "--assume", "cast.rounding"], ["key=value"]),
        (["--device", "ascend", "--assume", "cast.roundin=rtz"], ["cast.roundin", "cast.rounding"]),
        (["--device", "ascend", "--max-memory", "lots"], ["lots"]),
        (["--device", "ascend", "--max-memory", "1MB"], ["--max-memory"]),
        (["--device", "ascend", "--block-size", "100"], ["100"]),
    ],
)
def test_bad_options(options: list[str], fragments: list[str], model: Path, tmp_path: Path, run: Run) -> None:
    result = run("--model-path", model, "--output-path", tmp_path / "out", *options)
    assert_refused(result, tmp_path, fragments)


def test_missing_device(model: Path, tmp_path: Path, run: Run) -> None:
    assert_refused(run("--model-path", model), tmp_path, ["--device"])


def test_output_folder_in_use(model: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious.txt").write_text("keep me")
    result = run("--model-path", model, "--output-path", out, "--device", "ascend")
    assert result.exit_code == 2
    assert "--overwrite" in result.stderr
    assert [file.name for file in out.iterdir()] == ["precious.txt"]
    assert not list(tmp_path.glob(".out*"))


def test_disk_full_is_resumable(
    model: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    real, calls = os.pwrite, []

    def full(descriptor: int, data: bytes, offset: int) -> int:
        calls.append(offset)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data, offset)

    command = ["--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2"]
    monkeypatch.setattr(os, "pwrite", full)
    result = run(*command)
    assert result.exit_code == 2, result.output
    assert "--resume" in result.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(os, "pwrite", real)
    assert run(*command, "--no-validate", "--resume").exit_code == 0
    assert run(
        "--model-path", model, "--output-path", tmp_path / "whole", "--device", "example@1.2", "--no-validate"
    ).exit_code == 0  # fmt: skip
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


def test_allow_unsupported_goes_on_and_says_what_will_happen(model: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    result = run(
        "--model-path", model, "--output-path", out, "--device", "ascend-910b", "--allow-unsupported",
        "--no-validate",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    said = json.dumps(manifest["notes"]) + json.dumps(manifest["chip"]) + json.dumps(manifest["assumptions"])
    assert "E4M3" in said or "e4m3" in said
    assert (
        torch.float8_e4m3fn == load_file(out / "model.safetensors")["model.layers.0.mlp.up_proj.weight"].dtype
    )
