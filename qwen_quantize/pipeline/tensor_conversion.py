"""One tensor on its way from a checkpoint to an output folder, piece by piece."""

from __future__ import annotations

import hashlib
import math
import threading
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qwen_quantize.calibrators.block_convert import (
    BlockConversion,
    NotFiniteError,
    find_not_finite,
    quantize_rows,
    requantize_blocks,
)
from qwen_quantize.calibrators.block_fp8 import exact_scale, partial_blocks
from qwen_quantize.checkpoint.stored_linears import LinearReader, StoredKind, StoredLinear
from qwen_quantize.checkpoint.tensor_info import DTYPES, torch_shape
from qwen_quantize.checkpoint.writer import OutputFolder, OutputTensor
from qwen_quantize.errors import UserError
from qwen_quantize.formats.cast_rule import CastRule
from qwen_quantize.pipeline.records import EXACT_DB, LinearRecord, exponent_counts, why_no_better

PIECE_BYTES = 8 << 20  # of whichever form of a piece is the largest
_QUANTIZED_AS_STORED = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class QuantizeLinear:
    """A linear, however it is stored, becomes E4M3 codes and power-of-two scales of blocks."""

    module: str
    weight: OutputTensor  # F8_E4M3 [out, in]
    scale: OutputTensor  # F32, one for each block

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return self.weight, self.scale


@dataclass(frozen=True, slots=True)
class DecodeLinear:
    """A linear that is stored quantized becomes floats."""

    module: str
    output: OutputTensor

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return (self.output,)


@dataclass(frozen=True, slots=True)
class CopyTensor:
    """A tensor is copied. Floats must be finite, and are converted where the output has another dtype."""

    tensor: str
    output: OutputTensor

    @property
    def outputs(self) -> tuple[OutputTensor, ...]:
        return (self.output,)


Job = QuantizeLinear | DecodeLinear | CopyTensor


def job_name(job: Job) -> str:
    """The name of a job: that of its first output."""
    return job.outputs[0].name


@dataclass(frozen=True, slots=True)
class Target:
    """What linears become: blocks of (rows, columns), rounded by `cast`."""

    block: tuple[int, int]
    cast: CastRule


@dataclass(frozen=True, slots=True)
class Finished:
    """A job that is done; nbytes: of its outputs; linear: what the report says of a quantized linear."""

    name: str
    nbytes: int
    linear: LinearRecord | None


class StoppedError(Exception):
    """Another thread has failed."""


class Turns:
    """Lets threads wait for each other's steps, until one of them fails."""

    def __init__(self) -> None:
        self.changed = threading.Condition()  # also guards what the threads share
        self.stopped = False

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.changed.notify_all()


class TensorConversion:
    """A job in progress. `convert` may be called from several threads, with pieces taken in order.

    rows: of the first output, along its first dimension; step: how many of them make a piece.
    """

    def __init__(
        self, job: Job, linears: LinearReader, folder: OutputFolder, target: Target, turns: Turns
    ) -> None:
        self.job, self.linears, self.folder, self.target, self.turns = job, linears, folder, target, turns
        self.stored = None if isinstance(job, CopyTensor) else linears.describe(job.module)
        self.output = job.outputs[0]
        self.rows = self.output.shape[0] if self.output.shape else 1
        self.whole = not self.output.shape or not math.prod(self.output.shape)
        self.step = max(self.rows, 1) if self.whole else self._rows_at_a_time()
        self._left = len(self.pieces())
        self._parts: dict[int, BlockConversion] = {}
        self._hash = hashlib.sha256()
        self._hashed = 0

    @property
    def source_tensor(self) -> str:
        """The name of the source's tensor that holds the elements."""
        if self.stored is not None:
            return self.stored.weight
        assert isinstance(self.job, CopyTensor)
        return self.job.tensor

    def pieces(self) -> list[tuple[int, int]]:
        """Rows [start, stop) of each piece, in order; a tensor without elements has one piece too."""
        starts = range(0, max(self.rows, 1), self.step)
        return [(start, min(start + self.step, self.rows)) for start in starts]

    def _rows_at_a_time(self) -> int:
        """Whole block rows of about PIECE_BYTES."""
        read = self.linears.source.info(self.source_tensor).nbytes
        elements = math.prod(self.output.shape)
        largest = max(read, self.output.nbytes, 4 * elements if self._decodes() else 0)
        multiple = 1
        if self.stored is not None:
            multiple = math.lcm(self.target.block[0], self.stored.block[0] if self.stored.block else 1)
        return max(1, PIECE_BYTES // max(largest // self.rows, 1) // multiple) * multiple

    def _decodes(self) -> bool:
        """Whether the tensor goes through float32."""
        return self.stored is not None and not (
            self._maps_codes(self.stored) or self._reads_floats(self.stored)
        )

    def _maps_codes(self, stored: StoredLinear) -> bool:
        same = stored.kind is StoredKind.BLOCK_FP8 and stored.block == self.target.block
        return same and isinstance(self.job, QuantizeLinear)

    def _reads_floats(self, stored: StoredLinear) -> bool:
        if stored.kind is not StoredKind.PLAIN or not isinstance(self.job, QuantizeLinear):
            return False
        return self.linears.source.info(stored.weight).dtype in _QUANTIZED_AS_STORED

    def convert(self, index: int, start: int, stop: int) -> Finished | None:
        """Read, convert and write one piece; the result when it was the tensor's last.

        UserError for NaN and infinity, naming tensor and place, and whatever reading and writing raise.
        """
        if self.whole:
            self._convert_whole()
        elif isinstance(self.job, CopyTensor):
            self._write_floats(self.linears.source.read_rows(self.job.tensor, start, stop), start)
        elif isinstance(self.job, DecodeLinear):
            self._write_floats(self.linears.read_rows(self.job.module, start, stop), start)
        else:
            self._quantize(index, start, stop)
        with self.turns.changed:
            self._left -= 1
            if self._left:
                return None
        nbytes = sum(output.nbytes for output in self.job.outputs)
        record = (
            self._finish_linear(self.job) if isinstance(self.job, QuantizeLinear) and not self.whole else None
        )
        return Finished(job_name(self.job), nbytes, record)

    def _convert_whole(self) -> None:
        """A tensor that has no rows to read it by: a single value, or none."""
        for output in self.job.outputs:
            dtype, shape = DTYPES[output.dtype].torch, torch_shape(output.dtype, output.shape)
            values = torch.zeros(shape, dtype=dtype)
            if isinstance(self.job, CopyTensor):
                values.copy_(self.linears.source.read(self.job.tensor))
                self._require_finite(values, 0)
            self.folder.write(output.name, values)

    def _write_floats(self, rows: Tensor, start: int) -> None:
        room = self.folder.row_buffer(self.output.name, start, start + len(rows))
        room.copy_(rows)
        self._require_finite(room, start)
        self.folder.write_rows(self.output.name, start, room)

    def _require_finite(self, values: Tensor, start: int) -> None:
        found = find_not_finite(values) if values.is_floating_point() else None
        if found is not None:
            raise self._not_finite(*found, start)

    def _not_finite(self, place: tuple[int, ...], value: float, start: int) -> UserError:
        """place: in rows that begin at row `start`."""
        whole = [place[0] + start, *place[1:]] if place else []
        return UserError(
            f"{self.linears.source.path}: tensor {self.source_tensor!r} holds {value} at {whole}; repair the "
            "checkpoint, a quantized copy would be wrong everywhere"
        )

    def _quantize(self, index: int, start: int, stop: int) -> None:
        assert self.stored is not None
        module, block, cast = self.stored.module, self.target.block, self.target.cast
        room = self.folder.row_buffer(self.output.name, start, stop)
        codes = room.view(torch.uint8)
        try:
            if self._maps_codes(self.stored):
                found, scale = self.linears.read_codes(module, start, stop)
                part = requantize_blocks(found, scale, block, cast, out=codes, threads=1)
            else:
                if self._reads_floats(self.stored):
                    rows = self.linears.source.read_rows(self.stored.weight, start, stop)
                else:
                    rows = self.linears.read_rows(module, start, stop)
                part = quantize_rows(rows, block, cast, out=codes, threads=1)
        except NotFiniteError as error:
            raise self._not_finite(error.place, error.value, start) from error
        self.folder.write_rows(self.output.name, start, room)
        self._hash_in_order(index, codes)
        self._parts[index] = replace(part, codes=codes[:0])

    def _hash_in_order(self, index: int, codes: Tensor) -> None:
        """Add a piece to the tensor's hash after those before it, which other threads have in hand already."""
        with self.turns.changed:
            self.turns.changed.wait_for(lambda: self._hashed == index or self.turns.stopped)
            if self.turns.stopped:
                raise StoppedError
        self._hash.update(codes.numpy().data)  # the turn is ours alone, and hashing lets other threads run
        with self.turns.changed:
            self._hashed += 1
            self.turns.changed.notify_all()

    def _finish_linear(self, job: QuantizeLinear) -> LinearRecord:
        """Write the scales and add the pieces up, in order: sums do not depend on which was ready first."""
        parts = [self._parts[index] for index in sorted(self._parts)]
        exponents = torch.cat([part.exponents for part in parts])
        self.folder.write(job.scale.name, exact_scale(exponents))
        noise = math.fsum(part.noise for part in parts)
        baseline = math.fsum(part.baseline_noise for part in parts)
        signal = math.fsum(part.signal for part in parts)
        zero = sum(part.zero_blocks for part in parts)
        error, baseline_error = (value / signal if signal > 0 else 0.0 for value in (noise, baseline))
        zeros = (f"{zero} all-zero blocks written with scale 1",) if zero else ()
        return LinearRecord(
            name=job.module,
            shape=(self.output.shape[0], self.output.shape[1]),
            error=error,
            baseline_error=baseline_error,
            weight_sqnr_db=10 * math.log10(signal / noise) if noise > 0 and signal > 0 else EXACT_DB,
            searched_blocks=sum(part.searched_blocks for part in parts),
            zero_blocks=zero,
            partial_blocks=partial_blocks((self.output.shape[0], self.output.shape[1]), self.target.block),
            exponents=exponent_counts(exponents),
            sha256=self._hash.hexdigest(),
            notes=(*zeros, *why_no_better(error, baseline_error)),
        )
