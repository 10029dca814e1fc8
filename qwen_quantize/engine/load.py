"""From a checkpoint on disk to what the engine computes with, one layer at a time or whole."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen_quantize.checkpoint.layouts import DEEPSEEK_FP8, BlockFp8Config, parse_quantization_config
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.engine.linear import (
    ActivationCast,
    EmulatedGroup,
    LinearGroup,
    MixedGroup,
    PlainGroup,
    fuse,
)
from qwen_quantize.engine.model import Layer, Model
from qwen_quantize.engine.rotary import RotaryTable
from qwen_quantize.errors import UserError
from qwen_quantize.formats.block_kernels import dequantize_blocks
from qwen_quantize.formats.tables import E4M3FN
from qwen_quantize.models.blueprint import Blueprint, LinearSite
from qwen_quantize.models.lookup import require_blueprint

_PLAIN_DTYPES = ("F32", "BF16", "F16", "F64")
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


class ModelReader:
    """Reads a model's tensors as float32, decoding quantized linears; keeps none of them."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.names = frozenset(source.names())
        self.blueprint: Blueprint = require_blueprint(source.config)
        self.quantization: BlockFp8Config | None = parse_quantization_config(source.config)
        self.rotary = RotaryTable(self.blueprint.config.rope, self.blueprint.config.head_dim)
        self._check_tensors()

    def _check_tensors(self) -> None:
        for name, shape in self.blueprint.expected_tensors().items():
            if name not in self.names:
                raise UserError(
                    f"{self.source.path}: the tensor {name!r} is missing; the checkpoint is incomplete or "
                    "its config.json belongs to another model"
                )
            found = tuple(self.source.info(name).shape)
            if found != shape:
                raise UserError(
                    f"{self.source.path}: tensor {name!r} has shape {list(found)}, its config.json says "
                    f"{list(shape)}"
                )
            self._check_dtype(name, shape)

    def _check_dtype(self, name: str, shape: tuple[int, ...]) -> None:
        """Plain floats, or E4M3 weights of linears with a whole grid of scales: nothing else has a meaning."""
        dtype = self.source.info(name).dtype
        module = name.removesuffix(".weight")
        scale = DEEPSEEK_FP8.scale_name(module)
        if dtype in _PLAIN_DTYPES and scale not in self.names:
            return
        if dtype != DEEPSEEK_FP8.weight_dtype or self.quantization is None:
            raise UserError(
                f"{self.source.path}: tensor {name!r} is {dtype}; plain floats ({', '.join(_PLAIN_DTYPES)}) can "
                "be read, and F8_E4M3 where config.json has a quantization_config of block FP8"
            )
        if scale not in self.names:
            raise UserError(
                f"{self.source.path}: {name!r} is {dtype} but {scale!r} is missing; without its scales the "
                "weight means nothing"
            )
        linear = len(shape) == 2 and name != self.blueprint.family.embedding
        grid = DEEPSEEK_FP8.scale_shape((shape[0], shape[-1]), self.quantization.block)
        found = self.source.info(scale)
        if not linear or tuple(found.shape) != grid or found.dtype not in _SCALE_DTYPES:
            raise UserError(
                f"{self.source.path}: the scales {scale!r} are {found.dtype} {list(found.shape)}; blocks of "
                f"{list(self.quantization.block)} over {list(shape)} need {list(grid)}, float or F8_E8M0, on a "
                "linear"
            )

    def read(self, name: str) -> Tensor:
        """An unquantized tensor as float32."""
        return self.source.read(name).float()

    def is_quantized(self, module: str) -> bool:
        return self.quantization is not None and DEEPSEEK_FP8.scale_name(module) in self.names

    def read_linear(self, module: str) -> Tensor:
        """[out, in] float32 weight of a linear, decoded if it is quantized."""
        name = DEEPSEEK_FP8.weight_name(module)
        if not self.is_quantized(module):
            return self.read(name)
        assert self.quantization is not None
        block = self.quantization.block
        weight = self.source.read(name)
        scale = self.source.read(DEEPSEEK_FP8.scale_name(module)).float()
        return dequantize_blocks(weight.view(torch.uint8), scale, E4M3FN, block[0], block[1])

    def read_group(
        self, layer: int, sites: tuple[LinearSite, ...], cast: ActivationCast | None
    ) -> LinearGroup:
        """The linears of one stream; quantized ones compute as the chip does when `cast` is given."""
        names = [self.blueprint.layer_name(layer, site.path) for site in sites]
        weights = [self.read_linear(name) for name in names]
        biases = [
            self.read(name + ".bias") if self.blueprint.has_bias(site) else None
            for name, site in zip(names, sites, strict=True)
        ]
        quantized = [cast is not None and self.is_quantized(name) for name in names]
        if cast is None or not any(quantized):
            return fuse(weights, biases)
        if all(quantized):
            return EmulatedGroup(fuse(weights, biases), cast)
        parts: list[LinearGroup] = []
        for weight, bias, emulate in zip(weights, biases, quantized, strict=True):
            plain = fuse([weight], [bias])
            parts.append(EmulatedGroup(plain, cast) if emulate else plain)
        return MixedGroup(tuple(parts))

    def read_norms(self, layer: int) -> dict[str, Tensor]:
        return {
            suffix: self.read(self.blueprint.layer_name(layer, suffix))
            for suffix in self.blueprint.layer_norms()
        }

    def read_layer(self, layer: int, cast: ActivationCast | None = None) -> Layer:
        groups = {
            stream: self.read_group(layer, sites, cast) for stream, sites in self.blueprint.streams().items()
        }
        return Layer(groups, self.read_norms(layer))

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 of any shape -> [..., hidden] float32."""
        return self.source.read(self.blueprint.family.embedding)[tokens].float()

    def read_head(self, cast: ActivationCast | None = None) -> tuple[Tensor, LinearGroup]:
        """(final norm [hidden] float32, the head as a group of one); a tied head is the embedding."""
        family = self.blueprint.family
        norm = self.read(family.final_norm)
        if self.blueprint.config.tie_word_embeddings:
            return norm, fuse([self.read(family.embedding)], [None])
        module = family.head.removesuffix(".weight")
        plain = fuse([self.read_linear(module)], [None])
        return norm, EmulatedGroup(plain, cast) if cast is not None and self.is_quantized(module) else plain


def load_model(reader: ModelReader, cast: ActivationCast | None = None) -> Model:
    """The whole model in memory as float32."""
    layers = tuple(reader.read_layer(index, cast) for index in range(reader.blueprint.config.num_layers))
    final_norm, head = reader.read_head(cast)
    if reader.blueprint.config.tie_word_embeddings:
        assert isinstance(head, PlainGroup)
        embedding = head.weight
    else:
        embedding = reader.read(reader.blueprint.family.embedding)
    return Model(reader.blueprint, embedding, layers, final_norm, head, reader.rotary)
