"""A layer of measured facts in the place of a device's name: the chip that it was measured on, with the facts."""

from __future__ import annotations

import tomllib
from pathlib import Path

from qwen_quantize.chip_profiles.devices import members_of
from qwen_quantize.chip_profiles.loader import measured_chip, no_chip, split_versions
from qwen_quantize.errors import UserError


def device_with_layer(device: str | None, layer: Path) -> str:
    """What `--device DEVICE --measured LAYER` means as one device: the layer, at the versions that `device` states.

    UserError for a layer that was measured on another chip, or that cannot be read or names no chip.
    """
    if layer.suffix != ".toml":
        raise UserError(f"--measured {layer}: measured facts are in a .toml file; `probe --output` writes it")
    try:
        tables = tomllib.loads(layer.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--measured {layer}: the measured facts cannot be read: {error}") from error
    chip = measured_chip(tables, str(layer))
    if chip is None and "chip" in tables:
        raise UserError(f"--measured {layer} is a profile of its own; name it with --device")
    if chip is None:
        raise no_chip(f"--measured {layer}")
    if device is None:
        return str(layer)
    name, written = split_versions(device.strip())
    measured_on = split_versions(chip)[0]
    if measured_on not in members_of(name):
        raise UserError(f"--measured {layer} was measured on {measured_on}, which {device} is not")
    return f"{layer}@{written}" if written else str(layer)
