"""A recorded run: one safetensors file with what a model said of every token, and how it was computed.

Tensors (n predictions, w windows, k most likely tokens): `log_probability` F32 [n], `targets` I32 [n],
`top_ids` I32 [n, k], `top_log_probabilities` F32 [n, k], `window_documents` I32 [w]. The header's metadata holds
one entry, `qwen_quantize_run`: a JSON object with `format` (1) and the fields of `RunAbout`. The reader treats
the file as a hostile one: header, shapes, ranges and text are checked before anything is computed from them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import save
from torch import Tensor

from qwen_quantize.checkpoint.disk import replacing
from qwen_quantize.checkpoint.json_file import parse_object
from qwen_quantize.checkpoint.safetensors_header import SafetensorsHeader, StoredTensor, read_header
from qwen_quantize.errors import UserError
from qwen_quantize.eval.token_scores import TokenScores

FORMAT = 1
METADATA_KEY = "qwen_quantize_run"

_AGAIN = "record it again with `eval --record`"
_DTYPES = {"F32": torch.float32, "I32": torch.int32}
_TENSORS = {
    "log_probability": ("F32", 1),
    "targets": ("I32", 1),
    "top_ids": ("I32", 2),
    "top_log_probabilities": ("F32", 2),
    "window_documents": ("I32", 1),
}
_MOST_K = 1024
_LONGEST_TEXT = 4096  # characters of one entry of the metadata
_ROUNDING_ABOVE_ONE = 1e-3  # a float32 log_softmax may give a log-probability just above 0


@dataclass(frozen=True, slots=True)
class RunAbout:
    """What was run on what. `chip` is None and `arithmetic` empty where no chip's cast was computed.

    model_fingerprint: of config, headers and sizes; manifest_sha256: of the manifest beside the model, or "";
    arithmetic: `Arithmetic.fields`; max_tokens: how many were asked for, so that the text can be cut alike again.
    """

    tool_version: str
    model: str
    model_fingerprint: str
    manifest_sha256: str
    chip: str | None
    versions: Mapping[str, str]
    with_claims: bool
    arithmetic: Mapping[str, str]
    arithmetic_fingerprint: str
    text: str
    text_sha256: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A run as it stands in a file."""

    about: RunAbout
    scores: TokenScores


def check_record_path(path: Path) -> None:
    """UserError, before hours of work, where a run cannot be written or would replace another kind of file."""
    if not path.parent.is_dir():
        raise UserError(f"--record {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UserError(f"--record {path} is a folder; name a file, such as run.safetensors")
    if path.suffix != ".safetensors":
        raise UserError(f"--record {path}: name a file that ends in .safetensors")
    if path.exists() and not is_recording(path):
        raise UserError(f"--record {path} exists and is no recorded run; name another file")


def is_recording(path: Path) -> bool:
    """Whether the file says that it is a recorded run; what it holds is not checked."""
    try:
        return METADATA_KEY in read_header(path).metadata
    except UserError:
        return False


def write_run(path: Path, run: RecordedRun) -> None:
    """Whole or not at all; the same run gives the same bytes."""
    scores = run.scores
    about = {
        "format": FORMAT,
        **asdict(run.about),
        "model": _line(run.about.model),
        "text": _line(run.about.text),
        "documents": [_line(name) for name in scores.documents],
    }
    tensors = {
        "log_probability": scores.log_probability.float().contiguous(),
        "targets": scores.targets.int().contiguous(),
        "top_ids": scores.top_ids.int().contiguous(),
        "top_log_probabilities": scores.top_log_probabilities.float().contiguous(),
        "window_documents": scores.window_documents.int().contiguous(),
    }
    text = json.dumps(about, sort_keys=True)
    with replacing(path) as file:
        file.write(save(tensors, metadata={METADATA_KEY: text}))


def _line(text: str) -> str:
    """A path as one line that UTF-8 can hold: what it cannot, and line breaks, become escapes."""
    valid = text.encode("utf-8", "backslashreplace").decode()
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in valid)
    return shown[:_LONGEST_TEXT]


def read_run(path: Path) -> RecordedRun:
    """UserError that names the file for whatever is wrong with it."""
    header = read_header(path)
    if METADATA_KEY not in header.metadata:
        raise UserError(f"{path} is a safetensors file but no recorded run; make one with `eval --record`")
    about = parse_object(header.metadata[METADATA_KEY].encode("utf-8", "replace"), f"{path}: its metadata")
    if about.get("format") != FORMAT:
        raise UserError(
            f"{path} has the format {about.get('format')!r:.40}, this program reads {FORMAT}; {_AGAIN}"
        )
    tensors = _read_tensors(path, header)
    documents = about.get("documents")
    if not isinstance(documents, list) or not all(isinstance(name, str) for name in documents):
        raise UserError(f"{path}: 'documents' must be a list of names; {_AGAIN}")
    scores = TokenScores(
        log_probability=tensors["log_probability"],
        targets=tensors["targets"].long(),
        top_ids=tensors["top_ids"].long(),
        top_log_probabilities=tensors["top_log_probabilities"],
        window_documents=tensors["window_documents"].long(),
        documents=tuple(documents),
    )
    _check_values(path, scores)
    return RecordedRun(_read_about(path, about), scores)


def check_comparable(before: RecordedRun, after: RecordedRun, names: tuple[str, str]) -> None:
    """UserError unless both runs scored the same tokens: text, windows and number of tokens agree."""
    ours, theirs = before.scores, after.scores
    pairs = (
        ("the SHA-256 of the text", before.about.text_sha256, after.about.text_sha256),
        ("the number of tokens", ours.tokens, theirs.tokens),
        ("the number of windows", ours.windows, theirs.windows),
    )
    for what, first, second in pairs:
        if first != second:
            raise UserError(
                f"{names[0]} and {names[1]} cannot be compared: {what} is {first} and {second}; record both on "
                "the same text with the same --max-tokens and --length"
            )
    if not torch.equal(ours.targets, theirs.targets):
        raise UserError(
            f"{names[0]} and {names[1]} cannot be compared: the text is the same but its tokens are not, so the "
            "tokenizers differ"
        )


def _read_tensors(path: Path, header: SafetensorsHeader) -> dict[str, Tensor]:
    if header.tensors.keys() != _TENSORS.keys():
        found = ", ".join(sorted(header.tensors)[:8])
        raise UserError(
            f"{path} must hold the tensors {', '.join(_TENSORS)}, found {found or 'none'}; {_AGAIN}"
        )
    for name, (dtype, dimensions) in _TENSORS.items():
        info = header.tensors[name].info
        if info.dtype != dtype or len(info.shape) != dimensions:
            raise UserError(
                f"{path}: tensor {name!r} must be {dtype} with {dimensions} dimensions, found {info.dtype} "
                f"{list(info.shape)}; {_AGAIN}"
            )
    shapes = {name: stored.info.shape for name, stored in header.tensors.items()}
    tokens, (windows,) = shapes["log_probability"][0], shapes["window_documents"]
    top = shapes["top_ids"]
    if tokens < 1 or windows < 1 or tokens % windows:
        raise UserError(f"{path}: {tokens} predictions do not fill {windows} windows evenly; {_AGAIN}")
    if shapes["targets"] != (tokens,) or top != shapes["top_log_probabilities"] or top[0] != tokens:
        raise UserError(f"{path}: its tensors are not of the same {tokens} predictions; {_AGAIN}")
    if not 1 <= top[1] <= _MOST_K:
        raise UserError(f"{path} keeps {top[1]} tokens for each prediction; allowed: 1 to {_MOST_K}")
    try:
        with path.open("rb") as file:
            return {name: _read(path, file, stored) for name, stored in header.tensors.items()}
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _read(path: Path, file: IO[bytes], stored: StoredTensor) -> Tensor:
    file.seek(stored.begin)
    # The header's sizes were held against the size of the file, so this is no more than the file has.
    data = bytearray(file.read(stored.info.nbytes))
    if len(data) != stored.info.nbytes:
        raise UserError(f"{path} became shorter while it was read; run again when it is complete")
    return torch.frombuffer(data, dtype=_DTYPES[stored.info.dtype]).view(stored.info.shape)


def _check_values(path: Path, scores: TokenScores) -> None:
    """Ranges. NaN and minus infinity are no damage: a chip whose casts overflow does predict them."""
    for name in ("log_probability", "top_log_probabilities"):
        if bool((getattr(scores, name) > _ROUNDING_ABOVE_ONE).any()):
            raise UserError(f"{path}: tensor {name!r} has log-probabilities above 0; {_AGAIN}")
    top = scores.top_log_probabilities
    if bool((top[:, 1:] > top[:, :-1]).any()):
        raise UserError(f"{path}: tensor 'top_log_probabilities' must fall along each row; {_AGAIN}")
    if bool((top.double().exp().sum(dim=1) > 1 + _ROUNDING_ABOVE_ONE).any()):
        raise UserError(f"{path}: tensor 'top_log_probabilities' has rows that sum to more than 1; {_AGAIN}")
    if bool((scores.targets < 0).any()) or bool((scores.top_ids < 0).any()):
        raise UserError(f"{path} has negative token ids; {_AGAIN}")
    ids = scores.top_ids.sort(dim=1).values
    if bool((ids[:, 1:] == ids[:, :-1]).any()):
        raise UserError(f"{path}: tensor 'top_ids' names a token twice in one row; {_AGAIN}")
    known = scores.window_documents
    if bool((known < 0).any()) or bool((known >= len(scores.documents)).any()):
        raise UserError(
            f"{path}: tensor 'window_documents' points outside the {len(scores.documents)} documents; {_AGAIN}"
        )


def _read_about(path: Path, found: Mapping[str, Any]) -> RunAbout:
    def text(key: str) -> str:
        value = found.get(key)
        if not isinstance(value, str) or len(value) > _LONGEST_TEXT or not value.isprintable():
            raise UserError(f"{path}: metadata {key!r} must be a line of text, found {value!r:.80}; {_AGAIN}")
        return value

    def mapping(key: str) -> dict[str, str]:
        value = found.get(key)
        if not isinstance(value, dict) or not all(
            isinstance(item, str) and len(item) <= _LONGEST_TEXT and (name + item).isprintable()
            for name, item in value.items()
        ):
            raise UserError(f"{path}: metadata {key!r} must map names to text, found {value!r:.80}; {_AGAIN}")
        return value

    with_claims = found.get("with_claims")
    if not isinstance(with_claims, bool):
        raise UserError(
            f"{path}: metadata 'with_claims' must be true or false, found {with_claims!r:.80}; {_AGAIN}"
        )
    max_tokens = found.get("max_tokens")
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or not 0 < max_tokens < 1 << 63:
        raise UserError(
            f"{path}: metadata 'max_tokens' must be a whole number, found {max_tokens!r:.80}; {_AGAIN}"
        )
    return RunAbout(
        tool_version=text("tool_version"),
        model=text("model"),
        model_fingerprint=text("model_fingerprint"),
        manifest_sha256=text("manifest_sha256"),
        chip=None if found.get("chip") is None else text("chip"),
        versions=mapping("versions"),
        with_claims=with_claims,
        arithmetic=mapping("arithmetic"),
        arithmetic_fingerprint=text("arithmetic_fingerprint"),
        text=text("text"),
        text_sha256=text("text_sha256"),
        max_tokens=max_tokens,
    )
