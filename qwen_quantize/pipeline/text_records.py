"""What a record of a dataset means: a text or a conversation, found by the names of its columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen_quantize.engine.tokenizer import Message
from qwen_quantize.errors import UserError


@dataclass(frozen=True, slots=True)
class Document:
    """One text or one conversation; exactly one of the two is there.

    `id` names file and line (from 1), record or row (from 0); `source` is the dataset as the user named it.
    """

    id: str
    text: str | None
    messages: list[Message] | None
    source: str = ""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"document {self.id} needs either a text or messages")


# In this order: a conversation says more than the text that was made from it.
_CONVERSATION_COLUMNS = ("messages", "conversations")
_TEXT_COLUMNS = ("text", "content")
_PAIR_COLUMNS = (("prompt", "response"), ("instruction", "output"))
READABLE_COLUMNS = frozenset(
    (*_CONVERSATION_COLUMNS, *_TEXT_COLUMNS, "prompt", "response", "instruction", "input", "output")
)
_UNDERSTOOD = (
    "text, content, messages, conversations, prompt with response, instruction with input and output"
)

# The two spellings of a turn, and what the second one calls the roles.
_TURN_KEYS = (("role", "content"), ("from", "value"))
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}


def document_of(record: object, identity: str, where: str, source: str, column: str | None) -> Document:
    """The document in one record. `where` (file and line) stands in errors: UserError for every fault."""
    if not isinstance(record, Mapping):
        raise UserError(f"{where}, is {_kind(record)}; an object with columns is needed")
    if column is not None:
        if column not in record:
            raise UserError(f"{where}, has no column {column!r}; it has {_listed(record)}")
        value = record[column]
        if isinstance(value, list):
            return Document(identity, None, _conversation(value, f"{where}, {column}"), source)
        return Document(identity, _text(value, f"{where}, {column}"), None, source)
    for name in _CONVERSATION_COLUMNS:
        if name in record:
            return Document(identity, None, _conversation(record[name], f"{where}, {name}"), source)
    for name in _TEXT_COLUMNS:
        if name in record:
            return Document(identity, _text(record[name], f"{where}, {name}"), None, source)
    for question, answer in _PAIR_COLUMNS:
        if question in record and answer in record:
            return Document(identity, None, _pair(record, question, answer, where), source)
    raise UserError(
        f"{where}, has no column that is understood; it has {_listed(record)}, understood are {_UNDERSTOOD} "
        "(or name the column to read)"
    )


def _pair(record: Mapping[str, object], question: str, answer: str, where: str) -> list[Message]:
    asked = _text(record[question], f"{where}, {question}")
    if question == "instruction" and record.get("input") is not None:
        given = _text(record["input"], f"{where}, input")
        asked = f"{asked}\n\n{given}" if given else asked
    return [Message("user", asked), Message("assistant", _text(record[answer], f"{where}, {answer}"))]


def _conversation(value: object, where: str) -> list[Message]:
    if not isinstance(value, list):
        raise UserError(f"{where}, is {_kind(value)}; a list of turns with role and content is needed")
    if not value:
        raise UserError(f"{where}, is an empty conversation")
    return [_turn(turn, f"{where}, turn {index}") for index, turn in enumerate(value)]


def _turn(value: object, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}, is {_kind(value)}; an object with role and content is needed")
    for role_key, content_key in _TURN_KEYS:
        if role_key in value and content_key in value:
            role = _text(value[role_key], f"{where}, {role_key}")
            content = _content(value[content_key], f"{where}, {content_key}")
            return Message(_ROLES.get(role, role) if role_key == "from" else role, content)
    raise UserError(f"{where}, has {_listed(value)}; role and content (or from and value) are needed")


def _content(value: object, where: str) -> str:
    """A turn's text; a list of parts, each {"type": "text", "text": ...}, is joined."""
    if not isinstance(value, list):
        return _text(value, where)
    texts = []
    for part in value:
        if not isinstance(part, Mapping) or "text" not in part:
            raise UserError(f"{where}, holds a part that is no text; only texts can calibrate")
        texts.append(_text(part["text"], where))
    return "".join(texts)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}, is {_kind(value)}; a text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud800" alone is legal in JSON and no character
        raise UserError(f"{where}, holds half of a surrogate pair at character {error.start}") from error
    return value


def _kind(value: object) -> str:
    match value:
        case None:
            return "empty (null)"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "a text"
        case list():
            return "a list"
        case Mapping():
            return "an object"
        case _:
            return f"of type {type(value).__name__}"


def _listed(record: Mapping[str, object]) -> str:
    names = [str(name) for name in record]
    if not names:
        return "no columns"
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return ", ".join(names[:20]) + more
