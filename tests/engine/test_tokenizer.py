"""The tokenizer wrapper against transformers' AutoTokenizer on a byte-level BPE made here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from qwen_quantize.engine.tokenizer import Message, load_tokenizer
from qwen_quantize.errors import UserError

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}\n"
    "    {{- '<|im_start|>assistant\\n' }}\n"
    "{% endif %}\n"
)
EVERYTHING = (
    "{{ bos_token }}{% set ns = namespace(count=0) %}\n"
    "{% for message in messages if message.role != 'system' %}\n"
    "    {% set ns.count = ns.count + 1 %}\n"
    "    {% if loop.index > 3 %}{% break %}{% endif %}\n"
    "{{ ns.count }}:{{ message | tojson }}{{ dict(a='<&>') | tojson(indent=2) }}\n"
    "    {% generation %}[{{ message.content }}]{% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if tools is none and documents is none %}none{% endif %}{{ eos_token }}{{ strftime_now('%Y') }}"
)
CORPUS = ["the quick brown fox jumps over the lazy dog", "sense and sensibility, pride and prejudice"] * 20
TALK = [
    Message("system", "Be brief."),
    Message("user", "  Who's there? <b> & 'quotes' ü 界"),
    Message("assistant", "Nobody.\n"),
    Message("user", "Really?"),
    Message("assistant", "Yes."),
]


def backend(with_bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if with_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def write_folder(folder: Path, with_bos: bool = False, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend(with_bos).save(str(folder / "tokenizer.json"))
    content = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(content | config))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    folder = write_folder(tmp_path_factory.mktemp("pair"), with_bos=True)
    return load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=60) | st.sampled_from(["the<|im_end|> fox", "<s>", "", "  \n\n the  dog "]))
def test_encode_and_decode_equal_transformers(pair, text: str) -> None:
    ours, theirs = pair
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("with_bos", [True, False])
@pytest.mark.parametrize(
    "config", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}]
)
def test_beginning_of_text_is_added_as_transformers_does(
    tmp_path: Path, with_bos: bool, config: dict
) -> None:
    folder = write_folder(tmp_path, with_bos, **config)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("the fox") == theirs.encode("the fox")
    assert (ours.encode("the fox")[0] == ours.bos_id) == with_bos


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, EVERYTHING])
@pytest.mark.parametrize("place", ["config", "file", "list"])
def test_chat_template_equals_transformers(tmp_path: Path, template: str, prompt: bool, place: str) -> None:
    if place == "file":  # the file wins over the entry in the config
        folder = write_folder(tmp_path, chat_template="unused")
        (folder / "chat_template.jinja").write_text(template)
    elif place == "list":
        named = [{"name": "default", "template": template}, {"name": "tool_use", "template": "tools"}]
        folder = write_folder(tmp_path, chat_template=named)
    else:
        folder = write_folder(tmp_path, chat_template=template)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        [asdict(message) for message in TALK], tokenize=False, add_generation_prompt=prompt
    )
    assert ours.has_chat_template
    assert ours.apply_chat_template(TALK, add_generation_prompt=prompt) == expected


def test_named_tokens_as_objects_and_as_ids(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "objects", eos_token={"__type": "AddedToken", "content": "<|im_end|>"})
    assert load_tokenizer(folder).eos_id == AutoTokenizer.from_pretrained(folder).eos_token_id == 3
    folder = write_folder(tmp_path / "ids", eos_token=None, bos_token=None)
    assert load_tokenizer(folder).eos_id is None
    (folder / "config.json").write_text('{"eos_token_id": [1, 3], "bos_token_id": null}')
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 1)


def test_a_special_token_outside_the_vocabulary_is_added(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, pad_token="<pad>", eos_token="<end>")
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("fox<end>the") == theirs.encode("fox<end>the")
    assert ours.eos_id == theirs.eos_token_id
    assert ours.vocabulary_size == len(theirs)


def test_truncation_saved_with_the_tokenizer_is_lifted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    saved = backend()
    saved.enable_truncation(4)
    saved.enable_padding(length=8)
    saved.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("the quick brown fox") == backend().encode("the quick brown fox").ids


def test_without_tokenizer_json_transformers_builds_it(tmp_path: Path) -> None:
    model = json.loads(backend().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode("the quick fox")
    assert ids == theirs.encode("the quick fox")
    assert ours.decode(ids) == "the quick fox"
    assert ours.eos_id == theirs.eos_token_id == 1
    assert ours.apply_chat_template([Message("user", "hi")]).startswith("<|im_start|>user\nhi")


def test_the_digest_follows_what_decides_the_ids(tmp_path: Path) -> None:
    folder = write_folder(tmp_path)
    first = load_tokenizer(folder).sha256
    assert load_tokenizer(folder).sha256 == first
    (folder / "chat_template.jinja").write_text(CHATML)
    second = load_tokenizer(folder).sha256
    (folder / "README.md").write_text("not part of it")
    assert first != second == load_tokenizer(folder).sha256


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer"),
        ({"tokenizer.json": "{\n broken"}, "tokenizer.json, line 2, is not JSON"),
        ({"tokenizer.json": '{"version": "1.0"}'}, "is no tokenizer that"),
        ({"tokenizer_config.json": "[1]"}, "holds no JSON object"),
        ({"tokenizer_config.json": '{"chat_template": 3}'}, "neither a text"),
        ({"tokenizer_config.json": "[" * 100_000}, "too deeply"),
        ({"vocab.txt": "a\nb\n"}, "transformers cannot build"),
    ],
)
def test_unusable_folders(tmp_path: Path, files: dict[str, str], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_a_missing_folder_and_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no folder"):
        load_tokenizer(tmp_path / "none")
    (write_folder(tmp_path) / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not UTF-8 at byte 2"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "cannot be compiled"),
        ("{{ messages[7].content.upper() }}", "refuses a conversation"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "refuses a conversation"),  # the sandbox changes nothing it was given
        ("{{ ''.__class__.__mro__ }}", "refuses a conversation"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}", "refuses a conversation"),
        ("{{ namespace([('__init__', 1)]) }}", "may not store"),
        ("{% for i in range(999999999) %}{% endfor %}", "refuses a conversation"),
    ],
)
def test_templates_that_fail_or_misbehave(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path, chat_template=template))
    with pytest.raises(UserError, match=message):
        tokenizer.apply_chat_template(TALK)


def test_no_template_and_no_messages(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(write_folder(tmp_path / "without")).apply_chat_template(TALK)
    with pytest.raises(UserError, match="empty conversation"):
        load_tokenizer(write_folder(tmp_path / "with", chat_template=CHATML)).apply_chat_template([])


def test_reading_a_tokenizer_imports_neither_transformers_nor_torch(tmp_path: Path) -> None:
    write_folder(tmp_path, chat_template=CHATML)
    script = (
        "import sys; from pathlib import Path\n"
        "from qwen_quantize.engine.tokenizer import Message, load_tokenizer\n"
        f"load_tokenizer(Path({str(tmp_path)!r})).apply_chat_template([Message('user', 'hi')])\n"
        "print(sorted({'transformers', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
