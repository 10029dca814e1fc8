"""Documents out of files, folders and Hugging Face datasets, one at a time."""

from __future__ import annotations

import codecs
import difflib
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.text_records import READABLE_COLUMNS, Document, document_of

_LINE_BYTES = 64 << 20  # a longer line is no record but a file of another kind, or a decompression bomb
_PIECE_CHARACTERS = 8 << 20  # longer plain texts come in pieces, so that none is held whole
_BLOCK_BYTES = 1 << 20
_PARQUET_ROWS = 64
_SUFFIXES = (".jsonl", ".json", ".txt", ".md", ".parquet")
# What dataset folders hold beside their data.
_NOT_DATA = re.compile(r"readme.*|licen[sc]e.*|copying.*|dataset_infos?\.json|state\.json", re.IGNORECASE)
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(:(?P<first>[\w.-]+))?(:(?P<second>[\w.\[\]%:-]+))?")


_Stream = gzip.GzipFile | io.BufferedReader


@dataclass(frozen=True, slots=True)
class _DataFile:
    path: Path
    label: str  # the file's name in document ids: relative to the folder that was asked for


def load_documents(
    source: str | Path, *, column: str | None = None, limit: int | None = None
) -> Iterator[Document]:
    """Stream the documents of a file, a folder of files, or a Hugging Face dataset, in a fixed order.

    Files: .jsonl, .json (a list of objects, read whole; or JSON lines), .parquet, .txt and .md (one document
    each, in pieces of 8 Mi characters), all but .parquet also with .gz. A folder is read recursively in the
    order of names; hidden files, README and LICENSE are left out. "org/name", "org/name:split" and
    "org/name:config:split" name a dataset on the hub (split "train" unless given); nothing local is looked up
    there. `column` names the one column to read; without it `text_records` says what is understood. `limit`
    stops after that many documents. A source that is not there raises UserError at once, its faults when
    they are reached.
    """
    if limit is not None and limit < 1:
        raise UserError(f"a limit of {limit} documents leaves nothing to read")
    name = str(source)
    path = Path(source).expanduser()
    if path.exists():
        documents = _documents_of_files(_data_files(path), name, column)
    elif isinstance(source, str) and (match := _HUB_NAME.fullmatch(source)) and not _names_a_file(path):
        documents = _documents_of_hub(match, name, column)
    else:
        raise _not_there(path)
    return _not_empty(islice(documents, limit), name)


def _names_a_file(path: Path) -> bool:
    return path.name.lower().removesuffix(".gz").endswith(_SUFFIXES) or path.parent.exists()


def _not_there(path: Path) -> UserError:
    parent = path.parent
    if not parent.is_dir():
        return UserError(f"no file or folder {path}: the folder {parent} is not there either")
    near = difflib.get_close_matches(path.name, [entry.name for entry in parent.iterdir()], n=3)
    hint = f"; near it: {', '.join(near)}" if near else ""
    return UserError(f"no file or folder {path}{hint}")


def _data_files(path: Path) -> list[_DataFile]:
    if path.is_dir():
        found = [
            _DataFile(entry, str(entry.relative_to(path)))
            for entry in sorted(path.rglob("*"))
            if entry.is_file()
            and entry.name.lower().removesuffix(".gz").endswith(_SUFFIXES)
            and not any(part.startswith(".") for part in entry.relative_to(path).parts)
            and not _NOT_DATA.fullmatch(entry.name)
        ]
        if not found:
            raise UserError(f"the folder {path} holds no data file ({', '.join(_SUFFIXES)}, or .jsonl.gz)")
        return found
    if not path.is_file():
        raise UserError(f"{path} is neither a regular file nor a folder")
    return [_DataFile(path, path.name)]


def _not_empty(documents: Iterator[Document], name: str) -> Iterator[Document]:
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise UserError(f"the dataset {name} is empty: it holds no record")


def _documents_of_files(files: list[_DataFile], name: str, column: str | None) -> Iterator[Document]:
    for file in files:
        kind = Path(file.path.name.lower().removesuffix(".gz")).suffix
        reader = _READERS.get(kind)
        if reader is None:
            raise UserError(f"{file.path} has no known kind: {', '.join(_SUFFIXES)} and .jsonl.gz are read")
        try:
            yield from reader(file, name, column)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise UserError(f"{file.path} is damaged or no gzip file: {error}") from error
        except OSError as error:
            raise UserError(f"{file.path} cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> _Stream:
    return gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb")


def _decoded(data: bytes, path: Path, offset: int) -> str:
    """UTF-8 text; `offset` is where `data` begins in the (decompressed) file."""
    mark = len(codecs.BOM_UTF8) if offset == 0 and data.startswith(codecs.BOM_UTF8) else 0
    try:
        return data[mark:].decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error, offset + mark) from error


def _not_utf8(path: Path, error: UnicodeDecodeError, offset: int) -> UserError:
    byte = error.object[error.start]
    return UserError(
        f"{path} is not UTF-8: byte 0x{byte:02x} at offset {offset + error.start}; convert the file first"
    )


def _json_lines(file: _DataFile, name: str, column: str | None) -> Iterator[Document]:
    with _open(file.path) as stream:
        yield from _records_of_lines(stream, file, name, column)


def _records_of_lines(stream: _Stream, file: _DataFile, name: str, column: str | None) -> Iterator[Document]:
    offset = 0
    number = 0
    while line := stream.readline(_LINE_BYTES):
        number += 1
        where = f"{file.path}, line {number}"
        if len(line) == _LINE_BYTES:
            raise UserError(f"{where}, is longer than {_LINE_BYTES >> 20} MiB: this is no file of JSON lines")
        text = _decoded(line, file.path, offset)
        offset += len(line)
        if text.strip():
            value = _parsed(text.rstrip("\r\n"), where)
            yield document_of(value, f"{file.label}:{number}", where, name, column)


def _parsed(text: str, where: str) -> object:
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}"
        raise UserError(f"{where}, is not JSON: {error.msg} at {place}") from error
    except RecursionError as error:
        raise UserError(f"{where}, nests its JSON too deeply") from error
    except ValueError as error:  # an integer of thousands of digits
        raise UserError(f"{where}, is not usable JSON: {error}") from error
    return value


def _json_file(file: _DataFile, name: str, column: str | None) -> Iterator[Document]:
    with _open(file.path) as stream:
        start = stream.read(1 << 12).removeprefix(codecs.BOM_UTF8).lstrip()
        stream.seek(0)
        # Many hubs' .json files are JSON lines; those need not be read whole.
        if start.startswith(b"{"):
            yield from _records_of_lines(stream, file, name, column)
            return
        value = _parsed(_decoded(stream.read(), file.path, 0), str(file.path)) if start else []
    if not isinstance(value, list):
        raise UserError(f"{file.path} holds neither a list of objects nor one object per line")
    for index, record in enumerate(value):
        yield document_of(record, f"{file.label}:{index}", f"{file.path}, record {index}", name, column)


def _plain_text(file: _DataFile, name: str, column: str | None) -> Iterator[Document]:
    del column  # a plain text has none
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset = 0
    held: list[str] = []
    count = 0
    with _open(file.path) as stream:
        while True:
            data = stream.read(_BLOCK_BYTES)
            if offset == 0 and data.startswith(codecs.BOM_UTF8):
                offset, data = len(codecs.BOM_UTF8), data.removeprefix(codecs.BOM_UTF8)
            pending = len(decoder.getstate()[0])  # bytes of a character that the last block cut
            try:
                held.append(decoder.decode(data, final=not data))
            except UnicodeDecodeError as error:
                raise _not_utf8(file.path, error, offset - pending) from error
            offset += len(data)
            if data and sum(map(len, held)) < _PIECE_CHARACTERS:
                continue
            text = "".join(held)
            end = (text.rfind("\n") + 1 or len(text)) if data else len(text)
            held = [text[end:]]
            if end:
                count += 1
                label = file.label if count == 1 else f"{file.label}#{count}"
                yield Document(label, text[:end].replace("\r\n", "\n"), None, name)
            if not data:
                return


def _parquet(file: _DataFile, name: str, column: str | None) -> Iterator[Document]:
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(file.path) as table:
            names: list[str] = table.schema_arrow.names
            wanted = [column] if column is not None else [one for one in names if one in READABLE_COLUMNS]
            # With nothing usable the whole first row goes on, for the error that lists its columns.
            usable = wanted if wanted and set(wanted) <= set(names) else names
            row = 0
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=usable):
                for record in batch.to_pylist():
                    yield document_of(record, f"{file.label}:{row}", f"{file.path}, row {row}", name, column)
                    row += 1
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(f"{file.path} is no readable Parquet file: {error}") from error


_Reader = Callable[[_DataFile, str, str | None], Iterator[Document]]
_READERS: dict[str, _Reader] = {
    ".jsonl": _json_lines,
    ".json": _json_file,
    ".txt": _plain_text,
    ".md": _plain_text,
    ".parquet": _parquet,
}


def _documents_of_hub(match: re.Match[str], name: str, column: str | None) -> Iterator[Document]:
    missing = f"no file or folder {name}, and as a Hugging Face dataset it"
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"{missing} needs the `datasets` package: install it with pip install 'qwen-quantize[datasets]'"
        ) from error
    config, split = match["first"], match["second"]
    if split is None:
        config, split = None, config or "train"
    index = 0
    try:
        # Streaming: nothing is downloaded that no window needs.
        for row in datasets.load_dataset(match["name"], config, split=split, streaming=True):
            yield document_of(row, f"{name}:{index}", f"{name}, row {index}", name, column)
            index += 1
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{missing} cannot be read: {str(error) or type(error).__name__}") from error
