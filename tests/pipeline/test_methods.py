"""Every method on every kind of model, from the command line to logits: dense, with experts, with latent attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from qwen_quantize.calibrators.methods import METHODS, Transform
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.models.blueprint import Half
from qwen_quantize.models.scale_pairs import scale_pairs
from tests.cli.test_resume import hashes
from tests.stopping import stopped_after
from tests.tiny_models import make_tiny, make_tokenizer, words

QUICK = (("awq", "qwen3"), ("awq_v2", "deepseek-v3"), ("w8a8", "mixtral"), ("nvfp4", "qwen2"))
FAMILIES = ("qwen2", "qwen3", "mixtral", "deepseek-v3", "deepseek-v2-lite", "gemma2")
# About twice what is lost on the worst of these models, whose random routers flip at a touch; a transform that changed
# the function, or a scale that was lost, costs a hundred times as much.
ALLOWED_KL = {"w8a8": 0.03, "fp8": 0.08, "hif8": 0.1, "mxfp8": 0.08, "mxfp6": 0.12}
SIZES = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64}
LATENT_SIZES = {"kv_lora_rank": 32, "q_lora_rank": 64, "v_head_dim": 16}


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run(*arguments: object) -> dict[str, Any]:
    result = invoke(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def make(folder: Path, family: str) -> Path:
    latent = LATENT_SIZES if family.startswith("deepseek") else {}
    if family == "deepseek-v2-lite":  # queries without a latent
        latent = {key: size for key, size in latent.items() if key != "q_lora_rank"}
    make_tiny(folder, family, **SIZES, **latent)
    make_tokenizer(folder)
    _make_features_loud(folder)
    return folder


def _make_features_loud(folder: Path) -> None:
    """A random model has features of one size, and then no factor is worth moving."""
    state = load_file(folder / "model.safetensors")
    offset = 1.0 if json.loads((folder / "config.json").read_text())["model_type"] == "gemma2" else 0.0
    generator = torch.Generator().manual_seed(0)
    for name, tensor in state.items():
        if name.endswith(
            ("input_layernorm.weight", "post_attention_layernorm.weight", "pre_feedforward_layernorm.weight")
        ):
            loudness = torch.exp(0.8 * torch.randn(tensor.shape, generator=generator))
            state[name] = (tensor + offset) * loudness - offset
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def common(tmp_path: Path) -> list[str]:
    return options_in(tmp_path)


def options_in(folder: Path) -> list[str]:
    """What all runs here have, with texts that are put into the folder."""
    calibration, held_out = folder / "calib.jsonl", folder / "held-out.txt"
    calibration.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(6)))
    held_out.write_text(words(800, seed=50))
    return [
        "--calibration-dataset", str(calibration), "--calibration-length", "32", "--calibration-samples", "8",
        "--validation-text", str(held_out), "--validation-tokens", "512", "--device", "cpu", "--allow-unsupported",
    ]  # fmt: skip


CASES = [
    pytest.param(method, family, marks=[] if (method, family) in QUICK else [pytest.mark.slow])
    for method in METHODS
    for family in FAMILIES
    if method != "ue8m0"
]


@pytest.mark.parametrize(("method", "family"), CASES)
def test_every_method_on_every_kind_of_model(
    method: str, family: str, tmp_path: Path, common: list[str]
) -> None:
    model, out = make(tmp_path / "model", family), tmp_path / "out"
    record = run("--model-path", model, "--output-path", out, "--quant-method", method, *common)
    assert record["validation"]["kl_mean"] < ALLOWED_KL.get(method, 0.3)
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    blueprint = ModelReader(open_source(model)).blueprint
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"]]
    assert {linear["name"] for linear in linears} == set(blueprint.linear_modules())
    assert all(linear["error"] <= linear["baseline_error"] for linear in linears)
    moves = [move for layer in manifest["layers"] for move in layer["moves"]]
    assert bool(moves) == (METHODS[method].transform is not Transform.NONE)
    assert all(move["error"] < move["error_without"] for move in moves)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "deepseek-v3", "mixtral"])
def test_a_move_changes_no_logit(
    family: str, tmp_path: Path, common: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With linears that keep their values exactly, the moved model computes what the unmoved one does."""
    from qwen_quantize.pipeline import stream

    model, out = make(tmp_path / "model", family), tmp_path / "out"
    moved: dict[str, torch.Tensor] = {}
    write_solved = stream.write_solved

    def keeping(run: Any, plain: Any, solved: Any, statistics: Any) -> Any:
        for module, weight in zip(solved, torch.split(plain.weight, list(plain.sizes)), strict=True):
            moved[f"{module}.weight"] = weight.clone()
        return write_solved(run, plain, solved, statistics)

    monkeypatch.setattr(stream, "write_solved", keeping)
    monkeypatch.setattr("qwen_quantize.pipeline.in_turn.write_solved", keeping)
    run("--model-path", model, "--output-path", out, "--quant-method", "awq", "--no-validate", *common)
    source = load_file(model / "model.safetensors")
    written = load_file(out / "model.safetensors")
    blueprint = ModelReader(open_source(model)).blueprint
    suffixes = {
        pair.producer.suffix
        for layer in range(blueprint.num_layers)
        for half in Half
        for pair in scale_pairs(blueprint, layer, half)
        if hasattr(pair.producer, "suffix")
    }
    changed = [n for n in source if n in written and not torch.equal(source[n], written[n])]
    assert any(name.endswith(suffix) for name in changed for suffix in suffixes)
    assert set(moved) == {f"{module}.weight" for module in blueprint.linear_modules()}

    class Moved:
        """The source with the tensors that the run has written, and the linears as they were before rounding."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def read(self, name: str) -> torch.Tensor:
            if name in moved:
                return moved[name]
            found: torch.Tensor = written[name] if name in changed else self._inner.read(name)
            return found

        def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
            return self.read(name)[start:stop]

    tokens = torch.arange(40).reshape(2, 20) % blueprint.config.vocab_size
    expected = load_model(ModelReader(open_source(model))).forward(tokens)
    found = load_model(ModelReader(Moved(open_source(model)))).forward(tokens)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4 * float(expected.abs().max()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[object], dict[str, str]]:
    """(a command without its output, what it writes when nobody stops it)."""
    folder = tmp_path_factory.mktemp("whole")
    model = make(folder / "model", "deepseek-v3")
    command: list[object] = ["--model-path", model, "--quant-method", "awq_v2", *options_in(folder)]
    run(*command, "--output-path", folder / "out")
    return command, hashes(folder / "out")


@pytest.mark.parametrize("stop_after", [1, 4, 9])
def test_an_interrupted_run_resumes_to_the_same_bytes(
    stop_after: int,
    whole: tuple[list[object], dict[str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, expected = whole
    with stopped_after(stop_after, monkeypatch):
        assert invoke(*command, "--output-path", tmp_path / "out").exit_code == 130
    run(*command, "--output-path", tmp_path / "out", "--resume")
    assert hashes(tmp_path / "out") == expected


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that no test writes to."""
    return make(tmp_path_factory.mktemp("dense") / "model", "qwen3")


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "mxfp4", "nvfp4"])
def test_without_data_the_rest_is_solved_one_by_one(scheme: str, dense: Path, tmp_path: Path) -> None:
    model, out = dense, tmp_path / "out"
    run(
        "--model-path", model, "--output-path", out, "--device", "cpu", "--allow-unsupported",
        "--quant-method", "rtn", "--scheme", scheme, "--no-validate",
    )  # fmt: skip
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    linears = [linear for layer in manifest["layers"] for linear in layer["linears"]]
    assert len(linears) == len(ModelReader(open_source(model)).blueprint.linear_modules())
    assert all(0 < linear["error"] <= linear["baseline_error"] for linear in linears)


@pytest.mark.parametrize(
    ("arguments", "words_of_the_answer"),
    [
        (["--quant-method", "awq"], "--calibration-dataset"),
        (["--quant-method", "fp8", "--scheme", "w8a8"], "rtn and gptq make every scheme"),
        (["--quant-method", "rtn", "--scheme", "w5"], "w4a16"),
        (["--quant-method", "rtn", "--scheme", "ue8m0"], "--quant-method ue8m0"),
        (["--quant-method", "rtn", "--group-size", "48"], "do not divide"),
        (["--quant-method", "rtn", "--group-size", "-3"], "positive"),
        (["--quant-method", "rtn", "--block-size", "64"], "--group-size may"),
        (["--quant-method", "ue8m0", "--group-size", "64"], "--block-size"),
        (["--quant-method", "fp8", "--group-size", "64"], "part of the format"),
        (["--quant-method", "w8a8", "--asymmetric"], "w4a16"),
        (["--quant-method", "rtn", "--layout", "box"], "compressed-tensors"),
        (["--quant-method", "rtn", "--layout", "deepseek-fp8"], "deepseek-fp8"),
    ],
)
def test_requests_that_do_not_go_together(
    arguments: list[str], words_of_the_answer: str, dense: Path, tmp_path: Path
) -> None:
    result = invoke(
        "--model-path", dense, "--output-path", tmp_path / "out", "--device", "cpu", "--allow-unsupported",
        *arguments,
    )  # fmt: skip
    assert result.exit_code == 2, result.output
    assert words_of_the_answer in result.stderr
    assert not (tmp_path / "out").exists()


def test_groups_that_divide_every_row_are_chosen(tmp_path: Path) -> None:
    model, out = make(tmp_path / "model", "qwen3"), tmp_path / "out"  # rows of 192: no multiple of 128
    record = run(
        "--model-path",
        model,
        "--output-path",
        out,
        "--device",
        "cpu",
        "--quant-method",
        "rtn",
        "--no-validate",
    )
    assert any("groups of 64" in note for note in record["notes"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    channel = tmp_path / "channel"
    run(
        "--model-path", model, "--output-path", channel, "--device", "cpu", "--quant-method", "rtn", "--no-validate",
        "--group-size", "0", "--asymmetric",
    )  # fmt: skip
    weights = json.loads((channel / "config.json").read_text())["quantization_config"]["config_groups"]
    assert weights["group_0"]["weights"]["strategy"] == "channel"
    assert weights["group_0"]["weights"]["symmetric"] is False


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_folders_for_engines_of_half_precision(layout: str, tmp_path: Path, common: list[str]) -> None:
    model, out = make(tmp_path / "model", "qwen3"), tmp_path / "out"
    record = run(
        "--model-path", model, "--output-path", out, "--quant-method", "gptq", "--layout", layout, *common,
        *(["--asymmetric"] if layout == "awq" else []),
    )  # fmt: skip
    assert record["layout"] == layout
    assert record["validation"]["kl_mean"] < 0.3
    written = load_file(out / "model.safetensors")
    assert written["model.layers.0.mlp.up_proj.scales"].dtype == torch.float16
    assert written["model.layers.0.mlp.up_proj.qweight"].dtype == torch.int32


def test_linears_that_no_text_reaches_stay_where_inputs_have_to_be_known(
    tmp_path: Path, common: list[str]
) -> None:
    """The embedded mixture of experts has a layer for multi-token prediction."""
    out = tmp_path / "out"
    record = run(
        "--model-path",
        "embedded:moe",
        "--output-path",
        out,
        "--quant-method",
        "nvfp4",
        *common,
        "--no-validate",
    )
    assert any("multi-token prediction see no text" in note for note in record["notes"])
    names = set(load_file(out / "model.safetensors"))
    last = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    assert not any(f"model.layers.{last}." in name and name.endswith("weight_packed") for name in names)
    assert any("model.layers.1." in name and name.endswith("weight_packed") for name in names)
