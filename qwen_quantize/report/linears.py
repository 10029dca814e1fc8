"""One quantized linear as the manifest describes it, and what its name says."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from qwen_quantize.report.fields import Fields

_LAYER_IN_NAME = re.compile(r"\.\d+\.")
_EXPERT_IN_NAME = re.compile(r"\.experts\.(\d{1,9})\.")
_EXACT_DB = 999.0  # the manifest writes this for a weight without any error


@dataclass(frozen=True, slots=True)
class Linear:
    """One quantized linear; errors are relative and squared, None where a value is missing."""

    layer: int | None  # None outside the layers
    name: str
    kind: str  # the name without its layer; an expert's number is a star
    shape: tuple[int, ...]
    error: float | None
    baseline_error: float | None
    weight_sqnr_db: float | None  # infinite without any error
    searched_blocks: int
    zero_blocks: int
    partial_blocks: int
    exponents: dict[int, int]
    sha256: str
    notes: tuple[str, ...]

    @property
    def place(self) -> str:
        """The name without its layer; a routed expert keeps its number."""
        return _after_layer(self.name) or self.name

    @property
    def last_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def expert(self) -> int | None:
        """The routed expert that the linear belongs to."""
        found = _EXPERT_IN_NAME.search(self.name)
        return int(found[1]) if found else None

    @property
    def blocks(self) -> int:
        return sum(self.exponents.values())

    @property
    def saving(self) -> float | None:
        """The share of the baseline's error that is gone; None where there is nothing to compare."""
        if self.error is None or not self.baseline_error:
            return None
        return 1 - self.error / self.baseline_error


def read_linear(fields: Fields, layer: int | None) -> Linear:
    """One entry of a layer's `linears` or of `head`."""
    name = fields.text("name")
    sqnr = fields.number("weight_sqnr_db")
    return Linear(
        layer=layer,
        name=name,
        kind=linear_kind(name),
        shape=fields.integers("shape"),
        error=fields.number("error"),
        baseline_error=fields.number("baseline_error"),
        weight_sqnr_db=math.inf if sqnr is not None and sqnr >= _EXACT_DB else sqnr,
        searched_blocks=fields.integer("searched_blocks", 0),
        zero_blocks=fields.integer("zero_blocks", 0),
        partial_blocks=fields.integer("partial_blocks", 0),
        exponents=fields.exponents("exponents"),
        sha256=fields.text("sha256"),
        notes=fields.texts("notes"),
    )


def linear_kind(name: str) -> str:
    """'model.layers.3.mlp.experts.17.up_proj' -> 'mlp.experts.*.up_proj'; a name without a layer stays."""
    after = _after_layer(name)
    return _LAYER_IN_NAME.sub(".*.", after) if after else name


def _after_layer(name: str) -> str:
    """What follows the layer's number; empty without one."""
    found = _LAYER_IN_NAME.search(name)
    return name[found.end() :] if found else ""
