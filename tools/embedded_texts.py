"""Make the text files of the package from Debian's r-cran-janeaustenr (six public-domain novels).

    python tools/embedded_texts.py [--deb FILE] [--output FOLDER]

Writes `calibration.jsonl` and `heldout.txt`. The same .deb gives the same bytes.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

PACKAGE = "r-cran-janeaustenr"
DATABASE = "usr/lib/R/site-library/janeaustenr/data/Rdata"
EMBEDDED = Path(__file__).resolve().parent.parent / "qwen_quantize" / "embedded"

HELDOUT_NOVEL = "persuasion"
CALIBRATION_NOVEL = "northangerabbey"
# Trained on whole; of the calibration novel only what follows the calibration passages is trained on.
TRAINING_NOVELS = ("emma", "mansfieldpark", "prideprejudice", "sensesensibility")

CALIBRATION_CHARACTERS = 150_000
HELDOUT_CHARACTERS = 150_000
PASSAGE_CHARACTERS = 1_800

RValue: TypeAlias = "str | list[RValue] | dict[str, RValue] | None"


class EmbeddedTextError(ValueError):
    """The novels cannot be had from the file; says what is missing and what to do."""


# --- the .deb: an `ar` archive that holds a tar archive ---


def fetch_deb(folder: Path) -> Path:
    """Fetch the package into `folder` with `apt-get download`; raise EmbeddedTextError where apt cannot."""
    command = ["apt-get", "download", PACKAGE]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise EmbeddedTextError(f"no apt-get on this machine; give the {PACKAGE} .deb with --deb") from error
    found = sorted(folder.glob(f"{PACKAGE}_*.deb"))
    if done.returncode != 0 or not found:
        reason = done.stderr.strip() or "no file came"
        raise EmbeddedTextError(f"`{' '.join(command)}` failed ({reason}); give the .deb with --deb")
    return found[-1]


def read_novels(deb: Path) -> dict[str, list[str]]:
    """Read the novels out of the .deb: name to lines, as they were typeset (hard-wrapped)."""
    with tarfile.open(fileobj=io.BytesIO(_data_tar(deb))) as tar:
        index, database = (_tar_member(tar, DATABASE + suffix) for suffix in (".rdx", ".rdb"))
    # The .rdx is a gzip-compressed R list; its `variables` names a (offset, length) pair per object.
    variables = _read_r(zlib.decompress(index, wbits=31))
    places = variables["variables"] if isinstance(variables, dict) else None
    if not isinstance(places, dict):
        raise EmbeddedTextError(f"{deb}: {DATABASE}.rdx lists no variables")
    novels: dict[str, list[str]] = {}
    for name, place in places.items():
        offset, length = (int(str(number)) for number in place or [])
        # Each block is a big-endian length of the unpacked bytes, then a zlib stream.
        lines = _read_r(zlib.decompress(database[offset + 4 : offset + length]))
        if not isinstance(lines, list):
            raise EmbeddedTextError(f"{deb}: `{name}` is not a vector of lines")
        novels[name] = [str(line) for line in lines]
    missing = {HELDOUT_NOVEL, CALIBRATION_NOVEL, *TRAINING_NOVELS} - novels.keys()
    if missing:
        raise EmbeddedTextError(f"{deb}: lacks {', '.join(sorted(missing))}; holds {', '.join(novels)}")
    return novels


def _data_tar(deb: Path) -> bytes:
    raw = deb.read_bytes()
    if not raw.startswith(b"!<arch>\n"):
        raise EmbeddedTextError(f"{deb}: not a Debian package (no `ar` header)")
    at = 8
    while at + 60 <= len(raw):
        header = raw[at : at + 60]
        name, size = header[:16].decode("ascii").strip().rstrip("/"), int(header[48:58])
        body = raw[at + 60 : at + 60 + size]
        if name == "data.tar.xz":
            return lzma.decompress(body)
        at += 60 + size + size % 2  # members start at even offsets
    raise EmbeddedTextError(f"{deb}: holds no data.tar.xz")


def _tar_member(tar: tarfile.TarFile, name: str) -> bytes:
    for spelling in (name, "./" + name):
        if spelling in tar.getnames():
            stream = tar.extractfile(spelling)
            if stream is not None:
                return stream.read()
    raise EmbeddedTextError(f"the package holds no {name}")


# --- R's serialisation, as far as lists, symbols, numbers and strings go ---
# Format: R Internals, section 1.8 "Serialization Formats", the XDR form, version 3.

_SYMBOL, _PAIRLIST, _CHARS = 1, 2, 9
_LOGICAL, _INTEGER, _REAL, _STRINGS, _LIST = 10, 13, 14, 16, 19
_NIL, _REFERENCE = 254, 255
_HAS_ATTRIBUTES, _HAS_TAG = 1 << 9, 1 << 10


def _read_r(raw: bytes) -> RValue:
    """Read one R value: strings and numbers become lists of str, a list with names a dict."""
    if not raw.startswith(b"X\n"):
        raise EmbeddedTextError("R data does not begin with the XDR mark `X\\n`")
    stream = io.BytesIO(raw)
    stream.seek(2)
    version, _, _ = struct.unpack(">3i", stream.read(12))
    if version != 3:
        raise EmbeddedTextError(f"R serialisation version {version}; only 3 is read here")
    stream.seek(_integer(stream), io.SEEK_CUR)  # the native encoding's name
    return _item(stream, [])


def _integer(stream: io.BytesIO) -> int:
    return int(struct.unpack(">i", stream.read(4))[0])


def _item(stream: io.BytesIO, symbols: list[RValue]) -> RValue:
    flags = _integer(stream)
    kind = flags & 0xFF
    value: RValue
    if kind == _NIL:
        return None
    if kind == _REFERENCE:
        return symbols[(flags >> 8) - 1]
    if kind == _SYMBOL:
        symbols.append(_item(stream, symbols))
        return symbols[-1]
    if kind == _PAIRLIST:
        return _pairs(stream, flags, symbols)
    if kind == _CHARS:
        size = _integer(stream)
        return None if size < 0 else stream.read(size).decode("utf-8")  # -1 stands for NA
    size = _integer(stream)
    if kind in (_STRINGS, _LIST):
        value = [_item(stream, symbols) for _ in range(size)]
    elif kind in (_LOGICAL, _INTEGER, _REAL):
        letter, width = ("d", 8) if kind == _REAL else ("i", 4)
        value = [str(number) for number in struct.unpack(f">{size}{letter}", stream.read(width * size))]
    else:
        raise EmbeddedTextError(f"R type {kind} does not occur in the novels' package")
    if flags & _HAS_ATTRIBUTES:
        attributes = _item(stream, symbols)
        names = attributes.get("names") if isinstance(attributes, dict) else None
        if isinstance(names, list):
            value = {str(name): entry for name, entry in zip(names, value, strict=True)}
    return value


def _pairs(stream: io.BytesIO, flags: int, symbols: list[RValue]) -> RValue:
    pairs: dict[str, RValue] = {}
    while flags & 0xFF == _PAIRLIST:
        if flags & _HAS_ATTRIBUTES:
            raise EmbeddedTextError("R pair lists with attributes do not occur in the novels' package")
        tag = _item(stream, symbols) if flags & _HAS_TAG else len(pairs)
        pairs[str(tag)] = _item(stream, symbols)
        flags = _integer(stream)
    return pairs


# --- lines to paragraphs, paragraphs to passages ---


def paragraphs(lines: Iterable[str]) -> list[str]:
    """Join hard-wrapped lines into paragraphs from the first chapter to the end, without _italics_ marks.

    A text without chapters is taken from its beginning.
    """
    found: list[str] = []
    words: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            words += line.replace("_", "").split()
        elif words:
            found.append(" ".join(words))
            words = []
    start = next((i for i, text in enumerate(found) if re.match(r"(?i)chapter\b", text)), 0)
    # Northanger Abbey closes with an editor's note, which is none of the author's text.
    ends = {"THE END", "FINIS", "A NOTE ON THE TEXT"}
    end = next((i for i, text in enumerate(found) if text.strip(" .").upper() in ends), len(found))
    return found[start:end]


def passages(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Group paragraphs into passages of at least `characters`; a shorter rest at the end is dropped."""
    group: list[str] = []
    for text in texts:
        group.append(text)
        if sum(len(part) + 2 for part in group) >= characters:
            yield "\n\n".join(group)
            group = []


def head(texts: Sequence[str], characters: int) -> int:
    """How many leading paragraphs make at least `characters`; all of them where the text is shorter."""
    total = 0
    for count, text in enumerate(texts, start=1):
        total += len(text) + 2
        if total >= characters:
            return count
    return len(texts)


def calibration_passages(novels: dict[str, list[str]]) -> list[str]:
    """The passages that ship for calibration: the beginning of the calibration novel."""
    texts = paragraphs(novels[CALIBRATION_NOVEL])
    return list(passages(texts[: head(texts, CALIBRATION_CHARACTERS)], PASSAGE_CHARACTERS))


def heldout_text(novels: dict[str, list[str]], characters: int = HELDOUT_CHARACTERS) -> str:
    """The first `characters` or so of the novel that neither training nor calibration sees."""
    texts = paragraphs(novels[HELDOUT_NOVEL])
    return "\n\n".join(texts[: head(texts, characters)]) + "\n"


def training_texts(novels: dict[str, list[str]]) -> list[str]:
    """One text per training novel, then what follows the calibration passages in theirs."""
    texts = ["\n\n".join(paragraphs(novels[name])) for name in TRAINING_NOVELS]
    rest = paragraphs(novels[CALIBRATION_NOVEL])
    return [*texts, "\n\n".join(rest[head(rest, CALIBRATION_CHARACTERS) :])]


def jsonl(texts: Iterable[str]) -> str:
    """One JSON record `{"text": ...}` a line."""
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)


def novels_from(deb: Path | None) -> dict[str, list[str]]:
    """Read the novels from `deb`, or from a freshly fetched package when it is None."""
    if deb is not None:
        return read_novels(deb)
    with tempfile.TemporaryDirectory() as folder:
        return read_novels(fetch_deb(Path(folder)))


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--deb", type=Path, help=f"the {PACKAGE} package; fetched with apt-get when left out")
    parser.add_argument("--output", type=Path, default=EMBEDDED, help="folder for the two files")
    options = parser.parse_args(arguments)
    try:
        novels = novels_from(options.deb)
    except (EmbeddedTextError, OSError) as error:
        print(f"embedded_texts: {error}", file=sys.stderr)
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    files = {"calibration.jsonl": jsonl(calibration_passages(novels)), "heldout.txt": heldout_text(novels)}
    for name, text in files.items():
        (options.output / name).write_text(text, encoding="utf-8", newline="\n")
        print(f"{options.output / name}: {len(text.encode())} bytes", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
