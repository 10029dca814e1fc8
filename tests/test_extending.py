"""CONTRIBUTING.md says what it takes to add a thing; each test here adds one and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from qwen_quantize.calibrators.block_fp8 import exact_scale
from qwen_quantize.calibrators.methods import METHODS, Method
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.checkpoint import linear_storage
from qwen_quantize.checkpoint.layouts import DEEPSEEK_FP8, LAYOUTS
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.cli.main import app
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.formats.block_kernels import quantize_blocks
from qwen_quantize.formats.blocks import QuantizedTensor, block_amax
from qwen_quantize.formats.cast_rule import RNE_SATURATE, CastRule, Overflow, Rounding, Subnormals
from qwen_quantize.formats.codec import decode, decode_table, encode
from qwen_quantize.formats.groups import fake_quantize_groups
from qwen_quantize.formats.reference import encode_scalar
from qwen_quantize.formats.scales import ScaleRule, scale_exponents
from qwen_quantize.formats.spec import FloatFormat
from qwen_quantize.models.blueprint import Family, LinearSite, Stream
from qwen_quantize.models.lookup import BY_ARCHITECTURE
from tests.tiny_models import make_tiny, make_tokenizer, words

# Not one of the named formats; IEEE rules, so that ml_dtypes.float8_e3m4 is its oracle.
E3M4 = FloatFormat("e3m4", 3, 4, bias=3, has_infinity=True, nan_codes=(0x78,))


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Every dimension of a linear is a multiple of 64."""
    folder = tmp_path / "model"
    make_tiny(folder, "llama", hidden_size=128, intermediate_size=192, num_key_value_heads=4, seed=21)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Options that name calibration and validation text for a tiny model."""
    data, held_out = tmp_path / "calib.jsonl", tmp_path / "held-out.txt"
    data.write_text("".join(f'{{"text": "{words(90, seed)}"}}\n' for seed in range(6)))
    held_out.write_text(words(800, seed=50))
    return [
        "--calibration-dataset", str(data), "--calibration-length", "32", "--calibration-samples", "8",
        "--validation-text", str(held_out), "--validation-tokens", "512",
    ]  # fmt: skip


@pytest.mark.parametrize("native", ["1", "0"], ids=["native", "torch"])
def test_a_number_format_is_one_record(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QWEN_QUANTIZE_NATIVE", native)
    assert (E3M4.max, E3M4.min_normal, E3M4.min_subnormal) == (15.5, 0.25, 2.0**-6)
    codes = np.arange(256, dtype=np.uint8)
    theirs = codes.view(ml_dtypes.float8_e3m4).astype(np.float32)
    np.testing.assert_array_equal(decode(torch.from_numpy(codes), E3M4).numpy(), theirs)
    np.testing.assert_array_equal(decode_table(E3M4).numpy(), theirs)

    rule = CastRule(Rounding.RNE, Overflow.NONSATURATE, Subnormals.KEEP)
    x = torch.cat([torch.linspace(-17, 17, 4001), torch.linspace(-0.3, 0.3, 1001)])
    expected = x.numpy().astype(ml_dtypes.float8_e3m4).view(np.uint8)
    np.testing.assert_array_equal(encode(x, E3M4, rule).numpy(), expected)
    truncating = replace(rule, rounding=Rounding.RTZ)
    slow = [encode_scalar(float(value), E3M4, truncating) for value in x[::7]]
    assert encode(x, E3M4, truncating)[::7].tolist() == slow


def test_a_new_format_is_scaled_and_grouped_like_the_others() -> None:
    amax = torch.tensor([15.5, 15.75, 16.0, 0.0, 1.0])
    assert scale_exponents(amax, E3M4, ScaleRule.RCEIL).tolist() == [0, 1, 1, 0, -3]
    assert scale_exponents(amax, E3M4, ScaleRule.FLOOR).tolist() == [0, 0, 1, 0, -3]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2)) * 40
    found = fake_quantize_groups(x, E3M4, RNE_SATURATE, ScaleRule.RCEIL, 32)
    grouped = x.view(5, 2, 32)
    scale = torch.ldexp(
        torch.ones(5, 2), scale_exponents(grouped.abs().amax(dim=2), E3M4, ScaleRule.RCEIL)
    ).unsqueeze(2)
    codes = (grouped / scale).numpy().astype(ml_dtypes.float8_e3m4)
    expected = torch.from_numpy(codes.astype(np.float32)) * scale
    assert torch.equal(found, expected.view(5, 64))


FAMILY = Family(
    name="sample",
    architectures=("SampleForCausalLM",),
    linears=(
        LinearSite("attention.q_proj", Stream.ATTENTION_INPUT),
        LinearSite("attention.k_proj", Stream.ATTENTION_INPUT),
        LinearSite("attention.v_proj", Stream.ATTENTION_INPUT),
        LinearSite("attention.o_proj", Stream.ATTENTION_OUTPUT),
        LinearSite("feed_forward.gate_proj", Stream.MLP_INPUT),
        LinearSite("feed_forward.up_proj", Stream.MLP_INPUT),
        LinearSite("feed_forward.down_proj", Stream.MLP_HIDDEN),
    ),
    input_norm="first_norm.weight",
    mlp_norm="second_norm.weight",
    embedding="sample.words.weight",
    final_norm="sample.last_norm.weight",
    head="sample.out.weight",
    layer_prefix="sample.blocks.{layer}.",
)
RENAMED = {
    "model.layers.": "sample.blocks.",
    "self_attn.": "attention.",
    "mlp.": "feed_forward.",
    "post_attention_layernorm": "second_norm",
    "input_layernorm": "first_norm",
    "model.embed_tokens": "sample.words",
    "model.norm": "sample.last_norm",
    "lm_head": "sample.out",
}


def in_the_names_of_the_family(name: str) -> str:
    for ours, theirs in RENAMED.items():
        name = name.replace(ours, theirs)
    return name


def test_a_model_family_is_one_record(
    model: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(1, 160, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = load_model(ModelReader(open_source(model))).forward(tokens)
    weights = load_file(model / "model.safetensors")
    renamed = {in_the_names_of_the_family(name): tensor for name, tensor in weights.items()}
    assert not set(renamed) & set(weights)
    save_file(renamed, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["SampleForCausalLM"]}))
    command = ["--model-path", model, "--output-path", tmp_path / "out", "--device", "example@1.2", *texts]
    assert CliRunner().invoke(app, [str(argument) for argument in command]).exit_code == 2

    monkeypatch.setitem(BY_ARCHITECTURE, "SampleForCausalLM", FAMILY)
    found = load_model(ModelReader(open_source(model))).forward(tokens)
    assert torch.equal(found, expected)
    record: dict[str, Any] = json.loads(run(*command, "--json").stdout)
    assert 0 < record["validation"]["kl_mean"] < 0.1
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["sample.blocks.1.feed_forward.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert set(renamed) <= set(written)


def toy_solver(problem: LayerProblem) -> LayerSolution:
    """Every block gets one exponent too many: coarse, legal, and not what any other method would write."""
    spec = problem.scheme.weight
    rows, columns = spec.granularity.rows, spec.granularity.cols
    amax = block_amax(problem.weight, spec.granularity)
    exponents = scale_exponents(amax, spec.format, ScaleRule.RCEIL) + 1
    codes = quantize_blocks(problem.weight, exponents, spec.format, problem.weight_cast, rows, columns)
    return LayerSolution(
        quantized=QuantizedTensor(
            codes, exact_scale(exponents), None, spec.format, spec.granularity, tuple(problem.weight.shape)
        ),
        error=0.25,
        baseline_error=0.5,
        weight_sqnr_db=30.0,
        searched_blocks=0,
        zero_blocks=0,
        partial_blocks=0,
        notes=("from the toy",),
    )


def test_a_method_is_one_function_and_one_line(
    model: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[LayerProblem] = []

    def solve(problem: LayerProblem) -> LayerSolution:
        problems.append(problem)
        return toy_solver(problem)

    toy = Method("toy", "ue8m0", solve, uses_second_moments=False, description="one exponent too many")
    monkeypatch.setitem(METHODS, "toy", toy)
    out = tmp_path / "out"
    command = ["--model-path", model, "--output-path", out, "--device", "example@1.2", *texts]
    run(*command, "--quant-method", "toy")
    assert len(problems) == 14
    assert all(problem.statistics is not None and not problem.factors for problem in problems)
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    assert manifest["method"] == "toy"
    assert {tuple(linear["notes"]) for layer in manifest["layers"] for linear in layer["linears"]} == {
        ("from the toy",)
    }
    before, after = load_file(model / "model.safetensors"), load_file(out / "model.safetensors")
    for name, scale in after.items():
        if not name.endswith("_scale_inv"):
            continue
        weight = before[name.removesuffix("_scale_inv")].numpy()
        blocks = weight.reshape(weight.shape[0] // 64, 64, weight.shape[1] // 64, 64)
        largest = np.abs(blocks).max(axis=(1, 3)).astype(np.float64)
        expected = 2.0 ** (np.ceil(np.log2(largest / 448)) + 1)
        np.testing.assert_array_equal(scale.numpy(), expected.astype(np.float32))


CHIP = """
[chip]
name = "mine"
title = "My chip"
vendor = "Me"
family = "mine"
generation = 1

[dtypes.e4m3fn]
matrix = { value = true, source = ["PROBE"], confidence = "measured" }

[arithmetic.casts."fp32->e4m3fn"]
source = ["PROBE"]
confidence = "measured"
rounding = "rtz"
overflow = "saturate"
subnormals = "keep"
"""


def test_a_chip_is_one_file(model: Path, texts: list[str], tmp_path: Path) -> None:
    profile, out = tmp_path / "mine.toml", tmp_path / "out"
    profile.write_text(CHIP, encoding="utf-8")
    run("chips", "validate", profile)
    command = ["--model-path", model, *texts]
    record = json.loads(run(*command, "--output-path", out, "--device", profile, "--json").stdout)
    assert record["chip"] == "mine"
    assumed = {assumption["field"] for assumption in record["assumptions"]}
    assert "scale.rule" in assumed
    assert "cast.rounding" not in assumed
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    assert manifest["chip"]["activation_cast"]["rounding"] == "rtz"
    # The example's firmware 1.2 rounds to nearest: a cast that only truncates has to measure worse.
    nearest = json.loads(
        run(*command, "--output-path", tmp_path / "rne", "--device", "example@1.2", "--json").stdout
    )
    assert record["validation"]["kl_mean"] > nearest["validation"]["kl_mean"]


def test_a_layout_is_a_record_and_a_name(
    model: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(DEEPSEEK_FP8, name="other", scale_suffix="weight_scale", readers=("nobody",))
    monkeypatch.setitem(LAYOUTS, "other", other)
    monkeypatch.setattr(linear_storage, "_BLOCK_SCALES", (".weight_scale",))
    out = tmp_path / "out"
    command = ["--model-path", model, "--output-path", out, "--device", "example@1.2", "--layout", "other"]
    record = json.loads(run(*command, *texts, "--json").stdout)
    assert record["layout"] == "other"
    assert record["validation"]["kl_mean"] < 0.1, "the folder is not read back by the same names"
    names = set(load_file(out / "model.safetensors"))
    assert "model.layers.0.mlp.up_proj.weight_scale" in names
    assert not any(name.endswith("_scale_inv") for name in names)
