"""Ways to spoil a model folder: its tensors, its JSON files, the bytes of its shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoint.good_folders import DESCRIPTION

Act = Callable[[Path], object]
Change = Callable[[dict[str, Tensor]], object]


def weights_of(folder: Path) -> Path:
    return next(iter(sorted(folder.glob("*.safetensors"))))


def tensors(change: Change) -> Act:
    """Rewrite the (first) shard with changed tensors."""

    def act(folder: Path) -> None:
        file = weights_of(folder)
        found = load_file(file)
        change(found)
        save_file(
            {name: tensor.contiguous() for name, tensor in found.items()}, file, metadata={"format": "pt"}
        )

    return act


def put(name: str, value: Callable[[Tensor], Tensor]) -> Act:
    """Replace one tensor by a function of it."""

    def change(found: dict[str, Tensor]) -> None:
        found[name] = value(found[name])

    return tensors(change)


def fill(name: str, value: float, row: int | None = 0) -> Act:
    """Set one row of a tensor, or all of it, to a value."""

    def changed(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        (copy if row is None or copy.dim() == 0 else copy[row : row + 1]).fill_(value)
        return copy

    return put(name, changed)


def drop(*names: str) -> Act:
    """Remove tensors that end so."""

    def change(found: dict[str, Tensor]) -> None:
        gone = [name for name in found if name.endswith(names)]
        assert gone
        for name in gone:
            del found[name]

    return tensors(change)


def add(name: str, tensor: Tensor) -> Act:
    return tensors(lambda found: found.update({name: tensor}))


def rename(old: str, new: str) -> Act:
    return tensors(lambda found: found.update({new: found.pop(old)}))


def json_file(name: str, change: Callable[[dict[str, Any]], object]) -> Act:
    def act(folder: Path) -> None:
        found = json.loads((folder / name).read_text())
        change(found)
        (folder / name).write_text(json.dumps(found))

    return act


def config(**values: Any) -> Act:
    return json_file("config.json", lambda found: found.update(values))


def without(*keys: str) -> Act:
    def change(found: dict[str, Any]) -> None:
        for key in keys:
            del found[key]

    return json_file("config.json", change)


def quant(**values: Any) -> Act:
    return json_file("config.json", lambda found: found["quantization_config"].update(values))


def weights_arguments(**values: Any) -> Act:
    """Of the first config group of compressed-tensors."""
    return json_file(
        "config.json",
        lambda found: found["quantization_config"]["config_groups"]["group_0"]["weights"].update(values),
    )


def group(**values: Any) -> Act:
    return json_file(
        "config.json", lambda found: found["quantization_config"]["config_groups"]["group_0"].update(values)
    )


def description(**values: Any) -> Act:
    return json_file(DESCRIPTION, lambda found: found.update(values))


def described(name: str, kind: str | None) -> Act:
    """Give a tensor another type in the description, or none."""

    def change(found: dict[str, Any]) -> None:
        if kind is None:
            del found[name]
        else:
            found[name] = kind

    return json_file(DESCRIPTION, change)


def index(change: Callable[[dict[str, Any]], object]) -> Act:
    return json_file("model.safetensors.index.json", change)


def unlink(name: str) -> Act:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Act:
    return lambda folder: (folder / name).write_text(content)


def move(old: str, new: str) -> Act:
    return lambda folder: (folder / old).rename(folder / new)


def cut(name: str, keep: float = 0.5) -> Act:
    def act(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])

    return act


def both(*acts: Act) -> Act:
    def act(folder: Path) -> None:
        for one in acts:
            one(folder)

    return act


def codes(name: str, byte: int) -> Act:
    """Put a byte into the first place of a tensor of bytes."""

    def changed(tensor: Tensor) -> Tensor:
        raw = tensor.clone().contiguous().view(torch.uint8)
        raw.view(-1)[0] = byte
        return raw.view(tensor.dtype)

    return put(name, changed)
