"""Orthogonal rotations of the features between linears, fused into them (QuaRot, arXiv 2404.00456; SpinQuant).

A rotation spreads one loud feature over all. R1 turns the residual stream, R2 the values of each head; a rotation
in blocks turns only within the groups that share a scale, which is the one that helps MXFP4 (arXiv 2511.04214).
Everything is computed in float64 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.calibrators.hadamard import hadamard_signs, has_hadamard
from qwen_quantize.calibrators.pair_scaling import LayerTensors
from qwen_quantize.models.scale_pairs import RowsProducer, ScalePair

MX_BLOCK = 32


def hadamard_rotation(order: int, generator: torch.Generator | None = None) -> Tensor:
    """[order, order] float64 R with R R^T = 1, entries +-1 / sqrt(order).

    With a generator its rows get random signs, so that no feature that is constant meets only ones. ValueError for an
    order that `hadamard_signs` cannot build.
    """
    rotation = hadamard_signs(order).double() / math.sqrt(order)
    if generator is None:
        return rotation
    signs = torch.randint(0, 2, (order, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return rotation * signs


@dataclass(frozen=True, slots=True)
class Rotation:
    """R = diag(signs) (F1 x F2 x ...), a Kronecker product, so that no matrix of all features is ever made.

    signs: float64 [size] of +-1; factors: float64 [f, f], each orthogonal, whose f multiply to the size.
    """

    signs: Tensor
    factors: tuple[Tensor, ...]

    def turn(self, x: Tensor, *, back: bool = False) -> Tensor:
        """x R, or with `back` x R^T, over the last dimension in runs of the size; float64 [..., K], size | K."""
        size = self.signs.shape[0]
        if x.shape[-1] % size:
            raise ValueError(f"{x.shape[-1]} features are no multiple of the rotation's {size}")
        turned = x.double().reshape(-1, size)
        if not back:
            turned = turned * self.signs
        left = 1
        for factor in self.factors:
            order = factor.shape[0]
            runs = turned.reshape(-1, order, size // (left * order))
            turned = (factor if back else factor.T) @ runs
            left *= order
        turned = turned.reshape(-1, size)
        return (turned * self.signs if back else turned).reshape(x.shape)


def signed_rotation(order: int, generator: torch.Generator) -> Rotation:
    """The rotation of `hadamard_rotation`'s kind in factors of 16 and one more; ValueError as it raises."""
    orders = []
    while order % 32 == 0 and has_hadamard(order // 16):
        orders.append(16)
        order //= 16
    orders.append(order)
    factors = tuple(hadamard_rotation(one) for one in orders)
    signs = torch.randint(0, 2, (math.prod(orders),), generator=generator, dtype=torch.float64) * 2 - 1
    return Rotation(signs, factors)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x R over the last dimension, [..., K] in x's dtype; R [b, b] float64 turns each run of b features, b | K.

    That is what an input becomes, and a linear's weight [out, K] in front of it: (x R) (W R)^T = x W^T.
    """
    size = rotation.shape[0]
    if x.shape[-1] % size:
        raise ValueError(f"{x.shape[-1]} features are no multiple of the rotation's {size}")
    blocks = x.double().reshape(*x.shape[:-1], -1, size)
    return torch.flatten(blocks @ rotation, -2).to(x.dtype)


def rotate_outputs(tensor: Tensor, rotation: Tensor) -> Tensor:
    """The weight [out, in] or bias [out] of a linear whose output y becomes y R; R as in `rotate`."""
    if tensor.dim() == 1:
        return rotate(tensor, rotation)
    return rotate(tensor.T, rotation).T.contiguous()


def fold_norm(norm: Tensor, readers: LayerTensors, offset: float = 0.0) -> tuple[Tensor, LayerTensors]:
    """(a norm that multiplies with 1, its readers' matrices with its weight in their columns).

    norm: [K], to which `offset` is added before use, as the checkpoint holds it; readers: every matrix [n, K] that
    reads the normed stream, no other. RMS norm commutes with a rotation only once its weight is out of it.
    """
    weight = norm.double() + offset

    def folded(matrix: Tensor) -> Tensor:
        return (matrix.double() * weight).to(matrix.dtype)

    return torch.full_like(norm, 1.0 - offset), LayerTensors(
        {path: folded(matrix) for path, matrix in readers.weights.items()},
        readers.biases,
        {suffix: folded(matrix) for suffix, matrix in readers.tensors.items()},
    )


def rotate_residual(readers: LayerTensors, writers: LayerTensors, rotation: Tensor) -> LayerTensors:
    """R1 in one layer: the entries of both, turned. Norms must be folded into the readers first.

    readers: every matrix [n, hidden] that reads the normed residual, in `weights` or `tensors` (routers, gates);
    writers: the linears [hidden, n] that add to it, and their biases. Outside the layers the embedding's rows turn
    as `rotate` does, once, and the head with the final norm folded in is a reader: where it was the embedding
    itself it no longer is.
    """
    return LayerTensors(
        {
            **{path: rotate(weight, rotation) for path, weight in readers.weights.items()},
            **{path: rotate_outputs(weight, rotation) for path, weight in writers.weights.items()},
        },
        {path: rotate_outputs(bias, rotation) for path, bias in writers.biases.items()},
        {suffix: rotate(matrix, rotation) for suffix, matrix in readers.tensors.items()},
    )


def rotate_values(layer: LayerTensors, pair: ScalePair, rotation: Tensor) -> LayerTensors:
    """R2: the changed entries of a pair from values to the output projection, all heads turned alike.

    rotation: [b, b] float64, b dividing a head's values. Only for a pair that `value_rotation_pair` gives: a gate
    between the two would not let a rotation through, though it lets a factor.
    """
    producer = pair.producer
    if not isinstance(producer, RowsProducer):
        raise ValueError(f"the {pair.stream} of this layer has no linear that makes its values")
    path = producer.site.path
    rows = torch.tensor(producer.rows())

    def turned(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        copy[rows] = rotate_outputs(tensor[rows], rotation)
        return copy

    weights = {site.path: rotate(layer.weights[site.path], rotation) for site in pair.readers}
    biases = {path: turned(layer.biases[path])} if path in layer.biases else {}
    return LayerTensors({**weights, path: turned(layer.weights[path])}, biases)
