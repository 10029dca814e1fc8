"""Documents out of files, folders and hub names, and every fault of a file."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qwen_quantize.engine.tokenizer import Message
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline import text_files
from qwen_quantize.pipeline.texts import load_documents


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(source: str | Path, **options: object) -> list[str | None]:
    return [document.text for document in load_documents(source, **options)]  # type: ignore[arg-type]


# Ways in


@pytest.mark.parametrize(
    ("record", "text", "messages"),
    [
        ({"text": "a", "extra": 3}, "a", None),
        ({"content": "b"}, "b", None),
        ({"messages": [{"role": "user", "content": "q"}], "text": "t", "prompt": "p"}, None, [("user", "q")]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            None,
            [("user", "q"), ("assistant", "a")],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, {"text": "y"}]}]},
            None,
            [("user", "xy")],
        ),
        ({"prompt": "p", "response": "r"}, None, [("user", "p"), ("assistant", "r")]),
        ({"instruction": "i", "output": "o"}, None, [("user", "i"), ("assistant", "o")]),
        ({"instruction": "i", "input": "n", "output": "o"}, None, [("user", "i\n\nn"), ("assistant", "o")]),
        ({"instruction": "i", "input": "", "output": "o"}, None, [("user", "i"), ("assistant", "o")]),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "parquet"])
def test_records(tmp_path: Path, record: dict, text: str | None, messages: list | None, kind: str) -> None:
    path = tmp_path / f"data.{kind}"
    if kind == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist([record]), path)
    elif kind == "json":
        path.write_text(json.dumps([record], indent=2))
    elif kind == "jsonl":
        path.write_text(json.dumps(record))
    else:
        path.write_bytes(gzip.compress(json.dumps(record).encode() + b"\n"))
    [document] = load_documents(path)
    assert document.text == text
    turns = document.messages and [(message.role, message.content) for message in document.messages]
    assert turns == messages


def test_ids_blank_lines_and_byte_order_marks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "x"}\r\n\r\n{"text": "\xc3\xbc"}')
    documents = list(load_documents(str(path)))
    assert [(document.id, document.text) for document in documents] == [
        ("a.jsonl:1", "x"),
        ("a.jsonl:3", "ü"),
    ]
    assert {document.source for document in documents} == {str(path)}


def test_json_files_of_lines_are_read_as_lines(tmp_path: Path) -> None:
    assert texts(write_lines(tmp_path / "a.json", {"text": "x"}, {"text": "y"})) == ["x", "y"]


def test_plain_texts_are_one_document_and_huge_ones_come_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = "".join(f"line {number} ü\n" for number in range(1000))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + whole.replace("\n", "\r\n").encode())
    (tmp_path / "b.md").write_text("# head")
    assert texts(tmp_path) == [whole, "# head"]
    monkeypatch.setattr(text_files, "_PIECE_CHARACTERS", 1000)
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 333)  # cuts characters, too
    pieces = list(load_documents(tmp_path / "a.txt"))
    assert len(pieces) > 5
    assert "".join(piece.text or "" for piece in pieces) == whole
    assert all((piece.text or "").endswith("\n") for piece in pieces)
    assert len({piece.id for piece in pieces}) == len(pieces)


def test_a_folder_is_read_in_order_without_what_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".cache").mkdir()
    write_lines(tmp_path / "sub" / "a.jsonl", {"text": "third"})
    write_lines(tmp_path / "b.jsonl", {"text": "second"})
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / ".cache" / "c.txt").write_text("hidden")
    (tmp_path / "README.md").write_text("about")
    (tmp_path / "LICENSE.txt").write_text("free")
    (tmp_path / "weights.bin").write_bytes(b"\0")
    documents = list(load_documents(tmp_path))
    assert [document.text for document in documents] == ["first", "second", "third"]
    assert documents[2].id == "sub/a.jsonl:1"


def test_column_and_limit(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", *({"text": "no", "body": str(n)} for n in range(5)))
    assert texts(path, column="body", limit=2) == ["0", "1"]
    path = write_lines(tmp_path / "b.jsonl", {"talk": [{"role": "user", "content": "q"}]})
    [document] = load_documents(path, column="talk")
    assert document.messages == [Message("user", "q")]


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "good"})
    with path.open("a") as stream:
        stream.write("broken\n")
    documents = load_documents(path)
    assert next(documents).text == "good"
    with pytest.raises(UserError, match="line 2, is not JSON"):
        next(documents)


# Faults


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": \n',
            r"a\.jsonl, line 2, is not JSON: Expecting value at column",
        ),
        ("a.jsonl", b'{"text": "x"}\n["y"]\n', r"a\.jsonl, line 2, is a list; an object"),
        ("a.jsonl", b'{"text": 5}', r"line 1, text, is a number; a text is needed"),
        ("a.jsonl", b'{"text": null}', r"line 1, text, is empty \(null\)"),
        ("a.jsonl", b'{"text": true}', r"line 1, text, is true or false"),
        ("a.jsonl", b'{"text": {"a": 1}}', r"line 1, text, is an object"),
        ("a.jsonl", b'{"text": "\\ud800"}', r"line 1, text, holds half of a surrogate pair at character 0"),
        (
            "a.jsonl",
            b'{"body": "x", "title": "y"}',
            r"it has body, title, understood are text, content, mess",
        ),
        ("a.jsonl", b"{}", "it has no columns"),
        ("a.jsonl", b'{"messages": "x"}', r"messages, is a text; a list of turns"),
        ("a.jsonl", b'{"messages": []}', "empty conversation"),
        ("a.jsonl", b'{"messages": [3]}', r"turn 0, is a number"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}', r"turn 0, has role; role and content"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": null}]}', r"turn 0, content, is empty"),
        ("a.jsonl", b'{"messages": [{"role": "u", "content": [{"image": 1}]}]}', "a part that is no text"),
        ("a.jsonl", b'{"prompt": "x", "response": 1}', r"line 1, response, is a number"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', r"not UTF-8: byte 0xff at offset 24"),
        ("a.jsonl", b"\xef\xbb\xbf\xff", r"not UTF-8: byte 0xff at offset 3"),
        ("a.jsonl", b"[" * 100_000, "too deeply"),
        ("a.jsonl", b"9" * 5000, "not usable JSON"),
        ("a.jsonl", b"\n \n", "is empty: it holds no record"),
        ("a.json", b"", "is empty: it holds no record"),
        ("a.json", b"[]", "is empty: it holds no record"),
        ("a.json", b"3", "holds neither a list of objects nor"),
        ("a.json", b'[{"text": "x"},\n {"text": 1}]', r"a\.json, record 1, text, is a number"),
        ("a.json", b"[1,\n2,\n", r"a\.json, is not JSON: .* at line 3"),
        ("a.txt", b"", "is empty: it holds no record"),
        ("a.txt", b"ab\xc3\x28", r"not UTF-8: byte 0xc3 at offset 2"),
        ("a.txt", b"\xef\xbb\xbfab\xc3", r"not UTF-8: byte 0xc3 at offset 5"),
        ("a.jsonl.gz", b"not gzip", "damaged or no gzip"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 1000)[:-20], "damaged or no gzip"),
        ("a.parquet", b"not parquet", "no readable Parquet file"),
        ("a.csv", b"a,b", r"no known kind: \.jsonl, \.json"),
    ],
)
def test_faulty_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(load_documents(path))


def test_utf8_faults_behind_the_first_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_BLOCK_BYTES", 4)
    path = tmp_path / "a.txt"
    path.write_bytes(b"abc\xc3\xbcabc\xe4\xb8(")  # the last character begins in one block, breaks in the next
    with pytest.raises(UserError, match="byte 0xe4 at offset 8"):
        list(load_documents(path))


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "_LINE_BYTES", 1 << 20)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'"' + b"a" * (8 << 20)))
    with pytest.raises(UserError, match=r"line 1, is longer than 1 MiB"):
        list(load_documents(path))


def test_missing_files_are_said_at_once_with_near_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "calibration.jsonl", {"text": "x"})
    with pytest.raises(UserError, match=r"no file or folder .*; near it: calibration\.jsonl"):
        load_documents(tmp_path / "calibraton.jsonl")
    with pytest.raises(UserError, match="is not there either"):
        load_documents(tmp_path / "none" / "a.jsonl")
    with pytest.raises(UserError, match="holds no data file"):
        load_documents((tmp_path / "empty").mkdir() or tmp_path / "empty")
    with pytest.raises(UserError, match="neither a regular file"):
        load_documents("/dev/null")
    with pytest.raises(UserError, match="limit of 0"):
        load_documents(tmp_path, limit=0)


def test_a_named_column_that_is_not_there(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(arrow.table({"body": ["x"], "title": ["y"]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"row 0, has no column 'text'; it has body, title"):
        list(load_documents(tmp_path / "a.parquet", column="text"))
    with pytest.raises(UserError, match=r"row 0, .* it has body, title, understood are"):
        list(load_documents(tmp_path / "a.parquet"))
    parquet.write_table(arrow.table({"text": arrow.array([], arrow.string())}), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="is empty"):
        list(load_documents(tmp_path / "b.parquet"))


# Hub datasets, without the network


def test_hub_names_need_the_datasets_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        UserError, match=r"no file or folder org/name, .*pip install 'qwen-quantize\[datasets\]'"
    ):
        list(load_documents("org/name"))


class FakeDatasets:
    """Stands in for the `datasets` package; records what was asked for."""

    class exceptions:
        class DatasetsError(Exception):
            pass

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict]:
        self.asked.append((name, config, split, streaming))
        if split == "gone":
            raise ValueError("unknown split gone")
        yield {"text": "one"}
        if split == "torn":
            raise ConnectionError("the line went dead")
        yield {"text": "two"}


def test_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDatasets()
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert texts("org/name") == ["one", "two"]
    assert texts("org/name:test", limit=1) == ["one"]
    assert [document.id for document in load_documents("org/na.me-2:small:test")] == [
        "org/na.me-2:small:test:0",
        "org/na.me-2:small:test:1",
    ]
    assert fake.asked == [
        ("org/name", None, "train", True),
        ("org/name", None, "test", True),
        ("org/na.me-2", "small", "test", True),
    ]
    for split, message in (("gone", "unknown split gone"), ("torn", "the line went dead")):
        with pytest.raises(UserError, match=f"org/name:{split}, .* cannot be read: {message}"):
            list(load_documents(f"org/name:{split}"))
    with pytest.raises(UserError, match="no file or folder"):  # a file's name is never asked for on the hub
        load_documents("org/name.jsonl")
    assert len(fake.asked) == 5
