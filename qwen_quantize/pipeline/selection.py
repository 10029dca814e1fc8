"""Which linears are quantized: the field's custom, changed by the user's patterns."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from qwen_quantize.errors import UserError
from qwen_quantize.models.blueprint import Blueprint


@dataclass(frozen=True, slots=True)
class Selection:
    """Module names, in checkpoint order. `kept` are linears that stay as they are."""

    quantized: tuple[str, ...]
    kept: tuple[str, ...]
    notes: tuple[str, ...]


def _matches(pattern: str, names: Sequence[str]) -> list[str]:
    if pattern.startswith("re:"):
        try:
            compiled = re.compile(pattern[3:])
        except re.error as error:
            raise UserError(f"the pattern {pattern!r} is not a regular expression: {error}") from error
        return [name for name in names if compiled.search(name)]
    return [name for name in names if fnmatch.fnmatchcase(name, pattern) or name.endswith("." + pattern)]


def select_linears(blueprint: Blueprint, ignore: Sequence[str], include: Sequence[str]) -> Selection:
    """All linears of the decoder layers, less `ignore`, plus `include`.

    A pattern is a glob over module names (`model.layers.0.*`), a bare last part (`down_proj`) or a regular
    expression after `re:`. A pattern that matches nothing is a UserError, and so is a choice that splits
    linears which engines fuse (query, key, value; gate, up).
    """
    family, config = blueprint.family, blueprint.config
    layer_linears = [
        blueprint.layer_name(layer, site.path)
        for layer in range(config.num_layers)
        for site in family.linears
    ]
    head = family.head.removesuffix(".weight")
    embedding = family.embedding.removesuffix(".weight")
    names = [*layer_linears, head]
    chosen = dict.fromkeys(layer_linears, True)
    chosen[head] = False
    for pattern in ignore:
        matched = _matches(pattern, names)
        if not matched:
            raise UserError(f"--ignore {pattern!r} matches no linear of this model; one is {names[0]!r}")
        chosen.update(dict.fromkeys(matched, False))
    notes = []
    for pattern in include:
        matched = _matches(pattern, names)
        if not matched:
            if _matches(pattern, [embedding]):
                raise UserError(f"--include {pattern!r}: an embedding cannot be stored in block FP8")
            raise UserError(f"--include {pattern!r} matches no linear of this model; one is {names[0]!r}")
        chosen.update(dict.fromkeys(matched, True))
    if chosen[head]:
        if config.tie_word_embeddings:
            raise UserError(
                f"--include: {head!r} is tied to the embedding and cannot be quantized without changing it"
            )
        notes.append("the head is quantized: transformers, vLLM and SGLang expect it in high precision")
    _check_fused(blueprint, chosen)
    return Selection(
        quantized=tuple(name for name in names if chosen[name]),
        kept=tuple(name for name in names if not chosen[name]),
        notes=tuple(notes),
    )


def _check_fused(blueprint: Blueprint, chosen: dict[str, bool]) -> None:
    for layer in range(blueprint.config.num_layers):
        for sites in blueprint.streams().values():
            members = [blueprint.layer_name(layer, site.path) for site in sites]
            states = {chosen[name] for name in members}
            if len(states) > 1:
                kept = [name for name in members if not chosen[name]]
                raise UserError(
                    f"the patterns keep {', '.join(kept)} but quantize its siblings; engines fuse "
                    f"{', '.join(members)}, so keep or quantize them together"
                )
