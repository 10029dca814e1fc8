"""How a quantized linear is named and stored for the engines that read it, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_quantize.checkpoint.compressed_config import CompressedTensors, parse_compressed_tensors
from qwen_quantize.errors import UserError
from qwen_quantize.models.config_values import shown


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """FP8 weights with a grid of block scales beside them.

    weight_dtype, scale_dtype: safetensors names; scale_suffix replaces nothing, it follows the module's
    name; the scale multiplies, whatever its historical name says.
    """

    name: str
    weight_dtype: str
    scale_dtype: str
    scale_suffix: str
    readers: tuple[str, ...]

    def weight_name(self, module: str) -> str:
        return f"{module}.weight"

    def scale_name(self, module: str) -> str:
        return f"{module}.{self.scale_suffix}"

    def scale_shape(self, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
        """The grid of a weight [N, K]: one scale per block, partial blocks at the edges included."""
        return -(-shape[0] // block[0]), -(-shape[1] // block[1])


DEEPSEEK_FP8 = BlockLayout(
    name="deepseek-fp8",
    weight_dtype="F8_E4M3",
    scale_dtype="F32",  # V3.1 stores its powers of two as float32; older engines cannot read F8_E8M0
    scale_suffix="weight_scale_inv",
    readers=("transformers", "vLLM", "SGLang"),
)

LAYOUTS: dict[str, BlockLayout] = {DEEPSEEK_FP8.name: DEEPSEEK_FP8}


@dataclass(frozen=True, slots=True)
class BlockFp8Config:
    """What a checkpoint's `quantization_config` says of its FP8 blocks."""

    block: tuple[int, int]
    power_of_two_scales: bool
    kept_modules: tuple[str, ...]


def deepseek_quantization_config(block: tuple[int, int], kept_modules: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of DeepSeek-V3.1; kept modules under the key that all its readers know."""
    config: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(block),
    }
    if kept_modules:
        config["modules_to_not_convert"] = list(kept_modules)
    return config


# Keys that are optional, and the values that mean what the reader does.
_READABLE: dict[str, tuple[str, ...]] = {
    "activation_scheme": ("dynamic",),
    "fmt": ("e4m3",),
    "scale_fmt": ("ue8m0", "float"),
}
_LARGEST_BLOCK = 65_536


def parse_quantization(config: Mapping[str, Any]) -> BlockFp8Config | CompressedTensors | None:
    """What config.json says of quantized weights: None for plain ones; UserError for an unreadable scheme."""
    found = config.get("quantization_config")
    if isinstance(found, Mapping) and found.get("quant_method") == "compressed-tensors":
        return parse_compressed_tensors(found)
    return parse_quantization_config(config)


def parse_quantization_config(config: Mapping[str, Any]) -> BlockFp8Config | None:
    """The block FP8 of config.json, None for an unquantized checkpoint; UserError for any other scheme."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise UserError(f"config.json: 'quantization_config' must be an object, found {shown(found)}")
    method = found.get("quant_method")
    if method != "fp8":
        raise UserError(
            f"config.json: checkpoints with quant_method {shown(method)} cannot be read; block FP8 ('fp8') and "
            "'compressed-tensors' can"
        )
    for key, allowed in _READABLE.items():
        value = found.get(key)
        if value is not None and value not in allowed:
            raise UserError(
                f"config.json: {key} {shown(value)} cannot be read; {' and '.join(map(repr, allowed))} can"
            )
    return BlockFp8Config(
        block=_parse_block(found.get("weight_block_size")),
        power_of_two_scales=found.get("scale_fmt") == "ue8m0",
        kept_modules=_parse_names(found, "modules_to_not_convert") or _parse_names(found, "ignored_layers"),
    )


def _parse_block(block: object) -> tuple[int, int]:
    if isinstance(block, list) and len(block) == 2:
        rows, columns = block
        if all(type(size) is int and 0 < size <= _LARGEST_BLOCK for size in block):  # True is an int too
            return rows, columns
    raise UserError(
        f"config.json: 'weight_block_size' must be two positive whole numbers up to {_LARGEST_BLOCK} such as "
        f"[128, 128], found {shown(block)}"
    )


def _parse_names(found: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = found.get(key)
    if names is None:
        return ()
    # A lone string is a sequence of strings too, one letter each.
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise UserError(f"config.json: {key!r} must be a list of module names, found {shown(names)}")
    return tuple(names)
