"""What is known of a stored linear, and the tensors of one module by the ends of their names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.tensor_info import TensorInfo
from qwen_quantize.errors import UserError
from qwen_quantize.formats.activation_form import ActivationForm

PLAIN_DTYPES = ("F32", "BF16", "F16", "F64")

WEIGHT, PACKED, WORDS = ".weight", ".weight_packed", ".qweight"
# The tensor that holds a linear's elements ends in one of these, whatever the layout.
WEIGHT_SUFFIXES = (WEIGHT, PACKED, WORDS)


class StoredKind(StrEnum):
    """How the elements of a linear are stored."""

    PLAIN = "plain"
    BLOCK_FP8 = "block_fp8"
    CHANNEL_FP8 = "channel_fp8"  # one scale for each row, or one for all
    INT8_STATIC = (
        "int8_static"  # its scales are those of the sums: of the weight's row times of the input (Ascend)
    )
    INT8 = "int8"  # a byte each, of int4 too where inputs are cast (compressed-tensors)
    INT4 = "int4"
    MXFP8 = "mxfp8"
    MXFP6 = "mxfp6"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    HIF8 = "hif8"
    AWQ = "awq"  # int4, transposed and interleaved
    GPTQ = "gptq"  # integers, transposed


class Arrangement(StrEnum):
    """Where in the tensor of a weight its elements lie, as far as the kind does not say it."""

    ROWS = "rows"
    ROW_PAIRS = "row_pairs"  # int4 of two rows in a byte, the even row in the low nibble
    COLUMN_PAIRS = "column_pairs"  # int4 of two columns in a byte, the even column in the low nibble


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of a matrix unit: rows of the reduction axis, and the bytes of a row."""

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One linear and the tensors that make it.

    shape: (out, in). weight: the tensor with its elements. parts: all tensors that its values depend on.
    block: (rows, columns) that share a scale, only for BLOCK_FP8. group_size: columns that share a scale, the
    whole row where each row has one. `scale` multiplies; zero_point is subtracted before that. tensor_scale:
    NVFP4's scale of the whole weight, which divides. group_index: a tensor with the group of each column.
    activation: what the config says becomes of the input, None where it stays. tiles: the weight is stored in these.
    bias_steps: the tensor with the bias in steps of the sums. zero_offset: a tensor that must hold zeros.
    """

    module: str
    kind: StoredKind
    shape: tuple[int, int]
    weight: str
    parts: tuple[str, ...]
    block: tuple[int, int] | None = None
    scale: str | None = None
    zero_point: str | None = None
    group_index: str | None = None
    group_size: int | None = None
    tensor_scale: str | None = None
    activation: ActivationForm | None = None
    arrangement: Arrangement = Arrangement.ROWS
    tiles: Tiles | None = None
    bias_steps: str | None = None
    zero_offset: str | None = None


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The tensors of one module; suffixes begin with a dot."""

    source: CheckpointSource
    names: frozenset[str]
    module: str

    def fail(self, text: str) -> UserError:
        return UserError(f"{self.source.path}: {text}")

    def name(self, suffix: str) -> str | None:
        """The tensor's name, None where there is none."""
        return self.module + suffix if self.module + suffix in self.names else None

    def present(self, suffixes: Iterable[str]) -> list[str]:
        return [self.module + suffix for suffix in suffixes if self.module + suffix in self.names]

    def matrix(self, suffix: str) -> TensorInfo:
        """The tensor with the elements; UserError unless it is there and has two dimensions."""
        name = self.module + suffix
        if name not in self.names:
            raise self.fail(
                f"the tensor {name!r} is missing; the checkpoint is incomplete or its config.json belongs to "
                "another model"
            )
        info = self.source.info(name)
        if len(info.shape) != 2:
            raise self.fail(
                f"tensor {name!r} has shape {list(info.shape)}; the weight of a linear has two dimensions"
            )
        return info

    def check_shape(self, found: tuple[int, int], wanted: tuple[int, int] | None, name: str) -> None:
        if wanted is None or found == wanted:
            return
        hint = "; it is transposed" if found == wanted[::-1] else ""
        raise self.fail(f"tensor {name!r} has shape {list(found)}, its config.json says {list(wanted)}{hint}")

    def need_scale(self, names: Sequence[str], weight: TensorInfo, usual: str) -> TensorInfo:
        """The one scale of a weight; UserError without one, and where there are two."""
        if not names:
            raise self.fail(
                f"{weight.name!r} is {weight.dtype} but {usual!r} is missing; without its scales the weight means "
                "nothing; download the model again"
            )
        if len(names) > 1:
            raise self.fail(
                f"{weight.name!r} has two scales, {names[0]!r} and {names[1]!r}; which one is meant?"
            )
        return self.source.info(names[0])

    def part(
        self, suffix: str, dtypes: Sequence[str], shape: Sequence[int], weight: TensorInfo
    ) -> TensorInfo:
        """A tensor that must be there with one of these dtypes and this shape; UserError otherwise."""
        name = self.module + suffix
        if name not in self.names:
            raise self.fail(
                f"{weight.name!r} is there but {name!r} is missing; without it the weight means nothing; download "
                "the model again"
            )
        info = self.source.info(name)
        if info.dtype not in dtypes or tuple(info.shape) != tuple(shape):
            raise self.fail(
                f"tensor {name!r} is {info.dtype} {list(info.shape)}; beside {weight.name!r} {list(weight.shape)} it "
                f"must be {' or '.join(dtypes)} {list(shape)}"
            )
        return info

    def single(self, suffix: str, weight: TensorInfo) -> TensorInfo:
        """A float32 tensor of one value that must be there; UserError otherwise."""
        name = self.module + suffix
        shape = self.source.info(name).shape if name in self.names else (1,)
        return self.part(suffix, ("F32",), shape if math.prod(shape) == 1 else (1,), weight)

    def stored_shape(self, weight: str) -> tuple[int, int]:
        """The (out, in) that `weight_shape` holds for a packed weight; UserError where it is missing or none."""
        name = self.module + ".weight_shape"
        if name not in self.names:
            raise self.fail(f"{weight!r} is packed but {name!r} is missing; download the model again")
        info = self.source.info(name)
        if info.dtype not in ("I64", "I32") or tuple(info.shape) != (2,):
            raise self.fail(
                f"tensor {name!r} is {info.dtype} {list(info.shape)}; it must be two whole numbers"
            )
        rows, columns = (int(size) for size in self.source.read(name))
        if min(rows, columns) < 1 or max(rows, columns) >= 1 << 31:
            raise self.fail(f"tensor {name!r} holds {[rows, columns]}, which is no shape")
        return rows, columns

    def group_index(self, suffix: str, columns: int) -> str | None:
        """The tensor that names each column's group, None where there is none; UserError for another shape."""
        name = self.name(suffix)
        if name is None:
            return None
        info = self.source.info(name)
        if info.dtype not in ("I32", "I64") or tuple(info.shape) != (columns,):
            raise self.fail(
                f"tensor {name!r} is {info.dtype} {list(info.shape)}; it must name the group of {columns} columns"
            )
        return name
