"""Ascend folders: those of somebody else, and those that the command line writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from qwen_quantize.checkpoint.ascend_layout import ASCEND
from qwen_quantize.checkpoint.ascend_packing import (
    unpack_int4_pairs,
)
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind
from qwen_quantize.checkpoint.tensor_info import DTYPES
from qwen_quantize.checkpoint.writer import OutputFolder, OutputTensor, plan_shards
from qwen_quantize.cli.main import app
from qwen_quantize.cli.session import ChipQuestion, folder_chip
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Stream
from qwen_quantize.pipeline.journal import Journal
from tests.checkpoint.ascend_samples import (
    DESCRIPTION,
    LOADER,
    make_reference,
)
from tests.tiny_models import make_tiny, make_tokenizer, words


def write_folder(
    folder: Path, entries: dict[str, Any], tensors: dict[str, Tensor], config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {"torch_dtype": "bfloat16"}))
    (folder / DESCRIPTION).write_text(json.dumps(entries))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "quant_model_weights.safetensors",
    )
    return folder


def int8(*shape: int, seed: int, low: int = -128, high: int = 128) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int8)


def static_tensors(
    module: str, rows: int, columns: int, offset: int, words_: bool, bias: Tensor
) -> dict[str, Tensor]:
    """A linear as msModelSlim writes it, by its formulas."""
    weight = int8(rows, columns, seed=rows + columns)
    input_scale = torch.tensor([0.0173])
    deq = input_scale * (torch.rand(rows, generator=torch.Generator().manual_seed(rows)) * 0.003 + 0.001)
    steps = torch.round(bias / deq - offset * weight.float().sum(dim=1)).to(torch.int32)
    return {
        f"{module}.weight": weight,
        f"{module}.input_scale": input_scale,
        f"{module}.input_offset": torch.tensor([float(offset)]),
        f"{module}.quant_bias": steps,
        f"{module}.deq_scale": deq.view(torch.int32).to(torch.int64) if words_ else deq,
    }


@pytest.mark.parametrize("words_", [False, True], ids=["bf16", "fp16"])
@pytest.mark.parametrize("offset", [0, -7])
def test_a_static_folder_computes_what_the_engine_computes(tmp_path: Path, offset: int, words_: bool) -> None:
    dtype = torch.float16 if words_ else torch.bfloat16
    make_tiny(tmp_path, "qwen2", num_hidden_layers=1)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    config = {
        **json.loads((tmp_path / "config.json").read_text()),
        "dtype": str(dtype).removeprefix("torch."),
    }
    entries: dict[str, Any] = {"model_quant_type": "W8A8", "version": "1.0.0", "group_size": 0}
    biases = {}
    for name in [name for name in tensors if "_proj.weight" in name]:
        module = name.removesuffix(".weight")
        rows, columns = tensors.pop(name).shape
        bias = tensors.get(f"{module}.bias", torch.zeros(rows))
        biases[module] = bias
        own = static_tensors(module, rows, columns, offset, words_, bias)
        entries |= dict.fromkeys(own, "W8A8")
        tensors |= own
    entries |= {name: "FLOAT" for name in tensors if name not in entries}
    write_folder(tmp_path, entries, tensors, config)
    reader = ModelReader(open_source(tmp_path))
    stored = reader.linears.describe("model.layers.0.mlp.up_proj")
    assert stored.kind is StoredKind.INT8_STATIC
    compute = folder_chip(ChipQuestion("cpu"), None, reader).compute
    layer = reader.read_layer(0, compute)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(3)) * 0.7
    for stream, names in (
        (Stream.ATTENTION_INPUT, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        (Stream.MLP_INPUT, ("mlp.gate_proj", "mlp.up_proj")),
    ):
        for found, name in zip(layer.groups[stream](x), names, strict=True):
            module = f"model.layers.0.{name}"
            scale = (
                tensors[f"{module}.input_scale"].to(dtype).double()
            )  # the engine's parameter has the model's dtype
            codes = torch.clamp(torch.round(x.double() / scale) + offset, -128, 127)
            deq = tensors[f"{module}.deq_scale"]
            deq = deq.to(torch.int32).view(torch.float32) if words_ else deq
            sums = codes @ tensors[f"{module}.weight"].double().T + tensors[f"{module}.quant_bias"]
            torch.testing.assert_close(found.double(), sums * deq.double(), rtol=1e-4, atol=1e-4)
            if biases[module].any():
                lost = sums * deq.double() - (
                    (codes - offset) @ tensors[f"{module}.weight"].double().T * deq.double()
                    + biases[module].double()
                )
                assert float(lost.abs().max()) < float(deq.max())


def linear(folder: Path, kind: str, more: dict[str, Any] | None = None, **parts: Tensor) -> LinearReader:
    tensors = {f"m.q_proj.{suffix}": tensor for suffix, tensor in parts.items()}
    entries = {"group_size": 0, **dict.fromkeys(tensors, kind), **(more or {})}
    return LinearReader(open_source(write_folder(folder, entries, tensors)))


def test_int4_is_read_in_each_of_its_orders(tmp_path: Path) -> None:
    codes = int8(6, 32, seed=1, low=-8, high=8)
    scale, zero = torch.rand(6, 2) + 0.5, int8(6, 2, seed=2, low=-3, high=4).float()
    wanted = (codes.float().view(6, 2, 16) - zero[..., None]) * scale[..., None]
    nibbles = codes.view(torch.uint8) & 15
    packings = {
        "rows": (nibbles[0::2] | (nibbles[1::2] << 4)).view(torch.int8),
        "columns": (nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)).view(torch.int8),
        "bytes": codes,
    }
    for name, weight in packings.items():
        reader = linear(
            tmp_path / name,
            "W4A16",
            {"group_size": 16},
            weight=weight,
            weight_scale=scale,
            weight_offset=zero,
        )
        stored = reader.describe("m.q_proj", (6, 32))
        assert stored.activation is None
        assert torch.equal(reader.read("m.q_proj"), wanted.view(6, 32))
        assert torch.equal(reader.read_rows("m.q_proj", 1, 4), wanted.view(6, 32)[1:4])


def test_types_of_one_folder_differ_by_module(tmp_path: Path) -> None:
    one = torch.ones(4, 1)
    tensors = {
        "a.weight": int8(4, 32, seed=1),
        "a.weight_scale": one,
        "a.weight_offset": torch.zeros(4, 1),
        "b.weight": torch.ones(4, 32).to(torch.float8_e4m3fn),
        "b.weight_scale": torch.full((4, 1), 128, dtype=torch.uint8),
        "c.weight": torch.ones(4, 32, dtype=torch.bfloat16),
        "d.weight": int8(2, 32, seed=2),
        "d.weight_scale": one.clone(),
        "d.weight_offset": torch.zeros(4, 1),
        "d.scale_bias": one.clone(),
    }
    kinds = {"a": "W8A8_DYNAMIC", "b": "W8A8_MXFP8", "c": "FLOAT", "d": "W4A8_DYNAMIC"}
    entries = {"version": "1.0.0"} | {name: kinds[name[0]] for name in tensors}
    reader = LinearReader(open_source(write_folder(tmp_path, entries, tensors)))
    found = {module: reader.describe(module) for module in kinds}
    assert [stored.kind for stored in found.values()] == [
        StoredKind.INT8,
        StoredKind.MXFP8,
        StoredKind.PLAIN,
        StoredKind.INT4,
    ]
    assert torch.equal(reader.read("b"), torch.full((4, 32), 2.0))
    assert found["c"].activation is None
    assert found["d"].shape == (4, 32)
    assert "d.scale_bias" in reader.companions()
    assert "to W4A8_DYNAMIC and W8A8_DYNAMIC and W8A8_MXFP8 of msModelSlim" in str(reader.loss_warning)


BROKEN: dict[str, tuple[Callable[[dict[str, Any], dict[str, Tensor]], object], str]] = {
    "a type that nobody reads": (lambda e, _: e.update({"m.weight": "W8A8_TIMESTEP"}), "cannot be read"),
    "no type at all": (lambda e, _: e.update({"m.weight": 3}), "must have a type"),
    "a group size that is none": (lambda e, _: e.update(group_size="32"), "'group_size' must be"),
    "an int8 weight as FLOAT": (lambda e, _: e.update({"m.weight": "FLOAT"}), "belongs to another model"),
    "a missing scale": (lambda _, t: t.pop("m.deq_scale"), "is missing"),
    "a scale of another size": (lambda _, t: t.update({"m.deq_scale": torch.ones(3)}), "must be"),
    "words beyond a scale": (
        lambda _, t: t.update({"m.deq_scale": torch.full((4,), 1 << 50)}),
        "more than the 32 bits",
    ),
    "a scale of zero": (lambda _, t: t.update({"m.deq_scale": torch.zeros(4)}), "no positive numbers"),
    "half an offset": (lambda _, t: t.update({"m.input_offset": torch.tensor([0.5])}), "a whole number"),
    "a NaN for an offset": (
        lambda _, t: t.update({"m.input_offset": torch.tensor([torch.nan])}),
        "a whole number",
    ),
    "two-level scales": (
        lambda e, t: (
            e.update({"m.weight": "W8A8_DYNAMIC"}),
            t.update({"m.weight_scale_second": torch.ones(4, 2)}),
        ),
        "two levels",
    ),
    "offsets where kernels have none": (
        lambda e, t: (
            e.update({"m.weight": "W8A8_DYNAMIC"}),
            t.update({"m.weight_scale": torch.ones(4, 1), "m.weight_offset": torch.ones(4, 1)}),
        ),
        "holds offsets",
    ),
    "MX beside another group": (
        lambda e, t: (
            e.update({"m.weight": "W8A8_MXFP8", "group_size": 64}),
            t.update({"m.weight": torch.ones(4, 32).to(torch.float8_e4m3fn)}),
        ),
        "group of all",
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_folder_is_refused_by_name(tmp_path: Path, how: str) -> None:
    change, message = BROKEN[how]
    tensors = static_tensors("m", 4, 32, 0, False, torch.zeros(4))
    entries: dict[str, Any] = {"group_size": 0, **dict.fromkeys(tensors, "W8A8")}
    change(entries, tensors)
    with pytest.raises(UserError, match=message):
        LinearReader(open_source(write_folder(tmp_path, entries, tensors))).read("m")


def test_what_is_no_scale_of_sums_is_refused_for_the_bias_too(tmp_path: Path) -> None:
    tensors = static_tensors("m", 4, 32, 0, True, torch.zeros(4))
    entries: dict[str, Any] = {"group_size": 0, **dict.fromkeys(tensors, "W8A8")}
    linears = LinearReader(open_source(write_folder(tmp_path / "whole", entries, tensors)))
    assert linears.integer_bias("m") is not None
    with pytest.raises(UserError, match="cannot be told bit by bit"):
        linears.read_quantized("m")
    tensors["m.deq_scale"] += 1 << 40
    broken = LinearReader(open_source(write_folder(tmp_path / "broken", entries, tensors)))
    with pytest.raises(UserError, match=r"m\.deq_scale.*32 bits"):
        broken.integer_bias("m")


def test_shards_have_the_names_that_vllm_ascend_looks_for(tmp_path: Path) -> None:
    tensors = {f"m{number}.weight": int8(8, 32, seed=number) for number in range(3)}
    outputs = [OutputTensor(name, "I8", (8, 32)) for name in tensors]
    plan = plan_shards(outputs, 300, ASCEND.weights_stem)
    assert [shard.file for shard in plan] == [
        f"quant_model_weights-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]
    with OutputFolder(tmp_path / "out", plan, resume=False, overwrite=False) as folder:
        for name, tensor in tensors.items():
            folder.write(name, tensor)
        folder.add_file("config.json", b"{}")
        folder.add_file(
            DESCRIPTION, json.dumps({**dict.fromkeys(tensors, "FLOAT"), "group_size": 0}).encode()
        )
        with pytest.raises(UserError, match="cannot be the name"):
            folder.add_file("quant_model_weights.safetensors.index.json", b"{}")
        folder.finish()
    source = open_source(tmp_path / "out")
    assert {name: source.read(name).tolist() for name in source.names()} == {
        name: tensor.tolist() for name, tensor in tensors.items()
    }


def test_weights_are_found_whatever_an_older_version_called_them(tmp_path: Path) -> None:
    tensors = {"m.weight": int8(4, 32, seed=1), "m.weight_scale": torch.ones(4, 1)}
    folder = write_folder(tmp_path, dict.fromkeys(tensors, "W8A8_DYNAMIC"), tensors)
    (folder / "quant_model_weights.safetensors").rename(
        folder / "quant_model_weight_w8a8_dynamic.safetensors"
    )
    assert torch.equal(LinearReader(open_source(folder)).read("m"), tensors["m.weight"].float())
    save_file({"m.weight": torch.ones(4, 32)}, folder / "model.safetensors")
    with pytest.raises(UserError, match="left over"):
        open_source(folder)
    (folder / "quant_model_weight_w8a8_dynamic.safetensors").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has neither"):
        open_source(folder)


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def in_dtype(folder: Path, dtype: torch.dtype) -> None:
    file = folder / "model.safetensors"
    save_file(
        {name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}))


CASES = {
    "W8A8": ("qwen2", torch.float16, "ascend-910b", ("--quant-method", "w8a8", "--scheme", "w8a8_static")),
    "W8A8_DYNAMIC": ("qwen3-moe", torch.bfloat16, "ascend-910b", ("--quant-method", "w8a8")),
    "W8A8_MXFP8": ("qwen2", torch.bfloat16, "ascend-950", ("--quant-method", "rtn", "--scheme", "mxfp8")),
    "W4A8_DYNAMIC": ("qwen2", torch.bfloat16, "ascend-910b", ("--quant-method", "w4a8", "--group-size", "0")),
}  # fmt: skip


def dequantized(kind: str, tensors: dict[str, Tensor], module: str) -> Tensor:
    """By the formulas of the format, from raw tensors."""
    weight = tensors[f"{module}.weight"]
    if kind == "W8A8":
        deq = tensors[f"{module}.deq_scale"].to(torch.int32).view(torch.float32)
        return weight.double() * (deq.double() / tensors[f"{module}.input_scale"].double())[:, None]
    scale = tensors[f"{module}.weight_scale"]
    if kind == "W8A8_MXFP8":
        values = weight.float().double().view(weight.shape[0], -1, 32)
        return (values * torch.exp2(scale.double() - 127)[..., None]).flatten(1)
    if kind == "W4A8_DYNAMIC":
        octets = weight.to(torch.int16) & 255
        both = torch.stack((octets & 15, octets >> 4), dim=1).flatten(0, 1)
        weight = torch.where(both > 7, both - 16, both)
    return weight.double() * scale.double()


@pytest.mark.parametrize("kind", CASES)
def test_a_model_becomes_a_folder_and_is_read_back(kind: str, tmp_path: Path) -> None:
    family, dtype, device, method = CASES[kind]
    model, out = tmp_path / "model", tmp_path / "out"
    sizes = {"num_experts": 3, "num_experts_per_tok": 2} if family == "qwen3-moe" else {}
    made = make_tiny(model, family, num_hidden_layers=1, **sizes, seed=7)
    del made
    make_tokenizer(model)
    in_dtype(model, dtype)
    text, held_out = tmp_path / "calib.jsonl", tmp_path / "text.txt"
    text.write_text("".join(f'{{"text": "{words(60, seed)}"}}\n' for seed in range(6)))
    held_out.write_text(words(200, seed=50))
    record = run(
        "--model-path", model, "--output-path", out, "--device", device, *method, "--layout", "ascend",
        "--calibration-dataset", text, "--calibration-length", 32, "--calibration-samples", 6,
        "--validation-text", held_out, "--validation-tokens", 96, "--json",
    )  # fmt: skip
    assert record["layout"] == "ascend"
    assert 0 < record["validation"]["kl_mean"] < 0.2
    names = {path.name for path in out.iterdir()}
    assert {DESCRIPTION, "quant_model_weights.safetensors"} <= names
    assert not any(name.startswith("model") for name in names)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    tensors = load_file(out / "quant_model_weights.safetensors")
    entries = json.loads((out / DESCRIPTION).read_text())
    assert set(tensors) <= set(entries), "vLLM Ascend fails on a tensor without an entry"
    quantized = [
        name.removesuffix(".weight")
        for name, value in entries.items()
        if value == kind and name.endswith(".weight")
    ]
    assert len(quantized) == (7 if family == "qwen2" else 4 + 3 * 3)
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if entries[name] == "FLOAT":
            assert tensor.dtype == dtype
            continue
        rule = LOADER[kind] | ({"deq_scale": (("I64",), lambda n, _: (n,))} if kind == "W8A8" else {})
        if suffix == "scale_bias" and module.endswith(("down_proj", "o_proj")):
            rule = rule | {"scale_bias": (("F32",), lambda n, _: (n, 16))}
        dtypes, size = rule[suffix]
        rows, columns = load_file(model / "model.safetensors")[f"{module}.weight"].shape
        assert (tuple(tensor.shape), DTYPES[dtypes[0]].torch) == (size(rows, columns), tensor.dtype)
    manifest = json.loads((out / "qwen_quantize.json").read_text())
    linears = [*manifest["head"], *(linear for layer in manifest["layers"] for linear in layer["linears"])]
    sums = {linear["name"]: linear["sha256"] for linear in linears}
    reader = ModelReader(open_source(out))
    plain = {name: tensor for name, tensor in tensors.items() if entries[name] == "FLOAT"}
    for module in quantized:
        wanted = dequantized(kind, tensors, module)
        torch.testing.assert_close(reader.read_linear(module).double(), wanted, rtol=1e-6, atol=0)
        plain[f"{module}.weight"] = wanted.float()
        if kind == "W8A8":
            scale = tensors[f"{module}.deq_scale"].to(torch.int32).view(torch.float32)
            bias = tensors[f"{module}.quant_bias"] * scale
            known = plain.get(f"{module}.bias", torch.zeros_like(bias)).float()
            assert bool(((bias - known).abs() <= scale * 0.51).all())
            if f"{module}.bias" in plain:
                assert bool(bias.any())
                plain[f"{module}.bias"] = bias
        codes = ASCEND_CODES[kind](tensors[f"{module}.weight"])
        assert hashlib.sha256(codes.numpy().tobytes()).hexdigest() == sums[module]
    reference = tmp_path / "reference"
    make_reference(model, reference, plain)
    tokens = torch.randint(1, 160, (2, 24), generator=torch.Generator().manual_seed(1))
    found = load_model(reader).forward(tokens)
    expected = load_model(ModelReader(open_source(reference))).forward(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    on_chip = load_model(reader, folder_chip(ChipQuestion(device), None, reader).compute).forward(tokens)
    assert not torch.equal(on_chip, found)


ASCEND_CODES: dict[str, Callable[[Tensor], Tensor]] = {
    "W8A8": lambda weight: weight,
    "W8A8_DYNAMIC": lambda weight: weight,
    "W8A8_MXFP8": lambda weight: weight.view(torch.uint8),
    "W4A8_DYNAMIC": unpack_int4_pairs,
}


def test_requests_that_cannot_be_met(tmp_path: Path) -> None:
    model = tmp_path / "model"
    make_tiny(model, "qwen3", num_hidden_layers=1)
    make_tokenizer(model)
    asked = [
        "--model-path",
        model,
        "--output-path",
        tmp_path / "out",
        "--device",
        "ascend-910b",
        "--layout",
        "ascend",
    ]
    for more, message in (
        (("--quant-method", "rtn", "--scheme", "w8a8_static"), "which only text can tell"),
        (("--quant-method", "rtn", "--scheme", "w4a8"), "--group-size 0"),
        (("--quant-method", "rtn", "--scheme", "fp8", "--allow-unsupported"), "choose another --layout"),
        (("--quant-method", "fp8", "--scheme", "w8a8_static"), "makes fp8 and cannot make w8a8_static"),
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in (*asked, *more)])
        assert result.exit_code == 2
        assert message in result.output
    assert not (tmp_path / "out").exists()


def test_a_resumed_run_goes_on_from_the_scales_that_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tmp_path / "model", tmp_path / "calib.jsonl"
    make_tiny(model, "qwen2-moe", num_hidden_layers=1, num_experts=2, num_experts_per_tok=1)
    make_tokenizer(model)
    text.write_text("".join(f'{{"text": "{words(60, seed)}"}}\n' for seed in range(4)))
    command = [
        "--model-path", model, "--device", "ascend-910b", "--quant-method", "gptq", "--scheme", "w8a8_static",
        "--layout", "ascend", "--calibration-dataset", text, "--calibration-length", 16, "--calibration-samples", 4,
        "--no-validate", "--json",
    ]  # fmt: skip
    run(*command, "--output-path", tmp_path / "whole")
    finish = Journal.finish

    def stopping(self: Journal, unit: str, record: dict[str, Any]) -> None:
        finish(self, unit, record)
        if "expert" in unit:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", stopping)
        out = tmp_path / "out"
        result = CliRunner().invoke(app, [str(argument) for argument in (*command, "--output-path", out)])
        assert result.exit_code != 0
    assert not out.exists()
    run(*command, "--output-path", out, "--resume")
    for name in ("quant_model_weights.safetensors", DESCRIPTION):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
