"""The linears of a checkpoint as float32, by rows, however they are stored.

Nothing is kept in memory but names, so that several threads may read at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen_quantize.checkpoint.ascend_layout import read_deq_scale
from qwen_quantize.checkpoint.ascend_packing import bias_of_steps, unpack_int4_pairs
from qwen_quantize.checkpoint.awq_layout import unpack_interleaved
from qwen_quantize.checkpoint.gptq_layout import GptqConfig, unpack_transposed
from qwen_quantize.checkpoint.integer_weights import (
    scale_integers,
    unpack_columns,
    unpack_rows,
    unpack_sixes,
)
from qwen_quantize.checkpoint.layout_parts import read_scale
from qwen_quantize.checkpoint.layouts import BlockFp8Config, Quantization
from qwen_quantize.checkpoint.linear_parts import (
    PLAIN_DTYPES,
    WEIGHT_SUFFIXES,
    Arrangement,
    StoredKind,
    StoredLinear,
)
from qwen_quantize.checkpoint.linear_storage import LinearStorage
from qwen_quantize.checkpoint.source import CheckpointSource
from qwen_quantize.checkpoint.tiles_layout import elements_of_tiles
from qwen_quantize.errors import UserError
from qwen_quantize.formats.block_kernels import dequantize_blocks
from qwen_quantize.formats.blocks import QuantizedTensor
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.granularity import Granularity
from qwen_quantize.formats.packing import signed_nibbles, unpack_nibble_pairs
from qwen_quantize.formats.rounding import quantize_values
from qwen_quantize.formats.spec import Format
from qwen_quantize.formats.tables import E2M1, E2M3, E4M3FN, HIF8, INT4, INT8

__all__ = ["PLAIN_DTYPES", "WEIGHT_SUFFIXES", "LinearReader", "StoredKind", "StoredLinear"]

# Elements in groups along a row, a byte each or packed.
_GROUPED: dict[StoredKind, Format] = {
    StoredKind.MXFP8: E4M3FN,
    StoredKind.MXFP6: E2M3,
    StoredKind.MXFP4: E2M1,
    StoredKind.NVFP4: E2M1,
    StoredKind.HIF8: HIF8,
}


@dataclass(frozen=True, slots=True)
class IntegerParts:
    """What an integer weight is made of: (codes - zero) * scale.

    codes: int8 or uint8 [rows, columns]; scale: float32 [rows, groups]; zero: like it, None for none; index: int64
    [columns], the group of each column, None where they are in their groups' order.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    index: Tensor | None


_BITS_IN_TILES = {
    StoredKind.INT4: 4, StoredKind.INT8: 8, StoredKind.CHANNEL_FP8: 8, StoredKind.BLOCK_FP8: 8, StoredKind.MXFP8: 8,
}  # fmt: skip


class LinearReader:
    """Describes and reads the linears of one checkpoint; `module` is a name without `.weight`."""

    def __init__(self, source: CheckpointSource) -> None:
        self.source = source
        self._storage = LinearStorage(source)

    @property
    def quantization(self) -> Quantization | None:
        """What config.json says of quantized weights."""
        return self._storage.quantization

    @property
    def loss_warning(self) -> str | None:
        """One sentence where another tool has quantized the source; None for plain and published FP8 weights."""
        quantization = self.quantization
        if quantization is not None and not isinstance(quantization, BlockFp8Config):
            form = quantization.describe()
        elif self.source.lossy_types:
            form = f"{' and '.join(self.source.lossy_types)} of GGUF"
        else:
            form = ""
        if not form:
            return None
        return (
            f"the weights of {self.source.path} have been quantized before, to {form}: what that lost is not "
            "won back, and every error reported here is measured against those weights; start from the "
            "original model where you can"
        )

    def companions(self) -> frozenset[str]:
        """All scales, zero points and the like that belong to a weight and mean nothing without it."""
        return self._storage.companions()

    def describe(self, module: str, shape: tuple[int, int] | None = None) -> StoredLinear:
        """How the linear is stored; UserError by name for whatever is missing or does not fit.

        shape: (out, in) as the model has it.
        """
        return self._storage.describe(module, shape)

    def is_quantized(self, module: str) -> bool:
        """Whether the weight has scales, also for what is no linear; UserError where it cannot be read."""
        return self._storage.is_quantized(module)

    def read(self, module: str) -> Tensor:
        """[out, in] float32."""
        stored = self.describe(module)
        return self._decode(stored, 0, stored.shape[0])

    def read_rows(self, module: str, start: int, stop: int) -> Tensor:
        """[stop - start, in] float32; for BLOCK_FP8 `start` must be the first row of a block, else ValueError."""
        return self._decode(self.describe(module), start, stop)

    def read_codes(self, module: str, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(E4M3 codes uint8 [stop - start, in], float32 scales of the row blocks touched) of a BLOCK_FP8 linear.

        ValueError for other kinds, and for a `start` inside a block.
        """
        return self._codes(self.describe(module), start, stop)

    def read_integers(self, module: str) -> IntegerParts:
        """The undecoded parts of a whole integer weight; ValueError for a linear stored otherwise."""
        stored = self.describe(module)
        if stored.kind in (StoredKind.INT8, StoredKind.INT4, StoredKind.AWQ, StoredKind.GPTQ):
            return self._integers(stored, 0, stored.shape[0])
        raise ValueError(f"{module!r} is stored as {stored.kind}, which has no integer codes")

    def read_row_codes(self, module: str) -> tuple[Tensor, Tensor]:
        """(E4M3 codes uint8 [out, in], float32 scales [out, 1]) of a CHANNEL_FP8 linear; ValueError for others."""
        stored = self.describe(module)
        if stored.kind is not StoredKind.CHANNEL_FP8:
            raise ValueError(f"{module!r} is stored as {stored.kind}, which has no scales of rows")
        codes = self._elements(stored, 0, stored.shape[0]).view(torch.uint8)
        return codes, self._by_row(str(stored.scale), 0, stored.shape[0]).contiguous()

    def sum_row_scale(self, stored: StoredLinear) -> Tensor:
        """float32 [out]: what multiplies the rows of an INT8_STATIC weight, the sums' scales less the input's.

        The input's is as the engine holds it; UserError where one is no positive number.
        """
        form = stored.activation
        assert form is not None
        assert form.input_scale is not None
        assert stored.scale is not None
        scale = self._deq_scale(stored.scale)
        of_input = quantize_values(
            self.source.read(form.input_scale).float(), form.scale_format, RNE_SATURATE
        )
        for name, values in ((stored.scale, scale), (form.input_scale, of_input)):
            if not bool((values.isfinite() & (values > 0)).all()):
                raise UserError(
                    f"{self.source.path}: tensor {name!r} holds scales that are no positive numbers"
                )
        return scale / of_input

    def _deq_scale(self, name: str) -> Tensor:
        try:
            return read_deq_scale(self.source.read(name))
        except ValueError as error:
            raise UserError(f"{self.source.path}: tensor {name!r}: {error}") from error

    def integer_bias(self, module: str) -> Tensor | None:
        """float32 [out]: the bias that an INT8_STATIC linear's kernel adds as integers; None for other kinds."""
        if not self.is_quantized(module):
            return None
        stored = self.describe(module)
        if stored.bias_steps is None:
            return None
        form = stored.activation
        assert form is not None
        scale = self._deq_scale(str(stored.scale))
        offset, sums = 0, torch.zeros(stored.shape[0], dtype=torch.int64)
        if form.input_zero_point is not None:
            offset = int(self.source.read(form.input_zero_point).float())
            sums = self._elements(stored, 0, stored.shape[0]).sum(dim=1, dtype=torch.int64)
        return bias_of_steps(self.source.read(stored.bias_steps), scale, offset, sums)

    def _elements(self, stored: StoredLinear, start: int, stop: int) -> Tensor:
        """The elements of some rows in the order of rows; packed ones stay packed unless rows share a byte."""
        if stored.tiles is not None:
            across = stored.tiles.bytes * 8 // _BITS_IN_TILES[stored.kind]
            first, last = start // across, -(-stop // across)
            tiled = self.source.read_rows(stored.weight, first, last)
            skip = start - first * across
            return elements_of_tiles(tiled, (skip + stop - start, stored.shape[1]))[skip:]
        match stored.arrangement:
            case Arrangement.ROW_PAIRS:
                pairs = self.source.read_rows(stored.weight, start // 2, -(-stop // 2))
                return unpack_int4_pairs(pairs)[start % 2 :][: stop - start]
            case Arrangement.COLUMN_PAIRS:
                return signed_nibbles(
                    unpack_nibble_pairs(self.source.read_rows(stored.weight, start, stop).view(torch.uint8))
                )
        return self.source.read_rows(stored.weight, start, stop)

    def read_quantized(self, module: str) -> QuantizedTensor:
        """The linear as codes, scales and zero points; its `dequantize` is what `read` gives, bit for bit.

        Integers are signed, whatever the file adds to them, and zero points that are all 0 are left out. UserError
        for a linear that is not quantized, and for columns in an order that groups do not follow.
        """
        stored = self.describe(module)
        rows, columns = stored.shape
        match stored.kind:
            case StoredKind.PLAIN:
                raise UserError(f"{self.source.path}: {module!r} is not quantized, so it has no codes")
            case StoredKind.BLOCK_FP8:
                assert stored.block is not None
                codes, scale = self._codes(stored, 0, rows)
                return QuantizedTensor(
                    codes, scale, None, E4M3FN, Granularity.block(*stored.block), stored.shape
                )
            case StoredKind.CHANNEL_FP8:
                codes = self._elements(stored, 0, rows).view(torch.uint8)
                scale = self._by_row(str(stored.scale), 0, rows).contiguous()
                return QuantizedTensor(codes, scale, None, E4M3FN, Granularity.channel(), stored.shape)
            case StoredKind.INT8 | StoredKind.INT4 | StoredKind.AWQ | StoredKind.GPTQ:
                return self._quantized_integers(stored)
            case StoredKind.INT8_STATIC:
                raise UserError(
                    f"{self.source.path}: {module!r} holds the scales of its sums (deq_scale) and its bias in steps of "
                    "them (quant_bias), from which the scales of its weights cannot be told bit by bit"
                )
        codes, scale = self._grouped(stored, 0, rows)
        size = columns if stored.group_size is None else stored.group_size
        second = 1.0 if stored.tensor_scale is None else float(self._tensor_scale(stored.tensor_scale))
        grid = Granularity.channel() if stored.kind is StoredKind.HIF8 else Granularity.group(size)
        return QuantizedTensor(codes, scale, None, _GROUPED[stored.kind], grid, stored.shape, second)

    def read_elements(self, module: str) -> Tensor:
        """The codes of `read_quantized`, and those of a linear with static sums; UserError as there."""
        stored = self.describe(module)
        if stored.kind is StoredKind.INT8_STATIC:
            return self._elements(stored, 0, stored.shape[0])
        return self.read_quantized(module).codes

    def _quantized_integers(self, stored: StoredLinear) -> QuantizedTensor:
        rows, columns = stored.shape
        found, bits = self._integers(stored, 0, rows), self._storage.integer_bits(stored)
        assert stored.group_size is not None
        if found.index is not None and not torch.equal(
            found.index, torch.arange(columns) // stored.group_size
        ):
            raise UserError(
                f"{self.source.path}: the columns of {stored.module!r} are in an order of activations (g_idx) that no "
                "other layout can say"
            )
        if bits not in (4, 8):
            raise UserError(
                f"{self.source.path}: {stored.module!r} has {bits} bits, which no other layout has"
            )
        codes, zero = found.codes, found.zero
        if codes.dtype == torch.uint8:  # AWQ and GPTQ count from 0
            middle = 1 << (bits - 1)
            codes = (codes.to(torch.int16) - middle).to(torch.int8)
            zero = None if zero is None else zero - middle
        if zero is not None and not bool(zero.any()):
            zero = None
        grid = Granularity.channel() if found.scale.shape[1] == 1 else Granularity.group(stored.group_size)
        return QuantizedTensor(
            codes.contiguous(),
            found.scale.contiguous(),
            None if zero is None else zero.contiguous(),
            INT4 if bits == 4 else INT8,
            grid,
            stored.shape,
        )

    def _codes(self, stored: StoredLinear, start: int, stop: int) -> tuple[Tensor, Tensor]:
        if stored.block is None or stored.scale is None:
            raise ValueError(f"{stored.module!r} is stored as {stored.kind}, which has no blocks")
        rows = stored.block[0]
        if start % rows:
            raise ValueError(f"rows of {stored.module!r} begin at multiples of {rows}, not at {start}")
        codes = self._elements(stored, start, stop).view(torch.uint8)
        scale = self.source.read_rows(stored.scale, start // rows, -(-stop // rows)).float()
        return codes, scale

    def _decode(self, stored: StoredLinear, start: int, stop: int) -> Tensor:
        match stored.kind:
            case StoredKind.PLAIN:
                return self.source.read_rows(stored.weight, start, stop).float()
            case StoredKind.BLOCK_FP8:
                assert stored.block is not None
                codes, scale = self._codes(stored, start, stop)
                return dequantize_blocks(codes, scale, E4M3FN, *stored.block)
            case StoredKind.CHANNEL_FP8:
                codes = self._elements(stored, start, stop).view(torch.uint8)
                scale = self._by_row(str(stored.scale), start, stop).contiguous()
                return dequantize_blocks(codes, scale, E4M3FN, 1, max(stored.shape[1], 1))
            case StoredKind.INT8_STATIC:
                codes = self._elements(stored, start, stop).float()
                codes *= self.sum_row_scale(stored)[start:stop, None]
                return codes
            case StoredKind.INT8 | StoredKind.INT4 | StoredKind.AWQ | StoredKind.GPTQ:
                return self._decode_integers(stored, start, stop)
        return self._decode_grouped(stored, start, stop)

    def _decode_grouped(self, stored: StoredLinear, start: int, stop: int) -> Tensor:
        codes, scale = self._grouped(stored, start, stop)
        if stored.tensor_scale is not None:
            scale = scale * self._tensor_scale(stored.tensor_scale)
        assert stored.group_size is not None
        fmt = _GROUPED[stored.kind]
        return dequantize_blocks(codes, scale.contiguous(), fmt, 1, max(stored.group_size, 1))

    def _grouped(self, stored: StoredLinear, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(codes uint8, float32 scales of the groups) of elements in groups along a row."""
        fmt = _GROUPED[stored.kind]
        codes = self._elements(stored, start, stop)
        if fmt == E2M1:
            codes = unpack_nibble_pairs(codes)
        elif fmt == E2M3:
            codes = unpack_sixes(codes)
        return codes.view(torch.uint8), read_scale(self.source.read_rows(str(stored.scale), start, stop))

    def _tensor_scale(self, name: str) -> Tensor:
        """NVFP4's scale of a whole weight as it multiplies, float32 []; the file holds its reciprocal."""
        divisor = self.source.read(name).float().reshape(())
        if not 0 < float(divisor) < math.inf:
            raise UserError(
                f"{self.source.path}: tensor {name!r} holds {float(divisor)}; the scale of a weight is positive"
            )
        return 1 / divisor

    def _by_row(self, name: str, start: int, stop: int) -> Tensor:
        """float32 [rows, groups] of a scale or zero point that may be one for all rows."""
        if math.prod(self.source.info(name).shape) == 1:
            return self.source.read(name).float().reshape(1, 1).expand(stop - start, 1)
        return self.source.read_rows(name, start, stop).float().reshape(stop - start, -1)

    def _decode_integers(self, stored: StoredLinear, start: int, stop: int) -> Tensor:
        found = self._integers(stored, start, stop)
        assert stored.group_size is not None
        return scale_integers(
            found.codes.float().contiguous(), found.scale, found.zero, stored.group_size, found.index
        )

    def _integers(self, stored: StoredLinear, start: int, stop: int) -> IntegerParts:
        """Of compressed-tensors; AWQ's and GPTQ's have the output features last: all bytes are read for any rows."""
        if stored.kind is StoredKind.AWQ or stored.kind is StoredKind.GPTQ:
            return self._transposed(stored, start, stop)
        bits = 4 if stored.kind is StoredKind.INT4 else 8
        codes = self._elements(stored, start, stop)
        if codes.dtype == torch.int32:
            codes = unpack_columns(codes, bits, stored.shape[1])
        scale = self._by_row(str(stored.scale), start, stop)
        if stored.zero_offset is not None and bool(self._by_row(stored.zero_offset, start, stop).any()):
            raise UserError(
                f"{self.source.path}: tensor {stored.zero_offset!r} holds offsets, and the kernels that cast their "
                "inputs have none"
            )
        index = None
        if stored.group_index is not None:
            index = self._read_index(stored.group_index, scale.shape[1])
        zero = None
        if stored.zero_point is not None:
            if self.source.info(stored.zero_point).dtype == "I32":
                first, last = start * bits // 32, -(-stop * bits // 32)
                words = self.source.read_rows(stored.zero_point, first, last)
                zero = unpack_rows(words, bits, start - first * 32 // bits, stop - start).float()
            else:
                zero = self._by_row(stored.zero_point, start, stop)
        return IntegerParts(codes, scale, zero, index)

    def _transposed(self, stored: StoredLinear, start: int, stop: int) -> IntegerParts:
        words, zeros = self.source.read(stored.weight), self.source.read(str(stored.zero_point))
        scale = self.source.read(str(stored.scale)).float()[:, start:stop].t()
        if stored.kind is StoredKind.AWQ:
            first, last = start // 8, -(-stop // 8)
            rows = slice(start - first * 8, stop - first * 8)
            codes = unpack_interleaved(words[:, first:last])[:, rows].t()
            zero = unpack_interleaved(zeros[:, first:last])[:, rows].t().float()
        else:
            config = self.quantization
            assert isinstance(config, GptqConfig)
            codes = unpack_transposed(words[:, start:stop], config.bits, stored.shape[1])
            stored_zero = unpack_transposed(zeros.t(), config.bits, stored.shape[0])[:, start:stop].t()
            offset = 1 if config.version == 1 else 0
            zero = ((stored_zero.to(torch.int16) + offset) % (1 << config.bits)).float()
        index = None
        if stored.group_index is not None:
            index = self._read_index(stored.group_index, scale.shape[1])
        return IntegerParts(codes, scale, zero, index)

    def _read_index(self, name: str, groups: int) -> Tensor | None:
        index = self.source.read(name).long()
        if bool((index == -1).all()):  # never filled in: the columns are in their groups' order
            return None
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= groups:
            raise UserError(
                f"{self.source.path}: tensor {name!r} names groups {low} .. {high}, and there are {groups}"
            )
        return index
