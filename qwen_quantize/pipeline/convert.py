"""Tensors from a checkpoint to an output folder without calibration data, at the speed of the disk.

Several threads each take the next piece of work, a run of whole block rows of one tensor of a few megabytes, in the
order in which the source holds them: read it, convert it, write it. So reading, computing and writing overlap, and
memory holds one piece for each thread, whatever the size of a tensor. No model code is needed: tensor names are enough.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet

import torch

from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputFolder
from qwen_quantize.pipeline.tensor_conversion import (
    CopyTensor,
    DecodeLinear,
    Finished,
    Job,
    QuantizeLinear,
    StoppedError,
    Target,
    TensorConversion,
    Turns,
    job_name,
)

__all__ = [
    "CopyTensor",
    "DecodeLinear",
    "Finished",
    "Job",
    "QuantizeLinear",
    "Target",
    "convert_tensors",
    "job_name",
]

SYNC_SECONDS = 2.0  # finished tensors are made durable and reported this often ...
SYNC_BYTES = 1 << 30  # ... or when so much of them has gathered


def convert_tensors(
    jobs: Sequence[Job],
    linears: LinearReader,
    folder: OutputFolder,
    target: Target,
    finished: Callable[[Sequence[Finished]], None],
    progress: Callable[[str, int, int], None],
    *,
    skip: AbstractSet[str] = frozenset(),
    threads: int | None = None,
) -> None:
    """Do all jobs but those named in `skip`, which an interrupted run has finished, if `folder` knows them as written.

    finished: told of jobs in batches, in the caller's thread, after their bytes are durable. progress: what is
    counted, how many are done, of how many. threads: None for two more than torch uses, because some wait for the
    disk; the result does not depend on it.

    Raises the first error in the order of the source after all threads have stopped: UserError for what cannot be
    read and for NaN and infinity, ResumableError where the disk fails; KeyboardInterrupt likewise.
    """
    left = [
        job
        for job in jobs
        if job_name(job) not in skip or not all(folder.is_written(output.name) for output in job.outputs)
    ]
    turns = Turns()
    ordered = _in_file_order(left, linears)
    # Made when a thread asks: a big model has a hundred thousand tensors.
    run = _Run((TensorConversion(job, linears, folder, target, turns) for job in ordered), len(left), turns)
    count = torch.get_num_threads() + 2 if threads is None else threads
    workers = [threading.Thread(target=run.work, name=f"convert-{i}", daemon=True) for i in range(count)]
    done = len(jobs) - len(left)
    try:
        for worker in workers:
            worker.start()
        while batch := run.next_batch():
            folder.sync()
            finished(batch)
            done += len(batch)
            progress("tensors", done, len(jobs))
    finally:
        turns.stop()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
    run.raise_error()


def _in_file_order(jobs: Sequence[Job], linears: LinearReader) -> list[Job]:
    """Jobs as their tensors lie in the source; UserError for a linear that cannot be read."""
    place = {name: index for index, name in enumerate(linears.source.names())}

    def of(job: Job) -> int:
        return place[job.tensor if isinstance(job, CopyTensor) else linears.describe(job.module).weight]

    return sorted(jobs, key=of)


class _Run:
    """The work that is left, shared by all threads; `turns` guards it."""

    def __init__(self, tensors: Iterator[TensorConversion], count: int, turns: Turns) -> None:
        self.turns = turns
        self._pieces = _pieces(tensors)
        self._unfinished = count
        self._gathered: list[Finished] = []
        self._gathered_bytes = 0
        self._errors: list[tuple[int, BaseException]] = []

    def work(self) -> None:
        """What each thread does until nothing is left or one has failed."""
        number = -1
        try:
            while True:
                with self.turns.changed:
                    piece = None if self.turns.stopped else next(self._pieces, None)
                if piece is None:
                    return
                number, tensor, index, (start, stop) = piece
                done = tensor.convert(index, start, stop)
                if done is not None:
                    self._gather(done)
        except StoppedError:
            return
        except BaseException as error:  # raised again in the caller's thread
            with self.turns.changed:
                self._errors.append((number, error))
            self.turns.stop()

    def _gather(self, done: Finished) -> None:
        with self.turns.changed:
            self._gathered.append(done)
            self._gathered_bytes += done.nbytes
            self._unfinished -= 1
            self.turns.changed.notify_all()

    def next_batch(self) -> list[Finished]:
        """Wait for enough finished tensors; [] when there are no more, or a thread has failed."""
        with self.turns.changed:
            self.turns.changed.wait_for(self._must_report, timeout=SYNC_SECONDS)
            while not (self._gathered or self._must_report()):
                self.turns.changed.wait()
            batch, self._gathered, self._gathered_bytes = self._gathered, [], 0
            return [] if self.turns.stopped else batch

    def _must_report(self) -> bool:
        return self.turns.stopped or not self._unfinished or self._gathered_bytes >= SYNC_BYTES

    def raise_error(self) -> None:
        """Raise the error of the earliest piece that failed, if one did."""
        if self._errors:
            raise min(self._errors, key=lambda entry: entry[0])[1]


def _pieces(
    tensors: Iterator[TensorConversion],
) -> Iterator[tuple[int, TensorConversion, int, tuple[int, int]]]:
    """(number, tensor, number within the tensor, rows) of every piece."""
    number = 0
    for tensor in tensors:
        for index, rows in enumerate(tensor.pieces()):
            yield number, tensor, index, rows
            number += 1
