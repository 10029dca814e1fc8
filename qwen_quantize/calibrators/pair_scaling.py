"""Moving a factor from a producer to its readers, on plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qwen_quantize.models.scale_pairs import NormProducer, ScalePair


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """Tensors of a layer. weights, biases: by a linear's path; tensors: whatever else, by its suffix.

    A linear without a bias is missing in `biases`. A routed expert's path has its number in it.
    """

    weights: Mapping[str, Tensor] = field(default_factory=dict)
    biases: Mapping[str, Tensor] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def changed(self, changes: LayerTensors) -> LayerTensors:
        """These tensors, with those of `changes` in place of the ones they name."""
        return LayerTensors(
            {**self.weights, **changes.weights},
            {**self.biases, **changes.biases},
            {**self.tensors, **changes.tensors},
        )


def tie_of(pair: ScalePair) -> Tensor | None:
    """[columns] int64: which of the pair's factors each column of its readers has; None for each its own."""
    return None if pair.tie is None else torch.tensor(pair.tie.features())


def apply_pair(
    layer: LayerTensors, pair: ScalePair, scale: Tensor, experts: Sequence[int] = (), stored: bool = False
) -> LayerTensors:
    """The entries of `layer` that the pair changes, new tensors of the same dtypes: producer and all readers.

    scale: [pair.features], positive. experts: the routed experts whose readers are in `layer`, for pairs that
    name all of them; every expert of the layer must have its turn, with the same scale. stored: whether norms
    come as the checkpoint holds them, some less one, and not as the engine multiplies with them. KeyError for a
    tensor that is missing.
    """
    return divide_producer(layer, pair, scale, stored).changed(multiply_readers(layer, pair, scale, experts))


def divide_producer(
    layer: LayerTensors, pair: ScalePair, scale: Tensor, stored: bool = False
) -> LayerTensors:
    """The producer's entries divided by `scale` [pair.features]; `stored` as in `apply_pair`."""
    _check(pair, scale)
    producer = pair.producer
    if isinstance(producer, NormProducer):
        norm = layer.tensors[producer.suffix]
        return LayerTensors(
            tensors={producer.suffix: divided_norm(norm, scale, producer.offset if stored else 0.0)}
        )
    path = producer.site.path
    rows = torch.tensor(producer.rows())
    biases = {}
    if path in layer.biases:
        biases[path] = divided_rows(layer.biases[path], rows, scale)
    return LayerTensors({path: divided_rows(layer.weights[path], rows, scale)}, biases)


def multiply_readers(
    layer: LayerTensors, pair: ScalePair, scale: Tensor, experts: Sequence[int] = ()
) -> LayerTensors:
    """The readers' entries, columns times `scale` [pair.features]; `experts` as in `apply_pair`.

    Readers outside the experts are always multiplied: for experts one by one use `multiply_expert_readers`.
    """
    _check(pair, scale)
    columns = expand_tied(scale, tie_of(pair))
    paths = [site.path for site in pair.readers if "{expert}" not in site.path]
    changes = LayerTensors(
        {path: layer.weights[path] * columns.to(layer.weights[path].dtype) for path in paths},
        tensors={
            suffix: layer.tensors[suffix] * columns.to(layer.tensors[suffix].dtype)
            for suffix in pair.tensor_readers
        },
    )
    for expert in experts:
        changes = changes.changed(multiply_expert_readers(layer, pair, scale, expert))
    return changes


def multiply_expert_readers(layer: LayerTensors, pair: ScalePair, scale: Tensor, expert: int) -> LayerTensors:
    """Only one routed expert's readers of a pair that names those of all experts."""
    _check(pair, scale)
    columns = expand_tied(scale, tie_of(pair))
    paths = [site.path.replace("{expert}", str(expert)) for site in pair.readers if "{expert}" in site.path]
    return LayerTensors({path: layer.weights[path] * columns.to(layer.weights[path].dtype) for path in paths})


def expand_tied(scale: Tensor, tie: Tensor | None) -> Tensor:
    """The factor of each column: scale [features], tie [columns] int64 or None -> [columns]."""
    return scale if tie is None else scale[tie]


def divided_norm(weight: Tensor, scale: Tensor, offset: float = 0.0) -> Tensor:
    """(weight + offset) / scale - offset, computed in float64, in the dtype of `weight` [features]."""
    return ((weight.double() + offset) / scale.double() - offset).to(weight.dtype)


def divided_rows(tensor: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    """A copy of `tensor` [out, in] or [out] whose `rows` [n] int64 are divided by `scale` [n]."""
    copy = tensor.clone()
    divisor = scale.to(tensor.dtype)
    copy[rows] /= divisor.unsqueeze(1) if tensor.dim() == 2 else divisor
    return copy


def storable_scale(weight: Tensor, scale: Tensor, dtype: torch.dtype, offset: float = 0.0) -> Tensor:
    """The scale next to `scale` [features] by which the norm's division is exact once it is stored in `dtype`.

    weight: [features], as the checkpoint holds it; offset: what is added to it before use. A norm kept in BF16
    would round weight / scale, an error of its own in each feature of the stream; the readers, which are rounded
    anyway, can take the factor that the rounded norm stands for. Features with weight 0, or whose division
    would leave `dtype` or change its sign, keep their scale.
    """
    effective = weight.double() + offset
    kept = divided_norm(weight.double(), scale, offset).to(dtype).double() + offset
    found = (effective / kept).to(scale.dtype)
    usable = found.isfinite() & (found > 0)
    return torch.where(usable, found, scale)


def _check(pair: ScalePair, scale: Tensor) -> None:
    if tuple(scale.shape) != (pair.features,):
        raise ValueError(f"scale has shape {tuple(scale.shape)}, the pair has {pair.features} features")
    if not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
        raise ValueError("a scale that is not positive and finite cannot be divided by")
