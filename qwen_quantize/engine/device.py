"""A loaded model on another device of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

from qwen_quantize.engine.model import Model
from qwen_quantize.engine.rotary import LayerRotary
from qwen_quantize.errors import UserError


def find_device(name: str) -> torch.device:
    """The device of a string such as `cuda:0` or `npu`; UserError where torch does not have it here."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except Exception as error:  # back ends raise whatever they like
        raise UserError(
            f"torch has no device {name!r} on this machine ({str(error).splitlines()[0]}); leave --device out for "
            "the CPU, or install the chip's torch extension"
        ) from error
    return device


def moved(model: Model, device: torch.device) -> Model:
    """The model on `device`; whoever runs it does so under `with device:`, where new tensors are made too."""
    with device:
        rotary = LayerRotary(model.blueprint.config)
    parts = {
        name: _moved(getattr(model, name), device) for name in ("embedding", "layers", "final_norm", "head")
    }
    return replace(model, rotary=rotary, step=None, **parts)


def _moved(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, Mapping):
        return {key: _moved(value, device) for key, value in part.items()}
    if isinstance(part, tuple):
        return tuple(_moved(value, device) for value in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _moved(getattr(part, f.name), device) for f in fields(part)})
    return part
