"""From checked leaves by path to the groups of a profile."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen_quantize.chip_profiles.leaf import UNSTATED, Leaf
from qwen_quantize.chip_profiles.reader import Path
from qwen_quantize.chip_profiles.schema import ChipFacts, Place, field_names, place_of

Tree = dict[str, Any]  # nested by path; a node is a Leaf or a further Tree


def build_facts(leaves: Mapping[Path, Leaf]) -> ChipFacts:
    """The groups of a profile; places without a leaf become unknown."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = leaf
    facts: ChipFacts = _build(ChipFacts, tree)
    return facts


def _build(group: type, tree: Tree) -> Any:
    values: dict[str, Any] = {}
    for name in field_names(group):
        place = place_of(group, name)
        assert place is not None
        values[name] = _fill(place, tree.get(name))
    return group(**values)


def _fill(place: Place, node: Any) -> Any:
    if place.many:
        return {key: _fill(Place(place.spec, place.group), child) for key, child in (node or {}).items()}
    if place.group is not None:
        return _build(place.group, node or {})
    return node if isinstance(node, Leaf) else UNSTATED
