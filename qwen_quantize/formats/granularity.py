"""How much of a tensor shares one scale, and how a grid of scales lies over the tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor
from torch.nn import functional


class GranularityKind(StrEnum):
    """The shapes of the region that shares a scale."""

    TENSOR = "tensor"  # one scale for each matrix
    CHANNEL = "channel"  # one per output row of a weight [N, K]
    TOKEN = "token"  # one per row of activations [tokens, K]: the same grid as CHANNEL, another meaning
    GROUP = "group"  # one per row and `cols` consecutive elements of K
    BLOCK = "block"  # one per tile of `rows` x `cols`


@dataclass(frozen=True, slots=True)
class Granularity:
    """The region that shares a scale. Regions at the right and lower edge may be partial.

    `rows` and `cols` count elements; 0 means "all of them" and is set by the constructors only.

    [256, 320] with tensor() has scale [1, 1]; channel() or token() [256, 1]; group(128) [256, 3];
    block(128, 128) [2, 3]. Leading dimensions (experts) stay: [8, 256, 320] with channel() has [8, 256, 1].
    """

    kind: GranularityKind
    rows: int
    cols: int

    def __post_init__(self) -> None:
        whole_rows, whole_cols = _WHOLE[self.kind]
        if (self.rows == 0) != whole_rows or (self.cols == 0) != whole_cols or min(self.rows, self.cols) < 0:
            raise ValueError(f"granularity {self.kind} cannot have rows {self.rows} and cols {self.cols}")

    @staticmethod
    def tensor() -> Granularity:
        """One scale for the whole matrix."""
        return Granularity(GranularityKind.TENSOR, 0, 0)

    @staticmethod
    def channel() -> Granularity:
        """One scale for each output channel."""
        return Granularity(GranularityKind.CHANNEL, 1, 0)

    @staticmethod
    def token() -> Granularity:
        """One scale for each token."""
        return Granularity(GranularityKind.TOKEN, 1, 0)

    @staticmethod
    def group(size: int) -> Granularity:
        """One scale for each row and `size` consecutive elements."""
        return Granularity(GranularityKind.GROUP, 1, size)

    @staticmethod
    def block(rows: int, cols: int) -> Granularity:
        """One scale for each tile of `rows` x `cols`."""
        return Granularity(GranularityKind.BLOCK, rows, cols)

    def describe(self) -> str:
        """In words, to follow "a scale"."""
        match self.kind:
            case GranularityKind.BLOCK:
                return f"for {self.rows}x{self.cols}"
            case GranularityKind.GROUP:
                return f"for {self.cols} of a row"
            case GranularityKind.CHANNEL:
                return "per output channel"
            case GranularityKind.TOKEN:
                return "per token"
        return "per tensor"

    def block_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(rows, cols) of one region of a tensor of `shape` [..., N, K]; at least 1 each."""
        if len(shape) < 2:
            raise ValueError(f"granularity {self.kind} needs a matrix, got shape {tuple(shape)}")
        return self.rows or max(shape[-2], 1), self.cols or max(shape[-1], 1)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scale of a tensor of `shape` [..., N, K]: [..., ceil(N/rows), ceil(K/cols)]."""
        rows, cols = self.block_shape(shape)
        return (*shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / cols))


_WHOLE: dict[GranularityKind, tuple[bool, bool]] = {  # are all rows, all columns one region?
    GranularityKind.TENSOR: (True, True),
    GranularityKind.CHANNEL: (False, True),
    GranularityKind.TOKEN: (False, True),
    GranularityKind.GROUP: (False, False),
    GranularityKind.BLOCK: (False, False),
}


def expand_scale(scale: Tensor, granularity: Granularity, shape: tuple[int, ...]) -> Tensor:
    """Each region's scale repeated over its elements: `scale` of `scale_shape(shape)` becomes `shape`."""
    check_scale_shape(scale, granularity, shape)
    rows, cols = granularity.block_shape(shape)
    expanded = scale.repeat_interleave(rows, dim=-2)[..., : shape[-2], :]
    return expanded.repeat_interleave(cols, dim=-1)[..., : shape[-1]]


def check_scale_shape(scale: Tensor, granularity: Granularity, shape: tuple[int, ...]) -> None:
    """ValueError with both shapes unless `scale` fits a tensor of `shape`."""
    expected = granularity.scale_shape(shape)
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"scale has shape {tuple(scale.shape)}; {granularity.kind} regions of "
            f"{granularity.block_shape(shape)} over {tuple(shape)} need {expected}"
        )


def block_amax(x: Tensor, granularity: Granularity) -> Tensor:
    """The largest magnitude of each region of x [..., N, K], in x's dtype and `scale_shape(x.shape)`.

    A region with a NaN has amax NaN. Empty dimensions give empty scales.
    """
    shape = tuple(x.shape)
    rows, cols = granularity.block_shape(shape)
    scale_shape = granularity.scale_shape(shape)
    magnitudes = x.abs()
    pad_rows, pad_cols = scale_shape[-2] * rows - shape[-2], scale_shape[-1] * cols - shape[-1]
    if pad_rows or pad_cols:  # zeros never are the largest magnitude
        magnitudes = functional.pad(magnitudes, (0, pad_cols, 0, pad_rows))
    tiles = magnitudes.reshape(*shape[:-2], scale_shape[-2], rows, scale_shape[-1], cols)
    return tiles.amax(dim=(-3, -1))
