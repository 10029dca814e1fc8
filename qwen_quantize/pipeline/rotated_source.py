"""A checkpoint seen with its residual stream and its heads' values rotated: the same function, other weights.

R1 turns the residual stream: norms' weights fold into what reads them, embedding and writers turn by R, readers and
head by the same R. R2 turns each head's values, and the output projection behind them (QuaRot, arXiv 2404.00456). Both
are products with weights, so nothing is left to do at run time. Each tensor is turned when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen_quantize.calibrators.hadamard import has_hadamard
from qwen_quantize.calibrators.rotation import Rotation, signed_rotation
from qwen_quantize.checkpoint.completeness import stacked_experts
from qwen_quantize.checkpoint.planned_source import PlannedSource
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.tensor_info import DTYPES, TensorInfo, storage_bits
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import RESIDUAL_WRITERS, Blueprint, Half
from qwen_quantize.models.config_values import shown
from qwen_quantize.models.lookup import architecture_of, find_blueprint
from qwen_quantize.models.scale_pairs import (
    NormProducer,
    RowsProducer,
    ScalePair,
    residual_rotation_refusal,
    scale_pairs,
    value_rotation_pair,
)
from qwen_quantize.pipeline.tensors import float_dtype, module_of


class Rotate(StrEnum):
    """Which of a model's features are rotated before its weights are quantized."""

    NONE = "none"
    R2 = "r2"  # each head's values
    R1R2 = "r1r2"  # the residual stream too


_SEED = 0  # of the random signs: statistics and weights must be turned alike, whatever text they saw


@dataclass(frozen=True, slots=True)
class Rotating:
    """What `--rotate` asks for. block: features that turn together, 0 for all of the stream or of a head."""

    kind: Rotate = Rotate.NONE
    block: int = 0

    @classmethod
    def parse(cls, text: str) -> Rotating:
        """`none`, `r2`, `r1r2`, and `r2:32` or `r1r2:32` for runs of 32; UserError for anything else."""
        name, colon, size = text.partition(":")
        block = int(size) if size.isascii() and size.isdigit() and len(size) < 6 else 0
        if name not in tuple(Rotate) or (colon and (name == Rotate.NONE or not has_hadamard(block))):
            raise UserError(
                f"--rotate {text!r:.40} is none of none, r2 and r1r2, nor one of the last two with the size of runs "
                "that turn together, such as r1r2:32 (1, 2 or a multiple of 4)"
            )
        return cls(Rotate(name), block)

    def source(self, source: CheckpointSource) -> CheckpointSource:
        """The source as it is read with this; UserError where the model does not allow it."""
        return source if self.kind is Rotate.NONE else RotatedSource(source, self)

    def residual(self, hidden_size: int) -> Rotation | None:
        """What the residual stream is turned by, None where it is not."""
        return _rotation(hidden_size, self.block, _SEED) if self.kind is Rotate.R1R2 else None


@dataclass(frozen=True, slots=True)
class _Turn:
    """What reading a tensor does to it, in this order.

    gain: a norm, by name, whose weight multiplies the columns, once `offset` is added; columns, rows: the rotations
    of runs of them; row_places: the rows that turn, None for all. ones: it is such a norm itself, and this its value.
    """

    gain: str | None = None
    offset: float = 0.0
    columns: Rotation | None = None
    rows: Rotation | None = None
    row_places: tuple[int, ...] | None = None
    ones: float | None = None


class RotatedSource:
    """A source, read rotated. Quantized weights read decoded, and a tied head stands by itself under R1.

    Rotations are computed in float64 and rounded once, to the tensor's dtype; memory holds one tensor. notes: what the
    user should know. seed: of the random signs. UserError where the model does not allow it.
    """

    def __init__(self, inner: CheckpointSource, asked: Rotating, seed: int = _SEED) -> None:
        self.inner = inner
        self.path: Path = inner.path
        self.kind: str = inner.kind
        self._asked, self._seed = asked, seed
        found = find_blueprint(inner.config)
        if found is None or stacked_experts(inner.names()) is not None:
            raise UserError(
                f"{inner.path}: a rotation needs to know what reads and writes each feature, and the architecture "
                f"{shown(architecture_of(inner.config))} has no forward pass here; leave out --rotate"
            )
        self._blueprint: Blueprint = found
        self._linears = LinearReader(inner)
        self._decoded_dtype = float_dtype(inner)
        self.config: dict[str, Any] = {k: v for k, v in inner.config.items() if k != "quantization_config"}
        self._stored = self._stored_names()
        self._turns: dict[str, _Turn] = {}
        self._head: str | None = None
        if asked.kind is Rotate.R1R2:
            self._turn_residual(seed, asked.block)
        self._turn_values(seed, asked.block)

    @property
    def notes(self) -> tuple[str, ...]:
        inner = self.inner.notes if isinstance(self.inner, PlannedSource) else ()
        runs = f" in runs of {self._asked.block} features" if self._asked.block else ""
        what = "residual stream and values" if self._asked.kind is Rotate.R1R2 else "values"
        note = f"{what} rotated{runs}: the model computes the same function"
        if self._head is not None:
            note += (
                f"; the head, which was the embedding, now stands by itself: {self.info(self._head).nbytes} bytes more "
                "before anything is quantized"
            )
        return (*inner, note)

    def _stored_names(self) -> dict[str, str]:
        """The name that each tensor is seen under -> the stored one."""
        companions, found = self._linears.companions(), {}
        for name in self.inner.names():
            if name in companions:
                continue
            module = module_of(name)
            quantized = module is not None and self._linears.is_quantized(module)
            found[f"{module}.weight" if quantized else name] = name
        return found

    # What turns

    def _turn_residual(self, seed: int, block: int) -> None:
        blueprint, family = self._blueprint, self._blueprint.family
        refusal = residual_rotation_refusal(blueprint)
        if refusal is None:
            strange = next((n for n in self._stored if self._is_strange(n)), None)
            if strange is not None:
                refusal = f"what tensor {strange!r} does with the residual stream is not known"
        if refusal is not None:
            raise UserError(f"{self.path}: --rotate r1r2: {refusal}; --rotate r2 leaves the residual alone")
        rotation = _rotation(blueprint.config.hidden_size, block, seed)
        self._put(family.embedding, _Turn(columns=rotation))
        offset = blueprint.norm_offset(family.final_norm)
        if blueprint.config.tie_word_embeddings:
            self._head = family.head
            self._stored[family.head] = self._stored[family.embedding]
            self.config["tie_word_embeddings"] = False
        self._put(family.final_norm, _Turn(ones=1.0 - offset))
        self._put(family.head, _Turn(gain=family.final_norm, offset=offset, columns=rotation))
        for layer in range(blueprint.num_layers):
            for half, norm in ((Half.ATTENTION, family.input_norm), (Half.MLP, family.mlp_norm)):
                self._turn_half(layer, half, norm, rotation)

    def _is_strange(self, name: str) -> bool:
        """Whether the forward pass here does not use the tensor, so that it may read the residual stream unseen."""
        head = name == self._blueprint.family.head and self._blueprint.config.tie_word_embeddings
        known = name in self._blueprint.expected_tensors() or head
        return not known and not name.endswith((".rotary_emb.inv_freq", "_scale", ".kv_cache_offset"))

    def _turn_half(self, layer: int, half: Half, norm: str, rotation: Rotation) -> None:
        blueprint = self._blueprint
        experts = range(blueprint.num_experts(layer)) if half is Half.MLP else range(0)
        offset = blueprint.norm_offset(norm)
        turn = _Turn(gain=blueprint.layer_name(layer, norm), offset=offset, columns=rotation)
        for pair in scale_pairs(blueprint, layer, half):
            if not isinstance(pair.producer, NormProducer) or pair.producer.suffix != norm:
                continue
            for suffix in pair.tensor_readers:
                self._put(blueprint.layer_name(layer, suffix), turn)
            for site in pair.readers:
                for one in experts if "{expert}" in site.path else (None,):
                    self._put(f"{blueprint.module_name(layer, site, one)}.weight", turn)
        self._put(blueprint.layer_name(layer, norm), _Turn(ones=1.0 - offset))
        for site in (*blueprint.sites(layer, half), *(blueprint.expert_sites(layer) if experts else ())):
            if site.stream in RESIDUAL_WRITERS:
                for one in experts if "{expert}" in site.path else (None,):
                    module = blueprint.module_name(layer, site, one)
                    self._put(f"{module}.weight", _Turn(rows=rotation))
                    self._put(f"{module}.bias", _Turn(rows=rotation))

    def _turn_values(self, seed: int, block: int) -> None:
        turned = False
        for layer in range(self._blueprint.num_layers):
            pair = value_rotation_pair(self._blueprint, layer)
            if pair is not None and isinstance(pair.producer, RowsProducer):
                turned = True
                self._turn_head_values(layer, pair, pair.producer, seed + 1 + layer, block)
        if not turned and not self._turns:
            raise UserError(
                f"{self.path}: --rotate r2: no layer of this model has values that a rotation passes through (a gate "
                "or a norm stands behind them); leave out --rotate"
            )

    def _turn_head_values(
        self, layer: int, pair: ScalePair, producer: RowsProducer, seed: int, block: int
    ) -> None:
        latent = self._blueprint.config.latent
        size = self._blueprint.config.head_dim if latent is None else latent.value_dim
        rotation = _rotation(size, block, seed)
        module = self._blueprint.module_name(layer, producer.site)
        for name in (f"{module}.weight", f"{module}.bias"):
            self._put(name, _Turn(rows=rotation, row_places=producer.rows()))
        for site in pair.readers:
            self._put(f"{self._blueprint.module_name(layer, site)}.weight", _Turn(columns=rotation))

    def _put(self, name: str, turn: _Turn) -> None:
        """Add to what is done to a tensor; a linear may be turned on both sides."""
        if name not in self._stored:
            return
        old = self._turns.get(name, _Turn())
        changed = {
            field: value
            for field in ("gain", "columns", "rows", "row_places", "ones")
            if (value := getattr(turn, field)) is not None
        }
        assert all(getattr(old, field) is None for field in changed), name
        self._turns[name] = replace(old, offset=old.offset or turn.offset, **changed)

    # What a source is

    @property
    def lossy_types(self) -> tuple[str, ...]:
        return self.inner.lossy_types

    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def info(self, name: str) -> TensorInfo:
        if name not in self._stored:
            raise UserError(f"{self.path} has no tensor {name!r}")
        stored = self.inner.info(self._stored[name])
        module = module_of(name)
        if module is None or name == self._head or not self._linears.is_quantized(module):
            return replace(stored, name=name)
        shape = self._linears.describe(module).shape
        nbytes = storage_bits(self._decoded_dtype, shape) // 8
        return TensorInfo(name, self._decoded_dtype, shape, nbytes, stored.file)

    def read(self, name: str) -> Tensor:
        return self.read_rows(name, 0, self.info(name).shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """As of any source; where rows turn among each other, all of them are read for some."""
        info, turn = self.info(name), self._turns.get(name)
        if turn is None:
            return self._read_stored(name, start, stop)
        if turn.ones is not None:
            ones = torch.full(info.shape, turn.ones, dtype=DTYPES[info.dtype].torch)
            return ones[start:stop]
        across = turn.rows is not None
        found = self._read_stored(name, *((0, info.shape[0]) if across else (start, stop))).double()
        if turn.gain is not None:
            found = found * (self.inner.read(turn.gain).double() + turn.offset)
        if turn.columns is not None:
            found = turn.columns.turn(found)
        if turn.rows is not None:
            found = _turned_rows(found, turn.rows, turn.row_places)[start:stop]
        return found.to(DTYPES[info.dtype].torch).contiguous()

    def _read_stored(self, name: str, start: int, stop: int) -> Tensor:
        module = module_of(name)
        if module is not None and name != self._head and self._linears.is_quantized(module):
            whole = self._linears.read(module)  # rows of blocks are read together
            return whole[start:stop].to(DTYPES[self._decoded_dtype].torch)
        return self.inner.read_rows(self._stored[name], start, stop)

    def read_once(self) -> RotatedSource:
        return RotatedSource(self.inner.read_once(), self._asked, self._seed)

    def side_files(self) -> Mapping[str, bytes | Path]:
        return self.inner.side_files()

    def fingerprint(self) -> str:
        mark = f"{self.inner.fingerprint()} {self._asked.kind.value} {self._seed} {self._asked.block}"
        return hashlib.sha256(mark.encode()).hexdigest()


def _turned_rows(tensor: Tensor, rotation: Rotation, places: tuple[int, ...] | None) -> Tensor:
    """A float64 weight [out, in] or bias [out] whose outputs at `places` turn in runs."""
    where = slice(None) if places is None else torch.tensor(places)
    turned = tensor.clone()
    turned[where] = rotation.turn(tensor[where].transpose(0, -1)).transpose(0, -1)
    return turned


def _rotation(features: int, block: int, seed: int) -> Rotation:
    """With random signs, of the block, or of the largest part of `features` that there is a Hadamard matrix of."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [block] if block and features % block == 0 else _divisors(features)
    return signed_rotation(next(size for size in sizes if has_hadamard(size)), generator)


def _divisors(number: int) -> Iterator[int]:
    """From the largest on."""
    return (number // parts for parts in range(1, number + 1) if number % parts == 0)
