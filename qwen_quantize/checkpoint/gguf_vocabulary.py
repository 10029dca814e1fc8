"""What a GGUF says of a tokenizer, from the files beside a Hugging Face model; the inverse of `gguf_tokenizer`.

How text is cut has a name in GGUF and no description, so a tokenizer is written only where its steps are those of a
name in `PRE_TOKENIZERS`: any other would cut text otherwise in llama.cpp, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from qwen_quantize.checkpoint.gguf_sentencepiece import derive_merges
from qwen_quantize.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, PreTokenizer
from qwen_quantize.checkpoint.json_file import parse_object
from qwen_quantize.errors import UserError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # token types of ggml's gguf.md
_FILE = "tokenizer.json"
_INSTEAD = "choose another --layout"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokenizer keys of a GGUF header.

    model: "gpt2" for byte-level BPE, "llama" for SentencePiece's; pre: the name of how text is cut, only for the
    former. scores and space_prefix belong to the latter. template: of a chat.
    """

    model: str
    pre: str | None
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...] | None
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    adds_bos: bool
    adds_eos: bool
    space_prefix: bool | None
    template: str | None


def read_vocabulary(
    files: Mapping[str, bytes | Path], config: Mapping[str, Any], rows: int
) -> Vocabulary | None:
    """From the side files of a model; None without a tokenizer.json. rows: of the embedding, each needs a token.

    UserError for a tokenizer that GGUF has no words for.
    """
    if _FILE not in files:
        return None
    data = _bytes(files[_FILE])
    whole = parse_object(data, _FILE)
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise UserError(f"{_FILE} is no tokenizer that the tokenizers library can read: {error}") from error
    settings = (
        parse_object(_bytes(files["tokenizer_config.json"]), "tokenizer_config.json")
        if ("tokenizer_config.json" in files)
        else {}
    )
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    if count > rows:
        raise UserError(
            f"{_FILE} has {count} tokens and the embedding {rows} rows, which a GGUF cannot hold; {_INSTEAD}"
        )
    model = whole.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE":
        raise UserError(f"{_FILE}: only tokenizers of the kind BPE are written to a GGUF; {_INSTEAD}")
    named = {role: _id_of(tokenizer, settings, config, role) for role in ("bos", "eos", "unk", "pad")}
    byte_pieces = bool(model.get("byte_fallback"))
    tokens, types = _tokens(tokenizer, whole, rows, byte_pieces, named["unk"])
    merges = _merges(model)
    if byte_pieces:
        scores = _scores(tokens, types, merges)
        pre, space, merges = None, _space_prefix(whole), []
    else:
        scores, pre, space = None, _pre_tokenizer(whole), None
    before, after = _around(tokenizer)
    if before not in ([], [named["bos"]]) or after not in ([], [named["eos"]]):
        raise UserError(f"{_FILE} puts other tokens around a text than the ends that have a name; {_INSTEAD}")
    return Vocabulary(
        model="llama" if byte_pieces else "gpt2",
        pre=pre,
        tokens=tuple(tokens),
        types=tuple(types),
        merges=tuple(f"{left} {right}" for left, right in merges),
        scores=scores,
        bos=named["bos"],
        eos=named["eos"],
        unknown=named["unk"],
        padding=named["pad"],
        adds_bos=bool(before),
        adds_eos=bool(after),
        space_prefix=space,
        template=_template(files, settings),
    )


def _bytes(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _tokens(
    tokenizer: Tokenizer, whole: Mapping[str, Any], rows: int, byte_pieces: bool, unknown: int | None
) -> tuple[list[str], list[int]]:
    """(token, type) of each row; rows that no token has are unused."""
    added = {
        entry["id"]: bool(entry.get("special"))
        for entry in whole.get("added_tokens") or ()
        if isinstance(entry, dict) and isinstance(entry.get("id"), int)
    }
    tokens, types = [], []
    for number in range(rows):
        token = tokenizer.id_to_token(number)
        if token is None:
            tokens.append(f"[PAD{number}]")
            types.append(_UNUSED)
            continue
        tokens.append(token)
        if number == unknown and byte_pieces:
            types.append(_UNKNOWN)
        elif number in added:
            types.append(_CONTROL if added[number] else _USER_DEFINED)
        else:
            types.append(_BYTE if byte_pieces and _is_byte(token) else _NORMAL)
    if len(set(tokens)) != len(tokens):
        raise UserError(f"{_FILE} holds a token twice; {_INSTEAD}")
    return tokens, types


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Pairs, which older files write as one text with a space."""
    found = []
    for entry in model.get("merges") or ():
        pair = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise UserError(f"{_FILE}: the merge {entry!r:.80} is not of two tokens; download the file again")
        if any(" " in part for part in pair):
            raise UserError(
                f"{_FILE}: the merge {entry!r:.80} holds a space, which GGUF divides by; {_INSTEAD}"
            )
        found.append((pair[0], pair[1]))
    return found


def _scores(tokens: Sequence[str], types: Sequence[int], merges: list[tuple[str, str]]) -> tuple[float, ...]:
    """SentencePiece's scores, which fall with the id; UserError where they would not merge as the file does."""
    scores = tuple(-float(number) if kind == _NORMAL else 0.0 for number, kind in enumerate(types))
    usable = [kind in (_NORMAL, _USER_DEFINED) for kind in types]
    if derive_merges(tokens, scores, usable) != merges:
        raise UserError(
            f"{_FILE}: its merges do not follow from the order of its pieces, so a GGUF would cut text otherwise; "
            f"{_INSTEAD}"
        )
    return scores


def _steps(whole: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = whole.get("pre_tokenizer")
    if not isinstance(found, dict):
        return []
    steps = found.get("pretokenizers") if found.get("type") == "Sequence" else [found]
    return [step for step in steps or () if isinstance(step, dict)]


def _pre_tokenizer(whole: Mapping[str, Any]) -> str:
    """The name of how a byte-level tokenizer cuts text."""
    model, normalizer = whole["model"], whole.get("normalizer")
    steps = _steps(whole)
    digits = bool(steps) and steps[0].get("type") == "Digits" and steps[0].get("individual_digits") is True
    rest = steps[1:] if digits else steps
    split = None
    if rest and rest[0].get("type") == "Split" and rest[0].get("behavior") == "Isolated":
        pattern = rest[0].get("pattern")
        split = pattern.get("Regex") if isinstance(pattern, dict) and not rest[0].get("invert") else None
        rest = rest[1:]
    last = rest[0] if len(rest) == 1 else {}
    plain = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    composes = isinstance(normalizer, dict) and normalizer.get("type") == "NFC"
    if plain and (normalizer is None or composes) and last.get("use_regex", True) is (split is None):
        cuts = PreTokenizer(split, digits, composes, bool(model.get("ignore_merges")))
        for name, known in PRE_TOKENIZERS.items():
            if name != "default" and _cuts_alike(known, cuts):
                return name
    raise UserError(
        f"{_FILE} cuts text in a way that has no name here ({', '.join(sorted(PRE_TOKENIZERS))} have), and llama.cpp "
        f"would cut it otherwise; {_INSTEAD}"
    )


def _cuts_alike(known: PreTokenizer, cuts: PreTokenizer) -> bool:
    return (known.split, known.digits, known.compose, known.whole_words) == (
        cuts.split, cuts.digits, cuts.compose, cuts.whole_words,
    )  # fmt: skip


def _space_prefix(whole: Mapping[str, Any]) -> bool:
    """Whether a text gets a leading space, as SentencePiece models have it in either of two forms."""
    steps, normalizer = _steps(whole), whole.get("normalizer")
    if len(steps) == 1 and steps[0].get("type") == "Metaspace" and normalizer is None:
        return bool(steps[0].get("prepend_scheme", "always") != "never")
    inner = normalizer.get("normalizers") if isinstance(normalizer, dict) else None
    kinds = [step.get("type") for step in inner or () if isinstance(step, dict)]
    if not steps and kinds in (["Prepend", "Replace"], ["Replace"]):
        return bool(kinds[0] == "Prepend")
    raise UserError(f"{_FILE} cuts text in a way that a GGUF of its kind cannot say; {_INSTEAD}")


def _around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that are put before and after a text."""
    bare = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    for begin in range(len(full) - len(bare) + 1):
        if full[begin : begin + len(bare)] == bare:
            return full[:begin], full[begin + len(bare) :]
    return full, []


def _id_of(
    tokenizer: Tokenizer, settings: Mapping[str, Any], config: Mapping[str, Any], role: str
) -> int | None:
    """The id of a token with a role: by its text in tokenizer_config.json, else by its id in config.json."""
    value = settings.get(f"{role}_token")
    text = value.get("content") if isinstance(value, dict) else value
    found = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if found is not None:
        return int(found)
    number = config.get(f"{role}_token_id")
    number = number[0] if isinstance(number, list) and number else number
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


def _template(files: Mapping[str, bytes | Path], settings: Mapping[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        try:
            return _bytes(files["chat_template.jinja"]).decode()
        except UnicodeDecodeError as error:
            raise UserError(f"chat_template.jinja is no UTF-8: {error}") from error
    found = settings.get("chat_template")
    if isinstance(found, list):  # several with names: the one for chats is called so
        found = next(
            (one.get("template") for one in found if isinstance(one, dict) and one.get("name") == "default"),
            None,
        )
    return found if isinstance(found, str) else None
