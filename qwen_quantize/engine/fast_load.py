"""Models loaded for speed: quantized linears stay packed, and a token's step is one native call where it can be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import torch
from torch import Tensor

from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import StoredKind
from qwen_quantize.engine.compute import Compute
from qwen_quantize.engine.decode_step import decode_step
from qwen_quantize.engine.fast_linear import (
    BLOCK,
    FastGroup,
    Input,
    Kind,
    pack_weight,
    quantize_rows,
)
from qwen_quantize.engine.linear import ChipCompute, LinearGroup, MixedGroup
from qwen_quantize.engine.load import ModelReader, load_model
from qwen_quantize.engine.model import Model
from qwen_quantize.formats.activation_cast import ActivationCast, TokenCast
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.tables import INT8
from qwen_quantize.models.blueprint import LinearSite

_HEAD_GROUP = 32  # columns of the head that share a scale where it is made int8 here, as in Q8_0


class HeadForm(StrEnum):
    """What the output head is kept as: as it is stored, or as int8 made on loading."""

    STORED = "stored"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class FastOptions:
    """given: what inputs of weight-only integer linears become. head: what the output head is kept as."""

    given: Input = Input.INT16_BLOCKS
    head: HeadForm = HeadForm.STORED


@dataclass(frozen=True, slots=True)
class _Codes:
    """An undecoded weight: codes uint8 [rows, columns], scale float32 [rows, groups], zero uint8 like it."""

    kind: Kind
    group: int | None
    codes: Tensor
    scale: Tensor
    zero: Tensor | None


class FastReader(ModelReader):
    """A reader whose linears stay packed where the kernels have a form for them, and are decoded elsewhere."""

    def __init__(self, source: CheckpointSource, options: FastOptions | None = None) -> None:
        super().__init__(source)
        self.options = options or FastOptions()

    def read_group(
        self,
        layer: int,
        sites: tuple[LinearSite, ...],
        chip: Compute | None,
        expert: int | None = None,
    ) -> LinearGroup:
        """As the base class, packed; of a chip's arithmetic only the cast of inputs is kept."""
        names = [self.blueprint.module_name(layer, site, expert) for site in sites]
        found = [self._read_codes(name) for name in names]
        whole = [codes for codes in found if codes is not None]
        if not whole:
            return super().read_group(layer, sites, chip, expert)
        if len(whole) < len(found):
            return MixedGroup(tuple(self.read_group(layer, (site,), chip, expert) for site in sites))
        ways = [self._computed_as(name, chip) for name in names]
        biases = [
            self._read_bias(name, self.blueprint.has_bias(site))
            for name, site in zip(names, sites, strict=True)
        ]
        alike = {(it.kind, it.group, it.scale.shape[1]) for it in whole}
        if len(alike) == 1 and all(way == ways[0] for way in ways):
            return self._pack(whole, biases, ways[0])
        parts = zip(whole, biases, ways, strict=True)
        return MixedGroup(tuple(self._pack([one], [bias], way) for one, bias, way in parts))

    def _pack(self, members: list[_Codes], biases: list[Tensor | None], way: ChipCompute | None) -> FastGroup:
        first, sizes = members[0], tuple(it.codes.shape[0] for it in members)
        zero = None
        if any(it.zero is not None for it in members):
            usual = 8 if first.kind is Kind.INT4 else 128
            zeros = [
                torch.full_like(it.scale, usual, dtype=torch.uint8) if it.zero is None else it.zero
                for it in members
            ]
            zero = torch.cat(zeros)
        weight = pack_weight(
            first.kind,
            torch.cat([it.codes for it in members]),
            torch.cat([it.scale for it in members]),
            zero,
            first.group,
        )
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat(
                [torch.zeros(size) if b is None else b for b, size in zip(biases, sizes, strict=True)]
            )
        given, cast = self._input(first.kind, way)
        return FastGroup(weight, bias, sizes, given, cast)

    def _input(self, kind: Kind, way: ChipCompute | None) -> tuple[Input, ActivationCast | None]:
        if way is None or way.cast is None:
            return Input.FLOAT if kind is Kind.E4M3 else self.options.given, None
        if way.cast == TokenCast(INT8, RNE_SATURATE) and kind is not Kind.E4M3:
            return Input.INT8_TOKEN, None
        return Input.FLOAT, way.cast

    def _read_codes(self, module: str) -> _Codes | None:
        """None for what the kernels have no form for."""
        if not self.is_quantized(module):
            return None
        stored = self.linears.describe(module)
        columns = stored.shape[1]
        match stored.kind:
            case StoredKind.BLOCK_FP8:
                assert stored.block is not None
                codes, scale = self.linears.read_codes(module, 0, stored.shape[0])
                rows = torch.arange(stored.shape[0]) // stored.block[0]
                return _usable(_Codes(Kind.E4M3, stored.block[1], codes, scale[rows], None), columns)
            case StoredKind.CHANNEL_FP8:
                codes, scale = self.linears.read_row_codes(module)
                return _usable(_Codes(Kind.E4M3, None, codes, scale, None), columns)
            case StoredKind.INT4 | StoredKind.INT8 | StoredKind.AWQ | StoredKind.GPTQ:
                parts = self.linears.read_integers(module)
                if parts.index is not None:
                    return None
                return _usable(_unsigned(parts.codes, parts.scale, parts.zero, stored.group_size), columns)
        return None

    def _read_head_linear(self, chip: Compute | None) -> LinearGroup:
        family = self.blueprint.family
        if self.options.head is HeadForm.INT8:
            tied = self.blueprint.config.tie_word_embeddings
            weight = (
                self.read(family.embedding) if tied else self.read_linear(family.head.removesuffix(".weight"))
            )
            return FastGroup(
                quantize_rows(weight, _HEAD_GROUP), None, (weight.shape[0],), self._input(Kind.INT8, None)[0]
            )
        return super()._read_head_linear(chip)


def _unsigned(codes: Tensor, scale: Tensor, zero: Tensor | None, group: int | None) -> _Codes | None:
    """Integer codes and zero points from 0 on, in four bits where they fit there."""
    signed = codes.dtype == torch.int8
    low, high = int(codes.min()), int(codes.max())
    zeros = torch.zeros(1) if zero is None else zero
    low, high = min(low, int(zeros.min())), max(high, int(zeros.max()))
    kind, shift = Kind.INT8, 128 if signed else 0
    if (low >= -8 and high <= 7) if signed else high <= 15:
        kind, shift = Kind.INT4, 8 if signed else 0
    if low + shift < 0 or high + shift > 255 or not bool((zeros == zeros.round()).all()):
        return None
    moved = (codes.to(torch.int16) + shift).to(torch.uint8)
    if zero is None:
        return _Codes(
            kind, group, moved, scale, None if signed else torch.zeros_like(scale, dtype=torch.uint8)
        )
    return _Codes(kind, group, moved, scale, (zero + shift).to(torch.uint8))


def _usable(found: _Codes | None, columns: int) -> _Codes | None:
    if found is None or (found.group is not None and found.group < columns and found.group % BLOCK):
        return None
    if found.kind is Kind.E4M3 and bool(
        ((found.codes & 127) == 127).any()
    ):  # NaN, which the kernel does not know
        return None
    whole = found.group is None or found.group >= columns
    if whole and found.scale.shape[1] != 1:
        return None
    return replace(found, group=None) if whole else found


def load_fast(
    source: CheckpointSource, chip: Compute | None = None, options: FastOptions | None = None
) -> Model:
    """The whole model with packed linears; `chip` as for `load_model`, of which only casts of inputs are kept."""
    model = load_model(FastReader(source, options), chip)
    step = decode_step(model.blueprint, model.layers, model.final_norm, model.head, model.rotary)
    return replace(model, step=step)
