"""How a quantized linear is named and stored for the engines that read it, as records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qwen_quantize.checkpoint.ascend_description import AscendDescription
from qwen_quantize.checkpoint.ascend_layout import ASCEND
from qwen_quantize.checkpoint.awq_layout import AWQ, AwqConfig, parse_awq
from qwen_quantize.checkpoint.compressed_config import CompressedTensors, parse_compressed_tensors
from qwen_quantize.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from qwen_quantize.checkpoint.gguf_layout import GGUF
from qwen_quantize.checkpoint.gptq_layout import GPTQ, GptqConfig, parse_gptq
from qwen_quantize.checkpoint.layout_parts import (
    Destination,
    UsualFolder,
    check_parts,
    one_scheme,
    read_scale,
    scheme_words,
    stored_scale,
)
from qwen_quantize.checkpoint.mx_oss_layout import MX_OSS
from qwen_quantize.checkpoint.shards import OutputTensor
from qwen_quantize.checkpoint.tiles_layout import METHOD as TILES_METHOD
from qwen_quantize.checkpoint.tiles_layout import TILES, TilesConfig, parse_tiles
from qwen_quantize.checkpoint.word_config import auto_round_packing
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_form import ActivationForm
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.granularity import Granularity, GranularityKind
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.formats.tables import E4M3FN, E8M0, FP32, HIF8
from qwen_quantize.models.config_values import shown


class Layout(Protocol):
    """How the linears of every scheme that it holds are named and stored.

    readers: the engines that load it. Every method is pure; UserError says what the layout cannot hold.
    """

    @property
    def name(self) -> str: ...

    @property
    def readers(self) -> tuple[str, ...]: ...

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """The tensors of a linear [N, K], known before it is solved; the first one is the weight."""
        ...

    def pack(
        self, module: str, quantized: QuantizedTensor, scheme: Scheme, input_amax: float | None = None
    ) -> dict[str, Tensor]:
        """Exactly the tensors of `outputs`; ValueError where `quantized` is not what the scheme says.

        input_amax: the largest magnitude of the linear's input, for schemes that store a scale of it.
        """
        ...

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where a tensor is missing or does not fit."""
        ...

    def quantization_config(
        self, schemes: Mapping[str, Scheme], kept: Sequence[str]
    ) -> dict[str, Any] | None:
        """The `quantization_config` of config.json: schemes by module, and the modules that stay. None: no such key."""
        ...

    # What follows is in `UsualFolder` for layouts that are like most.

    @property
    def weights_stem(self) -> str:
        """What the names of the files with the weights begin with."""
        ...

    def fitted(self, destination: Destination) -> Layout:
        """The layout as it is for one model and chip; UserError where it cannot be."""
        ...

    def with_bias(self, module: str, packed: Mapping[str, Tensor], bias: Tensor) -> dict[str, Tensor]:
        """What `pack` gave, for a linear with a bias, float32 [N]: where kernels add the bias in their own type."""
        ...

    def side_files(
        self, schemes: Mapping[str, Scheme], tensors: Sequence[OutputTensor]
    ) -> Mapping[str, bytes]:
        """Files beside the weights that say how they are stored; tensors: all of the folder."""
        ...

    def notes(self, schemes: Mapping[str, Scheme]) -> tuple[str, ...]:
        """What the user has to know of these schemes in this layout."""
        ...


@dataclass(frozen=True, slots=True)
class BlockLayout(UsualFolder):
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

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        return (
            OutputTensor(self.weight_name(module), self.weight_dtype, shape),
            OutputTensor(
                self.scale_name(module), self.scale_dtype, self.scale_shape(shape, self._block(scheme))
            ),
        )

    def pack(
        self,
        module: str,
        quantized: QuantizedTensor,
        scheme: Scheme,
        input_amax: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        self._block(scheme)
        return {
            self.weight_name(module): quantized.codes.view(torch.float8_e4m3fn),
            self.scale_name(module): stored_scale(quantized.scale, self.scale_dtype),
        }

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        codes, scale = check_parts(self.outputs(module, shape, scheme), tensors)
        weight = scheme.weight
        return QuantizedTensor(
            codes.view(torch.uint8), read_scale(scale), None, weight.format, weight.granularity, shape
        )

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:
        scheme = one_scheme(self.name, schemes)
        powers = scheme.weight.scale_format == E8M0
        return deepseek_quantization_config(self._block(scheme), kept, power_of_two_scales=powers)

    def _block(self, scheme: Scheme) -> tuple[int, int]:
        weight, kind = scheme.weight, scheme.weight.granularity.kind
        tiled = kind in (GranularityKind.BLOCK, GranularityKind.GROUP)
        if weight.format != E4M3FN or weight.scale_format not in (E8M0, FP32) or not tiled:
            raise UserError(
                f"layout {self.name} holds FP8 blocks with power-of-two or FP32 scales, not {scheme_words(scheme)} "
                f"(scheme {scheme.name}); choose another --layout"
            )
        if scheme.activation is None:
            raise UserError(
                f"layout {self.name} says of every linear that its input is cast, and scheme {scheme.name} leaves "
                "inputs as they are; choose another --layout"
            )
        return weight.granularity.rows, weight.granularity.cols


DEEPSEEK_FP8 = BlockLayout(
    name="deepseek-fp8",
    weight_dtype="F8_E4M3",
    scale_dtype="F32",  # V3.1 stores its powers of two as float32; older engines cannot read F8_E8M0
    scale_suffix="weight_scale_inv",
    readers=("transformers", "vLLM", "SGLang"),
)


@dataclass(frozen=True, slots=True)
class PlainHif8Layout(UsualFolder):
    """HiFloat8 codes as bytes and a float32 scale for each row, which no engine but this program's reads yet."""

    name: str
    readers: tuple[str, ...]

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        weight = scheme.weight
        if weight.format != HIF8 or weight.granularity.kind is not GranularityKind.CHANNEL:
            raise UserError(
                f"layout {self.name} holds HiFloat8 with a scale for each output channel, not scheme {scheme.name}; "
                "choose another --layout"
            )
        return (
            OutputTensor(f"{module}.weight", "U8", shape),
            OutputTensor(f"{module}.weight_scale", "F32", (shape[0], 1)),
        )

    def pack(
        self,
        module: str,
        quantized: QuantizedTensor,
        scheme: Scheme,
        input_amax: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        weight, scale = self.outputs(module, (quantized.shape[0], quantized.shape[1]), scheme)
        return {weight.name: quantized.codes, scale.name: stored_scale(quantized.scale, scale.dtype)}

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        codes, scale = check_parts(self.outputs(module, shape, scheme), tensors)
        return QuantizedTensor(codes, scale, None, HIF8, scheme.weight.granularity, shape)

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:
        scheme = one_scheme(self.name, schemes)
        return {
            "activation_scheme": "dynamic" if scheme.activation is not None else None,
            "modules_to_not_convert": list(kept),
            "quant_method": "hif8",
        }


HIF8_PLAIN = PlainHif8Layout(name="hif8-plain", readers=("qwen_quantize",))

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (DEEPSEEK_FP8, COMPRESSED_TENSORS, AWQ, GPTQ, ASCEND, MX_OSS, GGUF, TILES, HIF8_PLAIN)
}

# Scheme name -> the layout that most of its readers load.
DEFAULT_LAYOUT: dict[str, str] = {
    "ue8m0": DEEPSEEK_FP8.name,
    "mxfp8": COMPRESSED_TENSORS.name,
    "mxfp6": COMPRESSED_TENSORS.name,
    "mxfp4": COMPRESSED_TENSORS.name,
    "nvfp4": COMPRESSED_TENSORS.name,
    "fp8": COMPRESSED_TENSORS.name,
    "w8a8": COMPRESSED_TENSORS.name,
    "w8a8_static": COMPRESSED_TENSORS.name,
    "w4a16": COMPRESSED_TENSORS.name,
    "w8a16": COMPRESSED_TENSORS.name,
    "w4a8": COMPRESSED_TENSORS.name,
    "hif8": HIF8_PLAIN.name,
}


@dataclass(frozen=True, slots=True)
class BlockFp8Config:
    """What a checkpoint's `quantization_config` says of its FP8 blocks."""

    block: tuple[int, int]
    power_of_two_scales: bool
    kept_modules: tuple[str, ...]

    @property
    def activation(self) -> ActivationForm:
        """Inputs are cast in groups as wide as the blocks, their scales rounded as those of the weights."""
        scales = E8M0 if self.power_of_two_scales else FP32
        return ActivationForm(E4M3FN, Granularity.group(self.block[1]), scales, dynamic=True)


@dataclass(frozen=True, slots=True)
class Hif8Config:
    """What config.json says of HiFloat8 weights in the plain layout."""

    casts_inputs: bool

    @property
    def activation(self) -> ActivationForm | None:
        if not self.casts_inputs:
            return None
        return ActivationForm(HIF8, Granularity.token(), FP32, dynamic=True)

    def describe(self) -> str:
        return "HiFloat8"


Quantization = (
    BlockFp8Config | CompressedTensors | AwqConfig | GptqConfig | Hif8Config | AscendDescription | TilesConfig
)


def deepseek_quantization_config(
    block: tuple[int, int], kept_modules: Sequence[str], *, power_of_two_scales: bool = True
) -> dict[str, Any]:
    """The `quantization_config` of DeepSeek-V3.1, or of V3 where scales are any numbers.

    Kept modules stand under the key that all its readers know.
    """
    config: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(block),
    }
    if not power_of_two_scales:
        del config["scale_fmt"]
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


def parse_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """What config.json says of quantized weights: None for plain ones; UserError for an unreadable scheme."""
    found = config.get("quantization_config")
    if not isinstance(found, Mapping):
        return parse_quantization_config(config)
    method = found.get("quant_method")
    if method == "auto-round":
        method = auto_round_packing(found)
    match method:
        case "compressed-tensors":
            return parse_compressed_tensors(found)
        case "awq":
            return parse_awq(found)
        case "gptq":
            return parse_gptq(found)
        case "hif8":
            return _parse_hif8(found)
        case method if method == TILES_METHOD:
            return parse_tiles(found)
    return parse_quantization_config(config)


def _parse_hif8(found: Mapping[str, Any]) -> Hif8Config:
    scheme = found.get("activation_scheme")
    if scheme not in (None, "dynamic"):
        raise UserError(
            f"config.json: activation_scheme {shown(scheme)} cannot be read; 'dynamic' and null can"
        )
    return Hif8Config(casts_inputs=scheme == "dynamic")


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
            f"config.json: checkpoints with quant_method {shown(method)} cannot be read; block FP8 ('fp8'), "
            "'compressed-tensors', 'awq', 'gptq' and 'auto-round' can"
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
