"""Statistics collected once: what is stored, that halves merge to the whole, and what is compiled from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from qwen_quantize.calibrators.observers import InputObserver
from qwen_quantize.checkpoint.safetensors_header import SafetensorsHeader
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.engine.load import ModelReader
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.collect import token_keys
from qwen_quantize.pipeline.compile import seen_by_chip
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.plan import make_plan
from qwen_quantize.pipeline.recipe import Recipe
from qwen_quantize.pipeline.statistics_folder import (
    StatisticsFolder,
    _read_tensor,
    merge_streams,
    read_statistics,
)
from tests.cli.test_resume import hashes
from tests.stopping import stopped_after
from tests.tiny_models import make_tiny, make_tokenizer, words

WINDOWS, LENGTH = 8, 32


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(words_of_the_answer: str, *arguments: object) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert words_of_the_answer in result.stderr


def make(folder: Path, family: str, **overrides: Any) -> Path:
    make_tiny(folder, family, **overrides)
    make_tokenizer(folder)
    return folder


def write_text(path: Path, seeds: range) -> Path:
    path.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in seeds))
    return path


def collect(model: Path, dataset: Path, out: Path, *more: object) -> StatisticsFolder:
    run(
        "--collect", out, "--model-path", model, "--calibration-dataset", dataset, "--calibration-length", LENGTH,
        "--calibration-samples", WINDOWS, *more,
    )  # fmt: skip
    return read_statistics(out)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(model, text, statistics) of a dense model; not written to by a test."""
    folder = tmp_path_factory.mktemp("dense")
    model = make(folder / "model", "qwen3", hidden_size=128, intermediate_size=192)
    dataset = write_text(folder / "calib.jsonl", range(6))
    collect(model, dataset, folder / "stats")
    return model, dataset, folder / "stats"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """(model, text, statistics) of a model with routed and shared experts; not written to by a test."""
    folder = tmp_path_factory.mktemp("sparse")
    model = make(folder / "model", "deepseek-v3", kv_lora_rank=32, q_lora_rank=64, v_head_dim=16)
    dataset = write_text(folder / "calib.jsonl", range(6))
    collect(model, dataset, folder / "stats")
    return model, dataset, folder / "stats"


def compiled(model: Path, stats: Path, out: Path, *more: object) -> dict[str, Any]:
    run(
        "--from-statistics", stats, "--model-path", model, "--output-path", out, "--no-validate",
        "--allow-unsupported", *more,
    )  # fmt: skip
    manifest: dict[str, Any] = json.loads((out / "qwen_quantize.json").read_text())
    return manifest


def test_the_first_half_equals_a_run_without_any_quantization(
    dense: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    """What the first layer's attention reads nothing has changed yet: same statistics, same codes."""
    model, dataset, stats = dense
    command = ["--device", "cpu", "--quant-method", "gptq"]
    run(
        "--model-path", model, "--output-path", tmp_path / "full", "--calibration-dataset", dataset,
        "--calibration-length", LENGTH, "--calibration-samples", WINDOWS, "--no-validate", *command,
    )  # fmt: skip
    manifest = compiled(model, stats, tmp_path / "out", *command)
    full = json.loads((tmp_path / "full" / "qwen_quantize.json").read_text())
    assert manifest["calibration"]["sha256"] == full["calibration"]["sha256"]
    assert manifest["calibration"]["tokens"] == full["calibration"]["tokens"]
    assert manifest["calibration"]["statistics"] == read_statistics(stats).sha256
    first = {linear["name"]: linear["sha256"] for linear in full["layers"][0]["linears"]}
    ours = {linear["name"]: linear["sha256"] for linear in manifest["layers"][0]["linears"]}
    for name in ("q_proj", "k_proj", "v_proj"):
        assert ours[f"model.layers.0.self_attn.{name}"] == first[f"model.layers.0.self_attn.{name}"]
    assert manifest["layers"][0]["streams"][0]["tokens"] == full["layers"][0]["streams"][0]["tokens"]


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_two_halves_merge_to_the_whole(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dataset, whole = request.getfixturevalue(kind)
    from qwen_quantize.pipeline import collect as module

    read, parts = module.read_calibration, []

    def half(first: int) -> Callable[..., Any]:
        def halved(*arguments: Any) -> Any:
            found = read(*arguments)
            from dataclasses import replace

            tokens = found.tokens[first : first + WINDOWS // 2]
            return replace(found, tokens=tokens, sha256=f"{found.sha256[:-1]}{first}")

        return halved

    for number, first in enumerate((0, WINDOWS // 2)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "read_calibration", half(first))
            parts.append(collect(model, dataset, tmp_path / f"part-{number}"))
    record = run(
        "statistics", "merge", tmp_path / "part-0", tmp_path / "part-1", "--output", tmp_path / "merged"
    )
    assert record["tokens"] == WINDOWS * LENGTH
    merged, expected = read_statistics(tmp_path / "merged"), read_statistics(whole)
    merged.verify()
    assert merged.manifest.layers == expected.manifest.layers
    for unit in expected.manifest.units:
        ours, theirs = merged.read(unit), expected.read(unit)
        for name, one in theirs.items():
            if name == "anyone":  # documented: spread over each part, not over the whole
                continue
            a, b = ours[name].statistics, one.statistics
            assert a.tokens == b.tokens
            assert torch.equal(a.histogram, b.histogram)
            assert torch.equal(ours[name].keys, one.keys)
            for x, y in zip(
                (a.amax, a.total, a.squares, *a.second_moments, a.sample.inputs, a.sample.weight),  # type: ignore[union-attr]
                (b.amax, b.total, b.squares, *b.second_moments, b.sample.inputs, b.sample.weight),  # type: ignore[union-attr]
                strict=True,
            ):
                torch.testing.assert_close(
                    x, y, rtol=1e-5, atol=1e-5 * float(y.abs().max()) if y.numel() else 0.0
                )
    refused(
        "same text",
        "statistics",
        "merge",
        tmp_path / "part-0",
        tmp_path / "part-0",
        "--output",
        tmp_path / "x",
    )


def test_merging_adds_bit_for_bit(sparse: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Of two given folders the merged sums are those of float64, the counts and the largest values exact."""
    model, _, stats = sparse
    other = collect(model, write_text(tmp_path / "other.jsonl", range(20, 26)), tmp_path / "other")
    first = read_statistics(stats)
    run("statistics", "merge", stats, tmp_path / "other", "--output", tmp_path / "merged")
    merged = read_statistics(tmp_path / "merged")
    for unit in first.manifest.units:
        a, b, both = first.read(unit), other.read(unit), merged.read(unit)
        assert set(both) == set(a) | set(b)
        for name in set(a) & set(b):
            x, y, z = a[name].statistics, b[name].statistics, both[name].statistics
            assert z.tokens == x.tokens + y.tokens
            assert torch.equal(z.histogram, x.histogram + y.histogram)
            assert torch.equal(z.amax, torch.maximum(x.amax, y.amax))
            assert all(
                torch.equal(s, p + q)
                for s, p, q in zip(z.second_moments, x.second_moments, y.second_moments, strict=True)
            )
            assert torch.equal(
                both[name].keys,
                torch.cat([a[name].keys, b[name].keys]).sort().values[: both[name].keys.numel()],
            )


@pytest.mark.parametrize(
    ("method", "device"), [("awq", "cpu"), ("ue8m0", "example@1.2"), ("w8a8", "cpu"), ("gptq", "cpu")]
)
def test_every_linear_is_compiled(
    method: str, device: str, sparse: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, _, stats = sparse
    manifest = compiled(model, stats, tmp_path / "out", "--device", device, "--quant-method", method)
    blueprint = ModelReader(open_source(model)).blueprint
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"]]
    assert {linear["name"] for linear in linears} == set(blueprint.linear_modules())
    assert all(linear["error"] <= linear["baseline_error"] for linear in linears)
    experts = [expert for layer in manifest["layers"] for expert in layer["experts"]]
    counted = [count for layer in read_statistics(stats).manifest.layers for count in layer["experts"]]
    assert [expert["tokens"] for expert in experts] == counted
    assert manifest["request"]["statistics"] == str(stats)


@pytest.mark.parametrize(("method", "wanted"), [("awq", False), ("gptq", True)])
def test_moments_are_read_where_they_are_used(
    method: str,
    wanted: bool,
    sparse: tuple[Path, Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []

    def noting(header: SafetensorsHeader, name: str) -> torch.Tensor:
        names.append(name)
        return _read_tensor(header, name)

    monkeypatch.setattr("qwen_quantize.pipeline.statistics_folder._read_tensor", noting)
    compiled(sparse[0], sparse[2], tmp_path / "out", "--device", "cpu", "--quant-method", method)
    assert any(name.endswith(".amax") for name in names)
    assert any(name.endswith(".moments") for name in names) == wanted


def test_compiling_needs_no_forward_pass_and_no_certain_number_of_threads(
    dense: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, stats = dense

    def never(*_: Any) -> Any:
        raise AssertionError("a forward pass was run")

    monkeypatch.setattr("qwen_quantize.pipeline.stream.run_attention", never)
    monkeypatch.setattr("qwen_quantize.pipeline.stream.run_mlp", never)
    command = ["--device", "cpu", "--quant-method", "awq_v2"]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            compiled(model, stats, tmp_path / f"out-{threads}", *command, "--threads", threads)
            shutil.move(tmp_path / f"out-{threads}", tmp_path / f"kept-{threads}")
    finally:
        torch.set_num_threads(before)
    assert hashes(tmp_path / "kept-1") == hashes(tmp_path / "kept-3")


@pytest.mark.parametrize("stop_after", [1, 5, 14])
def test_interrupted_runs_go_on(
    stop_after: int, sparse: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dataset, stats = sparse
    finish: Callable[..., None] = Journal.finish
    for name, command in (
        ("stats", ["--collect", tmp_path / "stats", "--calibration-dataset", dataset, "--calibration-length",
                   LENGTH, "--calibration-samples", WINDOWS]),
        ("out", ["--from-statistics", stats, "--output-path", tmp_path / "out", "--device", "cpu",
                 "--quant-method", "awq_v2", "--no-validate"]),
    ):  # fmt: skip
        whole = hashes(stats)
        if name == "out":
            run(*command, "--model-path", model)
            whole = hashes(tmp_path / "out")
            shutil.rmtree(tmp_path / "out")
        with stopped_after(stop_after, monkeypatch) as seen:
            assert invoke(*command, "--model-path", model).exit_code == 130
        assert not (tmp_path / name).exists()
        refused("--resume", *command, "--model-path", model)
        done: list[str] = []

        def counting(self: Journal, unit: str, record: dict[str, object], done: list[str] = done) -> None:
            finish(self, unit, record)
            done.append(unit)

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "finish", counting)
            run(*command, "--model-path", model, "--resume")
        assert not set(done) & set(seen)
        assert hashes(tmp_path / name) == whole
        assert not list(tmp_path.glob(".*"))


def test_a_cast_is_worked_out_from_the_sample(dense: tuple[Path, Path, Path]) -> None:
    """Second moments behind a truncating cast, derived, against those that an observer behind it gathers."""
    model, _, stats = dense
    recipe = Recipe(str(model), "example@1.3", "ue8m0", statistics=str(stats), allow_unsupported=True)
    plan = make_plan(recipe, open_source(model))
    cast = plan.principal.chip_compute().cast
    assert cast is not None
    stored = read_statistics(stats).read("layers.1.mlp")["mlp_input"]
    sample = stored.statistics.sample
    assert sample is not None
    assert (
        sample.inputs.shape[0] == WINDOWS * LENGTH
    )  # all tokens, so the observer sees what the sample holds
    observer = InputObserver(sample.inputs.shape[1], cast, (sample.inputs.shape[1],), crossed=True)
    observer.observe(sample.inputs, sample.weight)
    exact, found = observer.statistics(), seen_by_chip(plan, stored, "model.layers.1.mlp.gate_proj")
    (a,), (b,) = exact.second_moments, found.second_moments
    unquantized = stored.statistics.second_moments[0]
    assert float((b - a).norm() / a.norm()) < 0.02  # the cast's own scatter is not derived, only its slope
    assert float((b - a).norm()) < 0.2 * float((unquantized - a).norm())
    torch.testing.assert_close(found.cross, exact.cross, rtol=0.03, atol=0)
    assert float(torch.linalg.eigvalsh(b).min()) > -1e-9 * float(b.diagonal().max())
    if found.cross_moments:
        (c,), (d,) = exact.cross_moments, found.cross_moments
        assert float((d - c).norm() / c.norm()) < 0.01


def test_other_models_are_refused(dense: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, _, stats = dense
    other = make(tmp_path / "other", "qwen3", hidden_size=64)
    command = [
        "--from-statistics",
        stats,
        "--output-path",
        tmp_path / "out",
        "--device",
        "cpu",
        "--quant-method",
        "awq",
    ]
    refused("another model", *command, "--model-path", other)
    retold = tmp_path / "retold"
    shutil.copytree(model, retold)
    tokenizer = json.loads((retold / "tokenizer_config.json").read_text())
    (retold / "tokenizer_config.json").write_text(json.dumps({**tokenizer, "note": "changed"}))
    refused("another tokenizer", *command, "--model-path", retold)
    stranger = collect(other, write_text(tmp_path / "calib.jsonl", range(6)), tmp_path / "stranger")
    refused("different models", "statistics", "merge", stats, stranger.path, "--output", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    assert not (tmp_path / "out").exists()


def damaged(
    stats: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> StatisticsFolder:
    shutil.copytree(stats, folder)
    file = folder / "layers.0.mlp.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return read_statistics(folder)


@pytest.mark.parametrize(
    ("field", "value", "answer"),
    [
        ("mlp_input.moments", torch.zeros(3, dtype=torch.float64), "shape"),
        ("mlp_input.amax", torch.full((128,), -1.0), "negative"),
        ("mlp_input.amax", torch.full((128,), float("nan")), "not finite"),
        ("mlp_input.amax", torch.ones(128, dtype=torch.float64), "F32"),
        ("mlp_input.ranges", torch.tensor([1 << 40]), "do not make"),
        ("mlp_input.ranges", torch.tensor([], dtype=torch.int64), "do not make"),
        ("mlp_input.tokens", torch.tensor([7]), "other streams"),
        ("mlp_input.histogram", torch.zeros(8, 256, dtype=torch.int64), "shape"),
        ("extra.tokens", torch.tensor([7]), "missing"),
    ],
)
def test_hostile_files_are_refused(
    field: str, value: torch.Tensor, answer: str, dense: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    found = damaged(dense[2], tmp_path / "stats", lambda tensors: tensors.update({field: value}))
    with pytest.raises(UserError, match=answer):
        found.read("layers.0.mlp", {"mlp_input": 128})
    with pytest.raises(UserError, match="changed"):
        found.verify()


def test_moments_of_no_input_are_refused(dense: tuple[Path, Path, Path], tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["mlp_input.moments"][1:128] = 1e9  # far above what the diagonal allows

    damaged(dense[2], tmp_path / "stats", change)
    refused(
        "not those of any input", "--from-statistics", tmp_path / "stats", "--model-path", dense[0], "--device", "cpu",
        "--output-path", tmp_path / "out", "--quant-method", "gptq",
    )  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.update(format=2),
        lambda record: record.pop("units"),
        lambda record: record["units"]["layers.0.mlp"].update(file="../x"),
        lambda record: record["units"]["layers.0.mlp"].update(file=3),
        lambda record: record["layers"][0].update(experts=[-1]),
        lambda record: record.update(data=[{}]),
    ],
)
def test_hostile_manifests_are_refused(
    change: Callable[[dict[str, Any]], object], dense: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(dense[2], tmp_path / "stats")
    file = tmp_path / "stats" / "statistics.json"
    record = json.loads(file.read_text())
    change(record)
    file.write_text(json.dumps(record))
    with pytest.raises(UserError):
        read_statistics(tmp_path / "stats").read("layers.0.mlp")


def test_requests_that_do_not_go_together(dense: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, dataset, stats = dense
    compiling = [
        "--from-statistics",
        stats,
        "--model-path",
        model,
        "--device",
        "cpu",
        "--output-path",
        tmp_path / "o",
    ]
    refused("--calibration-dataset says nothing", *compiling, "--calibration-dataset", dataset)
    refused("--seed says nothing", *compiling, "--seed", 3)
    refused("forced", *compiling, "--expert-policy", "forced")
    refused("--device says nothing", "--collect", tmp_path / "s", "--model-path", model, "--device", "cpu")
    refused("--calibration-dataset", "--collect", tmp_path / "s", "--model-path", model)
    refused("no folder of statistics", *compiling[2:], "--from-statistics", tmp_path / "none")
    refused(
        "not empty", "--collect", stats, "--model-path", model, "--calibration-dataset", dataset,
        "--calibration-length", LENGTH,
    )  # fmt: skip
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    refused(
        "no folder of statistics", "--collect", tmp_path / "mine", "--model-path", model, "--calibration-dataset",
        dataset, "--overwrite", "--calibration-length", LENGTH,
    )  # fmt: skip


def test_keys_do_not_depend_on_the_other_windows() -> None:
    tokens = torch.arange(60).reshape(4, 15)
    keys = token_keys(tokens).view(4, 15)
    assert torch.equal(token_keys(tokens[2:]).view(2, 15), keys[2:])
    assert keys.unique().numel() == 60
    assert int(keys.min()) >= 0


def test_merging_refuses_other_ranges(dense: tuple[Path, Path, Path]) -> None:
    from dataclasses import replace

    stream = read_statistics(dense[2]).read("layers.0.mlp")["mlp_input"]
    (moment,) = stream.statistics.second_moments
    parts = (moment[:64, :64].clone(), moment[64:, 64:].clone())
    narrow = replace(stream, statistics=replace(stream.statistics, second_moments=parts))
    with pytest.raises(UserError, match="ranges"):
        merge_streams(stream, narrow)


def test_show_says_what_there_is(sparse: tuple[Path, Path, Path]) -> None:
    record = run("statistics", "show", sparse[2], "--verify")
    assert record["tokens"] == WINDOWS * LENGTH
    assert record["bytes"] == sum(file.stat().st_size for file in sparse[2].glob("*.safetensors"))
    assert [layer["tokens"] for layer in record["layers"]] == [WINDOWS * LENGTH] * len(record["layers"])
    assert any(layer["experts"] for layer in record["layers"])
