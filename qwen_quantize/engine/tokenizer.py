"""A model folder's tokenizer, read with the `tokenizers` library: transformers takes seconds to import."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from qwen_quantize.engine.chat_template import ChatTemplate
from qwen_quantize.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
ADDED_TOKENS_FILE = "added_tokens.json"
# Ends of text stand here too, as ids, in models whose tokenizer names none.
_ID_FILES = ("generation_config.json", "config.json")
# Any of these lets transformers build a tokenizer where tokenizer.json is missing.
_OTHER_VOCABULARIES = ("tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "spiece.model")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is system, user, assistant or whatever the chat template knows."""

    role: str
    content: str


class Tokenizer:
    """Text to token ids and back, and conversations to text; made by `load_tokenizer`.

    `bos_id` and `eos_id` are None where the model names no such token. `sha256` covers every file that
    decides ids or rendering. As in transformers 5, tokenizer.json alone decides whether a text is given a BOS
    in front: `add_bos_token` in tokenizer_config.json says nothing beside it.
    """

    def __init__(
        self,
        *,
        encode: Callable[[str, bool], list[int]],
        decode: Callable[[list[int]], str],
        special_tokens: Mapping[str, str],
        bos_id: int | None,
        eos_id: int | None,
        vocabulary_size: int,
        template: str | None,
        sha256: str,
        where: str,
    ) -> None:
        self._encode = encode
        self._decode = decode
        self._special_tokens = dict(special_tokens)
        self._template = template
        self._where = where
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.vocabulary_size = vocabulary_size
        self.sha256 = sha256

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids, never truncated or padded; names of special tokens inside `text` become those tokens."""
        return self._encode(text, add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return self._decode(list(ids))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def apply_chat_template(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """The conversation as the model was trained to see it; encode it with `add_special_tokens=False`.

        Raises UserError without a template, and where the template refuses the conversation.
        """
        if self._template is None:
            raise UserError(f"{self._where} has no chat template to render conversations with")
        return self._compiled_template.render(
            [asdict(message) for message in messages], add_generation_prompt, self._special_tokens
        )

    @cached_property
    def _compiled_template(self) -> ChatTemplate:
        assert self._template is not None
        return ChatTemplate(self._template, self._where)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; everything is read at once, so the folder may go afterwards.

    Without tokenizer.json transformers builds one from the older vocabulary files, offline and without
    running code from the folder. Raises UserError for a folder without a tokenizer and for unreadable files.
    """
    if not folder.is_dir():
        raise UserError(f"no folder {folder} to read a tokenizer from")
    config = _json_object(folder / CONFIG_FILE)
    template = _template_text(folder, config)
    digest = _digest(folder)
    if (folder / TOKENIZER_FILE).is_file():
        return _from_tokenizer_json(folder, config, template, digest)
    if any((folder / name).is_file() for name in _OTHER_VOCABULARIES):
        return _from_transformers(folder, template, digest)
    raise UserError(
        f"{folder} holds no tokenizer ({TOKENIZER_FILE}); copy the original model's tokenizer files there"
    )


def _from_tokenizer_json(
    folder: Path, config: dict[str, Any], template: str | None, digest: str
) -> Tokenizer:
    path = folder / TOKENIZER_FILE
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every fault of the file
        _json_object(path)  # says where broken JSON or UTF-8 breaks
        raise UserError(f"{path} is no tokenizer that the tokenizers library can read: {error}") from error
    # A file saved in the middle of training would cut every text at its training length.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))

    named = _named_tokens(folder, config)
    missing = [text for text in named.values() if backend.token_to_id(text) is None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in missing])

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(ids: list[int]) -> str:
        return backend.decode(ids, skip_special_tokens=False)

    def token_id(name: str) -> int | None:
        return backend.token_to_id(named[name]) if name in named else _configured_id(folder, f"{name}_id")

    return Tokenizer(
        encode=encode,
        decode=decode,
        special_tokens=named,
        bos_id=token_id("bos_token"),
        eos_id=token_id("eos_token"),
        vocabulary_size=backend.get_vocab_size(with_added_tokens=True),
        template=template,
        sha256=digest,
        where=str(folder),
    )


def _from_transformers(folder: Path, template: str | None, digest: str) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise UserError(f"transformers cannot build a tokenizer from {folder}: {error}") from error

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return Tokenizer(
        encode=encode,
        decode=decode,
        special_tokens={
            name: text for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)
        },
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        vocabulary_size=len(tokenizer),
        template=template,
        sha256=digest,
        where=str(folder),
    )


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Texts of the special tokens with a role, in the order of `_NAMED_TOKENS`."""
    sources = [config]
    if "added_tokens_decoder" not in config:
        # Folders from before that key was introduced keep the roles in a file of their own, which wins.
        sources.insert(0, _json_object(folder / SPECIAL_TOKENS_FILE))
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str) and text:
                named[name] = text
                break
    return named


def _configured_id(folder: Path, key: str) -> int | None:
    for name in _ID_FILES:
        value = _json_object(folder / name).get(key)
        # Several ends of text are a list, the first of them the end of a document.
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, int) and not isinstance(first, bool) and first >= 0:
            return first
    return None


def _template_text(folder: Path, config: dict[str, Any]) -> str | None:
    """The default chat template: its own file before the entry of tokenizer_config.json."""
    path = folder / TEMPLATE_FILE
    if path.is_file():
        return _text(path)
    value = config.get("chat_template")
    if isinstance(value, list):  # several templates, each {"name": ..., "template": ...}
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise UserError(f"chat_template in {folder / CONFIG_FILE} is neither a text nor a list of texts")
    return value


def _digest(folder: Path) -> str:
    names = (TOKENIZER_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, ADDED_TOKENS_FILE, "merges.txt", TEMPLATE_FILE)
    digest = hashlib.sha256()
    for name in sorted({*names, *_OTHER_VOCABULARIES}):
        path = folder / name
        if path.is_file():
            content = path.read_bytes()
            digest.update(f"{name}\n{len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty without the file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}, is not JSON: {error.msg}") from error
    except RecursionError as error:
        raise UserError(f"{path} nests its JSON too deeply to be read") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}: copy the file again") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
