"""`--layout gguf` end to end: the file is what gguf, transformers and this program read alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import Result

from qwen_quantize.checkpoint.gguf_header import read_gguf_header
from qwen_quantize.checkpoint.source import open_source
from tests.checkpoint.tiny_gguf import TEMPLATE, TEXTS, make_model, tokenizer

Run = Callable[..., Result]


@pytest.fixture(params=["llama", "qwen2", "qwen3"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model with norms and biases that are no ones and zeros, in a folder."""
    folder = tmp_path / "source"
    changes = {"attention_bias": True} if request.param == "llama" else {}
    model = make_model(request.param, tied=request.param == "qwen3", **changes)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def quantized(run: Run, source: Path, out: Path, scheme: str, *more: str) -> Path:
    method = ("mxfp4",) if scheme == "mxfp4" else ("rtn", "--scheme", scheme)
    done = run(
        "--model-path", source, "--output-path", out, "--device", "cpu", "--quant-method", *method,
        "--layout", "gguf", "--no-validate", *more,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (file,) = out.glob("*.gguf")
    return file


def test_what_is_written_is_what_others_read(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    # A projection that stays is one whose rows llama.cpp keeps in another order too.
    file = quantized(run, source, out, "w4a16", "--ignore", "re:layers.1.self_attn.[qkv]_proj")
    assert file.name == "model-Q4_0.gguf"
    ours = open_source(out)
    assert (ours.kind, ours.path) == ("gguf", file)
    plain = open_source(source)
    theirs = AutoModelForCausalLM.from_pretrained(out, gguf_file=file.name, dtype=torch.float32).state_dict()
    if plain.config["tie_word_embeddings"]:
        del theirs["lm_head.weight"]
    assert set(ours.names()) == set(plain.names())
    # transformers makes no llama with biases from a GGUF, so for those the source alone is the witness.
    assert {name for name in ours.names() if name not in theirs} <= {n for n in plain.names() if "bias" in n}
    for name in plain.names():
        found, given = ours.read(name), plain.read(name).float()
        if name in theirs:
            assert torch.equal(found, theirs[name]), name
        rounded = name.endswith("_proj.weight") and not (
            "layers.1.self_attn" in name and "o_proj" not in name
        )
        error = float((found - given).norm() / given.norm())
        assert 0 < error < 0.12 if rounded else error == 0, name
    reader = gguf.GGUFReader(file)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert kinds["blk.1.attn_q.weight"] == "BF16"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["token_embd.weight"] == "BF16"
    for tensor in reader.tensors:
        values = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        name = tensor.name
        if ours.config["model_type"] != "llama" or not ("attn_q." in name or "attn_k." in name):
            assert any(torch.equal(values, ours.read(mine)) for mine in ours.names()), name
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["model_type"] == ours.config["model_type"]


@pytest.mark.parametrize(("scheme", "file"), [("w8a16", "model-Q8_0.gguf"), ("mxfp4", "model-MXFP4.gguf")])
@pytest.mark.parametrize("source", ["qwen3"], indirect=True)
def test_the_other_types(source: Path, tmp_path: Path, run: Run, scheme: str, file: str) -> None:
    found = quantized(run, source, tmp_path / "out", scheme)
    assert found.name == file
    theirs = AutoModelForCausalLM.from_pretrained(
        found.parent, gguf_file=file, dtype=torch.float32
    ).state_dict()
    ours = open_source(found)
    assert all(torch.equal(ours.read(name), theirs[name]) for name in ours.names())


@pytest.mark.parametrize("source", ["llama"], indirect=True)
def test_the_header_says_what_the_model_is(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    header = read_gguf_header(quantized(run, source, out, "w4a16"))
    values = header.values
    assert values["general.architecture"] == "llama"
    assert values["general.file_type"] == gguf.LlamaFileType.MOSTLY_Q4_0
    assert values["tokenizer.ggml.pre"] == "smollm"
    assert values["tokenizer.ggml.token_type"][:5] == [3, 3, 3, 4, 1]
    assert values["tokenizer.ggml.add_bos_token"] is False
    assert values["tokenizer.chat_template"] == TEMPLATE
    rebuilt = Tokenizer.from_buffer(open_source(header.file).side_files()["tokenizer.json"])
    for text in TEXTS:
        assert rebuilt.encode(text).ids == tokenizer().encode(text).ids
    given, found = open_source(source).config, open_source(out).config
    for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id",
        "attention_bias", "tie_word_embeddings",
    ):  # fmt: skip
        assert found[key] == given[key], key


@pytest.mark.parametrize("source", ["qwen3"], indirect=True)
def test_validation_reads_the_file_back(source: Path, tmp_path: Path, run: Run) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(TEXTS) * 8)
    done = run(
        "--model-path", source, "--output-path", tmp_path / "out", "--device", "cpu", "--quant-method", "gptq",
        "--scheme", "w8a16", "--layout", "gguf", "--calibration-dataset", text, "--calibration-samples", 4,
        "--calibration-length", 32, "--validation-text", text, "--validation-tokens", 64, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["layout"] == "gguf"
    assert 0 < record["validation"]["kl_mean"] < 0.5


@pytest.mark.parametrize("source", ["qwen3"], indirect=True)
def test_refusals_leave_nothing_behind(source: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    base = (
        "--model-path",
        source,
        "--output-path",
        out,
        "--device",
        "cpu",
        "--layout",
        "gguf",
        "--no-validate",
    )
    for arguments, words in (
        (("--quant-method", "rtn", "--scheme", "w8a8"), "take w4a16, w8a16 or"),
        (("--quant-method", "rtn", "--group-size", "64"), "groups of 32 and no others"),
        (("--quant-method", "rtn", "--asymmetric"), "zero points"),
    ):
        done = run(*base, *arguments)
        assert done.exit_code == 2
        assert words in " ".join(done.output.split())
        assert not out.exists()
        assert not list(tmp_path.glob(".out*"))
    (source / "tokenizer.json").write_text(tokenizer().to_str().replace('"Digits"', '"Punctuation"', 1))
    done = run(*base, "--quant-method", "rtn")
    assert done.exit_code == 2
    assert not list(tmp_path.glob(".out*"))
