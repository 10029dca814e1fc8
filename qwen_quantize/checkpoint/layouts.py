"""How a quantized linear is named and stored for the engines that read it, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_quantize.errors import UserError


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


def parse_quantization_config(config: Mapping[str, Any]) -> BlockFp8Config | None:
    """None for an unquantized checkpoint; UserError for a scheme that cannot be read."""
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise UserError(f"config.json: 'quantization_config' must be an object, found {found!r}")
    method = found.get("quant_method")
    if method != "fp8":
        raise UserError(
            f"config.json: checkpoints with quant_method {method!r} cannot be read; block FP8 ('fp8') can"
        )
    block = found.get("weight_block_size")
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
    ):
        raise UserError(
            "config.json: 'weight_block_size' must be two positive whole numbers such as [128, 128], "
            f"found {block!r}"
        )
    scheme = found.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise UserError(f"config.json: activation_scheme {scheme!r} cannot be read; 'dynamic' can")
    kept = found.get("modules_to_not_convert") or found.get("ignored_layers") or []
    return BlockFp8Config(
        block=(block[0], block[1]),
        power_of_two_scales=found.get("scale_fmt") == "ue8m0",
        kept_modules=tuple(str(name) for name in kept),
    )
