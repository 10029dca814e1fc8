"""The tokenizer in a GGUF header, rebuilt as the files that Hugging Face readers expect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from qwen_quantize.checkpoint.gguf_header import GgufHeader
from qwen_quantize.checkpoint.gguf_sentencepiece import sentencepiece_tokenizer
from qwen_quantize.errors import UserError

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # token types of ggml's gguf.md

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace("{1,3}", "")  # every digit by itself


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before byte-pair merging, by the name in `tokenizer.ggml.pre`.

    split: a pattern of pieces, or None for GPT-2's own; digits: cut digits off first; compose: Unicode NFC
    first; whole_words: a piece that is a token is not merged; adds_bos: where the header does not say.
    """

    split: str | None = None
    digits: bool = False
    compose: bool = False
    whole_words: bool = False
    adds_bos: bool = False


_GPT2 = PreTokenizer()
_GPT2_DIGITS = PreTokenizer(digits=True)
_LLAMA3 = PreTokenizer(_LLAMA3_SPLIT, whole_words=True, adds_bos=True)

PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "phi-2": _GPT2,
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": PreTokenizer(_QWEN2_SPLIT, compose=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2_SPLIT),
}


def tokenizer_files(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, bytes | Path]:
    """tokenizer.json, tokenizer_config.json and generation_config.json; UserError where they cannot be built.

    A file without a vocabulary, which GGUF allows, gives only generation_config.json.
    """
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    files: dict[str, bytes | Path] = {"generation_config.json": _json({"_from_model_config": True, **ids})}
    if header.values.get("tokenizer.ggml.model", "none") == "none":
        return files
    vocabulary = _Vocabulary(header)
    files["tokenizer.json"] = vocabulary.build().to_str(pretty=False).encode("utf-8")
    files["tokenizer_config.json"] = _json(vocabulary.config(config))
    return files


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def byte_alphabet() -> dict[int, str]:
    """GPT-2's spelling of bytes: printable ones are themselves, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable}
    return spelled | {byte: chr(0x100 + number) for number, byte in enumerate(others)}


class _Vocabulary:
    """The tokenizer keys of a header, checked."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.model = header.values.get("tokenizer.ggml.model")
        if self.model not in ("gpt2", "llama"):
            raise UserError(
                f"{header.file}: its tokenizer is of the kind {self.model!r:.80}; 'gpt2' (byte-level BPE) "
                "and 'llama' (SentencePiece BPE) can be rebuilt, for others give the model as a folder of "
                "safetensors"
            )
        self.tokens = self._strings("tokens")
        if len(set(self.tokens)) != len(self.tokens):
            raise UserError(f"{header.file}: 'tokenizer.ggml.tokens' holds a token twice")
        types = header.values.get("tokenizer.ggml.token_type", [1] * len(self.tokens))
        if not isinstance(types, list) or len(types) != len(self.tokens):
            raise UserError(f"{header.file}: 'tokenizer.ggml.token_type' must have one entry for each token")
        self.types = types
        self.special = {
            key: self._special(field)
            for key, field in (
                ("bos_token", "bos"),
                ("eos_token", "eos"),
                ("unk_token", "unknown"),
                ("pad_token", "padding"),
            )
        }

    def _pre_tokenizer(self) -> PreTokenizer:
        name = self.header.values.get("tokenizer.ggml.pre", "default")
        if not isinstance(name, str) or name not in PRE_TOKENIZERS:
            raise UserError(
                f"{self.header.file}: the pre-tokenizer {name!r:.80} is not known, so text would be cut "
                f"wrongly; known are {', '.join(PRE_TOKENIZERS)}; give the model as a folder of safetensors"
            )
        return PRE_TOKENIZERS[name]

    def _scores(self) -> list[float]:
        scores = self.header.values.get("tokenizer.ggml.scores")
        if (
            not isinstance(scores, list)
            or len(scores) != len(self.tokens)
            or not all(isinstance(score, float) and score == score for score in scores)
        ):
            raise UserError(f"{self.header.file}: 'tokenizer.ggml.scores' must have a number for each token")
        return [score for score in scores if isinstance(score, float)]

    def _strings(self, name: str) -> list[str]:
        found = self.header.values.get(f"tokenizer.ggml.{name}")
        if not isinstance(found, list) or not all(isinstance(entry, str) for entry in found):
            raise UserError(f"{self.header.file}: 'tokenizer.ggml.{name}' must be a list of strings")
        return [self._text(f"ggml.{name}", str(entry)) for entry in found]

    def _text(self, name: str, text: str) -> str:
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{self.header.file}: 'tokenizer.{name}' holds text that is not UTF-8")
        return text

    def _merges(self) -> list[tuple[str, str]]:
        known = set(self.tokens)
        merges = []
        for entry in self._strings("merges"):
            left, _, right = entry.partition(" ")
            if left not in known or right not in known or left + right not in known:
                raise UserError(
                    f"{self.header.file}: the merge {entry!r} in 'tokenizer.ggml.merges' is not of two "
                    "tokens into a third"
                )
            merges.append((left, right))
        return merges

    def _special(self, field: str) -> str | None:
        token = self.header.values.get(f"tokenizer.ggml.{field}_token_id")
        if token is None:
            return None
        if not isinstance(token, int) or not 0 <= token < len(self.tokens):
            raise UserError(
                f"{self.header.file}: 'tokenizer.ggml.{field}_token_id' is {token!r:.80}, not one of the "
                f"{len(self.tokens)} tokens"
            )
        return self.tokens[token]

    def adds(self, which: str, default: bool) -> bool:
        return bool(self.header.values.get(f"tokenizer.ggml.add_{which}_token", default))

    def build(self) -> Tokenizer:
        """The tokenizer with its added tokens and what it puts around a text."""
        if self.model == "llama":
            tokenizer = sentencepiece_tokenizer(
                self.tokens,
                self._scores(),
                [kind in (_NORMAL, _USER_DEFINED) for kind in self.types],
                self.special["unk_token"],
                bool(self.header.values.get("tokenizer.ggml.add_space_prefix", True)),
            )
            processor = self._template(adds_bos=True)
        else:
            pre = self._pre_tokenizer()
            tokenizer = self._byte_level(pre)
            processor = self._template(pre.adds_bos) or processors.ByteLevel(trim_offsets=False)
        if processor is not None:
            tokenizer.post_processor = processor
        for token, kind in zip(self.tokens, self.types, strict=True):
            if kind in (_CONTROL, _USER_DEFINED) and token:
                tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
        return tokenizer

    def _byte_level(self, pre: PreTokenizer) -> Tokenizer:
        vocab = {token: number for number, token in enumerate(self.tokens)}
        tokenizer = Tokenizer(
            models.BPE(vocab=vocab, merges=self._merges(), fuse_unk=False, ignore_merges=pre.whole_words)
        )
        if pre.compose:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if pre.digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if pre.split is not None:
            steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _template(self, adds_bos: bool) -> processors.PostProcessor | None:
        """What the header puts before and after a text; adds_bos: where it does not say."""
        bos, eos = self.special["bos_token"], self.special["eos_token"]
        before = [bos] if bos is not None and self.adds("bos", adds_bos) else []
        after = [eos] if eos is not None and self.adds("eos", False) else []
        if not before and not after:
            return None
        second = [f"{token}:1" for token in before], [f"{token}:1" for token in after]
        return processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *second[0], "$B:1", *second[1]],
            special_tokens=[(token, self.tokens.index(token)) for token in sorted({*before, *after})],
        )

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The object of tokenizer_config.json."""
        found: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
        }
        found |= {key: token for key, token in self.special.items() if token is not None}
        template = self.header.values.get("tokenizer.chat_template")
        if isinstance(template, str):
            found["chat_template"] = self._text("chat_template", template)
        return found
