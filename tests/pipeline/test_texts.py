"""Documents to token windows: whole, apart from each other, repeatable."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_quantize.engine.tokenizer import Message, Tokenizer
from qwen_quantize.errors import UserError
from qwen_quantize.pipeline.texts import (
    Document,
    TokenBatchSpec,
    calibration_batches,
    evaluation_windows,
)

EOS = 0
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + CHATML


@dataclass
class Counter:
    """How much text a tokenizer was given."""

    characters: int = 0
    calls: list[str] = field(default_factory=list)


def tokenizer(
    template: str | None = None, counter: Counter | None = None, eos_id: int | None = EOS
) -> Tokenizer:
    """One id per word of digits: the id is the number, so that a test reads positions off a window."""

    def encode(text: str, _add_special_tokens: bool) -> list[int]:
        if counter is not None:
            counter.characters += len(text)
            counter.calls.append(text)
        return [int(word) if word.isdigit() else 1 for word in re.findall(r"\d+|[^\W\d]+", text)]

    return Tokenizer(
        encode=encode,
        decode=lambda ids: " ".join(map(str, ids)),
        special_tokens={},
        bos_id=None,
        eos_id=eos_id,
        vocabulary_size=1 << 30,
        template=template,
        sha256="",
        where="the test's tokenizer",
    )


def numbers(start: int, count: int) -> str:
    return " ".join(str(number) for number in range(start, start + count))


def text_document(number: int, count: int) -> Document:
    """Document `number` of `count` tokens; its token at position p is 10_000 * (number + 1) + p."""
    return Document(f"d{number}", numbers(10_000 * (number + 1), count), None, "made up")


# Calibration windows


def position_of(token: int) -> tuple[int, int]:
    return token // 10_000 - 1, token % 10_000


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    samples=st.integers(1, 12),
    length=st.integers(2, 40),
    seed=st.integers(0, 1 << 40),
)
def test_windows_are_whole_and_share_no_position(
    sizes: list[int], samples: int, length: int, seed: int
) -> None:
    documents = [text_document(number, size) for number, size in enumerate(sizes)]
    # One EOS goes between two short documents.
    short = [size for size in sizes if size < length]
    stream = sum(short) + max(0, len(short) - 1)
    if len(short) == len(sizes) and stream < min(16, length):
        with pytest.raises(UserError, match="too small"):
            calibration_batches(iter(documents), tokenizer(), samples, length, seed)
        return
    result = calibration_batches(iter(documents), tokenizer(), samples, length, seed)
    count, width = result.tokens.shape
    assert result.tokens.dtype == torch.int64
    assert 1 <= count <= samples
    assert width == length or (count == 1 and 16 <= width < length)
    ids = [token for token in result.tokens.flatten().tolist() if token != EOS]
    positions = {position_of(token) for token in ids}
    assert len(positions) == len(ids)
    assert all(position < sizes[number] for number, position in positions)
    assert result.documents_used == len({number for number, _ in positions})
    for window in result.tokens.tolist():
        for before, after in pairwise(window):
            # Inside a document ids follow each other; documents meet only at an EOS.
            assert EOS in (before, after) or after == before + 1
    # Fewer windows than asked for only where the data could not give more, and never without saying so.
    long_windows = sum(size // length for size in sizes)
    assert count >= min(samples, long_windows)
    assert ("asked for" in result.note) == (count < samples or width < length)


def test_packing_is_exact() -> None:
    documents = [text_document(number, 5) for number in range(40)]
    result = calibration_batches(documents, tokenizer(), 100, 16, 3)
    stream = result.tokens.flatten().tolist()
    # 40 documents of 5 with 39 EOS between are 239 ids: 14 windows of 16.
    assert result.tokens.shape == (14, 16)
    assert sorted(token for token in stream if token != EOS) == sorted(set(stream) - {EOS})
    assert result.note == "the text gives 14 windows of the 100 asked for"
    # Laid end to end again, every document but those cut at the rim is followed by one EOS.
    assert 34 <= stream.count(EOS) <= 39


def test_same_seed_same_bytes_and_another_seed_others() -> None:
    documents = [text_document(number, 30 + 17 * number) for number in range(20)]
    first, again, other = (calibration_batches(documents, tokenizer(), 8, 16, seed) for seed in (1, 1, 2))
    assert torch.equal(first.tokens, again.tokens)
    assert first.sha256 == again.sha256
    assert first.sha256 != other.sha256
    reshaped = first.tokens.numpy().astype("<i8").tobytes()
    assert first.sha256 == hashlib.sha256(b"8,16\n" + reshaped).hexdigest()
    assert first.source == "made up"


def test_long_documents_start_anywhere() -> None:
    starts = {
        int(row[0]) % 10_000
        for seed in range(20)
        for row in calibration_batches([text_document(0, 1000)], tokenizer(), 4, 64, seed).tokens
    }
    assert len({start % 64 for start in starts}) > 10


def test_repeated_documents_count_once() -> None:
    documents = [
        text_document(0, 50),
        Document("copy", f"  {numbers(10_000, 50)}\n", None),
        text_document(1, 50),
    ]
    result = calibration_batches(documents, tokenizer(), 100, 25, 0)
    assert result.tokens.shape[0] == 4
    assert "left out 1 documents that repeat" in result.note


def test_a_small_dataset_is_one_shorter_window_and_a_tiny_one_an_error() -> None:
    result = calibration_batches([text_document(0, 20)], tokenizer(), 4, 512, 0)
    assert result.tokens.tolist() == [list(range(10_000, 10_020))]
    assert "one window, shorter than the 512 asked for" in result.note
    with pytest.raises(UserError, match="dataset too small: made up has 15 tokens"):
        calibration_batches([text_document(0, 15)], tokenizer(), 4, 512, 0)
    with pytest.raises(UserError, match="dataset too small"):
        calibration_batches([Document("blank", "  \n", None)], tokenizer(), 4, 512, 0)


def test_reading_stops_when_there_is_enough() -> None:
    read: list[int] = []

    def endless() -> Iterator[Document]:
        number = 0
        while True:
            read.append(number)
            yield text_document(number, 100)
            number += 1

    result = calibration_batches(endless(), tokenizer(), 8, 50, 0)
    assert len(read) == 16  # 4 x 8 x 50 tokens
    assert result.tokens.shape == (8, 50)
    assert result.note == "read only the first part of the dataset, 4 times the tokens wanted"


def test_a_huge_document_is_not_tokenized_whole_and_leaves_room_for_others() -> None:
    huge = Document("huge", numbers(1_000_000, 200_000), None)
    counter = Counter()
    alone = calibration_batches([huge], tokenizer(counter=counter), 4, 32, 0)
    assert counter.characters < len(huge.text or "") / 50
    assert alone.tokens.shape == (4, 32)
    assert "read only the first part" in alone.note
    assert (alone.tokens < 1_000_000 + 4 * 4 * 32 + 32).all()
    others = [text_document(number, 100) for number in range(10)]
    used = {
        calibration_batches([huge, *others], tokenizer(), 4, 32, seed).documents_used for seed in range(8)
    }
    assert max(used) > 1


@pytest.mark.parametrize("length", [0, 1])
def test_impossible_requests(length: int) -> None:
    with pytest.raises(UserError, match="too short"):
        calibration_batches([], tokenizer(), 1, length, 0)
    with pytest.raises(UserError, match="the seed -1"):
        TokenBatchSpec(1, 512, -1)
    with pytest.raises(UserError, match="0 calibration samples"):
        TokenBatchSpec(0, 512, 0)


# Conversations


def talk(number: int, first: str = "user") -> Document:
    return Document(
        f"t{number}", None, [Message(first, numbers(number * 100 + 100, 20)), Message("assistant", "7")]
    )


def test_conversations_go_through_the_template() -> None:
    counter = Counter()
    result = calibration_batches([talk(0), talk(1)], tokenizer(CHATML, counter), 1, 24, 0)
    assert sorted(counter.calls) == [f"<user>{numbers(start, 20)}<assistant>7" for start in (100, 200)]
    assert result.tokens.shape == (1, 24)
    assert "template" not in result.note


def test_without_a_template_roles_are_written_out() -> None:
    counter = Counter()
    result = calibration_batches([talk(0)], tokenizer(None, counter), 1, 16, 0)
    assert counter.calls == [f"User: {numbers(100, 20)}\n\nAssistant: 7"]
    assert "has no chat template" in result.note


def test_conversations_that_the_template_refuses() -> None:
    documents = [talk(0, "assistant"), talk(1), talk(2)]
    result = calibration_batches(documents, tokenizer(STRICT), 2, 16, 0)
    assert "left out 1 conversations; the first, t0: " in result.note
    assert "user first" in result.note
    with pytest.raises(UserError, match=r"no conversation could be rendered; the first, t0: .*user first"):
        calibration_batches([talk(0, "assistant")], tokenizer(STRICT), 2, 16, 0)
    endless = (talk(number, "system") for number in iter(int, 1))
    with pytest.raises(UserError, match="no conversation could be rendered"):
        calibration_batches(endless, tokenizer(STRICT), 2, 16, 0)


def test_without_an_eos_documents_are_joined_and_it_is_said() -> None:
    result = calibration_batches(
        [text_document(0, 10), text_document(1, 10)], tokenizer(eos_id=None), 1, 20, 0
    )
    assert EOS not in result.tokens
    assert "names no EOS" in result.note


# Evaluation windows


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=5),
    length=st.integers(2, 40),
    limit=st.none() | st.integers(2, 300),
)
def test_evaluation_windows_are_the_text_in_order(sizes: list[int], length: int, limit: int | None) -> None:
    documents = [text_document(number, size) for number, size in enumerate(sizes)]
    stream: list[int] = []
    for document in documents:
        stream += [EOS] * bool(stream) + tokenizer().encode(document.text or "")
    stream = stream[:limit]
    if len(stream) < 2:
        with pytest.raises(UserError, match="too small"):
            evaluation_windows(documents, tokenizer(), length, limit)
        return
    result = evaluation_windows(documents, tokenizer(), length, limit)
    count, width = result.windows.shape
    assert width == min(length, len(stream))
    assert result.windows.flatten().tolist() == stream[: count * width]
    assert result.dropped_tokens == len(stream) - count * width < width
    for window, identity in zip(result.windows.tolist(), result.document_ids, strict=True):
        first = next((token for token in window[:1] if token != EOS), None)
        assert first is None or identity == f"d{position_of(first)[0]}"


def test_evaluation_of_a_long_text_reads_no_more_than_it_needs() -> None:
    text = numbers(1_000_000, 100_000)
    counter = Counter()
    result = evaluation_windows(text, tokenizer(counter=counter), 64, 640)
    assert result.windows.flatten().tolist() == list(range(1_000_000, 1_000_640))
    assert counter.characters < len(text) / 20
    assert result.text_sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert set(result.document_ids) == {"text"}


def test_evaluation_with_nothing_to_predict() -> None:
    with pytest.raises(UserError, match="at least 2"):
        evaluation_windows("1 2 3", tokenizer(), 1, None)
    with pytest.raises(UserError, match="at least 2"):
        evaluation_windows("1 2 3", tokenizer(), 4, 1)
    with pytest.raises(UserError, match="too small"):
        evaluation_windows(" ", tokenizer(), 4, None)
