"""What a config says becomes of a linear's input, and for which of several groups a linear is meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from qwen_quantize.checkpoint.compressed_inputs import parse_inputs, rank_of_match
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.tables import E2M1, E2M3, E4M3FN, E8M0, FP32, INT4, INT8

FP8 = {"num_bits": 8, "type": "float"}
TOKEN, TENSOR, GROUP = Granularity.token(), Granularity.tensor(), Granularity.group


@pytest.mark.parametrize(
    ("found", "form"),
    [
        (None, None),
        ({"num_bits": 8, "strategy": "token", "dynamic": True}, ActivationForm(INT8, TOKEN, FP32, True)),
        ({"num_bits": 4, "strategy": "token", "dynamic": True}, ActivationForm(INT4, TOKEN, FP32, True)),
        (
            {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False},
            ActivationForm(INT8, TOKEN, FP32, True, symmetric=False),
        ),
        ({}, ActivationForm(INT8, TENSOR, FP32, False)),
        (FP8, ActivationForm(E4M3FN, TENSOR, FP32, False)),
        (FP8 | {"strategy": "tensor", "dynamic": True}, ActivationForm(E4M3FN, TENSOR, FP32, True)),
        (FP8 | {"group_size": 128, "dynamic": True}, ActivationForm(E4M3FN, GROUP(128), FP32, True)),
        (
            FP8 | {"strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": "torch.uint8"},
            ActivationForm(E4M3FN, GROUP(32), E8M0, True),
        ),
        (
            {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
            ActivationForm(E2M3, GROUP(32), E8M0, True),
        ),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            ActivationForm(E2M1, GROUP(16), E4M3FN, True),
        ),
    ],
)  # fmt: skip
def test_forms(found: dict[str, Any] | None, form: ActivationForm | None) -> None:
    assert parse_inputs(found, "group_0") == form


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (3, "object"),
        ({"num_bits": 6}, "num_bits"),
        ({"num_bits": True}, "num_bits"),
        ({"type": ["int"]}, "num_bits"),
        ({"dynamic": 1}, "dynamic"),
        ({"dynamic": "global"}, "dynamic"),
        ({"symmetric": "yes"}, "symmetric"),
        ({"strategy": "channel"}, "strategy"),
        ({"strategy": "attn_head"}, "strategy"),
        ({"strategy": "token"}, "strategy"),  # static scales of tokens that nobody has seen
        ({"strategy": "group", "dynamic": True}, "group_size"),
        ({"group_size": 0, "dynamic": True}, "group_size"),
        ({"group_size": 1 << 40, "dynamic": True}, "group_size"),
    ],
)
def test_forms_that_cannot_be_read(found: object, word: str) -> None:
    with pytest.raises(UserError, match=rf"^config\.json: .*'group_0\.input_activations.*{word}"):
        parse_inputs(found, "group_0")


@pytest.mark.parametrize(
    ("targets", "rank"),
    [
        (["a.q_proj"], 0),
        (["re:.*q_proj$", "a.q_proj"], 0),
        (["re:.*q_proj$"], 1),
        (["re:q_proj"], None),  # patterns match from the start on
        (["Linear"], 2),
        (["RoutedExperts"], 2),
        (["Attention", "re:.*k_proj"], None),
        ([], None),
    ],
)
def test_ranks_of_targets(targets: list[str], rank: int | None) -> None:
    assert rank_of_match("a.q_proj", targets) == rank


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(x*)*y", "a" * 2000, "[", "(?P<n", "*" * 9])
def test_patterns_that_are_none_or_may_take_forever(pattern: str) -> None:
    with pytest.raises(UserError, match="pattern"):
        rank_of_match("a" * 60 + "!", [f"re:{pattern}"])


def opened(folder: Path, groups: dict[str, Any], tensors: dict[str, torch.Tensor]) -> LinearReader:
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return LinearReader(open_source(folder))


def group(inputs: dict[str, Any] | None, *targets: str, **weights: Any) -> dict[str, Any]:
    return {"weights": {"num_bits": 8, **weights}, "input_activations": inputs, "targets": list(targets)}


DYNAMIC = {"num_bits": 8, "strategy": "token", "dynamic": True}
CODES, SCALE = torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1)


def int8(*modules: str) -> dict[str, torch.Tensor]:
    found = {}
    for module in modules:
        found |= {f"{module}.weight": CODES.clone(), f"{module}.weight_scale": SCALE.clone()}
    return found


def test_targets_decide_between_groups_that_fit(tmp_path: Path) -> None:
    groups = {
        "group_0": group(None, "Linear", strategy="channel"),
        "group_1": group(DYNAMIC, "re:.*mlp", "x.q_proj", strategy="channel"),
    }
    linears = opened(tmp_path, groups, int8("x.mlp.up", "x.q_proj", "x.k_proj"))
    forms = {name: linears.describe(name).activation for name in ("x.mlp.up", "x.q_proj", "x.k_proj")}
    dynamic = ActivationForm(INT8, TOKEN, FP32, True)
    assert forms == {"x.mlp.up": dynamic, "x.q_proj": dynamic, "x.k_proj": None}
    nobody = {name: {**it, "targets": ["re:never"]} for name, it in groups.items()}
    linears = opened(tmp_path, nobody, int8("x.mlp.up"))
    with pytest.raises(UserError, match=r"'x\.mlp\.up'"):
        linears.describe("x.mlp.up")


def test_targets_are_not_asked_where_groups_agree_or_one_fits(tmp_path: Path) -> None:
    groups = {
        "group_0": group(DYNAMIC, "re:[", strategy="channel"),
        "group_1": group(None, "re:(a+)+", type="float", strategy="channel"),
        "group_2": group(DYNAMIC, "nobody", strategy="tensor"),
    }
    linears = opened(tmp_path, groups, int8("x.up"))
    assert linears.describe("x.up").activation == ActivationForm(INT8, TOKEN, FP32, True)


def test_static_scales_are_named_where_they_are_there(tmp_path: Path) -> None:
    groups = {"group_0": group({"num_bits": 8, "symmetric": False}, "Linear", strategy="channel")}
    linears = opened(tmp_path, groups, int8("x.up"))
    assert linears.describe("x.up").activation == ActivationForm(INT8, TENSOR, FP32, False, symmetric=False)
    extra = {"x.up.input_scale": torch.ones(1), "x.up.input_zero_point": torch.zeros(1, dtype=torch.int8)}
    linears = opened(tmp_path, groups, int8("x.up") | extra)
    assert linears.describe("x.up").activation == ActivationForm(
        INT8,
        TENSOR,
        FP32,
        False,
        "x.up.input_scale",
        symmetric=False,
        input_zero_point="x.up.input_zero_point",
    )
    assert linears.describe("x.up").parts == ("x.up.weight", "x.up.weight_scale")


@pytest.mark.parametrize(("scales", "format_"), [("ue8m0", E8M0), (None, FP32), ("float", FP32)])
def test_block_fp8(tmp_path: Path, scales: str | None, format_: Any) -> None:
    quantization: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [2, 4], "scale_fmt": scales}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    tensors = {"x.weight": torch.ones(2, 4).to(torch.float8_e4m3fn), "x.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors | {"y.weight": torch.ones(2, 4)}, tmp_path / "model.safetensors")
    linears = LinearReader(open_source(tmp_path))
    assert linears.describe("x").activation == ActivationForm(E4M3FN, GROUP(4), format_, True)
    assert linears.describe("y").activation is None
