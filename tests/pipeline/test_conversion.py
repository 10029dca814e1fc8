"""A quantized folder in another layout holds the same values, or the conversion says why not and what it costs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen_quantize.checkpoint.layouts import LAYOUTS
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.errors import UserError
from qwen_quantize.formats.schemes import SCHEMES, Scheme
from qwen_quantize.formats.tables import BF16, FP32
from qwen_quantize.models.lookup import require_blueprint
from qwen_quantize.pipeline.conversion import Conversion, plan_conversion
from qwen_quantize.pipeline.conversion_fit import global_amax, static_amax
from qwen_quantize.pipeline.conversion_run import Converted, conversion_manifest, convert
from qwen_quantize.pipeline.conversion_table import exact_conversions
from qwen_quantize.pipeline.journal import Journal
from qwen_quantize.pipeline.recipe import Output
from tests.checkpoint.quantized_samples import COMPRESSED, sample, weight_only, with_scales
from tests.tiny_models import make_tiny

CT = "compressed-tensors"
W4A16 = SCHEMES["w4a16"].with_group(32)
W8A16 = SCHEMES["w8a16"].with_group(32)
INPUT_AMAX = 2.7


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain") / "model"
    make_tiny(folder, "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    return folder


def stored(plain: Path, folder: Path, layout_name: str, scheme: Scheme) -> Path:
    """The model with random codes of a scheme as its linears."""
    folder.mkdir()
    tensors, layout = load_file(plain / "model.safetensors"), LAYOUTS[layout_name]
    config = json.loads((plain / "config.json").read_text())
    modules = require_blueprint(config).linear_modules()
    for seed, (module, shape) in enumerate(modules.items()):
        del tensors[f"{module}.weight"]
        tensors |= layout.pack(module, sample(scheme, shape, seed), scheme, INPUT_AMAX)
    config["quantization_config"] = layout.quantization_config(dict.fromkeys(modules, scheme), ["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def converted(source: Path, target: Path, layout: str, **more: Any) -> tuple[Conversion, Converted]:
    opened = open_source(source)
    plan = plan_conversion(
        opened, layout, requantize=more.get("requantize", False), scheme=more.get("scheme")
    )
    done = convert(plan, opened, Output(target), {"layout": layout}, lambda *_: None)
    manifest = conversion_manifest(plan, done, opened, {"layout": layout})
    done.folder.add_file("qwen_quantize.json", json.dumps(manifest).encode())
    done.folder.finish()
    return plan, done


def values(folder: Path) -> dict[str, torch.Tensor]:
    source = open_source(folder)
    linears, found = LinearReader(source), {}
    companions = linears.companions()
    for name in source.names():
        module = name.rpartition(".")[0]
        if name in companions:
            continue
        quantized = linears.is_quantized(module)
        found[module if quantized else name.removesuffix(".weight")] = (
            linears.read(module) if quantized else source.read(name).float()
        )
    return found


def equal(one: Path, other: Path) -> bool:
    a, b = values(one), values(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


THERE_AND_BACK = {
    "int4 to Q4_0": (CT, W4A16, "gguf"),
    "int8 to Q8_0": (CT, W8A16, "gguf"),
    "mxfp4 weights to GGUF": (CT, weight_only(SCHEMES["mxfp4"]), "gguf"),
    "int4 to AWQ": (CT, W4A16, "awq"),
    "int4 with zero points to AWQ": (CT, W4A16.with_zero_point(), "awq"),
    "int4 to GPTQ": (CT, W4A16, "gptq"),
    "int8 to GPTQ": (CT, W8A16, "gptq"),
    "int4 by row to GPTQ": (CT, W4A16.with_group(None), "gptq"),
    "AWQ to GGUF": ("awq", W4A16, "gguf"),
    "GPTQ to AWQ": ("gptq", W4A16, "awq"),
    "block FP8 of V3": ("deepseek-fp8", with_scales(SCHEMES["ue8m0"].with_block(32, 32), FP32), CT),
}


@pytest.mark.parametrize("case", THERE_AND_BACK)
def test_there_and_back_changes_no_value_and_no_code(plain: Path, tmp_path: Path, case: str) -> None:
    layout, scheme, other = THERE_AND_BACK[case]
    source = stored(plain, tmp_path / "source", layout, scheme)
    plan, _ = converted(source, tmp_path / "there", other)
    assert not plan.requantized
    assert plan.casts_dropped == ()
    assert equal(source, tmp_path / "there")
    converted(tmp_path / "there", tmp_path / "back", layout)
    before, after = (
        load_file(source / "model.safetensors"),
        load_file(tmp_path / "back" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), after[name].view(torch.uint8)), name
    configs = [
        json.loads((folder / "config.json").read_text())["quantization_config"]
        for folder in (source, tmp_path / "back")
    ]
    assert configs[0] == configs[1]


@pytest.mark.parametrize("name", [name for name in COMPRESSED if name != "ue8m0"])
def test_a_layout_to_itself_keeps_every_byte(plain: Path, tmp_path: Path, name: str) -> None:
    """Static scales of inputs and NVFP4's second ones come through their largest magnitude and back."""
    source = stored(plain, tmp_path / "source", CT, COMPRESSED[name])
    converted(source, tmp_path / "out", CT)
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name_, tensor in before.items():
        assert torch.equal(tensor.view(torch.uint8), after[name_].view(torch.uint8)), name_


def test_power_of_two_scales_of_inputs_are_told(plain: Path, tmp_path: Path) -> None:
    """compressed-tensors has no word for them in blocks; the weights are what they were all the same."""
    source = stored(plain, tmp_path / "source", "deepseek-fp8", SCHEMES["ue8m0"].with_block(32, 32))
    _, done = converted(source, tmp_path / "out", CT)
    assert len(done.input_scales_changed) == 7
    assert equal(source, tmp_path / "out")
    _, done = converted(tmp_path / "out", tmp_path / "back", "deepseek-fp8")
    assert done.input_scales_changed == ()
    assert equal(source, tmp_path / "back")
    record = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
    assert "scale_fmt" not in record


def test_inputs_that_gguf_does_not_cast_are_told(plain: Path, tmp_path: Path) -> None:
    source = stored(plain, tmp_path / "source", CT, SCHEMES["mxfp4"])
    plan, _ = converted(source, tmp_path / "out", "gguf")
    assert len(plan.casts_dropped) == len(plan.schemes) == 7
    assert equal(source, tmp_path / "out")


REFUSED = {
    "zero points to GPTQ": (CT, W4A16.with_zero_point(), "gptq", "zero points"),
    "zero points to GGUF": (CT, W4A16.with_zero_point(), "gguf", "zero points"),
    "float32 scales to AWQ": (CT, with_scales(W4A16, FP32), "awq", "stores its scales in FP16"),
    "narrow groups to GGUF": (CT, W4A16.with_group(16), "gguf", "each for 32 of a row"),
    "FP8 to GGUF": (CT, SCHEMES["fp8"], "gguf", "take w4a16"),
    "int8 with inputs to AWQ": (CT, SCHEMES["w8a8"], "awq", "INT4 weights"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_exact_form_is_refused_or_costs_a_stated_loss(
    plain: Path, tmp_path: Path, case: str
) -> None:
    layout, scheme, other, words = REFUSED[case]
    source = stored(plain, tmp_path / "source", layout, scheme)
    with pytest.raises(UserError, match=f"7 of 7 linears have no exact form in layout {other}.*({words})"):
        converted(source, tmp_path / "out", other)
    assert not (tmp_path / "out").exists()
    plan, done = converted(source, tmp_path / "out", other, requantize=True)
    assert len(plan.requantized) == len(done.losses) == 7
    before, after = values(source), values(tmp_path / "out")
    for module, loss in done.losses.items():
        difference = (before[module].double() - after[module].double()).square().sum()
        assert loss == pytest.approx(float(difference / before[module].double().square().sum()), rel=1e-6)
        assert 0 < loss < 0.05
    record = json.loads((tmp_path / "out" / "qwen_quantize.json").read_text())["conversion"]
    assert record["exact"] is False
    assert record["largest_relative_squared_error"] == max(done.losses.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_fit_are_taken_though_their_type_is_wider(
    plain: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    """FP16 holds the bfloat16 numbers of usual scales, for its mantissa is longer, and a few of float32's."""
    source = stored(plain, tmp_path / "source", CT, with_scales(W4A16, BF16))
    tensors = load_file(source / "model.safetensors")
    wide = {name: t.to(dtype) if name.endswith("weight_scale") else t for name, t in tensors.items()}
    save_file(wide, source / "model.safetensors")
    converted(source, tmp_path / "out", "gguf")
    assert equal(source, tmp_path / "out")


def test_one_linear_with_zero_points_gives_all_of_them_some(plain: Path, tmp_path: Path) -> None:
    source = stored(plain, tmp_path / "source", "awq", W4A16)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("up_proj.qzeros"))
    tensors[name][0, 0] ^= 1
    save_file(tensors, source / "model.safetensors")
    plan, _ = converted(source, tmp_path / "out", CT)
    assert not any(scheme.weight.symmetric for scheme in plan.schemes.values())
    assert equal(source, tmp_path / "out")
    converted(tmp_path / "out", tmp_path / "back", "awq")
    assert equal(source, tmp_path / "back")


def test_weights_alone_do_not_become_a_layout_that_casts_inputs(plain: Path, tmp_path: Path) -> None:
    scheme = replace(SCHEMES["ue8m0"].with_block(32, 32), activation=None, dynamic=False)
    source = stored(plain, tmp_path / "source", CT, scheme)
    with pytest.raises(UserError, match="says of every linear that its input is cast"):
        converted(source, tmp_path / "out", "deepseek-fp8")
    assert not list(tmp_path.glob(".out*"))


def test_columns_in_an_order_of_activations_are_refused(plain: Path, tmp_path: Path) -> None:
    source = stored(plain, tmp_path / "source", "gptq", W4A16)
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.g_idx"))
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(UserError, match="order of activations"):
        converted(source, tmp_path / "out", CT)
    _, done = converted(source, tmp_path / "out", CT, requantize=True)
    assert [*done.losses] == [name.removesuffix(".g_idx")]


def test_a_manifest_goes_on_and_says_where_it_came_from(plain: Path, tmp_path: Path) -> None:
    source = stored(plain, tmp_path / "source", CT, W4A16)
    data = json.dumps(
        {"tool": {}, "chip": {"name": "cpu"}, "request": {}, "source": {"path": "x"}, "layout": CT}
    ).encode()
    (source / "qwen_quantize.json").write_bytes(data)
    converted(source, tmp_path / "out", "awq")
    manifest = json.loads((tmp_path / "out" / "qwen_quantize.json").read_text())
    assert manifest["source"] == {"path": "x"}
    assert manifest["layout"] == "awq"
    assert manifest["converted_from"]["manifest_sha256"] == hashlib.sha256(data).hexdigest()
    assert manifest["converted_from"]["layout"] == CT
    assert manifest["conversion"]["exact"] is True


def test_plain_models_and_unknown_layouts(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no linear there is quantized"):
        converted(plain, tmp_path / "out", CT)
    with pytest.raises(UserError, match="not one of the layouts"):
        converted(plain, tmp_path / "out", "zip")


def test_a_resumed_conversion_writes_the_same_bytes(plain: Path, tmp_path: Path) -> None:
    source = open_source(stored(plain, tmp_path / "source", CT, W4A16.with_zero_point()))
    plan = plan_conversion(source, "gguf", requantize=True, scheme=None)
    whole = convert(plan, source, Output(tmp_path / "whole"), {}, lambda *_: None)
    whole.folder.finish()

    def stop(what: str, done: int, total: int) -> None:  # noqa: ARG001
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(plan, source, Output(tmp_path / "out"), {}, stop)
    assert not (tmp_path / "out").exists()
    again = convert(plan, source, Output(tmp_path / "out", resume=True), {}, lambda *_: None)
    assert again.losses == whole.losses
    again.folder.finish()
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


def test_static_scales_come_from_a_largest_magnitude() -> None:
    for amax in (torch.rand(200, generator=torch.Generator().manual_seed(3)) * 50).unbind():
        for largest in (127.0, 448.0):
            scale = float(amax / largest)
            assert torch.tensor(static_amax(scale, largest)) / largest == torch.tensor(scale)
        divisor = float(torch.tensor(448.0 * 6.0) / amax)
        assert torch.tensor(448.0 * 6.0) / torch.tensor(global_amax(divisor)) == torch.tensor(divisor)
    with pytest.raises(ValueError, match="cannot be written otherwise"):
        static_amax(0.10556936264038086, 127.0)


def test_the_table_of_exact_conversions_is_what_conversions_do() -> None:
    rows = {row.form: row.verdicts for row in exact_conversions()}
    assert set(rows["w4a16, groups of 32"]) == set(LAYOUTS)
    for layout in (CT, "awq", "gptq", "gguf"):
        assert rows["w4a16, groups of 32"][layout] == "exact"
        assert rows["w4a16, groups of 32, float32 scales"][layout] == (
            "exact" if layout == CT else "fitting scales"
        )
    assert rows["w4a16, groups of 32, zero points"]["gptq"] == "no"
    assert rows["mxfp4"]["gguf"] == "weights"
    assert rows["mxfp4"]["awq"] == "no"
    assert rows["ue8m0"]["deepseek-fp8"] == "exact"
    assert rows["ue8m0"][CT] == "input scales"
    assert rows["block FP8, float32 scales"][CT] == "exact"
    assert rows["w8a8"]["gptq"] == "fitting weights"
    assert rows["w8a8"]["tiles"] == "exact"
    assert rows["w4a16, groups of 32, zero points"]["tiles"] == "no"
    assert {form for form, verdicts in rows.items() if verdicts["mx-oss"] != "no"} == {"mxfp4"}
    assert all(any(verdict == "exact" for verdict in verdicts.values()) for verdicts in rows.values())


def test_what_the_manifest_says_of_linears_is_what_they_are_now(plain: Path, tmp_path: Path) -> None:
    source, out = stored(plain, tmp_path / "source", CT, SCHEMES["w8a8"]), tmp_path / "out"
    modules = list(require_blueprint(json.loads((plain / "config.json").read_text())).linear_modules())
    record = {
        "error": 1e-5,
        "scheme": "w8a8",
        "region": "x",
        "bits": 1,
        "sha256": "old",
        "searched_blocks": 3,
    }
    manifest = {
        "layout": CT,
        "scheme": {"name": "w8a8"},
        "block": [1, 0],
        "layers": [{"layer": 0, "linears": [{"name": module, **record} for module in modules]}],
        "head": [{"name": "lm_head", "error": 0.5}],
    }
    (source / "qwen_quantize.json").write_text(json.dumps(manifest))
    plan, done = converted(source, out, "gptq", requantize=True, scheme="w4a16")
    assert plan.requantized == set(modules)
    found = json.loads((out / "qwen_quantize.json").read_text())
    assert found["scheme"]["name"] == "w4a16"
    assert found["scheme"]["activation"] is None
    assert found["block"] == [1, 32]
    assert found["head"] == manifest["head"]
    tensors, linears = load_file(out / "model.safetensors"), LinearReader(open_source(out))
    for linear in found["layers"][0]["linears"]:
        name = linear["name"]
        own = [
            tensor for key, tensor in tensors.items() if key.rpartition(".")[0] == name and "bias" not in key
        ]
        assert linear["bits"] == 8 * sum(tensor.nbytes for tensor in own)
        assert (linear["scheme"], linear["symmetric"]) == ("w4a16", True)
        assert linear["error"] == done.losses[name] > 0
        assert "searched_blocks" not in linear
        codes = linears.read_quantized(name).codes
        assert linear["sha256"] == hashlib.sha256(codes.numpy().tobytes()).hexdigest()


def test_an_exact_conversion_keeps_what_was_measured(plain: Path, tmp_path: Path) -> None:
    source, out = stored(plain, tmp_path / "source", CT, W4A16), tmp_path / "out"
    module = "model.layers.0.mlp.up_proj"
    record = {"name": module, "error": 1e-5, "scheme": "w4a16", "bits": 1, "sha256": "same"}
    (source / "qwen_quantize.json").write_text(json.dumps({"layers": [{"linears": [record]}]}))
    converted(source, out, "gptq")
    (linear,) = json.loads((out / "qwen_quantize.json").read_text())["layers"][0]["linears"]
    assert (linear["error"], linear["sha256"]) == (1e-5, "same")
    assert linear["bits"] > 1


def test_losses_survive_a_crash_between_tensors_and_journal(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two is durable first, a loss that is gone is measured again."""
    source = stored(plain, tmp_path / "source", CT, SCHEMES["w8a8"])
    opened = open_source(source)
    plan = plan_conversion(opened, "gptq", requantize=True, scheme="w4a16")
    whole = convert(plan, opened, Output(tmp_path / "whole"), {}, lambda *_: None)
    for number, owner, name in ((0, Journal, "finish"), (1, OutputFolder, "sync")):
        target, method = tmp_path / str(number), getattr(owner, name)

        def stopping(*arguments: Any, method: Any = method, **named: Any) -> None:
            method(*arguments, **named)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, stopping)
            with pytest.raises(KeyboardInterrupt):
                convert(plan, opened, Output(target), {}, lambda *_: None)
        again = convert(plan, opened, Output(target, resume=True), {}, lambda *_: None)
        assert again.losses == whole.losses
        assert again.codes == whole.codes
        again.folder.discard()
    whole.folder.discard()
