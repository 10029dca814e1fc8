"""Conversion without data: every kind of source, any number of threads, errors, interrupts and resumed runs."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qwen_quantize.calibrators.block_fp8 import solve_block_fp8
from qwen_quantize.calibrators.problem import LayerProblem, LayerSolution
from qwen_quantize.checkpoint.safetensors_folder import SafetensorsFolder
from qwen_quantize.checkpoint.source import open_source
from qwen_quantize.checkpoint.stored_linears import LinearReader
from qwen_quantize.checkpoint.writer import OutputFolder, OutputTensor, plan_shards
from qwen_quantize.errors import ResumableError, UserError
from qwen_quantize.formats.block_kernels import dequantize_blocks
from qwen_quantize.formats.cast_rule import RNE_SATURATE
from qwen_quantize.formats.schemes import SCHEMES
from qwen_quantize.formats.tables import E4M3FN
from qwen_quantize.pipeline import convert, tensor_conversion
from qwen_quantize.pipeline.convert import (
    CopyTensor,
    DecodeLinear,
    Finished,
    Job,
    QuantizeLinear,
    Target,
    convert_tensors,
    job_name,
)
from qwen_quantize.pipeline.records import binary_exponents, why_no_better

BLOCK = (16, 16)
SOURCE_BLOCK = 16
ROWS, COLUMNS = 200, 72  # partial blocks at both edges
CONFIG = {
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SOURCE_BLOCK, SOURCE_BLOCK],
    }
}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, COLUMNS, generator=generator) * 0.05
    weight[32:48, :16] = 0
    codes = torch.randint(0, 127, (ROWS, COLUMNS), dtype=torch.uint8, generator=generator)
    codes |= torch.randint(0, 2, codes.shape, dtype=torch.uint8, generator=generator) << 7
    grid = (math.ceil(ROWS / SOURCE_BLOCK), math.ceil(COLUMNS / SOURCE_BLOCK))
    return {
        "a.fp8.weight": codes.view(torch.float8_e4m3fn),
        "a.fp8.weight_scale_inv": torch.rand(grid, generator=generator) * 1e-3 + 1e-4,
        "b.bf16.weight": weight.bfloat16(),
        "c.fp16.weight": weight.half(),
        "d.fp32.weight": weight,
        "e.fp64.weight": weight.double(),
        "f.norm": torch.rand(500, generator=generator).bfloat16(),
        "g.ids": torch.arange(300).reshape(30, 10),
        "h.step": torch.tensor(7.5),
        "i.empty": torch.zeros(0, 4),
        "j.embedding": torch.randn(400, 24, generator=generator).bfloat16(),
    }


LINEARS = ("a.fp8", "b.bf16", "c.fp16", "d.fp32", "e.fp64")
DTYPES = {torch.bfloat16: "BF16", torch.int64: "I64", torch.float32: "F32"}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_conversion, "PIECE_BYTES", 3000)


def make_source(folder: Path, changed: dict[str, Tensor] | None = None) -> SafetensorsFolder:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors() | (changed or {}), folder / "model.safetensors")
    return SafetensorsFolder(folder)


def quantize_job(module: str, block: tuple[int, int] = BLOCK) -> QuantizeLinear:
    grid = (math.ceil(ROWS / block[0]), math.ceil(COLUMNS / block[1]))
    return QuantizeLinear(
        module,
        OutputTensor(f"{module}.weight", "F8_E4M3", (ROWS, COLUMNS)),
        OutputTensor(f"{module}.weight_scale_inv", "F32", grid),
    )


def all_jobs(block: tuple[int, int] = BLOCK) -> list[Job]:
    copies = [(name, tensor) for name, tensor in tensors().items() if not name.startswith(LINEARS)]
    return [
        *(
            CopyTensor(name, OutputTensor(name, DTYPES[tensor.dtype], tuple(tensor.shape)))
            for name, tensor in copies
        ),
        *(quantize_job(module, block) for module in LINEARS),
    ]


class Run:
    """One output folder and what `convert_tensors` said of it."""

    def __init__(self, target: Path, jobs: Sequence[Job], *, resume: bool = False) -> None:
        self.jobs = jobs
        outputs = [output for job in jobs for output in job.outputs]
        self.folder = OutputFolder(target, plan_shards(outputs, 60_000), resume=resume, overwrite=False)
        self.finished: list[Finished] = []
        self.progress: list[tuple[str, int, int]] = []

    def convert(
        self,
        source: SafetensorsFolder,
        *,
        block: tuple[int, int] = BLOCK,
        skip: frozenset[str] = frozenset(),
        threads: int = 3,
    ) -> None:
        convert_tensors(
            self.jobs, LinearReader(source), self.folder, Target(block, RNE_SATURATE), self.take,
            lambda *what: self.progress.append(what), skip=skip, threads=threads,
        )  # fmt: skip

    def take(self, batch: Sequence[Finished]) -> None:
        on_disk = (self.folder.staging / ".written.jsonl").read_text()
        assert all(json.dumps({"tensor": one.name}) in on_disk for one in batch)
        self.finished += batch

    def publish(self) -> Path:
        self.folder.add_file("config.json", b"{}")
        return self.folder.finish()


def solved(source: SafetensorsFolder, module: str, block: tuple[int, int] = BLOCK) -> LayerSolution:
    weight = source.read(f"{module}.weight")
    if module == "a.fp8":
        scale = source.read("a.fp8.weight_scale_inv")
        weight = dequantize_blocks(weight.view(torch.uint8), scale, E4M3FN, SOURCE_BLOCK, SOURCE_BLOCK)
    scheme = SCHEMES["ue8m0"].with_block(*block)
    return solve_block_fp8(LayerProblem(module, weight.float(), scheme, RNE_SATURATE))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def no_threads_left() -> bool:
    return not any(thread.name.startswith("convert-") for thread in threading.enumerate())


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (24, 24)])
def test_every_kind_of_source(tmp_path: Path, block: tuple[int, int]) -> None:
    source = make_source(tmp_path / "in")
    run = Run(tmp_path / "out", all_jobs(block))
    run.convert(source, block=block)
    written = open_source(run.publish())
    records = {one.name: one.linear for one in run.finished}
    assert set(records) == {job_name(job) for job in run.jobs}
    assert run.progress[-1] == ("tensors", len(run.jobs), len(run.jobs))
    for module in LINEARS:
        expected, record = solved(source, module, block), records[f"{module}.weight"]
        assert torch.equal(written.read(f"{module}.weight").view(torch.uint8), expected.quantized.codes)
        assert torch.equal(written.read(f"{module}.weight_scale_inv"), expected.quantized.scale)
        assert record is not None
        notes = (*expected.notes, *why_no_better(expected.error, expected.baseline_error))
        assert (record.name, record.shape, record.notes) == (module, (ROWS, COLUMNS), notes)
        assert record.error == pytest.approx(expected.error, rel=1e-5)
        assert record.baseline_error == pytest.approx(expected.baseline_error, rel=1e-5)
        assert record.weight_sqnr_db == pytest.approx(expected.weight_sqnr_db, abs=1e-4)
        assert record.searched_blocks == expected.searched_blocks
        assert record.zero_blocks == expected.zero_blocks
        assert record.partial_blocks == expected.partial_blocks
        assert record.sha256 == hashlib.sha256(expected.quantized.codes.numpy().tobytes()).hexdigest()
        values, counts = binary_exponents(expected.quantized.scale).unique(return_counts=True)
        assert record.exponents == {str(v): c for v, c in zip(values.tolist(), counts.tolist(), strict=True)}
    for name in ("f.norm", "g.ids", "h.step", "i.empty", "j.embedding"):
        assert torch.equal(written.read(name), source.read(name))
        assert records[name] is None


def test_threads_change_nothing(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    found = []
    for threads in (1, 2, 7):
        run = Run(tmp_path / f"out{threads}", all_jobs())
        run.convert(source, threads=threads)
        by_name = sorted(run.finished, key=lambda one: one.name)
        found.append((contents(run.publish()), by_name))
    assert found[0] == found[1] == found[2]


def test_linears_that_are_decoded_and_floats_that_change_their_dtype(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    jobs = [
        DecodeLinear("a.fp8", OutputTensor("a.fp8.weight", "BF16", (ROWS, COLUMNS))),
        CopyTensor("d.fp32.weight", OutputTensor("d.fp32.weight", "F16", (ROWS, COLUMNS))),
        CopyTensor("f.norm", OutputTensor("renamed", "F32", (500,))),
        CopyTensor("h.step", OutputTensor("h.step", "BF16", ())),
    ]
    run = Run(tmp_path / "out", jobs)
    run.convert(source)
    written = open_source(run.publish())
    scale = source.read("a.fp8.weight_scale_inv")
    decoded = dequantize_blocks(source.read("a.fp8.weight").view(torch.uint8), scale, E4M3FN, 16, 16)
    assert torch.equal(written.read("a.fp8.weight"), decoded.bfloat16())
    assert torch.equal(written.read("d.fp32.weight"), source.read("d.fp32.weight").half())
    assert torch.equal(written.read("renamed"), source.read("f.norm").float())
    assert torch.equal(written.read("h.step"), torch.tensor(7.5, dtype=torch.bfloat16))


def test_pieces_are_small_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is read whole, whatever its size, and nothing is read twice."""
    source = make_source(tmp_path / "in")
    read: dict[str, list[tuple[int, int]]] = {}
    whole = SafetensorsFolder.read_rows

    def noting(self: SafetensorsFolder, name: str, start: int, stop: int) -> Tensor:
        read.setdefault(name, []).append((start, stop))
        return whole(self, name, start, stop)

    monkeypatch.setattr(SafetensorsFolder, "read_rows", noting)
    run = Run(tmp_path / "out", all_jobs())
    run.convert(source, threads=1)
    run.folder.discard()
    for name, rows in (("a.fp8.weight", ROWS), ("b.bf16.weight", ROWS), ("j.embedding", 400)):
        pieces = read[name]
        assert len(pieces) > 3
        assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
        assert pieces[-1][1] == rows
        assert all((stop - start) * source.info(name).nbytes // rows <= 3000 for start, stop in pieces)
    assert all(start % 16 == 0 for start, _ in read["a.fp8.weight"] + read["b.bf16.weight"])


def spoiled(name: str, place: tuple[int, ...], value: float) -> dict[str, Tensor]:
    tensor = tensors()[name].clone()
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8)[place] = 0x7F
    else:
        tensor[place] = value
    return {name: tensor}


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("a.fp8.weight", (150, 60), math.nan, r"'a.fp8.weight' holds nan at \[150, 60\]"),
        ("a.fp8.weight_scale_inv", (10, 2), math.inf, r"'a.fp8.weight' holds -?(inf|nan) at \[160, 32\]"),
        ("b.bf16.weight", (199, 71), math.inf, r"'b.bf16.weight' holds inf at \[199, 71\]"),
        ("c.fp16.weight", (100, 0), -math.inf, r"'c.fp16.weight' holds -inf at \[100, 0\]"),
        ("d.fp32.weight", (0, 0), math.nan, r"'d.fp32.weight' holds nan at \[0, 0\]"),
        ("e.fp64.weight", (77, 7), math.nan, r"'e.fp64.weight' holds nan at \[77, 7\]"),
        ("f.norm", (499,), math.nan, r"'f.norm' holds nan at \[499\]"),
        ("h.step", (), math.inf, r"'h.step' holds inf at \[\]"),
        ("j.embedding", (399, 23), math.nan, r"'j.embedding' holds nan at \[399, 23\]"),
    ],
)
def test_a_value_that_is_not_finite(
    tmp_path: Path, name: str, place: tuple[int, ...], value: float, message: str
) -> None:
    source = make_source(tmp_path / "in", spoiled(name, place, value))
    run = Run(tmp_path / "out", all_jobs())
    with pytest.raises(UserError, match=message):
        run.convert(source)
    assert no_threads_left()
    run.folder.discard()


def test_a_decoded_value_that_is_not_finite(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in", spoiled("a.fp8.weight", (150, 60), math.nan))
    run = Run(tmp_path / "out", [DecodeLinear("a.fp8", OutputTensor("x", "BF16", (ROWS, COLUMNS)))])
    with pytest.raises(UserError, match=r"'a.fp8.weight' holds nan at \[150, 60\]"):
        run.convert(source)
    run.folder.discard()


def test_the_first_of_several_errors_is_raised(tmp_path: Path) -> None:
    """In the order of the source: a message must not depend on which thread was quicker."""
    changed = spoiled("e.fp64.weight", (1, 1), math.nan) | spoiled("d.fp32.weight", (199, 1), math.nan)
    source = make_source(tmp_path / "in", changed)
    names = [name for name in source.names() if name in changed]
    for attempt in range(5):
        run = Run(tmp_path / f"out{attempt}", all_jobs())
        with pytest.raises(UserError, match=repr(names[0])):
            run.convert(source, threads=2)
        run.folder.discard()


def test_a_full_disk_stops_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(tmp_path / "in")
    run = Run(tmp_path / "out", all_jobs())
    whole, count = os.pwrite, 0

    def filling(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal count
        count += 1
        if count > 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", filling)
        with pytest.raises(ResumableError, match=r"disk is full.*--resume"):
            run.convert(source)
    assert no_threads_left()
    run.folder.close()


def test_an_interrupt_stops_all_threads_and_the_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "SYNC_BYTES", 1)  # a batch for each tensor or two
    source = make_source(tmp_path / "in")
    whole = Run(tmp_path / "whole", all_jobs())
    whole.convert(source)
    run = Run(tmp_path / "out", all_jobs())
    seen: list[str] = []
    gate, last = threading.Event(), source.names()[-1]
    read_rows = SafetensorsFolder.read_rows

    def gated(self: SafetensorsFolder, name: str, start: int, stop: int) -> Tensor:
        assert name != last or gate.wait(10)
        return read_rows(self, name, start, stop)

    def interrupted(batch: Sequence[Finished]) -> None:
        run_take(batch)
        seen.extend(one.name for one in batch)
        if len(seen) >= 3:
            gate.set()
            raise KeyboardInterrupt

    run_take = run.take
    run.take = interrupted  # type: ignore[method-assign]
    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFolder, "read_rows", gated)
        with pytest.raises(KeyboardInterrupt):
            run.convert(source, threads=2)
    assert no_threads_left()
    run.folder.close()
    assert 3 <= len(seen) < len(run.jobs)

    resumed = Run(tmp_path / "out", all_jobs(), resume=True)
    resumed.convert(source, skip=frozenset(seen))
    assert {one.name for one in resumed.finished} == {job_name(job) for job in run.jobs} - set(seen)
    assert resumed.progress[0][1] > len(seen)
    assert contents(resumed.publish()) == contents(whole.publish())


def test_what_is_skipped_must_be_written(tmp_path: Path) -> None:
    """A journal that knows more than the folder's record is not believed."""
    source = make_source(tmp_path / "in")
    run = Run(tmp_path / "out", all_jobs())
    run.convert(source, skip=frozenset(job_name(job) for job in run.jobs))
    assert len(run.finished) == len(run.jobs)
    run.publish()


def test_nothing_to_do(tmp_path: Path) -> None:
    source = make_source(tmp_path / "in")
    run = Run(tmp_path / "out", [quantize_job("b.bf16")])
    run.convert(source)
    again = Run.__new__(Run)
    again.jobs, again.folder, again.finished, again.progress = run.jobs, run.folder, [], []
    again.convert(source, skip=frozenset({"b.bf16.weight"}))
    assert again.finished == []
    run.folder.discard()
