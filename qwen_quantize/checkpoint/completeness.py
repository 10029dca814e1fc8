"""Whether a checkpoint holds the model that its config.json describes, tensor by tensor, before any is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from qwen_quantize.checkpoint.linear_parts import WEIGHT_SUFFIXES
from qwen_quantize.checkpoint.next_token import JOINING_LINEAR, next_token_tensors, repeated_tensors
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.stored_linears import PLAIN_DTYPES, LinearReader
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint

_COMPARED_BYTES = 16 << 20
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def check_tensors(source: CheckpointSource, linears: LinearReader, blueprint: Blueprint) -> tuple[str, ...]:
    """Notes on what is unusual and harmless; UserError naming the first tensor that is missing or wrong.

    Only names, dtypes and shapes are looked at, and the values of a head that is stored beside the embedding
    to which config.json ties it.
    """
    return _Check(source, linears, blueprint).run()


def stacked_experts(names: Iterable[str]) -> str | None:
    """The first tensor that holds all experts of a layer in one, which no family here reads."""
    return next((name for name in names if name.endswith(_STACKED)), None)


class _Check:
    def __init__(self, source: CheckpointSource, linears: LinearReader, blueprint: Blueprint) -> None:
        self.source = source
        self.linears = linears
        self.blueprint = blueprint
        self.names = frozenset(source.names())
        self.known: set[str] = set()
        self.notes: list[str] = []

    def run(self) -> tuple[str, ...]:
        stacked = stacked_experts(self.source.names())
        if stacked is not None:
            raise self.fail(
                f"{stacked!r} stacks all experts of a layer in one tensor, which calibration and inference cannot "
                "read yet; without --calibration-dataset and validation such a tensor is kept as it is"
            )
        stored = self.first_of_each_layer()
        self.check_layer_count(stored)
        self.check_linears(self.blueprint.linear_modules())
        self.check_rest()
        for layer in self.blueprint.next_token_layers:
            self.check_next_token_layer(layer, layer in stored)
        if self.blueprint.config.tie_word_embeddings:
            self.check_tied_head()
        self.note_unknown()
        return tuple(self.notes)

    def fail(self, text: str) -> UserError:
        return UserError(f"{self.source.path}: {text}")

    def first_of_each_layer(self) -> dict[int, str]:
        """Layer number -> the first name, in file order, that has it."""
        before, after = self.blueprint.family.layer_prefix.split("{layer}")
        found: dict[int, str] = {}
        for name in self.source.names():
            if name.startswith(before):
                number = name[len(before) :].partition(after)[0]
                if number.isascii() and number.isdigit() and len(number) < 8:
                    found.setdefault(int(number), name)
        return found

    def check_layer_count(self, stored: Mapping[int, str]) -> None:
        blueprint = self.blueprint
        decoder, extra = blueprint.num_layers, len(blueprint.next_token_layers)
        says = f"config.json says num_hidden_layers {decoder}" + (
            f" and {extra} for multi-token prediction" if extra else ""
        )
        beyond = min((layer for layer in stored if layer >= decoder + extra), default=None)
        if beyond is not None:
            raise self.fail(
                f"tensor {stored[beyond]!r} belongs to layer {beyond}, counted from 0, but {says}; one of the two "
                "belongs to another model"
            )
        absent = next((layer for layer in range(decoder) if layer not in stored), None)
        if absent is not None:
            prefix = blueprint.layer_name(absent, "")
            raise self.fail(
                f"{says}, but no tensor of layer {absent} ({prefix + '*'!r}) is there; the checkpoint is "
                "incomplete or its config.json belongs to another model"
            )
        for layer in range(decoder):
            joining = blueprint.layer_name(layer, JOINING_LINEAR)
            if joining in self.names:
                raise self.fail(
                    f"tensor {joining!r} makes layer {layer} one for multi-token prediction, but {says}: that "
                    "counts it among the decoder layers; correct num_hidden_layers"
                )

    def check_linears(self, modules: Mapping[str, tuple[int, int]]) -> None:
        for module, shape in modules.items():
            stored = self.linears.describe(module, shape)
            self.known.add(f"{module}.weight")
            self.known.update(stored.parts)

    def check_rest(self) -> None:
        head = self.blueprint.family.head
        for name, shape in self.blueprint.expected_tensors().items():
            if name in self.known:
                continue
            if name == head:  # the one linear outside the layers
                self.check_linears({name.removesuffix(".weight"): (shape[0], shape[1])})
            else:
                self.check_plain(name, shape)

    def check_plain(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.names:
            raise self.fail(
                f"the tensor {name!r} is missing; the checkpoint is incomplete or its config.json belongs to "
                "another model"
            )
        info = self.source.info(name)
        if tuple(info.shape) != shape:
            raise self.fail(
                f"tensor {name!r} has shape {list(info.shape)}, its config.json says {list(shape)}"
            )
        if info.dtype not in PLAIN_DTYPES:
            raise self.fail(
                f"tensor {name!r} is {info.dtype}; only linears may be quantized, {', '.join(PLAIN_DTYPES)} can be "
                "read here"
            )
        self.known.add(name)

    def check_next_token_layer(self, layer: int, present: bool) -> None:
        prefix = self.blueprint.layer_name(layer, "")
        if not present:
            self.notes.append(
                f"layer {layer}, which config.json declares for multi-token prediction, is not in the checkpoint; "
                "the model runs without it"
            )
            return
        modules = {
            module: shape
            for module, shape in self.blueprint.next_token_modules().items()
            if module.startswith(prefix)
        }
        tensors = next_token_tensors(self.blueprint, layer)
        weights = (tuple(module + suffix for suffix in WEIGHT_SUFFIXES) for module in modules)
        missing = next((pair[0] for pair in weights if self.names.isdisjoint(pair)), None)
        missing = missing or next((name for name in tensors if name not in self.names), None)
        if missing is not None:
            raise self.fail(
                f"the layer for multi-token prediction, {layer}, is there in part: {missing!r} is missing; download "
                "the model again, or take the layer out of files and config.json alike"
            )
        self.check_linears(modules)
        for name, shape in tensors.items():
            if name in self.names and self.is_fp8_matrix(name):
                self.check_linears({name.removesuffix(".weight"): (shape[0], shape[1])})
            else:
                self.check_plain(name, shape)
        for name, shape in repeated_tensors(self.blueprint, layer).items():
            if name in self.names:
                self.check_plain(name, shape)

    def is_fp8_matrix(self, name: str) -> bool:
        return name.endswith(JOINING_LINEAR) and self.linears.is_quantized(name.removesuffix(".weight"))

    def check_tied_head(self) -> None:
        family = self.blueprint.family
        if family.head not in self.names:
            return
        self.known.add(family.head)
        head, embedding = self.source.info(family.head), self.source.info(family.embedding)
        same = head.dtype == embedding.dtype and head.shape == embedding.shape
        if same:
            rows = max(1, _COMPARED_BYTES * head.shape[0] // max(head.nbytes, 1))
            for start in range(0, head.shape[0], rows):
                stop = min(start + rows, head.shape[0])
                ours = self.source.read_rows(family.head, start, stop).view(torch.uint8)
                theirs = self.source.read_rows(family.embedding, start, stop).view(torch.uint8)
                if not torch.equal(ours, theirs):
                    same = False
                    break
        if not same:
            raise self.fail(
                f"config.json ties the head to the embedding (tie_word_embeddings), but {family.head!r} and "
                f"{family.embedding!r} are both there and differ; remove the first, or set tie_word_embeddings to "
                "false if the model was trained so"
            )
        self.notes.append(
            f"{family.head!r} repeats {family.embedding!r}, to which config.json ties it; the two are the same"
        )

    def note_unknown(self) -> None:
        unknown = self.unknown(self.source.names(), self.linears.companions())
        if unknown:
            self.notes.append(
                f"{len(unknown)} tensors belong to no part of the model that is run, {unknown[0]!r} the first of them"
            )

    def unknown(self, names: Iterable[str], companions: frozenset[str]) -> list[str]:
        return [name for name in names if name not in self.known and name not in companions]
