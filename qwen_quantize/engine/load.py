"""From a checkpoint on disk to what the engine computes with, one layer at a time or whole."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qwen_quantize.checkpoint.completeness import check_tensors
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.engine.layer import Layer, ResidentExperts
from qwen_quantize.engine.linear import (
    ActivationCast,
    EmulatedGroup,
    LinearGroup,
    MixedGroup,
    PlainGroup,
    fuse,
)
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.rotary import LayerRotary
from qwen_quantize.engine.soft_cap import CappedGroup
from qwen_quantize.models.blueprint import Blueprint, Half, LinearSite, Stream
from qwen_quantize.models.lookup import require_blueprint


class ModelReader:
    """Reads a model's tensors as float32, decoding quantized linears; keeps none of them."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self.names = frozenset(source.names())
        self.blueprint: Blueprint = require_blueprint(source.config)
        self.linears = LinearReader(source)
        self.notes = check_tensors(source, self.linears, self.blueprint)
        self.rotary = LayerRotary(self.blueprint.config)

    def read(self, name: str) -> Tensor:
        """An unquantized tensor as float32."""
        return self.source.read(name).float()

    def _read_norm(self, name: str, suffix: str) -> Tensor:
        """A tensor that is no linear, as the engine multiplies with it: some norms are stored less one."""
        offset = self.blueprint.norm_offset(suffix)
        return self.read(name) + offset if offset else self.read(name)

    def is_quantized(self, module: str) -> bool:
        return self.linears.is_quantized(module)

    def read_linear(self, module: str) -> Tensor:
        """[out, in] float32 weight of a linear, decoded if it is quantized."""
        return self.linears.read(module)

    def read_group(
        self,
        layer: int,
        sites: tuple[LinearSite, ...],
        cast: ActivationCast | None,
        expert: int | None = None,
    ) -> LinearGroup:
        """The linears of one stream; quantized ones compute as the chip does when `cast` is given."""
        names = [self.blueprint.module_name(layer, site, expert) for site in sites]
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

    def read_half(self, layer: int, half: Half, cast: ActivationCast | None = None) -> Layer:
        """Half of a layer, with that half's linears and tensors only; routed experts are read when asked for."""
        groups = {
            stream: self.read_group(layer, sites, cast)
            for stream, sites in self.blueprint.streams(layer, half).items()
        }
        tensors = {
            suffix: self._read_norm(self.blueprint.layer_name(layer, suffix), suffix)
            for suffix in self.blueprint.layer_tensors(layer, half)
        }
        sparse = half is Half.MLP and self.blueprint.num_experts(layer) > 0
        experts = partial(self.read_expert, layer, cast=cast) if sparse else None
        return Layer(groups, tensors, experts)

    def read_expert(
        self, layer: int, expert: int, cast: ActivationCast | None = None
    ) -> dict[Stream, LinearGroup]:
        """The linears of one routed expert, read from disk now."""
        return {
            stream: self.read_group(layer, sites, cast, expert)
            for stream, sites in self.blueprint.expert_streams(layer).items()
        }

    def read_layer(self, layer: int, cast: ActivationCast | None = None, resident: bool = False) -> Layer:
        """A whole layer; its routed experts are read when asked for, or now and kept if `resident`."""
        attention = self.read_half(layer, Half.ATTENTION, cast)
        mlp = self.read_half(layer, Half.MLP, cast)
        experts = mlp.experts
        if resident and experts is not None:
            count = self.blueprint.num_experts(layer)
            experts = ResidentExperts(tuple(experts(expert) for expert in range(count)))
        return Layer({**attention.groups, **mlp.groups}, {**attention.tensors, **mlp.tensors}, experts)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens: int64 of any shape -> [..., hidden] float32, what the first layer reads."""
        hidden = self._embedding_rows(tokens)
        return hidden * self.blueprint.embedding_scale if self.blueprint.family.scaled_embedding else hidden

    def _embedding_rows(self, tokens: Tensor) -> Tensor:
        """Reads only the rows that are asked for, where they are few."""
        name = self.blueprint.family.embedding
        ids, place = torch.unique(tokens, return_inverse=True)
        if 2 * ids.numel() >= self.source.info(name).shape[0]:
            return self.source.read(name)[tokens].float()
        rows = torch.cat([self.source.read_rows(name, row, row + 1).float() for row in ids.tolist()])
        return rows[place]

    def read_head(self, cast: ActivationCast | None = None) -> tuple[Tensor, LinearGroup]:
        """(final norm [hidden] float32, the head as a group of one); a tied head is the embedding."""
        family, cap = self.blueprint.family, self.blueprint.config.logit_cap
        norm = self._read_norm(family.final_norm, family.final_norm)
        head = self._read_head_linear(cast)
        return norm, head if cap is None else CappedGroup(head, cap)

    def _read_head_linear(self, cast: ActivationCast | None) -> LinearGroup:
        family = self.blueprint.family
        if self.blueprint.config.tie_word_embeddings:
            return fuse([self.read(family.embedding)], [None])
        module = family.head.removesuffix(".weight")
        plain = fuse([self.read_linear(module)], [None])
        return EmulatedGroup(plain, cast) if cast is not None and self.is_quantized(module) else plain


def load_model(reader: ModelReader, cast: ActivationCast | None = None) -> Model:
    """The whole model in memory as float32, with all its experts."""
    layers = tuple(
        reader.read_layer(index, cast, resident=True) for index in range(reader.blueprint.num_layers)
    )
    final_norm, head = reader.read_head(cast)
    if reader.blueprint.config.tie_word_embeddings:
        plain = head.inner if isinstance(head, CappedGroup) else head
        assert isinstance(plain, PlainGroup)
        embedding = plain.weight
    else:
        embedding = reader.read(reader.blueprint.family.embedding)
    return Model(reader.blueprint, embedding, layers, final_norm, head, reader.rotary)
