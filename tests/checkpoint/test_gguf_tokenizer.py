"""The tokenizer that a GGUF gives back cuts text as the original does, and as transformers reads it."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from qwen_quantize.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, byte_alphabet
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.errors import UserError
from tests.checkpoint.tiny_gguf import TEXTS, make_model, tokenizer, write_gguf


def rebuilt(path: Path) -> PreTrainedTokenizerBase:
    folder = path.with_suffix("")
    folder.mkdir()
    source = open_source(path)
    for name, content in source.side_files().items():
        assert isinstance(content, bytes)
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps(source.config))
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


@pytest.mark.parametrize("pre", ["smollm", "qwen2", "llama-bpe", "gpt-2"])
def test_it_cuts_as_transformers_does(tmp_path: Path, pre: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("qwen2"), pre=pre, keys={})
    ours = rebuilt(path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in TEXTS:
        found = ours(text, add_special_tokens=False).input_ids
        assert found == theirs(text, add_special_tokens=False).input_ids, text
        assert ours.decode(found) == text
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
    assert (ours.bos_token, ours.eos_token, ours.unk_token) == (
        theirs.bos_token,
        theirs.eos_token,
        theirs.unk_token,
    )
    chat = [{"role": "user", "content": "你好"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


def test_it_cuts_as_the_original(tmp_path: Path) -> None:
    ours = rebuilt(write_gguf(tmp_path / "m.gguf", make_model("llama")))
    for text in TEXTS:
        assert ours(text).input_ids == tokenizer().encode(text).ids


def test_added_tokens_stay_whole(tmp_path: Path) -> None:
    ours = rebuilt(write_gguf(tmp_path / "m.gguf", make_model("llama")))
    ids = ours("a<|im_start|>b<think>c").input_ids
    assert ours.convert_tokens_to_ids("<|im_start|>") in ids
    assert ours.convert_tokens_to_ids("<think>") in ids
    assert ours.decode(ids, skip_special_tokens=True) == "ab<think>c"


@pytest.mark.parametrize(("pre", "bos"), [("llama-bpe", True), ("qwen2", False), ("smollm", False)])
def test_the_first_token(tmp_path: Path, pre: str, bos: bool) -> None:
    """llama.cpp puts a first token before Llama 3's texts where the file does not say otherwise."""
    ours = rebuilt(write_gguf(tmp_path / "m.gguf", make_model("llama"), pre=pre))
    ids = ours("hello").input_ids
    assert (ids[0] == 1) is bos
    assert ids[-1] != 2
    assert len(ours("hello", "there").input_ids) == len(ids) + len(ours("there").input_ids)


def test_byte_alphabet() -> None:
    assert byte_alphabet() == bytes_to_unicode()


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pattern_compiles_and_loses_nothing(pre: str) -> None:
    split = PRE_TOKENIZERS[pre].split
    if split is None:
        return
    cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
    for text in TEXTS:
        assert "".join(piece for piece, _ in cut.pre_tokenize_str(text)) == text


def test_digits() -> None:
    pieces = {}
    for pre in ("qwen2", "llama-bpe"):
        cut = pre_tokenizers.Split(Regex(PRE_TOKENIZERS[pre].split or ""), behavior="isolated")
        pieces[pre] = [piece for piece, _ in cut.pre_tokenize_str("a 12345")]
    assert pieces == {"qwen2": ["a", " ", "1", "2", "3", "4", "5"], "llama-bpe": ["a", " ", "123", "45"]}


def test_an_unknown_pre_tokenizer(tmp_path: Path) -> None:
    source = open_source(write_gguf(tmp_path / "m.gguf", make_model("qwen2"), pre="martian"))
    with pytest.raises(UserError, match=r"'martian'.*qwen2"):
        source.side_files()


def test_generation_config(tmp_path: Path) -> None:
    files = open_source(write_gguf(tmp_path / "m.gguf", make_model("qwen2"))).side_files()
    assert sorted(files) == ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    generation = files["generation_config.json"]
    assert isinstance(generation, bytes)
    assert json.loads(generation) == {
        "_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    json_bytes = files["tokenizer.json"]
    assert isinstance(json_bytes, bytes)
    assert Tokenizer.from_str(json_bytes.decode()).get_vocab_size() == tokenizer().get_vocab_size()


WORDS = "th he the ▁t ▁the ow own br ▁br ▁brown ▁▁ ov over qu qui er ▁o ▁over ju mp jump ▁jump um ump ps umps"


def sentencepiece_gguf(path: Path, **keys: object) -> Path:
    """A file with a SentencePiece vocabulary: bytes, letters and the pieces of a few words by score."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    letters = sorted(
        {letter for text in TEXTS for letter in text.replace(" ", "▁") if letter.isascii() or letter == "▁"}
    )
    words = WORDS.split()
    pieces += [*letters, *words]
    types += [1] * (len(letters) + len(words))
    scores = [0.0] * 259 + [-1000.0 - n for n in range(len(letters))] + [-float(n) for n in range(len(words))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in keys.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((len(pieces), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("keys", [{}, {"add_space_prefix": False}, {"add_bos_token": False}])
def test_sentencepiece_cuts_as_transformers_does(tmp_path: Path, keys: dict[str, object]) -> None:
    path = sentencepiece_gguf(tmp_path / "m.gguf", **keys)
    ours = rebuilt(path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in [*TEXTS, "the brown over jumps", "</s>the<s> over"]:
        found = ours(text).input_ids
        assert (found[0] == 1) is keys.get("add_bos_token", True)
        if "add_space_prefix" not in keys:  # transformers puts the space whatever the file says
            assert found == theirs(text).input_ids, text
    assert ours.tokenize("the over")[0] == ("the" if "add_space_prefix" in keys else "▁the")
    assert ours.decode(ours("the brown 你").input_ids, skip_special_tokens=True) == "the brown 你"


def test_sentencepiece_without_scores(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.scores", b"tokenizer.ggml.scorez"))
    with pytest.raises(UserError, match="scores"):
        open_source(path).side_files()


def test_another_kind_of_tokenizer(tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "m.gguf")
    name = b"tokenizer.ggml.model" + b"\x08\0\0\0" + b"\x05" + b"\0" * 7
    path.write_bytes(path.read_bytes().replace(name + b"llama", name + b"rwkv7"))
    with pytest.raises(UserError, match="'rwkv7'"):
        open_source(path).side_files()
