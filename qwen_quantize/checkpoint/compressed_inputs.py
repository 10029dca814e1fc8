"""What compressed-tensors says of a linear's input: its format and scales, and which modules are meant."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import E2M1, E2M3, E4M3FN, E8M0, FP32, INT4, INT8
from qwen_quantize.models.config_values import shown

_FORMATS: dict[tuple[str, int], Format] = {
    ("int", 4): INT4, ("int", 8): INT8, ("float", 4): E2M1, ("float", 6): E2M3, ("float", 8): E4M3FN,
}  # fmt: skip
_LARGEST_GROUP = 1 << 20
_LONGEST_PATTERN = 1000
_MOST_REPEATS = 8
_CLASSES = ("Linear", "RoutedExperts")


def fail(key: str, wanted: str, value: object) -> UserError:
    return UserError(f"config.json: quantization_config {key!r} must be {wanted}, found {shown(value)}")


def integer_in(value: object, key: str, largest: int) -> int | None:
    """A group size: None where it is null or -1, as written for one group in a row."""
    if value is None or (type(value) is int and value == -1):
        return None
    if type(value) is int and 0 < value <= largest:
        return value
    raise fail(key, "a positive whole number, -1 or null", value)


def parse_inputs(found: object, where: str) -> ActivationForm | None:
    """`input_activations` of a config group, without the names of tensors; UserError where unreadable."""
    if found is None:
        return None
    where = f"{where}.input_activations"
    if not isinstance(found, Mapping):
        raise fail(where, "an object or null", found)
    bits, kind = found.get("num_bits", 8), found.get("type", "int")
    known = type(bits) is int and isinstance(kind, str) and (kind, bits) in _FORMATS
    if not known:
        raise fail(f"{where}.num_bits", "4 or 8 for integers, 4, 6 or 8 for floats", [kind, bits])
    dynamic, symmetric = found.get("dynamic", False), found.get("symmetric", True)
    if not isinstance(dynamic, bool) and dynamic != "local":
        raise fail(f"{where}.dynamic", "true, false or 'local'", dynamic)
    if not isinstance(symmetric, bool):
        raise fail(f"{where}.symmetric", "true or false", symmetric)
    shape = _shape(found, where)
    if not dynamic and shape != Granularity.tensor():
        raise fail(f"{where}.strategy", "'tensor' where scales are static", found.get("strategy"))
    return ActivationForm(
        format=_FORMATS[kind, bits],
        granularity=shape,
        scale_format=_scale_format(found, kind, bits),
        dynamic=bool(dynamic),
        symmetric=symmetric,
    )


def _shape(found: Mapping[str, Any], where: str) -> Granularity:
    size = integer_in(found.get("group_size"), f"{where}.group_size", _LARGEST_GROUP)
    strategy = found.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "group"
    match strategy:
        case "tensor":
            return Granularity.tensor()
        case "token":
            return Granularity.token()
        case "group" | "tensor_group":
            if size is None:
                raise fail(
                    f"{where}.group_size", f"a positive whole number for the strategy {strategy!r}", None
                )
            return Granularity.group(size)
    raise fail(f"{where}.strategy", "one of tensor, token, group, tensor_group", strategy)


def _scale_format(found: Mapping[str, Any], kind: str, bits: int) -> Format:
    named = str(found.get("scale_dtype"))
    if "uint8" in named:
        return E8M0
    if "float8_e4m3" in named or found.get("strategy") == "tensor_group":
        return E4M3FN
    narrow = kind == "float" and bits < 8  # older files leave the dtype of MX scales out
    return E8M0 if narrow and found.get("strategy") == "group" else FP32


def parse_targets(found: object, where: str) -> tuple[str, ...]:
    """`targets` of a config group; UserError unless it is a list of names."""
    if found is None:
        return ()
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise fail(f"{where}.targets", "a list of module names, patterns or classes", found)
    return tuple(found)


def rank_of_match(module: str, targets: Sequence[str]) -> int | None:
    """0 where a target is the module's name, 1 where a pattern matches it, 2 for its class; None for no match."""
    if module in targets:
        return 0
    if any(_matches(module, target[3:]) for target in targets if target.startswith("re:")):
        return 1
    return 2 if any(name in targets for name in _CLASSES) else None


def _matches(module: str, pattern: str) -> bool:
    """Whether a pattern from a file matches from the name's start on; UserError for one that may take forever."""
    repeats = sum(pattern.count(sign) for sign in "*+{")
    if len(pattern) > _LONGEST_PATTERN or repeats > _MOST_REPEATS or re.search(r"\)\s*[*+{]", pattern):
        raise UserError(
            f"config.json: the pattern {shown(pattern)} in quantization_config 'targets' is too intricate to be "
            "evaluated; name the modules"
        )
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise UserError(
            f"config.json: the pattern {shown(pattern)} in quantization_config 'targets' is none: {error}"
        ) from error
