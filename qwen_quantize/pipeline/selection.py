"""Which linears are quantized: the field's custom, changed by the user's patterns."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from qwen_quantize.checkpoint.linear_parts import WEIGHT_SUFFIXES
from qwen_quantize.checkpoint.mx_oss_layout import MX_OSS
from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint
from qwen_quantize.models.fusion import fusion_of

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The linears that patterns choose from: module name -> (out, in), in checkpoint order.

    decoder: those of the layers that the forward pass runs; next_token: those of layers for multi-token
    prediction; head: the output head, None where it is tied to the embedding or unknown.
    """

    decoder: Mapping[str, Shape]
    next_token: Mapping[str, Shape]
    head: str | None
    head_shape: Shape | None
    embedding: str | None
    tied: bool

    def shapes(self) -> dict[str, Shape]:
        found = {**self.decoder, **self.next_token}
        if self.head is not None and self.head_shape is not None:
            found[self.head] = self.head_shape
        return found


@dataclass(frozen=True, slots=True)
class Selection:
    """Module name -> shape of what is quantized, and the names of linears that stay as they are."""

    quantized: Mapping[str, Shape]
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def candidates_of(blueprint: Blueprint, names: Iterable[str]) -> Candidates:
    """The linears of a model whose architecture is known; names: what the checkpoint holds."""
    family, config = blueprint.family, blueprint.config
    present = set(names)
    next_token = {
        module: shape
        for module, shape in blueprint.next_token_modules().items()
        if any(f"{module}{ending}" in present for ending in WEIGHT_SUFFIXES)
    }
    return Candidates(
        decoder=blueprint.linear_modules(),
        next_token=next_token,
        head=family.head.removesuffix(".weight"),
        head_shape=(config.vocab_size, config.hidden_size),
        embedding=family.embedding.removesuffix(".weight"),
        tied=config.tie_word_embeddings,
    )


def left_by_layout(layout: str | None, names: Sequence[str]) -> dict[str, bool]:
    """By name, False for every linear that a layout has no place for; UserError where that is all of them."""
    if layout != MX_OSS.name:
        return {}
    left = {name: False for name in names if not MX_OSS.holds(name)}
    if len(left) == len(names):
        raise UserError(
            f"layout {MX_OSS.name} holds routed experts with gate_proj, up_proj and down_proj, and this model has "
            "none; choose another --layout"
        )
    return left


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that a pattern means: a glob, the last parts of a name, or a regular expression after `re:`."""
    if pattern.startswith("re:"):
        try:
            compiled = re.compile(pattern[3:])
        except re.error as error:
            raise UserError(f"the pattern {pattern!r} is not a regular expression: {error}") from error
        return [name for name in names if compiled.search(name)]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern) or name.endswith("." + pattern)]


def select_linears(
    candidates: Candidates,
    ignore: Sequence[str],
    include: Sequence[str],
    decided: Mapping[str, bool] | None = None,
) -> Selection:
    """All linears of the layers, less `ignore`, plus `include`; the head only where it is included.

    decided: whether a linear is quantized, by name, where a recipe says so; patterns come after it.

    A pattern is a glob over module names (`model.layers.0.*`), a bare last part (`down_proj`) or a regular
    expression after `re:`. A pattern that matches nothing is a UserError, and so is a choice that splits
    linears which engines fuse (query, key, value; gate, up; the experts of a layer).
    """
    chosen = dict.fromkeys((*candidates.decoder, *candidates.next_token), True)
    head = candidates.head
    if head is not None:
        chosen[head] = False
    chosen.update(decided or {})
    names = list(chosen)
    for pattern in ignore:
        matched = matching(pattern, names)
        if not matched:
            raise UserError(f"--ignore {pattern!r} matches no linear of this model; one is {names[0]!r}")
        chosen.update(dict.fromkeys(matched, False))
    notes = []
    for pattern in include:
        matched = matching(pattern, names)
        if not matched:
            if candidates.embedding is not None and matching(pattern, [candidates.embedding]):
                raise UserError(f"--include {pattern!r}: an embedding cannot be stored in block FP8")
            raise UserError(f"--include {pattern!r} matches no linear of this model; one is {names[0]!r}")
        chosen.update(dict.fromkeys(matched, True))
    if head is not None and chosen[head]:
        if candidates.tied:
            raise UserError(
                f"--include: {head!r} is tied to the embedding and cannot be quantized without changing it"
            )
        notes.append("the head is quantized: transformers, vLLM and SGLang expect it in high precision")
    if not any(chosen.values()):
        raise UserError("the patterns leave no linear to quantize")
    if ignore or include or decided:
        _check_fused(chosen)
    shapes = candidates.shapes()
    return Selection(
        quantized={name: shapes[name] for name in names if chosen[name]},
        kept=tuple(name for name in names if not chosen[name]),
        notes=tuple(notes),
    )


def _check_fused(chosen: Mapping[str, bool]) -> None:
    groups: dict[str, list[str]] = {}
    for name in chosen:
        fusion = fusion_of(name)
        if fusion is not None:
            groups.setdefault(fusion, []).append(name)
    for members in groups.values():
        kept = [name for name in members if not chosen[name]]
        if kept and len(kept) < len(members):
            raise UserError(
                f"the patterns keep {some(kept)} but quantize its siblings; engines fuse {some(members)}, so "
                "keep or quantize them together"
            )


def some(names: Sequence[str]) -> str:
    """The first few names, and how many there are beside them."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
