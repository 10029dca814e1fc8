"""Which files of a model folder may be read: those really in it, and of them those that serving needs."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from qwen_quantize.errors import UserError

# No Python files: remote code is neither run nor passed on.
SIDE_FILES = (
    "tokenizer*.json",
    "*.model",
    "*.model.v[0-9]*",
    "*.tiktoken",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.json",
    "*.jinja",
    "generation_config.json",
    "processor_config.json",
    "*preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
)


def is_plain_name(name: str) -> bool:
    """Whether `name` is one visible file name, with no folder, drive or control character in it."""
    try:
        length = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        return False
    return (
        0 < length <= 255
        and not name.startswith(".")
        and not any(character in "/\\:" or ord(character) < 32 or ord(character) == 127 for character in name)
    )


def contained_file(folder: Path, name: str) -> Path:
    """The path of the regular file `name` in `folder`; UserError when it is missing or a link leads outside.

    The hub's cache keeps files as links into `../../blobs`; those are followed.
    """
    if not is_plain_name(name):
        raise UserError(f"{folder}: {name!r} is not a plain file name inside the folder; it is not opened")
    path = folder / name
    try:
        resolved = path.resolve(strict=True)
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing; download the model again") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise UserError(f"{path} cannot be opened: {error}") from error
    allowed = [folder.resolve()]
    if folder.parent.name == "snapshots":
        allowed.append((folder.parent.parent / "blobs").resolve())
    if not any(resolved.is_relative_to(root) for root in allowed):
        raise UserError(
            f"{path} is a link that leaves the folder (to {resolved}); it is not followed, "
            "put the file itself into the folder"
        )
    if not resolved.is_file():
        raise UserError(f"{path} is not a regular file")
    return path


def find_side_files(folder: Path) -> dict[str, Path]:
    """The side files of a model folder by name, sorted."""
    names = sorted(entry.name for entry in folder.iterdir() if not entry.is_dir())
    return {
        name: contained_file(folder, name)
        for name in names
        if is_plain_name(name) and any(fnmatch(name, pattern) for pattern in SIDE_FILES)
    }
