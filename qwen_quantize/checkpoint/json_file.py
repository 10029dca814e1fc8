"""JSON from files that nobody vouches for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen_quantize.errors import UserError

# Of a manifest or another record of a result: one of every linear of the largest models is some tens of megabytes.
RECORD_BYTES = 256 << 20


def parse_object(data: bytes, what: str, *, allow_infinite: bool = False) -> dict[str, Any]:
    """A JSON object; UserError that begins with `what` for anything else, duplicate keys included.

    allow_infinite admits the literals NaN and Infinity, which Python writes and JSON does not know.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key!r} stands twice in one object")
            found[key] = value
        return found

    def refuse_constant(text: str) -> float:
        if allow_infinite:
            return float(text.replace("Infinity", "inf"))
        raise ValueError(f"{text} is not JSON")

    try:
        # Decoded here: json.loads would also accept UTF-16 and UTF-32.
        parsed = json.loads(
            data.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=refuse_constant
        )
        if b"\\u" in data:  # half a surrogate pair, written as an escape, cannot be written out again
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{what} holds an escape that is no character; download it again") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{what} is not UTF-8 text (byte {error.start}); download it again") from error
    except RecursionError as error:
        raise UserError(f"{what} is nested too deeply to be read; download it again") from error
    except ValueError as error:
        raise UserError(f"{what} is not valid JSON: {error}; download it again") from error
    if not isinstance(parsed, dict):
        raise UserError(f"{what} must be a JSON object, found {type(parsed).__name__}; download it again")
    return parsed


def read_object(path: Path, limit: int, *, allow_infinite: bool = False) -> dict[str, Any]:
    """The JSON object in `path`; UserError also when it is missing, unreadable or over `limit` bytes."""
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > limit:
        raise UserError(f"{path} is larger than {limit} bytes, which no such file needs; download it again")
    return parse_object(data, str(path), allow_infinite=allow_infinite)
