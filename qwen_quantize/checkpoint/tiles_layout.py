"""Weights in the tiles that a chip's matrix unit reads, for loaders that copy them as they are.

FRACTAL_NZ of Ascend: the weight [N, K] counts as its transpose, K rows of N columns. A tile has 16 rows and 32 bytes of
columns (C0 elements: 32 of a byte, 64 of int4, 16 of 16 bits); tiles follow each other down the rows, then across:
[ceil(N/C0), ceil(K/16), 16, C0], padded with zeros. Element (k, n) stands at
((n // C0) ceil(K/16) + k // 16) 16 C0 + (k mod 16) C0 + n mod C0. Eight int4 make an int32, the first in its lowest
bits. Engines that tile weights when they load them, vLLM Ascend among them, do not read this.

Everything beside the weights is as in the layout compressed-tensors: scales by row, and the config groups.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from qwen_quantize.checkpoint.compressed_config import CompressedTensors, parse_compressed_tensors
from qwen_quantize.checkpoint.compressed_storage import describe_unpacked
from qwen_quantize.checkpoint.compressed_tensors import COMPRESSED_TENSORS
from qwen_quantize.checkpoint.layout_parts import Destination, UsualFolder, check_parts, read_scale
from qwen_quantize.checkpoint.linear_parts import (
    PLAIN_DTYPES,
    WEIGHT,
    ModuleTensors,
    StoredKind,
    StoredLinear,
    Tiles,
)
from qwen_quantize.checkpoint.shards import OutputTensor
from qwen_quantize.errors import UserError
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.packing import pack_nibble_pairs, signed_nibbles, unpack_nibble_pairs
from qwen_quantize.formats.schemes import Scheme
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import E4M3FN, INT4, INT8
from qwen_quantize.models.config_values import shown

METHOD = "qwen_quantize-tiles"  # no other program's name, so that none takes the folder for its own
_DTYPES: dict[Format, str] = {INT8: "I8", E4M3FN: "F8_E4M3", INT4: "I32"}
_REPLACED = ("weight", "weight_packed", "weight_shape")
_WORDS = re.compile(r"FRACTAL_NZ\b[^:]*: (\d{1,4}) rows x (\d{1,4}) bytes")
_LARGEST_SIDE = 4096
FRACTAL_NZ = Tiles(rows=16, bytes=32)


def tiles_of(weight_layout: str) -> Tiles | None:
    """The tiles that a chip profile's words name; None where they name none that are known here."""
    found = _WORDS.match(weight_layout)
    return None if found is None else Tiles(int(found[1]), int(found[2]))


def tiled_shape(shape: tuple[int, int], tiles: Tiles, bits: int) -> tuple[int, int, int, int]:
    """(tiles across N, tiles down K, rows, columns) of a weight [N, K] whose elements have `bits`; in elements."""
    across = tiles.bytes * 8 // bits
    return -(-shape[0] // across), -(-shape[1] // tiles.rows), tiles.rows, across


def pack_tiles(weight: Tensor, tiles: Tiles) -> Tensor:
    """[ceil(N/C0), ceil(K/rows), rows, C0] of a weight [N, K] of one or two bytes an element, same dtype."""
    raw = _as_integers(weight)
    across, down, rows, columns = tiled_shape((raw.shape[0], raw.shape[1]), tiles, 8 * raw.element_size())
    padded = functional.pad(raw, (0, down * rows - raw.shape[1], 0, across * columns - raw.shape[0]))
    by_tile = padded.view(across, columns, down, rows).permute(0, 2, 3, 1)
    return by_tile.contiguous().view(weight.dtype)


def unpack_tiles(tiled: Tensor, shape: tuple[int, int]) -> Tensor:
    """The weight [N, K] of `pack_tiles`, without the padding."""
    raw = _as_integers(tiled)
    across, down, rows, columns = raw.shape
    whole = raw.permute(0, 3, 1, 2).reshape(across * columns, down * rows)
    return whole[: shape[0], : shape[1]].contiguous().view(tiled.dtype)


def pack_int4_tiles(codes: Tensor, tiles: Tiles) -> Tensor:
    """int32 [ceil(N/64), ceil(K/16), 16, 8] of int4 codes int8 [N, K], for tiles of 16 rows and 32 bytes."""
    wide = pack_tiles(codes, replace(tiles, bytes=2 * tiles.bytes))
    packed = pack_nibble_pairs(wide)
    # Dimensions of one element may have any stride, which a view as wider words does not take.
    return packed.flatten().view(torch.int32).view(*packed.shape[:-1], -1)


def unpack_int4_tiles(words: Tensor, shape: tuple[int, int]) -> Tensor:
    """int8 codes [N, K]; the inverse of `pack_int4_tiles`."""
    nibbles = unpack_nibble_pairs(words.flatten().view(torch.uint8)).view(*words.shape[:-1], -1)
    return unpack_tiles(signed_nibbles(nibbles), shape)


def _as_integers(weight: Tensor) -> Tensor:
    """The same bytes in a type that can be padded and copied, whatever its kernels."""
    return weight.contiguous().view(torch.int8 if weight.element_size() == 1 else torch.int16)


@dataclass(frozen=True, slots=True)
class TilesLayout(UsualFolder):
    """See the module. tiles: of the chip that the layout was fitted to."""

    name: str
    readers: tuple[str, ...]
    tiles: Tiles = FRACTAL_NZ

    def fitted(self, destination: Destination) -> TilesLayout:
        if destination.weight_layout is None:
            raise UserError(
                f"layout {self.name}: no public document says how the matrix unit of {destination.chip} wants weights; "
                "choose another --layout"
            )
        tiles = tiles_of(destination.weight_layout)
        if tiles is None:
            raise UserError(
                f"layout {self.name} knows the tiles of FRACTAL_NZ alone, and {destination.chip} has "
                f"{destination.weight_layout!r}; choose another --layout"
            )
        return replace(self, tiles=tiles)

    def _beside(self, module: str, shape: tuple[int, int], scheme: Scheme) -> list[OutputTensor]:
        """What compressed-tensors stores beside the elements: scales, zero points."""
        own = [f"{module}.{suffix}" for suffix in _REPLACED]
        return [
            output for output in COMPRESSED_TENSORS.outputs(module, shape, scheme) if output.name not in own
        ]

    def outputs(self, module: str, shape: tuple[int, int], scheme: Scheme) -> tuple[OutputTensor, ...]:
        """The tensors of a linear [N, K], its weight first; UserError where the layout cannot hold it."""
        weight = scheme.weight
        if weight.format not in _DTYPES or not weight.symmetric:
            raise UserError(
                f"layout {self.name} has tiles of int8, e4m3fn and int4 without zero points, not scheme {scheme.name}; "
                "choose another --layout"
            )
        size = tiled_shape(shape, self.tiles, weight.format.bits)
        if weight.format == INT4:
            size = (*size[:3], size[3] // 8)
        return (
            OutputTensor(f"{module}.weight", _DTYPES[weight.format], size),
            *self._beside(module, shape, scheme),
            OutputTensor(f"{module}.weight_shape", "I64", (2,)),
        )

    def pack(
        self, module: str, quantized: QuantizedTensor, scheme: Scheme, input_amax: float | None = None
    ) -> dict[str, Tensor]:
        """The tensors that `outputs` names; ValueError where `quantized` is not what the scheme says."""
        shape = (quantized.shape[0], quantized.shape[1])
        self.outputs(module, shape, scheme)
        found = COMPRESSED_TENSORS.pack(module, quantized, scheme, input_amax)
        for suffix in _REPLACED:
            found.pop(f"{module}.{suffix}", None)
        if scheme.weight.format == INT4:
            found[f"{module}.weight"] = pack_int4_tiles(quantized.codes, self.tiles)
        else:
            codes = quantized.codes
            found[f"{module}.weight"] = pack_tiles(
                codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn), self.tiles
            )
        found[f"{module}.weight_shape"] = torch.tensor(shape)
        return found

    def unpack(
        self, module: str, tensors: Mapping[str, Tensor], shape: tuple[int, int], scheme: Scheme
    ) -> QuantizedTensor:
        """The inverse of `pack`; UserError where a tensor is missing or does not fit."""
        outputs = self.outputs(module, shape, scheme)
        stored = dict(zip((output.name for output in outputs), check_parts(outputs, tensors), strict=True))
        if stored[f"{module}.weight_shape"].tolist() != list(shape):
            raise UserError(f"tensor {module + '.weight_shape'!r} does not hold {list(shape)}")
        grid = scheme.weight.granularity
        return QuantizedTensor(
            codes=elements_of_tiles(stored[f"{module}.weight"], shape),
            scale=read_scale(stored[f"{module}.weight_scale"]).reshape(grid.scale_shape(shape)),
            zero_point=None,
            format=scheme.weight.format,
            granularity=grid,
            shape=shape,
        )

    def quantization_config(self, schemes: Mapping[str, Scheme], kept: Sequence[str]) -> dict[str, Any]:
        config = COMPRESSED_TENSORS.quantization_config(schemes, kept)
        return {**config, "quant_method": METHOD, "tiles": {"layout": "FRACTAL_NZ", **asdict(self.tiles)}}

    def notes(self, schemes: Mapping[str, Scheme]) -> tuple[str, ...]:  # noqa: ARG002
        return (
            f"layout {self.name} is for loaders that copy the chip's own tiles: vLLM Ascend and SGLang tile weights "
            "themselves when they load them, and do not read it",
        )


TILES = TilesLayout(name="tiles", readers=("qwen_quantize",))


def elements_of_tiles(tiled: Tensor, shape: tuple[int, int]) -> Tensor:
    """Codes [N, K] of stored tiles: int8, or uint8 of E4M3."""
    if tiled.dtype == torch.int32:
        return unpack_int4_tiles(tiled, shape)
    codes = unpack_tiles(tiled, shape)
    return codes if codes.dtype == torch.int8 else codes.view(torch.uint8)


@dataclass(frozen=True, slots=True)
class TilesConfig:
    """What config.json says of tiled weights: their tiles, and the ways of compressed-tensors beside them."""

    tiles: Tiles
    ways: CompressedTensors

    def describe(self) -> str:
        return f"{self.ways.describe()} in tiles"


def parse_tiles(found: Mapping[str, Any]) -> TilesConfig:
    """The record of a `quantization_config`; UserError for tiles that are none."""
    tiles = found.get("tiles")
    if not isinstance(tiles, Mapping) or tiles.get("layout") != "FRACTAL_NZ":
        raise UserError(f"config.json: tiles of the layout FRACTAL_NZ can be read, found {shown(tiles)}")
    sides = []
    for key in ("rows", "bytes"):
        side = tiles.get(key)
        if type(side) is not int or not 0 < side <= _LARGEST_SIDE or (key == "bytes" and side % 4):
            raise UserError(
                f"config.json: tiles {key!r} must be a whole number of a tile's size, found {shown(side)}"
            )
        sides.append(side)
    return TilesConfig(Tiles(*sides), parse_compressed_tensors(found))


def describe_tiles(
    tensors: ModuleTensors, config: TilesConfig, wanted: tuple[int, int] | None
) -> StoredLinear:
    """How a tiled linear is stored; UserError by name for whatever is missing or does not fit."""
    name = tensors.module + WEIGHT
    if name not in tensors.names:
        raise tensors.fail(f"the tensor {name!r} is missing; the checkpoint is incomplete")
    info = tensors.source.info(name)
    if info.dtype in PLAIN_DTYPES and len(info.shape) == 2:
        found = StoredLinear(tensors.module, StoredKind.PLAIN, (info.shape[0], info.shape[1]), name, (name,))
        tensors.check_shape(found.shape, wanted, name)
        return found
    shape = tensors.stored_shape(name)
    tensors.check_shape(shape, wanted, name)
    bits = {dtype: fmt.bits for fmt, dtype in _DTYPES.items()}.get(info.dtype)
    if bits is None:
        raise tensors.fail(f"tensor {name!r} is {info.dtype}; tiles are I8, F8_E4M3 or I32 (int4)")
    size = tiled_shape(shape, config.tiles, bits)
    size = (*size[:3], size[3] * bits // 32) if info.dtype == "I32" else size
    if tuple(info.shape) != size:
        raise tensors.fail(
            f"tensor {name!r} has shape {list(info.shape)}; tiles of a weight {list(shape)} have {list(size)}"
        )
    found = describe_unpacked(tensors, config.ways, info, shape)
    return replace(found, parts=(*found.parts, f"{tensors.module}.weight_shape"), tiles=config.tiles)
