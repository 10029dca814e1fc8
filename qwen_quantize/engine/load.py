"""From a checkpoint on disk to what the engine computes with, one layer at a time or whole."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from qwen_quantize.checkpoint.completeness import check_tensors
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind, StoredLinear
from qwen_quantize.engine.compute import Compute, computed_as
from qwen_quantize.engine.layer import Layer, ResidentExperts
from qwen_quantize.engine.linear import ChipCompute, LinearGroup, MixedGroup, PlainGroup, emulated, fuse
from qwen_quantize.engine.model import Model
from qwen_quantize.engine.rotary import LayerRotary
from qwen_quantize.engine.soft_cap import CappedGroup
from qwen_quantize.models.blueprint import Blueprint, Half, LinearSite, Stream
from qwen_quantize.models.lookup import require_blueprint


class ModelReader:
    """Reads a model's tensors as float32, decoding quantized linears; keeps none of them.

    quantized_as: another copy of the model, whose quantized linears count as quantized here: so that a chip can
    compute with the weights as they were. None: its own.
    """

    def __init__(self, source: CheckpointSource, quantized_as: ModelReader | None = None) -> None:
        self.source = source
        self._quantized_as = quantized_as
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
        """Whether a chip computes with this linear in low precision."""
        if self._quantized_as is not None:
            return self._quantized_as.is_quantized(module)
        return self.linears.is_quantized(module)

    def quantized_linears(self) -> Iterator[StoredLinear]:
        """How each linear is stored that a chip computes with in low precision, the head last."""
        modules = list(self.blueprint.linear_modules())
        if not self.blueprint.config.tie_word_embeddings:
            modules.append(self.blueprint.family.head.removesuffix(".weight"))
        return (self.linears.describe(module) for module in modules if self.linears.is_quantized(module))

    def read_linear(self, module: str) -> Tensor:
        """[out, in] float32 weight of a linear, decoded if it is quantized."""
        return self.linears.read(module)

    def read_group(
        self,
        layer: int,
        sites: tuple[LinearSite, ...],
        chip: Compute | None,
        expert: int | None = None,
    ) -> LinearGroup:
        """The linears of one stream; quantized ones compute as the chip does when `chip` is given."""
        names = [self.blueprint.module_name(layer, site, expert) for site in sites]
        weights = [self.read_linear(name) for name in names]
        biases = [
            self._read_bias(name, self.blueprint.has_bias(site))
            for name, site in zip(names, sites, strict=True)
        ]
        ways = [self._computed_as(name, chip) for name in names]
        if len(set(ways)) == 1:
            return self._group(names, weights, biases, ways[0])
        return MixedGroup(
            tuple(
                self._group([name], [weight], [bias], way)
                for name, weight, bias, way in zip(names, weights, biases, ways, strict=True)
            )
        )

    def _read_bias(self, module: str, has_bias: bool) -> Tensor | None:
        """What is added to a linear's sums: a kernel of integers has it among those, whatever stands beside."""
        integers = self.linears.integer_bias(module)
        if integers is not None:
            return integers
        return self.read(module + ".bias") if has_bias else None

    def _group(
        self, names: list[str], weights: list[Tensor], biases: list[Tensor | None], way: ChipCompute | None
    ) -> LinearGroup:
        plain = fuse(weights, biases)
        if way is None:
            return plain
        scales = [self._row_scale(name) for name in names] if way.bare else []
        found = [scale for scale in scales if scale is not None]
        return emulated(plain, way, torch.cat(found) if found and len(found) == len(names) else None)

    def _computed_as(self, module: str, chip: Compute | None) -> ChipCompute | None:
        """How the chip runs one linear, None in full precision."""
        if chip is None or not self.is_quantized(module):
            return None
        quantized = self if self._quantized_as is None else self._quantized_as
        return computed_as(chip, quantized.linears.describe(module))

    def _row_scale(self, module: str) -> Tensor | None:
        """[out] float32: the scales of whole rows, None where the weight has none, or more beside them."""
        if not self.linears.is_quantized(module):
            return None
        stored = self.linears.describe(module)
        if stored.tensor_scale is not None:  # which divides
            return (1.0 / self.read(stored.tensor_scale)).reshape(1).expand(stored.shape[0])
        if stored.kind is StoredKind.INT8_STATIC:
            return self.linears.sum_row_scale(stored)
        whole = stored.kind is StoredKind.CHANNEL_FP8 or stored.group_size == stored.shape[1]
        if stored.scale is None or stored.zero_point is not None or not whole:
            return None
        scale = self.read(stored.scale).flatten()
        return scale.expand(stored.shape[0]) if scale.numel() == 1 else scale

    def read_half(self, layer: int, half: Half, chip: Compute | None = None) -> Layer:
        """Half of a layer, with that half's linears and tensors only; routed experts are read when asked for."""
        groups = {
            stream: self.read_group(layer, sites, chip)
            for stream, sites in self.blueprint.streams(layer, half).items()
        }
        tensors = {
            suffix: self._read_norm(self.blueprint.layer_name(layer, suffix), suffix)
            for suffix in self.blueprint.layer_tensors(layer, half)
        }
        sparse = half is Half.MLP and self.blueprint.num_experts(layer) > 0
        experts = partial(self.read_expert, layer, chip=chip) if sparse else None
        return Layer(groups, tensors, experts)

    def read_expert(self, layer: int, expert: int, chip: Compute | None = None) -> dict[Stream, LinearGroup]:
        """The linears of one routed expert, read from disk now."""
        return {
            stream: self.read_group(layer, sites, chip, expert)
            for stream, sites in self.blueprint.expert_streams(layer).items()
        }

    def read_layer(self, layer: int, chip: Compute | None = None, resident: bool = False) -> Layer:
        """A whole layer; its routed experts are read when asked for, or now and kept if `resident`."""
        attention = self.read_half(layer, Half.ATTENTION, chip)
        mlp = self.read_half(layer, Half.MLP, chip)
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

    def read_head(self, chip: Compute | None = None) -> tuple[Tensor, LinearGroup]:
        """(final norm [hidden] float32, the head as a group of one); a tied head is the embedding."""
        family, cap = self.blueprint.family, self.blueprint.config.logit_cap
        norm = self._read_norm(family.final_norm, family.final_norm)
        head = self._read_head_linear(chip)
        return norm, head if cap is None else CappedGroup(head, cap)

    def _read_head_linear(self, chip: Compute | None) -> LinearGroup:
        family = self.blueprint.family
        if self.blueprint.config.tie_word_embeddings:
            return fuse([self.read(family.embedding)], [None])
        module = family.head.removesuffix(".weight")
        bias = self._read_bias(module, False)
        return self._group([module], [self.read_linear(module)], [bias], self._computed_as(module, chip))


def load_model(reader: ModelReader, chip: Compute | None = None) -> Model:
    """The whole model in memory as float32, with all its experts."""
    layers = tuple(
        reader.read_layer(index, chip, resident=True) for index in range(reader.blueprint.num_layers)
    )
    final_norm, head = reader.read_head(chip)
    plain = head.inner if isinstance(head, CappedGroup) else head
    if reader.blueprint.config.tie_word_embeddings and isinstance(plain, PlainGroup):
        embedding = plain.weight
    else:
        embedding = reader.read(reader.blueprint.family.embedding)
    return Model(reader.blueprint, embedding, layers, final_norm, head, reader.rotary)
