"""Documents -> windows of token ids: what calibration sees and what evaluation scores."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_quantize.engine.tokenizer import Message, Tokenizer
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.text_files import load_documents
from qwen_quantize.pipeline.text_records import Document

__all__ = [
    "CalibrationTokens",
    "Document",
    "EvaluationTokens",
    "Message",
    "TokenBatchSpec",
    "calibration_batches",
    "evaluation_windows",
    "load_documents",
]

_MATERIAL = 4  # windows' worth of tokens that are read for each window that is wanted
_SHORTEST = 16  # tokens; a window below that says nothing about a layer
_REFUSALS = 100  # conversations; with none rendered before, the template is at fault
_CHARACTERS_PER_TOKEN = 8  # first guess of how much text yields enough tokens; doubled until it does
_CUT_MARGIN = 64  # tokens dropped before a cut in the text: the cut may have changed how they are split


@dataclass(frozen=True, slots=True)
class TokenBatchSpec:
    """How many calibration windows of how many tokens, and the seed that draws them."""

    samples: int
    length: int
    seed: int

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"{self.samples} calibration samples were asked for; at least 1 is needed")
        if self.length < 2:
            raise UserError(
                f"calibration windows of {self.length} tokens are too short: at least 2 are needed"
            )
        if not 0 <= self.seed < 1 << 63:
            raise UserError(f"the seed {self.seed} is not between 0 and 2^63 - 1")


@dataclass(frozen=True, slots=True)
class CalibrationTokens:
    """tokens: int64 [samples, length], fewer or shorter where the data ends, which `note` then says.

    `sha256` is over the shape and the ids; `documents_used` counts the documents that reach a window;
    `source` is the dataset's name; `note` is empty when there is nothing to say.
    """

    tokens: Tensor
    sha256: str
    documents_used: int
    source: str
    note: str


@dataclass(frozen=True, slots=True)
class EvaluationTokens:
    """windows: int64 [n, length]; `document_ids` has one entry per window: the document that it begins in.

    `text_sha256` is over every text that was read for them (one text: its plain SHA-256), `dropped_tokens`
    counts the ids behind the last whole window.
    """

    windows: Tensor
    document_ids: tuple[str, ...]
    text_sha256: str
    dropped_tokens: int


@dataclass(slots=True)
class _Encoded:
    """A document's text and as many of its first tokens as were needed."""

    document: Document
    text: str
    with_special: bool
    ids: list[int] = field(default_factory=list)
    complete: bool = False


@dataclass(slots=True)
class _Material:
    documents: list[_Encoded] = field(default_factory=list)
    source: str = ""
    repeated: int = 0
    refused: int = 0
    first_refusal: str = ""
    without_template: bool = False
    stopped_early: bool = False


def calibration_batches(
    documents: Iterable[Document], tokenizer: Tokenizer, samples: int, length: int, seed: int
) -> CalibrationTokens:
    """Draw `samples` windows of exactly `length` tokens; the same documents and seed give the same bytes.

    Long documents give windows at random places that never overlap; short ones are strung together in random
    order, an EOS between them, and cut. Documents of the same text count once. A conversation is rendered
    with the model's chat template, or as plain text with roles where it has none. Reading stops at four times
    the tokens wanted, and no document fills more than a quarter of that while others follow. With less text
    there are fewer windows, at the least a single shorter one of 16 tokens; UserError below that.
    """
    spec = TokenBatchSpec(samples, length, seed)
    material = _gather(documents, tokenizer, spec)
    generator = torch.Generator().manual_seed(seed)
    # A window is its ids, and the numbers of the documents they are from.
    windows = _windows_of_long(material.documents, length, generator)
    stream, owners = _packed(material.documents, length, tokenizer.eos_id, generator)
    for start in range(0, len(stream) - length + 1, length):
        windows.append((stream[start : start + length], set(owners[start : start + length])))
    if not windows:
        if len(stream) < _SHORTEST:
            raise UserError(
                f"dataset too small: {material.source or 'the text'} has {len(stream)} tokens, at least "
                f"{_SHORTEST} are needed, and {samples} windows of {length} were asked for"
            )
        windows = [(stream, set(owners))]
    chosen = torch.randperm(len(windows), generator=generator)[:samples].tolist()
    tokens = torch.tensor([windows[index][0] for index in chosen], dtype=torch.int64)
    used = set().union(*(windows[index][1] for index in chosen))
    return CalibrationTokens(
        tokens, _tokens_sha256(tokens), len(used), material.source, _note(material, tokens, spec, tokenizer)
    )


def evaluation_windows(
    text_or_documents: str | Iterable[Document], tokenizer: Tokenizer, length: int, max_tokens: int | None
) -> EvaluationTokens:
    """Cut a text into contiguous windows [n, length] that do not overlap, from at most `max_tokens` tokens.

    Documents follow each other with an EOS between them. The last, partial window is dropped; only when there
    is no whole one it is the single, shorter window (UserError under 2 tokens: nothing to predict).
    """
    if length < 2:
        raise UserError(f"evaluation windows of {length} tokens predict nothing: at least 2 are needed")
    if max_tokens is not None and max_tokens < 2:
        raise UserError(f"{max_tokens} tokens predict nothing: at least 2 are needed")
    if isinstance(text_or_documents, str):
        text_or_documents = [Document("text", text_or_documents, None)]
    ids: list[int] = []
    owners: list[str] = []
    digest = hashlib.sha256()
    for document in text_or_documents:
        if max_tokens is not None and len(ids) >= max_tokens:
            break
        text, with_special, _ = _text_of(document, tokenizer)
        if not text.strip():
            continue
        encoded = _Encoded(document, text, with_special)
        _encode(encoded, tokenizer, None if max_tokens is None else max_tokens - len(ids))
        if ids:
            digest.update(b"\0")  # keeps two texts from hashing like their concatenation
            if tokenizer.eos_id is not None and ids[-1] != tokenizer.eos_id:
                ids.append(tokenizer.eos_id)
                owners.append(owners[-1])
        digest.update(text.encode())
        ids.extend(encoded.ids)
        owners.extend([document.id] * len(encoded.ids))
    ids = ids[:max_tokens]
    if len(ids) < 2:
        raise UserError("the evaluation text is too small: it has less than 2 tokens")
    width = min(length, len(ids))
    count = len(ids) // width
    windows = torch.tensor(ids[: count * width], dtype=torch.int64).view(count, width)
    starts = tuple(owners[index * width] for index in range(count))
    return EvaluationTokens(windows, starts, digest.hexdigest(), len(ids) - count * width)


def _text_of(document: Document, tokenizer: Tokenizer) -> tuple[str, bool, bool]:
    """(text, whether the tokenizer adds its special tokens, whether a template was missing)."""
    if document.messages is None:
        return document.text or "", True, False
    if tokenizer.has_chat_template:
        # The template writes the beginning of text itself where the model wants one.
        return tokenizer.apply_chat_template(document.messages), False, False
    turns = (f"{message.role.capitalize()}: {message.content}" for message in document.messages)
    return "\n\n".join(turns), True, True


def _gather(documents: Iterable[Document], tokenizer: Tokenizer, spec: TokenBatchSpec) -> _Material:
    """Encode documents until there is enough to draw from."""
    wanted = _MATERIAL * spec.samples * spec.length
    share = spec.samples * spec.length + spec.length - 1  # the leftover lets even a full share start anywhere
    material = _Material()
    seen: set[bytes] = set()
    total = 0
    for document in documents:
        material.source = material.source or document.source
        try:
            text, with_special, without_template = _text_of(document, tokenizer)
        except UserError as error:
            # Templates refuse turns out of order or unknown roles; most datasets have a few such.
            material.refused += 1
            material.first_refusal = material.first_refusal or f"{document.id}: {error}"
            if not material.documents and material.refused == _REFUSALS:
                break
            continue
        key = hashlib.sha256(text.strip().encode()).digest()
        if not text.strip() or key in seen:
            material.repeated += bool(text.strip())
            continue
        seen.add(key)
        material.without_template |= without_template
        encoded = _Encoded(document, text, with_special)
        _encode(encoded, tokenizer, share)
        material.documents.append(encoded)
        total += len(encoded.ids)
        if total >= wanted:
            material.stopped_early = True
            return material
    if not material.documents and material.refused:
        raise UserError(f"no conversation could be rendered; the first, {material.first_refusal}")
    # Nothing follows, so the documents (at most three) that were cut at their share may fill the rest.
    for encoded in material.documents:
        if not encoded.complete and total < wanted:
            before = len(encoded.ids)
            _encode(encoded, tokenizer, before + wanted - total)
            total += len(encoded.ids) - before
    material.stopped_early = not all(encoded.complete for encoded in material.documents)
    return material


def _encode(encoded: _Encoded, tokenizer: Tokenizer, at_most: int | None) -> None:
    """Fill in the first `at_most` ids (None: all), without tokenizing much more of the text than that."""
    characters = len(encoded.text)
    if at_most is not None:
        characters = min(characters, (at_most + _CUT_MARGIN) * _CHARACTERS_PER_TOKEN)
    while True:
        ids = tokenizer.encode(encoded.text[:characters], add_special_tokens=encoded.with_special)
        encoded.complete = characters == len(encoded.text)
        if not encoded.complete:
            ids = ids[:-_CUT_MARGIN]
        if encoded.complete or at_most is None or len(ids) >= at_most:
            break
        characters = min(len(encoded.text), 2 * characters)
    if at_most is not None and len(ids) > at_most:
        ids, encoded.complete = ids[:at_most], False
    encoded.ids = ids


def _windows_of_long(
    documents: list[_Encoded], length: int, generator: torch.Generator
) -> list[tuple[list[int], set[int]]]:
    windows: list[tuple[list[int], set[int]]] = []
    for number, encoded in enumerate(documents):
        count = len(encoded.ids) // length
        if count:
            # As many windows as fit, the leftover tokens spread between them at random: no two overlap.
            slack = len(encoded.ids) - count * length
            gaps = torch.randint(slack + 1, (count,), generator=generator).sort().values.tolist()
            for index, gap in enumerate(gaps):
                start = gap + index * length
                windows.append((encoded.ids[start : start + length], {number}))
    return windows


def _packed(
    documents: list[_Encoded], length: int, eos_id: int | None, generator: torch.Generator
) -> tuple[list[int], list[int]]:
    """The short documents in random order as one stream, and for each id the number of its document."""
    short = [number for number, encoded in enumerate(documents) if len(encoded.ids) < length]
    stream: list[int] = []
    owners: list[int] = []
    for position in torch.randperm(len(short), generator=generator).tolist():
        number = short[position]
        ids = documents[number].ids
        if stream and eos_id is not None and stream[-1] != eos_id:
            stream.append(eos_id)
            owners.append(owners[-1])  # the end of the document before
        stream.extend(ids)
        owners.extend([number] * len(ids))
    return stream, owners


def _note(material: _Material, tokens: Tensor, spec: TokenBatchSpec, tokenizer: Tokenizer) -> str:
    notes = []
    if tokens.shape[1] < spec.length:
        notes.append(
            f"the text has {tokens.shape[1]} tokens: one window, shorter than the {spec.length} asked for"
        )
    elif tokens.shape[0] < spec.samples:
        notes.append(f"the text gives {tokens.shape[0]} windows of the {spec.samples} asked for")
    if material.stopped_early:
        notes.append(f"read only the first part of the dataset, {_MATERIAL} times the tokens wanted")
    if material.repeated:
        notes.append(f"left out {material.repeated} documents that repeat an earlier one")
    if material.refused:
        notes.append(f"left out {material.refused} conversations; the first, {material.first_refusal}")
    if material.without_template:
        notes.append("the tokenizer has no chat template: conversations became plain text with roles")
    if tokenizer.eos_id is None and len(material.documents) > 1:
        notes.append("the tokenizer names no EOS: short documents follow each other without one")
    return "; ".join(notes)


def _tokens_sha256(tokens: Tensor) -> str:
    """SHA-256 over the shape and the ids as little-endian 64-bit integers."""
    header = ",".join(map(str, tokens.shape)).encode() + b"\n"
    return hashlib.sha256(header + tokens.numpy().astype("<i8").tobytes()).hexdigest()
